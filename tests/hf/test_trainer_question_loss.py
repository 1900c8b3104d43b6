"""A loss of a user's own on a question answering model: which padding it gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import whet
from tiny import Pad, tiny_config, tiny_model, tiny_rows
from whet.models.packed import packed_model

ROWS = tiny_rows(12)


class Own(whet.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def arguments(kind: Any, folder: Path, **changes: Any) -> Any:
    return kind(
        str(folder), use_cpu=True, per_device_train_batch_size=4, learning_rate=1e-2, num_train_epochs=1,
        train_sampling_strategy="sequential", save_strategy="no", logging_steps=1, report_to="none", disable_tqdm=True,
        **changes,
    )  # fmt: skip


def theirs(folder: Path) -> transformers.TrainingArguments:
    return arguments(transformers.TrainingArguments, folder, optim="adamw_torch")


def ours(folder: Path, **changes: Any) -> whet.TrainingArguments:
    return arguments(whet.TrainingArguments, folder, optim="adamw_torch", precision="fp32", **changes)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def ran(trainer: Any) -> list[float]:
    trainer.train()
    return losses(trainer)


def reference(folder: Path) -> list[float]:
    return ran(transformers.Trainer(tiny_model("bert"), theirs(folder), Pad(), list(ROWS)))  # pyright: ignore


@pytest.mark.parametrize(("padding", "tolerance"), [("all", 1e-5), ("sampled", 3e-2)])  # new tables of positions
def test_a_question_loss_of_a_user_runs_without_padding(tmp_path: Path, padding: Any, tolerance: float) -> None:
    """Against transformers' Trainer, whose span loss counts all padding."""
    trainer = Own(tiny_model("bert"), ours(tmp_path / "ours", padding_in_loss=padding), Pad(), list(ROWS))
    assert ran(trainer) == pytest.approx(reference(tmp_path / "theirs"), rel=tolerance)
    assert whet.changes(trainer.model) is not None


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

    found = ran(type("Ours", (Kept, whet.Trainer), {})(model(), ours(tmp_path / "ours"), pad, rows))
    wanted = ran(type("Theirs", (Kept, transformers.Trainer), {})(model(), theirs(tmp_path / "theirs"), pad, rows))
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers so
def test_a_wrapped_model_is_known_as_optimised() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model("bert"), peft.LoraConfig(task_type="QUESTION_ANS", target_modules=["query"]))
    assert packed_model(model) is None
    assert packed_model(whet.optimize(model)) is packed_model(model.get_base_model())
