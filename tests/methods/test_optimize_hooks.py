"""Hooks inside an encoder that runs packed: what gives each row something of its own gets rows, or is refused."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification

import engine
import whet
from tiny import arguments, padded, tiny_config, tiny_model, tiny_rows
from whet.errors import ConfigError
from whet.models.packed import packed_model

TOLERANCE = 1e-5  # relative: sums of some hundred float32 terms
PARTS = ("embeddings", "encoder.layer.0", "encoder.layer.1.attention.self")
N_ROWS = 4


def model_of(head: str) -> Any:
    torch.manual_seed(0)
    auto = AutoModel if head == "none" else AutoModelForSequenceClassification
    return auto.from_config(tiny_config("bert")).train()


def batch() -> dict[str, Tensor]:
    found = padded(list(tiny_rows(N_ROWS, "bert")), 0)
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def put(model: Any, part: str, change: Any) -> None:
    """Let a hook change what a part of the encoder returns."""

    def hook(_: nn.Module, __: Any, out: Any) -> Any:
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    model.base_model.get_submodule(part).register_forward_hook(hook)


def results(model: Any) -> list[Tensor]:
    """Return what the model gives for real tokens, and the gradients of a sum of it."""
    given = batch()
    out = model(**given)
    states = out.logits if "logits" in out else out.last_hidden_state[given["attention_mask"].bool()]
    generator = torch.Generator().manual_seed(1)
    (states * torch.randn(states.shape, generator=generator)).sum().backward()
    return [states.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]


def assert_near(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for one, exact in zip(found, wanted, strict=True):
        assert float((one - exact).norm()) <= TOLERANCE * max(float(exact.norm()), 0.1)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("head", ["none", "classes"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_vector_for_each_row_reaches_its_row(
    head: str, part: str, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The hook broadcasts (1, N, D) to (B, N, D), of which only the first row's tokens would be right."""
    of_rows = torch.randn(N_ROWS, 1, 32, generator=torch.Generator().manual_seed(2))
    untouched = model_of(head)
    model = deepcopy(untouched)
    if when == "after":
        whet.optimize(model)
    for one in (untouched, model):
        put(one, part, lambda states: states + of_rows)
    if when == "before":
        whet.optimize(model)
    wanted = results(untouched)
    assert_near(results(model), wanted)
    model.zero_grad()
    assert_near(results(model), wanted)
    told = [record.getMessage() for record in caplog.records]
    assert sum(f"hooks on {part} get packed tensors" in line for line in told) == 1
    assert sum("a hook returns another shape" in line for line in told) == 1


def test_a_hook_that_keeps_the_shape_leaves_the_padding_out(caplog: pytest.LogCaptureFixture) -> None:
    untouched = model_of("classes")
    model = whet.optimize(deepcopy(untouched))
    for one in (untouched, model):
        put(one, PARTS[0], lambda states: 1.5 * states)
    assert_near(results(model), results(untouched))
    assert not any("with their padding" in record.getMessage() for record in caplog.records)


def test_a_hook_that_cuts_tokens_off_gets_rows() -> None:
    """As without whet: the states of the first tokens of each row."""
    untouched = model_of("none").eval()
    model = whet.optimize(deepcopy(untouched))
    for one in (untouched, model):
        put(one, "encoder.layer.1", lambda states: states[:, :3])
    wanted, found = (one(**batch()).last_hidden_state for one in (untouched, model))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("head", ["classes", "answers"])
def test_the_trainer_refuses_a_hook_that_returns_more_rows(head: str, tmp_path: Path) -> None:
    model = tiny_model("bert") if head == "answers" else model_of("classes")
    put(model, PARTS[0], lambda states: states + torch.ones(2, 1, 1))
    rows = list(tiny_rows(8, "bert"))
    if head == "classes":
        rows = [{"input_ids": row["input_ids"], "labels": number % 2} for number, row in enumerate(rows)]
    given = {} if head == "answers" else {"data_collator": _collate}
    trainer = engine.Trainer(model, arguments(tmp_path, max_steps=1), train_dataset=rows, **given)
    with pytest.raises(ConfigError, match="something else of a packed batch"):
        trainer.train()


def _collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    wide = padded([{"input_ids": row["input_ids"]} for row in rows], 0)
    return wide | {"labels": torch.tensor([row["labels"] for row in rows])}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_rows_with_adapters_of_their_own_run_padded() -> None:
    """peft's adapter_names: its hooks hand each layer a name for each row."""
    peft = pytest.importorskip("peft")
    config = partial(
        peft.LoraConfig, task_type="SEQ_CLS", r=4, target_modules=["query", "value"], init_lora_weights=False
    )
    torch.manual_seed(3)
    untouched = peft.get_peft_model(model_of("classes"), config())
    untouched.add_adapter("other", config())
    untouched.eval()
    model = whet.optimize(deepcopy(untouched))
    names = ["default", "other", "__base__", "default"]
    with torch.no_grad():
        wanted, found = (one(**batch(), adapter_names=names).logits for one in (untouched, model))
        assert torch.allclose(found, wanted, rtol=0, atol=1e-6)  # logits of size 0.1
        plain = [one(**batch()).logits for one in (untouched, model)]
        packed: Any = packed_model(model)
        packed.hooks.look(packed.module.base_model)
        assert not packed.hooks.row_wise  # peft removes its hooks after each call
    assert torch.allclose(plain[1], plain[0], rtol=0, atol=1e-6)
    assert float((plain[0] - wanted).abs().max()) > 1e-3


def test_a_hook_that_returns_more_rows_is_met_once_and_forgotten_when_it_is_gone() -> None:
    """Only the first call runs without padding first; without hooks the padding is left out again."""
    model = whet.optimize(model_of("none").eval())
    seen: list[int] = []
    of_rows = torch.ones(N_ROWS, 1, 1)

    def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        seen.append(out.shape[0])
        return out + of_rows

    handle = model.embeddings.register_forward_hook(hook)
    for _ in range(2):
        model(**batch())
    assert seen == [1, N_ROWS, N_ROWS]
    handle.remove()
    model(**batch())
    counted = model.encoder.layer[0].register_forward_hook(lambda _, __, out: seen.append(len(out)))
    model(**batch())
    counted.remove()
    assert seen[3:] == [1]
