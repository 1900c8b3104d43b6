"""The simple optimizers of torch: SGD, RMSprop and Adagrad. Their weight decay is added to the gradient (L2)."""

from __future__ import annotations

import torch

from whet.optim.entry import Entry, Options, Shapes, bytes_of


def sgd_bytes(shapes: Shapes, options: Options, itemsize: int) -> int:
    """The momentum, if any."""
    return bytes_of(shapes, itemsize, moments=bool(options.get("momentum")), scalars=0)


def rmsprop_bytes(shapes: Shapes, options: Options, itemsize: int) -> int:
    """The mean square, the step, and the momentum and the mean if they are requested."""
    moments = 1 + bool(options.get("momentum")) + bool(options.get("centered"))
    return bytes_of(shapes, itemsize, moments=moments, scalars=1)


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
        moments=1,
        scalars=1,
        kind=torch.optim.Adagrad,
    ),
)
