"""What `whet.optimize` was given: a model that it can change in place, and that model's optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from whet.errors import ConfigError
from whet.models import known
from whet.models.packable import family_of, why_padded
from whet.models.wrapped import unwrapped

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def require_model(model: Any) -> None:
    """Refuse what is no model, and wrappers that whet's changes belong inside of."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            what="whet.optimize changes a model, and this is none",
            got=model.__name__ if isinstance(model, type) else repr(model),
            why="it puts operators into a torch.nn.Module that is loaded already",
            fix="load it first: whet.optimize(AutoModelForQuestionAnswering.from_pretrained('bert-base-uncased'))",
        )
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise ConfigError(
            what="whet.optimize cannot change a model that is compiled already",
            got="the result of torch.compile",
            why="it changes the modules that torch.compile reads",
            fix="pass the model inside, and train that one: whet.optimize(model._orig_mod); to compile as well,"
            " use whet's Trainer with --torch_compile",
        )
    if isinstance(model, _PARALLEL):
        raise ConfigError(
            what="whet.optimize takes the model inside of this wrapper",
            got=type(model).__name__,
            why="the wrapper has no configuration that names its family",
            fix="pass the model inside, and train that one: whet.optimize(model.module)",
        )


def require_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Refuse what is no optimizer, and one that would train none of the model's parameters."""
    if optimizer is None:
        return
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            what="whet.optimize takes an optimizer that is made already",
            got=optimizer.__name__ if isinstance(optimizer, type) else repr(optimizer),
            why="it returns the optimizer as it came, to be used for the model's steps",
            fix="make it first: optimizer=torch.optim.AdamW(model.parameters())",
        )
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        return
    raise ConfigError(
        what="the optimizer given to whet.optimize belongs to another model",
        got=f"{type(optimizer).__name__} with none of the parameters of this {type(model).__name__}",
        why="its steps would not train this model",
        fix="make it from this model: torch.optim.AdamW(model.parameters()); or leave optimizer out",
    )


def no_family(model: nn.Module) -> ConfigError:
    """Return the refusal of a model that cannot run without padding; it names the encoders inside that can."""
    calls = " and ".join(_call(name) for name in _encoders(model))
    return ConfigError(
        what=f"whet.optimize cannot run this model without padding: {why_padded(model)}",
        got=type(model).__name__,
        why=f"it knows encoders of the families {known.names()}, with their own attention",
        fix=f"optimize the encoder inside: {calls}"
        if calls
        else "train it as it is, or with whet's Trainer, which runs such a model padded",
    )


def _encoders(model: nn.Module) -> list[str]:
    """Return the names of the encoders in a model of an unknown family, without those that lie in another."""
    if getattr(getattr(unwrapped(model), "config", None), "model_type", None) in known.known():
        return []
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not inside and isinstance(module, PreTrainedModel) and family_of(module) is not None:
            found.append(name)
    return found


def _call(name: str) -> str:
    if all(part.isidentifier() for part in name.split(".")):
        return f"self.{name} = whet.optimize(self.{name})"
    return f"whet.optimize(model.get_submodule({name!r}))"
