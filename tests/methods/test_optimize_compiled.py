"""A model that `whet.optimize` changed, under torch.compile: what it gives uncompiled, and still without padding."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from optimized import inputs
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)

import whet
from tiny import Pad, losses, tiny_config, tiny_rows

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in aot_autograd
TARGETS = {
    AutoModelForQuestionAnswering: {name: torch.tensor([1, 2, 2]) for name in ("start_positions", "end_positions")},
    AutoModelForSequenceClassification: {"labels": torch.tensor([0, 1, 1])},
    AutoModelForTokenClassification: {"labels": None},
}
HEADS = pytest.mark.parametrize("head", TARGETS, ids=["questions", "rows", "tokens"])


def new(head: Any, family: str = "bert") -> Any:
    torch.manual_seed(0)
    return whet.optimize(head.from_config(tiny_config(family, dropout=0.2))).train()


def batches(head: Any) -> list[dict[str, torch.Tensor]]:
    """Two batches of different sizes, each with the head's targets."""
    found = [inputs(9, 14, 3), inputs(5, 7, 20, seed=1)]
    for batch in found:
        batch |= TARGETS[head]
        if head is AutoModelForTokenClassification:
            batch["labels"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"] % 2, -100)
    return found


def steps(called: Any, model: Any, given: list[dict[str, torch.Tensor]]) -> list[float]:
    """Train on the batches twice; return the losses."""
    torch.manual_seed(5)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in given * 2:
        loss = called(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.each_value
@HEADS
@pytest.mark.parametrize("how", ["torch.compile", "model.compile", "a block"])
def test_compiled_training_has_the_losses_of_uncompiled(
    head: Any, how: str, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    torch._dynamo.reset()
    plain, model = new(head), new(head)
    called = torch.compile(model, backend="eager") if how == "torch.compile" else model
    if how == "model.compile":
        model.compile(backend="eager")
    if how == "a block":
        model.bert.encoder.layer[1].compile(backend="eager")
    assert steps(called, model, batches(head)) == pytest.approx(steps(plain, plain, batches(head)), rel=1e-6)
    assert not [text for text in caplog.messages if "with their padding" in text]
    assert not [warning for warning in recwarn if "whet" in str(warning.message)]


def test_a_full_graph_is_refused_with_the_reason() -> None:
    torch._dynamo.reset()
    compiled: Any = torch.compile(new(AutoModelForTokenClassification), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="leave fullgraph=True out"):
        compiled(**batches(AutoModelForTokenClassification)[0])


def test_transformers_trainer_compiles_an_optimised_model(tmp_path: Path) -> None:
    torch._dynamo.reset()

    def run(name: str, **options: Any) -> list[float]:
        settings = TrainingArguments(
            str(tmp_path / name), max_steps=3, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True,
            disable_tqdm=True, per_device_train_batch_size=4, **options,
        )  # fmt: skip
        model = new(AutoModelForQuestionAnswering)
        trainer = Trainer(model, settings, data_collator=Pad(), train_dataset=list(tiny_rows(12)))  # pyright: ignore
        trainer.train()
        return losses(trainer)

    compiled = run("compiled", torch_compile=True, torch_compile_backend="eager")
    assert compiled == pytest.approx(run("plain"), rel=1e-6)


def test_a_copy_of_a_compiled_model_trains_alike() -> None:
    torch._dynamo.reset()
    model = new(AutoModelForSequenceClassification)
    compiled = torch.compile(model, backend="eager")
    given = batches(AutoModelForSequenceClassification)
    copied = deepcopy(model)
    assert steps(compiled, model, given) == pytest.approx(steps(copied, copied, given), rel=1e-6)
