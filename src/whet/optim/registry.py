"""The registry of optimizers: the rows of each file in `optimizers/`, what is built from them, and its state's size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet import plugins
from whet.card import Card
from whet.config.arguments import TrainingArguments
from whet.config.optimizer_names import ROOM, missing_package, module_of, names, options, plugged_in, rows
from whet.errors import ConfigError, WhetError
from whet.log import logger
from whet.optim.entry import Entry, Options, Request, Shapes, adam_settings, bytes_of, native_can_update

CARD = Card(
    name="optimizers",
    asked_by="optim",
    does="The rule of the update, with 8 bytes of state a weight down to none.",
    improves="both",
    same_result="no",
    hurts="When quality counts more than memory: compare the loss first.",
    source="each optimizer names its own; AdamW: Loshchilov and Hutter 2019, arXiv:1711.05101",
    page="memory.md#optimizers",
)


def entry(name: str) -> Entry:
    """Return the optimizer of this name or alias; its file alone is imported."""
    own = names()[name].name
    found: tuple[Entry, ...] = plugins.load(ROOM, module_of(own)).OPTIMIZERS
    return next(one for one in found if one.name == own)


def entries() -> list[Entry]:
    """Return every optimizer, in the order of the help text."""
    return [entry(row.name) for row in rows()]


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
        if args.optim not in names():
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
    found = entry_for(optim, request.parameters)
    if remark := found.aliases.get(optim):
        logger.info("optim %s: %s", optim, remark)
    if found.on_cpu:
        _require_cpu(found, request.parameters)
    if found.build is not None:
        return found.build(request)
    kind: Any = found.kind
    return kind(request.groups, **_settings(found, request.args), **request.options)


def _settings(chosen: Entry, args: Any) -> dict[str, Any]:
    """Return the learning rate, and the betas and the epsilon if it reads them."""
    read = {"lr": True, "betas": chosen.betas, "eps": chosen.epsilon}
    return {name: value for name, value in adam_settings(args).items() if read[name]}


def entry_for(optim: str, parameters: Iterable[Tensor]) -> Entry:
    """Return the optimizer of this name, for these parameters: `auto` stands for another one."""
    found = entry(optim)
    return found if found.stands_for is None else entry(found.stands_for(parameters))


def class_for(args: Any, parameters: Iterable[Tensor]) -> tuple[type[Optimizer], dict[str, Any]] | None:
    """Return a class and its settings, for a Trainer that makes the groups; None if the optimizer has to be built."""
    parameters = list(parameters)
    found = entry_for(args.optim, parameters)
    if found.on_cpu:
        _require_cpu(found, parameters)
    if found.kind is None or found.build is not None:
        return None
    return found.kind, {**_settings(found, args), **options(args.optim, args.optim_args)}


def _require_cpu(chosen: Entry, parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        if not native_can_update(parameter):
            raise ConfigError(
                what=f"{chosen.name} cannot update these parameters",
                got=f"{parameter.dtype} on {parameter.device}",
                why="its operator works on the CPU, with 32-bit or 16-bit dtypes",
                fix=f"use --optim {chosen.instead}",
            )


def state_bytes(optim: str, shapes: Shapes, optim_args: str | None = None, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes of this optimizer's state, for parameters of these shapes and this dtype.

    Nothing is allocated. Muon takes every matrix: pass embedding tables as vectors.
    """
    return _state_bytes(entry(optim), shapes, options(optim, optim_args), dtype.itemsize)


def _state_bytes(chosen: Entry, shapes: Shapes, given: Options, itemsize: int) -> int:
    if chosen.state_bytes is not None:
        return chosen.state_bytes(shapes, given, itemsize)
    return bytes_of(shapes, itemsize, moments=chosen.moments, scalars=chosen.scalars)


def model_state_bytes(model: nn.Module, args: TrainingArguments, kept: Mapping[int, int] | None = None) -> int | None:
    """Return the bytes of the optimizer's state for this model; None for a plug-in.

    `kept`: how many rows of each parameter count, by its id; None: all.
    """
    if args.optim not in names():
        return None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    chosen, given = entry_for(args.optim, trained), options(args.optim, args.optim_args)
    matrices = {id(parameter) for parameter in trained} if chosen.matrices is None else chosen.matrices(model)
    total = 0
    for dtype in {parameter.dtype for parameter in trained}:
        ours = {id(one): _shape(one, kept) for one in trained if one.dtype == dtype}
        shapes = [shape if one in matrices else (prod(shape),) for one, shape in ours.items() if prod(shape)]
        total += _state_bytes(chosen, shapes, given, dtype.itemsize)
    return total


def _shape(parameter: nn.Parameter, kept: Mapping[int, int] | None) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    if kept is None or not shape:
        return shape if kept is None or kept[id(parameter)] else (0,)
    return (kept[id(parameter)], *shape[1:])
