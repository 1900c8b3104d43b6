"""The registry of optimizers: the rows of each file in `optimizers/`, what is built from them, and its state's size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from math import prod
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.card import Card
from whet.config.arguments import TrainingArguments
from whet.config.optimizer_names import missing_package, names, options, plugged_in
from whet.errors import ConfigError, WhetError
from whet.log import logger
from whet.optim.entry import Entry, Options, Request, Shapes, adam_settings, bytes_of, native_can_update

CARD = Card(
    name="optimizers",
    asked_by="optim",
    does="The rule of the update and the format of its state, from 8 bytes a weight down to none.",
    improves="both",
    same_result="no",
    hurts="When quality counts more than memory: compare the loss first.",
    source="each optimizer names its own; AdamW: Loshchilov and Hutter 2019, arXiv:1711.05101",
    page="memory.md#optimizers",
)


def _entries() -> dict[str, Entry]:
    folder = Path(__file__).with_name("optimizers")
    modules = [import_module(f"{__package__}.{folder.name}.{one.name}") for one in iter_modules([str(folder)])]
    found: dict[str, Entry] = {entry.name: entry for module in modules for entry in module.OPTIMIZERS}
    return {name: found[row.name] for name, row in names().items()}


ENTRIES: Mapping[str, Entry] = _entries()
"""The optimizer of each name, aliases among them."""


def build(model: nn.Module, args: TrainingArguments, rates: Mapping[int, float] | None = None) -> Optimizer:
    """Return the optimizer that `args.optim` names, over the model's trainable parameters.

    `rates` has the share of the learning rate of each parameter, by its id; None: all have the same.
    """
    request = Request(model, args, options(args.optim, args.optim_args), rates)
    if not request.parameters:
        raise ConfigError(
            what="nothing to train",
            why="no parameter of the model requires a gradient",
            fix="set requires_grad on the parameters to train",
        )
    if problem := missing_package(args.optim):
        raise ConfigError.of([problem])
    try:
        if args.optim not in ENTRIES:
            return plugged_in()[args.optim].load()(model, args, dict(request.options))
        return _build(request)
    except WhetError:
        raise
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        raise ConfigError(
            what=f"the optimizer {args.optim} cannot be built",
            got=f"optim_args={args.optim_args}: {error}",
            why="it refuses these settings, this model or this machine",
            fix="change --optim_args, or use another --optim",
        ) from error


def _build(request: Request) -> Optimizer:
    optim = request.args.optim
    entry = entry_for(optim, request.parameters)
    if remark := entry.aliases.get(optim):
        logger.info("optim %s: %s", optim, remark)
    if entry.on_cpu:
        _require_cpu(entry, request.parameters)
    if entry.build is not None:
        return entry.build(request)
    kind: Any = entry.kind
    return kind(request.groups, **_settings(entry, request.args), **request.options)


def _settings(entry: Entry, args: Any) -> dict[str, Any]:
    """Return the learning rate, and the betas and the epsilon if it reads them."""
    read = {"lr": True, "betas": entry.betas, "eps": entry.epsilon}
    return {name: value for name, value in adam_settings(args).items() if read[name]}


def entry_for(optim: str, parameters: Iterable[Tensor]) -> Entry:
    """Return the optimizer of this name, for these parameters: `auto` stands for another one."""
    entry = ENTRIES[optim]
    return entry if entry.stands_for is None else ENTRIES[entry.stands_for(parameters)]


def class_for(args: Any, parameters: Iterable[Tensor]) -> tuple[type[Optimizer], dict[str, Any]] | None:
    """Return a class and its settings, for a Trainer that makes the groups; None if the optimizer has to be built."""
    entry = entry_for(args.optim, parameters)
    if entry.kind is None or entry.build is not None:
        return None
    return entry.kind, {**_settings(entry, args), **options(args.optim, args.optim_args)}


def _require_cpu(entry: Entry, parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        if not native_can_update(parameter):
            raise ConfigError(
                what=f"{entry.name} cannot update these parameters",
                got=f"{parameter.dtype} on {parameter.device}",
                why="its operator works on the CPU, with 32-bit or 16-bit dtypes",
                fix=f"use --optim {entry.instead}",
            )


def state_bytes(optim: str, shapes: Shapes, optim_args: str | None = None, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes of this optimizer's state, for parameters of these shapes and this dtype.

    Nothing is allocated. Muon takes every matrix: pass embedding tables as vectors.
    """
    return _state_bytes(ENTRIES[optim], shapes, options(optim, optim_args), dtype.itemsize)


def _state_bytes(entry: Entry, shapes: Shapes, given: Options, itemsize: int) -> int:
    if entry.state_bytes is not None:
        return entry.state_bytes(shapes, given, itemsize)
    return bytes_of(shapes, itemsize, moments=entry.moments, scalars=entry.scalars)


def model_state_bytes(model: nn.Module, args: TrainingArguments, kept: Mapping[int, int] | None = None) -> int | None:
    """Return the bytes of the optimizer's state for this model; None for a plug-in.

    `kept`: how many rows of each parameter count, by its id; None: all.
    """
    if args.optim not in ENTRIES:
        return None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    entry, given = entry_for(args.optim, trained), options(args.optim, args.optim_args)
    matrices = {id(parameter) for parameter in trained} if entry.matrices is None else entry.matrices(model)
    total = 0
    for dtype in {parameter.dtype for parameter in trained}:
        ours = {id(one): _shape(one, kept) for one in trained if one.dtype == dtype}
        shapes = [shape if one in matrices else (prod(shape),) for one, shape in ours.items() if prod(shape)]
        total += _state_bytes(entry, shapes, given, dtype.itemsize)
    return total


def _shape(parameter: nn.Parameter, kept: Mapping[int, int] | None) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    if kept is None or not shape:
        return shape if kept is None or kept[id(parameter)] else (0,)
    return (kept[id(parameter)], *shape[1:])
