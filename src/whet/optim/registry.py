"""Optimizers by their `--optim` names."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import nn
from torch.optim import Optimizer

from whet.card import Card
from whet.config.arguments import TrainingArguments
from whet.config.optimizer_names import OPTIONS, options, plugged_in
from whet.errors import ConfigError, WhetError
from whet.optim.entry import Entry, Request, Shapes
from whet.optim.optimizers import (
    adafactor,
    adamw_torch,
    anyprecision,
    auto,
    bitsandbytes,
    lion,
    muon,
    native,
    plain,
    torchao,
)

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

ENTRIES: Mapping[str, Entry] = {
    "auto": auto.ENTRY,
    "adamw_torch": adamw_torch.PLAIN,
    "adamw_torch_fused": adamw_torch.FUSED,
    "adamw_hf": adamw_torch.HF,
    "adamw_apex_fused": adamw_torch.APEX,
    "adamw_anyprecision": anyprecision.ENTRY,
    "adamw_whet": native.ENTRY,
    "adamw_whet_8bit": native.ENTRY_8BIT,
    "adamw_bnb_8bit": bitsandbytes.ENTRY,
    "adamw_8bit": bitsandbytes.ENTRY,
    "adamw_torch_8bit": torchao.ENTRY_8BIT,
    "adamw_torch_4bit": torchao.ENTRY_4BIT,
    "adafactor": adafactor.ENTRY,
    "muon": muon.ENTRY,
    "lion_32bit": lion.ENTRY,
    "adagrad": plain.ADAGRAD,
    "rmsprop": plain.RMSPROP,
    "sgd": plain.SGD,
}
assert ENTRIES.keys() == OPTIONS.keys(), "config/optimizer_names.py lists the same names"


def build(model: nn.Module, args: TrainingArguments, rates: Mapping[int, float] | None = None) -> Optimizer:
    """Return the optimizer that `args.optim` names, over the model's trainable parameters.

    `rates` has the share of the learning rate of each parameter, by its id; None: all have the same.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            what="nothing to train",
            why="no parameter of the model requires a gradient",
            fix="set requires_grad on the parameters to train",
        )
    request = Request(model, args, options(args.optim, args.optim_args), rates)
    try:
        if args.optim in ENTRIES:
            return ENTRIES[args.optim].build(request)
        return plugged_in()[args.optim].load()(model, args, dict(request.options))
    except WhetError:
        raise
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        raise ConfigError(
            what=f"the optimizer {args.optim} cannot be built",
            got=f"optim_args={args.optim_args}: {error}",
            why="it refuses these settings, this model or this machine",
            fix="change --optim_args, or use another --optim",
        ) from error


def state_bytes(optim: str, shapes: Shapes, optim_args: str | None = None, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes of this optimizer's state, for parameters of these shapes and this dtype.

    Nothing is allocated. Muon takes every matrix: pass embedding tables as vectors.
    """
    return ENTRIES[optim].state_bytes(shapes, options(optim, optim_args), dtype.itemsize)


def model_state_bytes(model: nn.Module, args: TrainingArguments, kept: Mapping[int, int] | None = None) -> int | None:
    """Return the bytes of the optimizer's state for this model; None for a plug-in.

    `kept`: how many rows of each parameter count, by its id; None: all.
    """
    if args.optim not in ENTRIES:
        return None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = muon.matrices(model) if args.optim == "muon" else {id(parameter) for parameter in trained}
    optim = auto.name_for(trained) if args.optim == "auto" else args.optim
    total = 0
    for dtype in {parameter.dtype for parameter in trained}:
        ours = {id(one): _shape(one, kept) for one in trained if one.dtype == dtype}
        shapes = [shape if one in matrices else (prod(shape),) for one, shape in ours.items() if prod(shape)]
        total += state_bytes(optim, shapes, args.optim_args, dtype)
    return total


def _shape(parameter: nn.Parameter, kept: Mapping[int, int] | None) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    if kept is None or not shape:
        return shape if kept is None or kept[id(parameter)] else (0,)
    return (kept[id(parameter)], *shape[1:])
