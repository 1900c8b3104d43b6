"""Optimizers by their `--optim` names."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError
from whet.optim.groups import parameter_groups


def _adamw_torch(model: nn.Module, args: TrainingArguments, *, fused: bool) -> Optimizer:
    """Decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2), torch's implementation."""
    return torch.optim.AdamW(
        parameter_groups(model, args.weight_decay),
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=fused,
    )


OPTIMIZERS: dict[str, Callable[[nn.Module, TrainingArguments], Optimizer]] = {
    "adamw_torch": lambda model, args: _adamw_torch(model, args, fused=False),
    "adamw_torch_fused": lambda model, args: _adamw_torch(model, args, fused=True),
}


def build(model: nn.Module, args: TrainingArguments) -> Optimizer:
    """Return the optimizer that `args.optim` names, over the model's trainable parameters."""
    if args.optim not in OPTIMIZERS:
        raise ConfigError(
            what="unknown optimizer",
            got=args.optim,
            why=f"whet has {', '.join(OPTIMIZERS)}",
            fix="use one of these in --optim, or pass optimizers=(optimizer, None) to Trainer",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            what="nothing to train",
            why="no parameter of the model requires a gradient",
            fix="set requires_grad on the parameters to train",
        )
    return OPTIMIZERS[args.optim](model, args)
