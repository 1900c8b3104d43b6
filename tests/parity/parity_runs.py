"""The same 50 steps by transformers' Trainer, by the engine, and by transformers' Trainer after whet.optimize.

Models are tiny and without dropout, rows have many lengths, and every step is logged. A family that whet learns later,
or a task that is added to TASKS, is in the table without another change.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import engine
import whet
from proven_models import PROVEN, proven_config
from tiny import DECODERS, FAMILIES, Pad, has_segments, padded, tiny_config, tiny_rows
from tiny_decoders import collate as collate_tokens
from tiny_decoders import tiny_decoder, token_rows
from trained_heads import HEADS, Head, collator, rows_for

N_STEPS, N_ROWS, ROWS_PER_BATCH = 50, 60, 8
"""The last batch of an epoch is shorter than the others."""
TOLERANCE = 1e-4
"""Relative, of each loss: 50 steps of float32 sums in another order. Another token in one sum moves a loss by 1e-3."""
WAYS = ("engine", "whet.optimize")
EVERY = (*FAMILIES, *DECODERS, *PROVEN)
"""Families with a file, and some that run packed by proof."""
_RUN: dict[str, Any] = {
    "per_device_train_batch_size": ROWS_PER_BATCH, "learning_rate": 5e-4, "warmup_steps": 5,
    "weight_decay": 0.01, "logging_steps": 1, "use_cpu": True, "save_strategy": "no", "report_to": "none",
    "disable_tqdm": True, "seed": 7, "remove_unused_columns": False,
}  # fmt: skip

Rows = list[dict[str, Any]]
Collate = Callable[[Rows], dict[str, Tensor]]


@dataclass(frozen=True)
class Task:
    """What is trained: a model of a family, rows for it, and how they become a batch."""

    model: Callable[[str], nn.Module]
    rows: Callable[[str], Rows]
    collate: Callable[[str], Collate]
    auto: Any
    """The class of transformers that has, or has not, such a head for a family."""
    spans: bool = False
    """Whether the loss of transformers counts padding, so that whet has to count it too."""


def config_of(family: str, **changes: Any) -> Any:
    """Return the configuration of a tiny model without dropout."""
    if family not in FAMILIES:
        config = proven_config(family)
        config.update(changes)
        return config
    rates = {"seq_classif_dropout": 0.0} if family == "distilbert" else {"classifier_dropout_prob": 0.0}
    rates |= {"summary_last_dropout": 0.0} if family == "electra" else {}
    return tiny_config(family, **rates, **changes)


def _by_head(head: Head) -> Task:
    return Task(
        model=lambda family: _new(head.auto, family, **head.config),
        rows=lambda _: rows_for(head, N_ROWS),
        collate=collator,
        auto=head.auto,
    )


def _new(auto: Any, family: str, **changes: Any) -> nn.Module:
    torch.manual_seed(3)
    return auto.from_config(config_of(family, **changes))


def _pairs(family: str) -> Rows:
    """Return pairs of texts in one row, with token types where the family has them."""
    rows = rows_for(HEADS["classes"], N_ROWS)
    for row in rows:
        row["labels"] %= 2
        if family in FAMILIES and has_segments(family):
            n_first = len(row["input_ids"]) // 3
            row["token_type_ids"] = [0] * n_first + [1] * (len(row["input_ids"]) - n_first)
    return rows


def _collate_pairs(family: str) -> Collate:
    def collate(rows: Rows) -> dict[str, Tensor]:
        batch = collator(family)(rows)
        if "token_type_ids" in rows[0]:
            types = padded([{"input_ids": row["token_type_ids"]} for row in rows], 0)
            batch["token_type_ids"] = types["input_ids"]
        return batch

    return collate


def _spans(family: str) -> Rows:
    rows = tiny_rows(N_ROWS, family if family in FAMILIES else "roberta")
    return [dict(row) for row in rows.take(range(N_ROWS))]


class Embedder(nn.Module):
    """Mean pooling over an encoder, and other rows of the batch as wrong answers, as sentence-transformers trains."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.encoder = _new(transformers.AutoModel, family)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, other_input_ids: Tensor, other_attention_mask: Tensor
    ) -> dict[str, Tensor]:
        one, other = self._embed(input_ids, attention_mask), self._embed(other_input_ids, other_attention_mask)
        scores = 20 * one @ other.T
        return {"loss": functional.cross_entropy(scores, torch.arange(len(one)))}

    def _embed(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        states = self.encoder(input_ids=input_ids, attention_mask=mask).last_hidden_state
        return functional.normalize((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)


def _two_texts(_: str) -> Rows:
    rows = (rows_for(HEADS["classes"], N_ROWS, seed) for seed in (1, 2))
    return [{"input_ids": one["input_ids"], "other": two["input_ids"]} for one, two in zip(*rows, strict=True)]


def _collate_two(family: str) -> Collate:
    def collate(rows: Rows) -> dict[str, Tensor]:
        one = collator(family)([{"input_ids": row["input_ids"]} for row in rows])
        other = collator(family)([{"input_ids": row["other"]} for row in rows])
        return one | {f"other_{name}": value for name, value in other.items()}

    return collate


def _next_tokens(_: str) -> Rows:
    """Return rows whose first token has no label: nothing predicts it, but transformers counts it for GPT-2."""
    rows = token_rows(N_ROWS)
    return [row | {"labels": [-100, *row["labels"][1:]]} for row in rows]


TASKS: dict[str, Task] = {
    "answers": Task(
        model=lambda family: _new(transformers.AutoModelForQuestionAnswering, family),
        rows=_spans,
        collate=lambda family: Pad(config_of(family).pad_token_id),
        auto=transformers.AutoModelForQuestionAnswering,
        spans=True,
    ),
    **{name: _by_head(head) for name, head in HEADS.items()},
    "pairs": Task(
        model=lambda family: _new(transformers.AutoModelForSequenceClassification, family, num_labels=2),
        rows=_pairs,
        collate=_collate_pairs,
        auto=transformers.AutoModelForSequenceClassification,
    ),
    "next tokens": Task(
        model=tiny_decoder,
        rows=_next_tokens,
        collate=lambda _: collate_tokens,
        auto=transformers.AutoModelForCausalLM,
    ),
    "embeddings": Task(model=Embedder, rows=_two_texts, collate=_collate_two, auto=transformers.AutoModel),
}


def has_task(family: str, task: str) -> bool:
    """Return whether transformers has this head for the family, and whet packs it."""
    if (task == "next tokens") != (family in DECODERS):
        return False
    return type(transformers.AutoConfig.for_model(family)) in TASKS[task].auto._model_mapping


def worst(family: str, task: str, n_steps: int = N_STEPS) -> dict[str, float]:
    """Return for each way of whet the largest relative difference of a loss from transformers' own run."""
    with tempfile.TemporaryDirectory() as folder:
        given = (family, task, Path(folder), n_steps)
        wanted = by_transformers(TASKS[task].model(family), *given)
        found = {way: _RUNS[way](TASKS[task].model(family), *given) for way in WAYS}
    assert len(wanted) == n_steps
    return {way: max(_differences(losses, wanted)) for way, losses in found.items()}


def _differences(found: list[float], wanted: list[float]) -> Iterator[float]:
    assert len(found) == len(wanted)
    assert wanted[0] != wanted[-1], "nothing was trained"
    for one, other in zip(found, wanted, strict=True):
        yield abs(one - other) / abs(other)


def by_transformers(model: nn.Module, family: str, task: str, folder: Path, n_steps: int = N_STEPS) -> list[float]:
    """Return the losses of transformers' own Trainer."""
    return _losses(transformers, model, family, task, folder, max_steps=n_steps)


def by_whet(model: nn.Module, family: str, task: str, folder: Path, n_steps: int = N_STEPS) -> list[float]:
    """Return the losses of the engine of the commands; it counts padding in a loss in which transformers counts it."""
    given: dict[str, Any] = {"precision": "fp32"} | ({"padding_in_loss": "all"} if TASKS[task].spans else {})
    return _losses(engine, model, family, task, folder, max_steps=n_steps, **given)


def optimized(model: nn.Module, family: str, task: str, folder: Path, n_steps: int = N_STEPS) -> list[float]:
    """Return the losses of transformers' own Trainer with a model that whet.optimize has changed."""
    model = whet.optimize(model, padding="all" if TASKS[task].spans else "auto")
    return by_transformers(model, family, task, folder, n_steps)


_RUNS = {"engine": by_whet, "whet.optimize": optimized}


class _Tokenizer(Pad):
    """What the engine asks of a tokenizer to count padding in a loss: how to pad, and with what."""

    def __init__(self, pad_token_id: int) -> None:
        super().__init__(pad_token_id)
        self.pad_token_id = pad_token_id

    def pad(self, rows: Any, **_: Any) -> dict[str, Tensor]:
        return self(rows)


def _losses(library: Any, model: nn.Module, family: str, task: str, folder: Path, **given: Any) -> list[float]:
    """Return the loss of each step of the library's Trainer, from the same settings, rows and batches."""
    of_whet_spans = library is engine and TASKS[task].spans
    batches: dict[str, Any] = (
        {"processing_class": _Tokenizer(config_of(family).pad_token_id)}
        if of_whet_spans
        else {"data_collator": TASKS[task].collate(family)}
    )
    transformers.set_seed(7)  # transformers draws its order of rows from torch's generator
    args = library.TrainingArguments(output_dir=str(folder), **(_RUN | given))
    trainer = library.Trainer(model=model, args=args, train_dataset=TASKS[task].rows(family), **batches)
    with redirect_stdout(StringIO()):  # the losses of each step
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
