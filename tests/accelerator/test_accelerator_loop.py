"""`whet.Accelerator` trains as accelerate's does, without padding, and refuses what it cannot honour."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import N_ROWS, Loop, fresh, losses_of, made, tiny_bert
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening

import whet
from saved_decoder import save_decoder
from tiny_decoders import collate as padded_tokens
from tiny_decoders import tiny_decoder, token_rows

CLOSE = 1e-5
"""Relative: float32 rounding through two layers and twenty steps."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh():
        yield


@pytest.fixture(scope="module")
def wanted() -> list[float]:
    """The losses of accelerate's own loop without dropout."""
    with fresh():
        return losses_of(made("accelerate", gradient_accumulation_steps=2))


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_loop_has_the_losses_of_accelerates_own(wanted: list[float], checkpointing: Any) -> None:
    found = losses_of(made("whet", gradient_accumulation_steps=2, gradient_checkpointing=checkpointing))
    assert len(found) == 20
    assert found == pytest.approx(wanted, rel=CLOSE)


def test_prepared_model_runs_without_padding_and_loses_nothing_when_unwrapped(tmp_path: Path) -> None:
    loop = Loop(made("whet"))
    assert whet.changes(loop.model) is not None
    loop.accelerator.unwrap_model(loop.model).save_pretrained(tmp_path)
    plain = type(loop.model).from_pretrained(tmp_path)
    assert whet.changes(plain) is None
    assert plain.state_dict().keys() == loop.model.state_dict().keys()


def test_bf16_stays_near_the_losses_of_float32(wanted: list[float]) -> None:
    found = losses_of(made("whet", gradient_accumulation_steps=2, mixed_precision="bf16"))
    assert found != pytest.approx(wanted, rel=CLOSE)
    assert found == pytest.approx(wanted, rel=0.02)  # bfloat16 has 8 bits: 0.4 % a product


def test_older_flag_for_the_format_is_understood() -> None:
    assert whet.Accelerator(cpu=True, bf16=True).mixed_precision == "bf16"


@pytest.mark.filterwarnings("ignore:Using .DataCollatorWithFlattening:UserWarning")  # asks for flash kernels
@pytest.mark.parametrize("collate", [padded_tokens, DataCollatorWithFlattening()], ids=["padded", "end to end"])
def test_decoder_trains_in_the_loop(collate: Any) -> None:
    losses = {}
    for one in ("accelerate", "whet"):
        with fresh():
            accelerator, rows = made(one), token_rows(8)
            model = tiny_decoder("llama", use_cache=False)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            loader = DataLoader(rows, 4, collate_fn=collate)  # pyright: ignore[reportArgumentType]
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            model.train()
            losses[one] = []
            for batch in loader:
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses[one].append(loss.item())
    assert losses["whet"] == pytest.approx(losses["accelerate"], rel=CLOSE)


def test_checkpointing_recomputes_the_modules_that_have_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """Next to a critic of one layer, prepared with the model or after it; alone, the critic is refused."""
    caplog.set_level("INFO")
    accelerator = made("whet", gradient_checkpointing=True)
    model, _ = accelerator.prepare(tiny_bert(), torch.nn.Linear(2, 1))
    accelerator.prepare(torch.nn.Linear(3, 1))
    assert caplog.text.count("Linear has no blocks, and keeps its activations") == 2
    assert all("whet_inner_forward" in vars(block) for block in model.bert.encoder.layer)
    with fresh(), pytest.raises(whet.ConfigError, match="finds no blocks"):
        made("whet", gradient_checkpointing=True).prepare(torch.nn.Linear(2, 1), torch.nn.Linear(2, 1))


def test_gathered_rows_are_each_there_once() -> None:
    assert Loop(made("whet")).labels_seen() == N_ROWS


def test_module_that_whet_does_not_know_trains_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 1)
    accelerator = made("whet")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert "Linear trains as it is" in caplog.text


def test_model_that_was_optimized_before_keeps_its_options() -> None:
    model = whet.optimize(tiny_bert(), dtype=torch.bfloat16)
    prepared = made("whet").prepare(model)
    changes = whet.changes(prepared)
    assert changes is not None
    assert changes.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "settings",
    [
        {"fsdp_plugin": object()},
        {"deepspeed_plugin": object()},
        {"megatron_lm_plugin": object()},
        {"parallelism_config": object()},
        {"dynamo_backend": "inductor"},
        {"mixed_precision": "fp8"},
        {"gradient_checkpointing": "some"},
        {"fp16": True},  # accelerate computes in float32 on a CPU, and says nothing
        {"no_such_setting": 1},
    ],
)
def test_setting_that_cannot_be_honoured_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(whet.ConfigError) as refused:
        whet.Accelerator(cpu=True, **settings)
    assert "fix:" in str(refused.value)


def test_environment_of_a_launcher_is_refused_like_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(whet.ConfigError, match="dynamo_backend"):
        whet.Accelerator(cpu=True)


def test_every_public_name_of_accelerates_class_works_or_names_the_way_that_works() -> None:
    """Not one ends in a bare AttributeError, which says nothing of what to do."""
    accelerator = made("whet")
    names = [name for name in dir(type(accelerator._inner)) if not name.startswith("_")]
    assert len(names) > 60
    refused = [name for name in names if not hasattr(accelerator, name)]
    for name in refused:
        with pytest.raises(whet.ConfigError, match=r"accelerate\.Accelerator, and call whet\.optimize"):
            getattr(accelerator, name)
    assert {"save", "register_save_state_pre_hook", "lomo_backward", "is_fsdp2"} <= set(refused)
    assert not {"accumulate", "backward", "clip_grad_norm_", "print", "unwrap_model", "is_main_process"} & set(refused)


def test_accumulation_is_set_on_the_running_loop() -> None:
    accelerator = made("whet")
    accelerator.gradient_accumulation_steps = 3
    assert accelerator.gradient_state.num_steps == 3
    with pytest.raises(whet.ConfigError, match="num_processes"):
        accelerator.num_processes = 2


@pytest.mark.parametrize("script", ["own_loop.py", "own_loop_accelerate.py"])
def test_example_trains_a_decoder_and_its_loop_has_15_lines(script: str, tmp_path: Path) -> None:
    save_decoder(tmp_path / "decoder")
    path = EXAMPLE.with_name(script)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(path), str(tmp_path / "decoder")],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert found[-1] < found[0]
    text = path.read_text("utf-8")
    loop = text[text.index("accelerator =") :].strip().splitlines()
    assert len([line for line in loop if line.strip()]) <= 15
