"""One row of a batch is changed: by how much do the other rows' logits and gradients move?

Each way of running a batch is measured alike, whet's and others'. The gradient is that of a fixed sum of the others'
logits: without a leak the changed row adds nothing but zeros to it, so its bits stay as they are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import engine
import whet
from proven_models import PROVEN, proven_config
from tiny import DECODERS, FAMILIES, NO_AUTOCAST, arguments, padded, tiny_config
from tiny_decoders import tiny_decoder
from whet.models.known import known

TASKS = {
    "qa": "AutoModelForQuestionAnswering",
    "classify": "AutoModelForSequenceClassification",
    "tag": "AutoModelForTokenClassification",
    "words": "AutoModelForMaskedLM",
}
WAYS = ("padded", "packed", "optimized")
FORMATS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
LENGTHS = (9, 21, 5, 14, 30, 2)
CHANGED = 3
SEED = 7
DROPOUT = 0.1


@dataclass(frozen=True)
class Moved:
    """The largest changes of the other rows' logits and gradients, and of the changed row's logits."""

    logits: float
    gradients: float
    own: float


@dataclass(frozen=True)
class Outcome:
    """The logits of each row, and the gradients of a fixed sum of those of all but the changed row."""

    rows: list[Tensor]
    gradients: list[Tensor]


FORMS = ("positions", "offset positions", "mask of ones", "cu_seq_lens", "seq_idx", "block mask")
"""How rows that lie end to end are given: all in one row of the batch."""
_NAMED = ("cu_seq_lens", "seq_idx", "block mask")
"""Those that say themselves which tokens belong together; positions say it to decoders alone."""
_KEPT_FROM_ENCODER = ("deberta", "deberta-v2", "mpnet")
"""Encoders whose heads in transformers do not hand on columns that they do not know."""
_WITH_EXPERTS = ("moe", "mixtral")
_ANOTHER_ORDER = 1e-4
"""An expert computes the tokens that chose it together: a product of another size may sum in another order. What one
row gives another by a leak is of the size of its own change, above 1."""


Run = Callable[[list[dict[str, Any]]], list[Tensor]]
"""Rows -> the logits of each."""


def has_task(family: str, task: str) -> bool:
    """Return whether transformers has this head for the family."""
    config = transformers.AutoConfig.for_model(family)
    return type(config) in getattr(transformers, TASKS[task])._model_mapping


def model_of(family: str, task: str) -> Any:
    """Return a tiny model in training mode, with dropout."""
    torch.manual_seed(0)
    given = tiny_config(family, dropout=DROPOUT) if family in FAMILIES else proven_config(family, dropout=DROPOUT)
    return getattr(transformers, TASKS[task]).from_config(given).train()


def rows_of(task: str, *, changed: bool) -> list[dict[str, Any]]:
    """Return rows of random tokens; one of them may be changed, its length stays."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(10, 190, (length,), generator=generator).tolist() for length in LENGTHS]
    if changed:
        rows[CHANGED] = [199 - token for token in rows[CHANGED]]
    return [_labelled(ids, task) for ids in rows]


def moved(model: Any, run: Run, task: str) -> Moved:
    """Return what changing one row moves."""
    before, after = (_outcome(model, run, rows_of(task, changed=changed)) for changed in (False, True))
    others = [number for number in range(len(LENGTHS)) if number != CHANGED]
    return Moved(
        logits=max(_gap(before.rows[number], after.rows[number]) for number in others),
        gradients=max(map(_gap, before.gradients, after.gradients)),
        own=_gap(before.rows[CHANGED], after.rows[CHANGED]),
    )


def measure(family: str, task: str, way: str, number_format: str) -> Moved | None:
    """Return what moves when a batch of this family's model runs in one of whet's ways; None if it cannot run so."""
    model = model_of(family, task)
    with _prepared(model, way, FORMATS[number_format]) as run:
        return None if run is None else moved(model, run, task)


@contextmanager
def _prepared(model: Any, way: str, dtype: torch.dtype | None) -> Iterator[Run | None]:
    autocast = torch.autocast("cpu", dtype) if dtype is not None else nullcontext()
    if way == "optimized":
        yield partial(run_padded, whet.optimize(model, dtype=dtype))
        return
    with tempfile.TemporaryDirectory() as folder, autocast:
        if way == "padded":
            fails = dtype is not None and model.config.model_type in NO_AUTOCAST
            yield None if fails else partial(run_padded, model)
        else:
            yield _packed(model, Path(folder))


def run_padded(model: Any, rows: list[dict[str, Any]]) -> list[Tensor]:
    """Return the logits of each row, the batch padded and its labels left out."""
    batch = {name: value for name, value in _collate(rows).items() if name in ("input_ids", "attention_mask")}
    torch.manual_seed(SEED)
    return _by_row(model(**batch), [len(row["input_ids"]) for row in rows])


def most(family: str) -> float:
    """Return by how much numbers of another row may change in this family without a leak."""
    return _ANOTHER_ORDER if family.endswith(_WITH_EXPERTS) else 0.0


def takes(family: str, form: str) -> bool:
    """Return whether rows end to end in this form are several sequences for the family."""
    return family in DECODERS or (form in _NAMED and family not in _KEPT_FROM_ENCODER)


def measure_form(family: str, form: str, number_format: str, *, by_whet: bool = True) -> Moved | None:
    """Return what moves when the family's model gets rows end to end in this form; None if it cannot run so.

    `by_whet`: under `whet.optimize`; else as transformers runs it.
    """
    decodes, dtype = family in DECODERS, FORMATS[number_format]
    model = tiny_decoder(family, dropout=DROPOUT).train() if decodes else model_of(family, "tag")
    if not by_whet and dtype is not None and family in NO_AUTOCAST:
        return None
    model = whet.optimize(model, dtype=dtype) if by_whet else model
    autocast = nullcontext() if by_whet or dtype is None else torch.autocast("cpu", dtype)
    with autocast:
        return moved(model, partial(run_end_to_end, model, form), "words" if decodes else "tag")


def run_end_to_end(model: Any, form: str, rows: list[dict[str, Any]]) -> list[Tensor]:
    """Return the logits of each row, the rows end to end and without labels."""
    lengths = [len(row["input_ids"]) for row in rows]
    decodes = model.config.model_type in DECODERS
    torch.manual_seed(SEED)
    call = end_to_end([row["input_ids"] for row in rows], form, causal=decodes)
    if form == "block mask" and model.config._attn_implementation == "eager":  # which adds the mask to the scores
        seen = call["attention_mask"]
        call["attention_mask"] = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    call["position_ids"] += known()[model.config.model_type].first_position(model)
    return list(model(**call, **{"use_cache": False} if decodes else {}).logits[0].split(lengths))


def end_to_end(rows: list[list[int]], form: str, *, causal: bool) -> dict[str, Any]:
    """Return a batch of one row that holds these rows in one of `FORMS`."""
    lengths, ids = [len(row) for row in rows], torch.tensor([[one for row in rows for one in row]])
    firsts = [3 * number for number in range(len(rows))] if form == "offset positions" else [0] * len(rows)
    positions = [torch.arange(length) + first for length, first in zip(lengths, firsts, strict=True)]
    call: dict[str, Any] = {"input_ids": ids, "position_ids": torch.cat(positions)[None]}
    bounds, longest = torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths)
    if form == "cu_seq_lens":
        call |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    if form == "seq_idx":
        call["seq_idx"] = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))[None].int()
    if form == "mask of ones":
        call["attention_mask"] = torch.ones_like(ids)
    if form == "block mask":
        blocks = torch.block_diag(*(torch.ones(n, n) for n in lengths))
        call["attention_mask"] = (blocks.tril() if causal else blocks).bool()[None, None]
    return call


def _packed(model: Any, folder: Path) -> Run | None:
    """Return how whet's Trainer runs its batches; None where it pads them."""
    spans = type(model).__name__.endswith("ForQuestionAnswering")
    trainer = engine.Trainer(model=model, args=arguments(folder), data_collator=None if spans else _collate)
    objective: Any = trainer.objective
    if not objective.packed:
        return None

    def run(rows: list[dict[str, Any]]) -> list[Tensor]:
        lengths = [len(row["input_ids"]) for row in rows]
        if type(objective).__name__ == "UnpaddedLoss":
            return run_padded(trainer.model, rows)  # a head to which whet gives hidden states with padding
        batch = objective.batch(rows, range(len(rows)), 0)
        output = objective.forward(batch, seed=SEED, step=1)
        if spans:
            start, end, _ = objective.span_logits(output, batch)
            return list(torch.stack([start, end], -1).split(lengths))
        return _by_row(output, lengths, packed=True)

    return run


def _by_row(output: Any, lengths: list[int], *, packed: bool = False) -> list[Tensor]:
    if "start_logits" in output:
        logits = torch.stack([output["start_logits"], output["end_logits"]], -1)
    else:
        logits = output["logits"]
    if logits.shape[0] == 1 and packed:  # tokens end to end, of which those that fill the batch up are left out
        return list(logits[0, : sum(lengths)].split(lengths))
    if logits.dim() == 2:
        return list(logits)
    return [logits[row, :length] for row, length in enumerate(lengths)]


def _outcome(model: Any, run: Run, rows: list[dict[str, Any]]) -> Outcome:
    found = run(rows)
    generator = torch.Generator().manual_seed(2)
    loss = torch.zeros(())
    for number, logits in enumerate(found):
        factors = torch.randn(logits.shape, generator=generator)
        if number != CHANGED:
            loss = loss + (logits.float() * factors).sum()
    weights = [one for one in model.parameters() if one.requires_grad]
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    return Outcome([one.detach() for one in found], [one for one in gradients if one is not None])


def _collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    wide = padded([{"input_ids": row["input_ids"]} for row in rows], 0)
    labels = [row["labels"] for row in rows if "labels" in row]
    if not labels:
        more = ("start_positions", "end_positions")
        return wide | {name: torch.tensor([row[name] for row in rows]) for name in more}
    if isinstance(labels[0], int):
        return wide | {"labels": torch.tensor(labels)}
    longest = wide["input_ids"].shape[1]
    return wide | {"labels": torch.tensor([one + [-100] * (longest - len(one)) for one in labels])}


def _labelled(ids: list[int], task: str) -> dict[str, Any]:
    labels: Mapping[str, Mapping[str, Any]] = {
        "qa": {"start_positions": 0, "end_positions": len(ids) - 1},
        "classify": {"labels": len(ids) % 2},
        "tag": {"labels": [place % 2 for place in range(len(ids))]},
        "words": {"labels": list(ids)},
    }
    return {"input_ids": ids, **labels[task]}


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max())


EVERY = (*FAMILIES, *PROVEN)
"""Families with a file, and some that run packed by proof."""
