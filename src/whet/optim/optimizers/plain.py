"""The simple optimizers of torch: SGD, RMSprop and Adagrad. Their weight decay is added to the gradient (L2)."""

from __future__ import annotations

from math import prod

import torch
from torch.optim import Optimizer

from whet.optim.entry import STEP_BYTES, Entry, Options, Request, Shapes


def build_sgd(request: Request) -> Optimizer:
    """Return stochastic gradient descent, with momentum if optim_args sets it."""
    return torch.optim.SGD(request.groups, lr=request.args.learning_rate, **request.options)


def build_rmsprop(request: Request) -> Optimizer:
    """Return RMSprop (Tieleman and Hinton 2012)."""
    return torch.optim.RMSprop(request.groups, lr=request.args.learning_rate, **request.options)


def build_adagrad(request: Request) -> Optimizer:
    """Return Adagrad (Duchi et al. 2011)."""
    return torch.optim.Adagrad(request.groups, lr=request.args.learning_rate, **request.options)


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


SGD = Entry(build=build_sgd, state_bytes=sgd_bytes)
RMSPROP = Entry(build=build_rmsprop, state_bytes=rmsprop_bytes)
ADAGRAD = Entry(build=build_adagrad, state_bytes=adagrad_bytes)
