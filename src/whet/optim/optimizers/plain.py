"""The simple optimizers of torch: SGD, RMSprop and Adagrad. Their weight decay is added to the gradient (L2)."""

from __future__ import annotations

from math import prod

import torch

from whet.optim.entry import STEP_BYTES, Entry, Options, Shapes


def sgd_bytes(shapes: Shapes, options: Options, itemsize: int) -> int:
    """The momentum, if any."""
    return sum(itemsize * prod(shape) for shape in shapes) if options.get("momentum") else 0


def rmsprop_bytes(shapes: Shapes, options: Options, itemsize: int) -> int:
    """The mean square, the step, and the momentum and the mean if they are requested."""
    n_tensors = 1 + bool(options.get("momentum")) + bool(options.get("centered"))
    return sum(n_tensors * itemsize * prod(shape) + STEP_BYTES for shape in shapes)


def adagrad_bytes(shapes: Shapes, _options: Options, itemsize: int) -> int:
    """The sum of squares, and the step."""
    return sum(itemsize * prod(shape) + STEP_BYTES for shape in shapes)


OPTIMIZERS = (
    Entry(
        name="sgd",
        rule="SGD",
        does="SGD of torch, with momentum if it is set (4 bytes); weight decay is added to the gradient",
        source="torch.optim.SGD",
        options={"momentum": "float", "dampening": "float", "nesterov": "bool"},
        reads="element",
        kind=torch.optim.SGD,
        state_bytes=sgd_bytes,
    ),
    Entry(
        name="rmsprop",
        rule="RMSprop",
        does="RMSprop of torch; weight decay is added to the gradient",
        source="Tieleman and Hinton 2012; torch.optim.RMSprop",
        options={"momentum": "float", "alpha": "float", "eps": "float", "centered": "bool"},
        reads="element",
        kind=torch.optim.RMSprop,
        state_bytes=rmsprop_bytes,
    ),
    Entry(
        name="adagrad",
        rule="Adagrad",
        does="Adagrad of torch; weight decay is added to the gradient",
        source="Duchi et al. 2011; torch.optim.Adagrad",
        options={"lr_decay": "float", "eps": "float", "initial_accumulator_value": "float"},
        kind=torch.optim.Adagrad,
        state_bytes=adagrad_bytes,
    ),
)
