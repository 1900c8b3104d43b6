"""Toy models, toy rows and settings for runs that take milliseconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForQuestionAnswering, TrainerCallback
from transformers.modeling_outputs import SequenceClassifierOutput

import engine

FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "tuple": lambda loss, logits: (loss, logits),
    "output": lambda loss, logits: SequenceClassifierOutput(loss=loss, logits=logits),  # pyright: ignore[reportArgumentType]
    "tensor": lambda loss, _: loss,
}
"""The ways in which a module may return its loss."""


class Toy(nn.Module):
    """Learns y = sum(x); has weights, biases, a norm and, if wanted, dropout."""

    def __init__(self, form: str = "dict", dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 1)
        self.form = form

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.dropout(self.norm(torch.tanh(self.hidden(x))))).squeeze(-1)
        if labels is None:
            return {"logits": logits}
        return FORMS[self.form](((logits - labels) ** 2).mean(), logits)


class Recorder(TrainerCallback):
    """Keeps what happened: (event, step), and what `keep` returns at each end of a step."""

    def __init__(self, keep: Callable[[nn.Module], Any] = lambda _: None) -> None:
        self.events: list[tuple[str, int]] = []
        self.kept: list[Any] = []
        self._keep = keep

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("train_begin", state.global_step))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("epoch_begin", state.global_step))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("step_begin", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        self.events.append(("step_end", state.global_step))
        self.kept.append(self._keep(model))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("epoch_end", state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("log", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("save", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("train_end", state.global_step))

    def steps(self, event: str) -> list[int]:
        """After which steps it happened."""
        return [step for name, step in self.events if name == event]


def toy_rows(n: int = 12) -> list[dict[str, Tensor]]:
    """Rows for `Toy`."""
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(7))
    return [{"x": row, "labels": row.sum()} for row in x]


def arguments(folder: Path | str, **changes: Any) -> engine.TrainingArguments:
    """Settings of a short quiet run: rows in their order, 4 a step, nothing saved unless asked for."""
    usual: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "train_sampling_strategy": "sequential",
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "num_train_epochs": 1,
    }
    return engine.TrainingArguments(**(usual | changes))


def toy_trainer(folder: Path | str, *, model: nn.Module | None = None, **changes: Any) -> engine.Trainer:
    """A trainer of a `Toy`; what Trainer itself takes goes there, everything else into the settings."""
    own = ("train_dataset", "eval_dataset", "data_collator", "compute_metrics", "callbacks", "optimizers")
    given: dict[str, Any] = {name: changes.pop(name) for name in own if name in changes}
    given = {"train_dataset": toy_rows(), "eval_dataset": toy_rows(6)} | given
    return engine.Trainer(model=Toy() if model is None else model, args=arguments(folder, **changes), **given)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every weight."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(found: nn.Module | dict[str, Tensor], wanted: nn.Module | dict[str, Tensor]) -> None:
    """Every bit of every weight is equal."""
    first, second = (weights_of(one) if isinstance(one, nn.Module) else one for one in (found, wanted))
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"these weights differ: {different}"


def entries(trainer: engine.Trainer, name: str) -> list[tuple[int, Any]]:
    """The log entries that hold this figure, as (step, figure)."""
    return [(entry["step"], entry[name]) for entry in trainer.state.log_history if name in entry]


def losing_metrics(values: Sequence[float]) -> Callable[[Any], dict[str, float]]:
    """A compute_metrics whose `score` takes these values, one an evaluation."""
    waiting = list(values)
    return lambda _: {"score": waiting.pop(0)}


def checkpoints(folder: Path) -> list[str]:
    """Names of the checkpoint folders, oldest first."""
    names = [path.name for path in folder.glob("checkpoint-*")]
    return sorted(names, key=lambda name: int(name.rpartition("-")[2]))


def read_json(path: Path) -> Any:
    """The content of a JSON file, which may hold neither NaN nor Infinity."""
    return json.loads(path.read_text("utf-8"), parse_constant=_no_json)


def _no_json(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def bert_config(**changes: Any) -> BertConfig:
    """A BERT of two narrow layers."""
    usual: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 40,
    }
    return BertConfig(**(usual | changes))


def tiny_bert(kind: type = BertForQuestionAnswering, **changes: Any) -> Any:
    """A new BERT with this head, the same each time; dropout 0.1 unless told."""
    torch.manual_seed(0)
    return kind(bert_config(**changes))


def span_rows(n: int = 12) -> list[dict[str, Any]]:
    """Token rows of different lengths, with where the answer begins and ends."""
    numbers = torch.Generator().manual_seed(3)
    rows = []
    for index in range(n):
        length = 6 + (5 * index) % 17
        ids = torch.randint(5, 50, (length,), generator=numbers).tolist()
        rows.append({"input_ids": ids, "start_positions": index % length, "end_positions": length - 1})
    return rows


def masked_rows(n: int = 12) -> list[dict[str, Any]]:
    """Rows of one length with labels for some of their tokens."""
    numbers = torch.Generator().manual_seed(5)
    ids = torch.randint(5, 50, (n, 10), generator=numbers)
    labels = torch.where(torch.rand(n, 10, generator=numbers) < 0.4, ids, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
