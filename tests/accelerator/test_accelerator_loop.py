"""`whet.Accelerator` trains as accelerate's does, without padding, and refuses what would be passed over in silence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from own_loops import N_ROWS, Loop, collate, fresh, losses_of, made, tiny_bert
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


def _kept(model: Any) -> int:
    """Return how many numbers autograd keeps of a forward pass; what is recomputed is not among them."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.numel()) or one, lambda one: one):
        model(**collate(range(8))).loss.backward()
    return sum(kept)


@pytest.mark.parametrize("before", ["an Accelerator", "accelerate", "whet.optimize", "restored"])
def test_each_accelerator_recomputes_as_it_is_asked_to(before: str) -> None:
    """Whatever another one has prepared before."""
    model = tiny_bert().train()
    if before == "accelerate":
        made("accelerate").prepare(model)
    else:
        made("whet").prepare(whet.optimize(model) if before == "whet.optimize" else model)
    if before == "restored":
        whet.restore(model)
    found = []
    for checkpointing in (False, True, False, "selective"):
        with fresh():
            made("whet", gradient_checkpointing=checkpointing).prepare(model)
        assert whet.changes(model) is not None
        found.append(_kept(model))
    plain, blocks, again, selective = found
    assert again == plain
    assert max(blocks, selective) < 0.5 * plain


def test_each_accelerator_prepares_a_model_in_its_own_format() -> None:
    model, batch, found = tiny_bert().eval(), collate(range(4)), {}
    for number, precision in enumerate(["bf16", "no", "bf16", "no"]):
        with fresh():
            prepared = made("whet", mixed_precision=precision).prepare(model)
        found[number] = prepared(**batch).logits
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("since", ["a Trainer", "whet.restore"])
def test_model_is_prepared_again_as_the_same_accelerator_is_asked_to(since: str, tmp_path: Path) -> None:
    model, batch, accelerator = tiny_bert().eval(), collate(range(4)), made("whet", mixed_precision="bf16")
    wanted = accelerator.prepare(model)(**batch).logits
    if since == "a Trainer":
        args = whet.TrainingArguments(
            str(tmp_path), max_steps=1, learning_rate=0.0, save_strategy="no", report_to="none", disable_tqdm=True,
            use_cpu=True, precision="fp32",
        )  # fmt: skip
        data = [collate([n]) for n in range(8)]
        rows = [{name: one[0] for name, one in row.items()} for row in data]
        whet.Trainer(model, args, lambda given: collate(range(len(given))), rows).train()
    else:
        whet.restore(model)
    model.eval()
    assert not torch.equal(model(**batch).logits, wanted)
    prepared = accelerator.prepare(model)
    assert whet.changes(prepared) is not None
    assert torch.equal(prepared(**batch).logits, wanted)


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
    ("settings", "names"),
    [
        ({"gradient_checkpointing": "some"}, "gradient_checkpointing"),
        ({"fp16": True}, "(?s)no effect on a CPU.*--precision fp16"),  # accelerate computes in float32, silently
        ({"fp16": True, "mixed_precision": "bf16"}, "several formats"),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin}, "FSDP was asked for"),  # accelerate leaves it out on a CPU
    ],
)
def test_setting_that_would_be_passed_over_in_silence_is_refused(settings: dict[str, Any], names: str) -> None:
    """The process can then be configured again, as if nothing had been."""
    environment = dict(os.environ)
    given = {name: value() if isinstance(value, type) else value for name, value in settings.items()}
    with pytest.raises(whet.ConfigError, match=names) as refused:
        whet.Accelerator(cpu=True, **given)
    assert "fix:" in str(refused.value)
    assert dict(os.environ) == environment
    assert whet.Accelerator(cpu=True, bf16=True).mixed_precision == "bf16"


@pytest.mark.slow
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
