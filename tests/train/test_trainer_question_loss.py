"""A loss of a user's own on a question answering model: which padding it gets, and what the log says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from override_runs import losses, ours, theirs

import engine
import whet
from tiny import Pad, tiny_config, tiny_model, tiny_rows
from whet.models.packed import packed_model

ROWS = tiny_rows(12)


class Own(engine.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def ran(trainer: Any) -> list[float]:
    trainer.train()
    return losses(trainer)


def reference(folder: Path) -> list[float]:
    return ran(transformers.Trainer(tiny_model("bert"), theirs(folder), Pad(), list(ROWS)))  # pyright: ignore


@pytest.mark.parametrize(("padding", "tolerance"), [("all", 1e-5), ("sampled", 3e-2)])  # new tables of positions
def test_a_question_loss_of_a_user_runs_without_padding(tmp_path: Path, padding: Any, tolerance: float) -> None:
    """Against transformers' Trainer, whose span loss counts all padding."""
    trainer = Own(tiny_model("bert"), ours(tmp_path / "ours", padding_in_loss=padding), Pad(), list(ROWS))
    assert trainer.objective.packed_model is not None
    assert ran(trainer) == pytest.approx(reference(tmp_path / "theirs"), rel=tolerance)


def test_the_log_says_why_a_question_answering_loss_runs_padded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        trainer = Own(tiny_model("bert"), ours(tmp_path / "ours"), Pad(), list(ROWS))
    (said,) = [text for text in caplog.messages if "batches run padded (BertForQuestionAnswering)" in text]
    assert "--padding_in_loss sampled" in said
    assert ran(trainer) == pytest.approx(reference(tmp_path / "theirs"), rel=1e-5)


def test_token_labels_that_compute_loss_keeps_to_itself_are_exact_in_padding(tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"], "labels": [one % 3 for one in row["input_ids"]]} for row in ROWS]

    def pad(found: list[Any]) -> dict[str, torch.Tensor]:
        """Pad labels by 0, as careless collators do."""
        width = max(len(row["input_ids"]) for row in found)
        ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in found])
        labels = torch.tensor([row["labels"] + [0] * (width - len(row["labels"])) for row in found])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}

    class Kept:
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
            return (loss, outputs) if return_outputs else loss

    def model() -> Any:
        torch.manual_seed(0)
        config = tiny_config("bert", num_labels=3)
        return transformers.AutoModelForTokenClassification.from_config(config)

    found = ran(type("Ours", (Kept, engine.Trainer), {})(model(), ours(tmp_path / "ours"), pad, rows))
    wanted = ran(type("Theirs", (Kept, transformers.Trainer), {})(model(), theirs(tmp_path / "theirs"), pad, rows))
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers so
def test_a_wrapped_model_is_known_as_optimised() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model("bert"), peft.LoraConfig(task_type="QUESTION_ANS", target_modules=["query"]))
    assert packed_model(model) is None
    assert packed_model(whet.optimize(model)) is packed_model(model.get_base_model())
