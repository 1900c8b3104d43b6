"""What a run is, for its user: its first lines, the bytes that a rank will hold, and the card of its model.

The first lines name the model, the data, the precision and its reason, the batch, memory, the machine and the saves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerState

from whet import console
from whet.config import recipes
from whet.config.arguments import TrainingArguments
from whet.config.ranks import Place
from whet.config.rules.sharing import stage_of_run
from whet.data.store import RowStore
from whet.engine.run import Prepared
from whet.errors import escape_controls
from whet.hardware import cpu, memory
from whet.kernels.library import library
from whet.optim import registry
from whet.store.weights import count_weights

_LABEL = 11
_WHOLE = ("recipe", "deepspeed")
"""Labels of settings that the user did not write: all are shown."""
_MOST_SAMPLED = 100_000
"""Rows of a larger data set that the padding is estimated from."""
_BUSY = 1.5
"""A machine whose load is more than this many times its cores is too busy for reliable timings."""


def of_training(
    prepared: Prepared, precision: str, counters: TrainerState, optimizer: Optimizer, *, state_is_known: bool
) -> list[str]:
    """Return the lines of a training run, just before its first step; `precision` is it in words.

    `state_is_known`: whether whet made the optimizer, and knows how much state it will have.
    """
    args = prepared.args
    micro_rows = counters.train_batch_size or args.per_device_train_batch_size
    rows = {
        "data": [*_rows(prepared, prepared.train_dataset, micro_rows), *_evaluated(prepared)],
        "batch": [
            _batch(args.train_rows_per_step, micro_rows, args.world_size, args.max_tokens_per_batch),
            *_length(args, counters.max_steps),
        ],
        "recipe": recipes.described(args),
        "deepspeed": _of_deepspeed(args),
        "memory": _memory(prepared, optimizer, state_is_known=state_is_known),
        "saves": _saves(args, counters),
    }
    if counters.global_step > 0:
        rows["resumes"] = [f"after step {counters.global_step:,} of {counters.max_steps:,}"]
    return _lines(prepared, precision, rows)


def _of_deepspeed(args: TrainingArguments) -> list[str]:
    if args.deepspeed is None:
        return []
    from whet.config import deepspeed

    return deepspeed.described(args)


def of_evaluation(prepared: Prepared, precision: str, dataset: Sized) -> list[str]:
    """Return the lines of an evaluation or prediction without training."""
    size = prepared.args.per_device_eval_batch_size
    return _lines(prepared, precision, {"data": _rows(prepared, dataset, size), "batch": [console.plural(size, "row")]})


def _lines(prepared: Prepared, precision: str, rows: dict[str, list[str]]) -> list[str]:
    known = {
        "model": _model(prepared.model),
        "data": rows.get("data", []),
        "precision": precision.split("; "),
        "batch": rows.get("batch", []),
        "recipe": rows.get("recipe", []),
        "deepspeed": rows.get("deepspeed", []),
        "memory": rows.get("memory", []),
        "machine": _machine(prepared.device),
        "saves": rows.get("saves", []),
        "resumes": rows.get("resumes", []),
    }
    return block({label: parts for label, parts in known.items() if parts}, console.width())


def block(rows: dict[str, list[str]], width: int) -> list[str]:
    """Return one line for each label, none longer than `width`: parts that do not fit are left out from the end.

    Settings that somebody else's file or a recipe made take as many lines as they need.
    """
    lines: list[str] = []
    for label, parts in rows.items():
        shown, most = [escape_controls(part) for part in parts], width - _LABEL
        found = console.folded(shown, most, ", ", "") if label in _WHOLE else [console.fit(shown, most)]
        lines += [f"{label if not number else '':<{_LABEL}}{line}" for number, line in enumerate(found)]
    return lines


def _model(model: nn.Module) -> list[str]:
    total, trained = count_weights(model), count_weights(model, trained=True)
    some = "all trainable" if trained == total else f"{console.count(trained)} trainable"
    return [type(model).__name__, f"{console.count(total)} parameters", some]


def _rows(prepared: Prepared, dataset: Sized, rows_per_batch: int) -> list[str]:
    """Return what is known about a data set without reading it: only a RowStore knows its tokens."""
    parts = [console.plural(len(dataset), "row")]
    if not isinstance(dataset, RowStore):
        return parts
    tokens = f"{console.count(int(dataset.cu_seqlens[-1]))} tokens"
    if not prepared.objective.packed:
        return [*parts, tokens, "padded batches"]
    avoided = padding_frac(dataset.lengths_with_padding, rows_per_batch, prepared.padded_length)
    return [*parts, tokens, f"{avoided:.0%} padding avoided"]


def _evaluated(prepared: Prepared) -> list[str]:
    if prepared.eval_dataset is None or not prepared.args.do_eval:
        return []
    return [f"evaluates {console.plural(len(prepared.eval_dataset), 'row')}"]


def padding_frac(lengths: np.ndarray, rows_per_batch: int, padded_length: int | None) -> float:
    """Return the fraction of padding in padded batches of the rows in random order."""
    if len(lengths) == 0:
        return 0.0
    order = np.random.default_rng(0).permutation(len(lengths))[:_MOST_SAMPLED]
    taken = lengths[order]
    starts = np.arange(0, len(taken), rows_per_batch)
    longest = np.maximum.reduceat(taken, starts)
    sizes = np.diff(np.append(starts, len(taken)))
    padded = np.maximum(longest, padded_length or 0)
    return 1.0 - float(taken.sum()) / float((padded * sizes).sum())


def _batch(rows_per_step: int, micro_rows: int, n_ranks: int, most_tokens: int | None) -> str:
    n_batches = -(-rows_per_step // (micro_rows * n_ranks))
    each = f"{n_batches} micro-batches of {micro_rows:,}" if n_batches > 1 else "1 micro-batch"
    each = each if most_tokens is None else f"micro-batches of at most {console.plural(most_tokens, 'token')}"
    ranks = f" on each of {n_ranks} ranks" if n_ranks > 1 else ""
    return f"{console.plural(rows_per_step, 'row')} a step in {each}{ranks}"


def _length(args: TrainingArguments, n_steps: int) -> list[str]:
    """Return the length of the run, and what decided it."""
    steps = console.plural(n_steps, "step")
    if args.max_steps > 0:
        return [steps]
    if n_steps == args.min_steps:
        return [f"{steps} (min_steps)"]
    return [steps, f"{args.num_train_epochs:g} epoch{'' if args.num_train_epochs == 1 else 's'}"]


def _memory(prepared: Prepared, optimizer: Optimizer, *, state_is_known: bool) -> list[str]:
    """Return what weights, gradients and optimizer state will take, and what is free now."""
    args, place = prepared.args, prepared.place
    trained = sum(one.numel() * one.element_size() for one in prepared.model.parameters() if one.requires_grad)
    found = planned_bytes(prepared.model, args, optimizer, place, known=state_is_known)
    size = found.weights + found.gradients + (found.state or 0)
    size += 0 if args.weight_averaging_start is None else trained  # their mean
    without = "activations" if found.state is not None else "optimizer and activations"
    available = _available(prepared.device)
    known = f"{console.amount(size)} without {without}"
    stage = stage_of_run(args)
    known += f", by zero_stage {stage} on this rank" if stage and place.n_ranks > 1 else ""
    return [known, *([f"{available} free"] if available else [])]


def _available(device: torch.device) -> str | None:
    if device.type == "cuda":
        return console.amount(torch.cuda.mem_get_info(device)[0])
    free = memory.free_bytes(unheld_bytes=memory.mapped_bytes() or 0)
    return None if free is None else console.amount(free)


def _machine(device: torch.device) -> list[str]:
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), console.amount(torch.cuda.mem_get_info(device)[1])]
    native, cores = library(), cpu.usable_cores()
    operators = f"{native.isa} native operators" if native is not None else "operators in plain torch"
    load = cpu.load()
    busy = [f"busy: load {load:.0f}"] if load is not None and load > _BUSY * (os.cpu_count() or cores) else []
    return [f"{torch.get_num_threads()} of {console.plural(cores, 'core')} used", operators, *busy]


def _saves(args: TrainingArguments, counters: TrainerState) -> list[str]:
    every = {
        "no": "no checkpoints",
        "steps": f"every {console.plural(counters.save_steps or 0, 'step')}",
        "epoch": "every epoch",
        "time": f"every {console.duration(args.save_interval_s)}",
        "best": "at each new best",
    }[args.save_strategy]
    kept = [f"newest {args.save_total_limit} kept"] if args.save_total_limit and args.save_strategy != "no" else []
    kept += ["the model only"] if args.save_only_model and args.save_strategy != "no" else []
    room = console.width() - _LABEL - len(every) - 2
    return [console.shorten(escape_controls(args.output_dir), max(room, len("...") + 3)), every, *kept]


# ---- bytes ----

_GRADIENTS, _WEIGHTS = 2, 2
"""The first stage that shares each, as stage 1 shares the state; stage 2 keeps the weights of a block longer than stage
3, not between steps."""


@dataclass(frozen=True)
class PlannedBytes:
    """Bytes that one rank holds between two steps; gradients until the optimizer's step is done."""

    weights: int
    gradients: int
    state: int | None
    """None: the optimizer is not one of whet's, so that its state is not known before the first step."""


def planned_bytes(
    model: nn.Module, args: TrainingArguments, optimizer: Optimizer | None, place: Place, *, known: bool = True
) -> PlannedBytes:
    """Return what this rank will hold. `known`: whether the arguments name the optimizer."""
    weights = list(model.parameters())
    trained = [one for one in weights if one.requires_grad]
    stage = stage_of_run(args) if place.n_ranks > 1 and optimizer is not None else 0
    kept = None if optimizer is None or not stage else _kept(weights, place, optimizer)
    gradients = 0 if args.optimizer_in_backward else _bytes_of(trained, kept if stage >= _GRADIENTS else None)
    return PlannedBytes(
        weights=_bytes_of(weights, kept if stage >= _WEIGHTS else None),
        gradients=gradients,
        state=registry.model_state_bytes(model, args, kept) if known else None,
    )


def _kept(parameters: Sequence[nn.Parameter], place: Place, optimizer: Optimizer) -> Mapping[int, int]:
    """Return how many rows of each parameter this rank keeps, by its id."""
    from whet.dist.shares import deal
    from whet.optim import divisible

    rows = deal([one.shape for one in parameters], place.n_ranks, divisible.unit_of(optimizer))
    return {id(one): of_ranks[place.rank][1] for one, of_ranks in zip(parameters, rows, strict=True)}


def _bytes_of(parameters: Sequence[nn.Parameter], kept: Mapping[int, int] | None) -> int:
    total = 0
    for one in parameters:
        n_elements = one.numel() if kept is None else kept[id(one)] * prod(one.shape[1:])
        total += n_elements * one.element_size()
    return total
