"""What `whet.optimize` was given: a model that it can change in place, and that model's optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from whet.errors import ConfigError
from whet.models import known
from whet.models.experts.settings import settings_of
from whet.models.packable import why_padded
from whet.own_loop import curated, inside, spacy_pipes

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def require_model(model: Any) -> None:
    """Refuse what holds no model, and wrappers that whet's changes belong inside of."""
    for name, root in require_modules(model, "whet.optimize"):
        for path, module in root.named_modules():
            _require_unwrapped(module, ".".join(part for part in (name, path) if part))


def require_modules(model: Any, function: str) -> list[tuple[str, nn.Module]]:
    """Return the modules that an object holds, with their names; refuse one that holds none."""
    roots = [] if isinstance(model, type) else inside.modules_in(model)
    if not roots and spacy_pipes.is_of_spacy(model):
        raise ConfigError(
            what=f"{function} changes a PyTorch model, and there is none in this object of spaCy",
            got=f"{type(model).__name__}, {_components_of(model)}",
            why="some components load their transformer when they are initialised, and others have none at all",
            fix=f"call nlp.initialize(...) first, then {function}(nlp), if the pipeline has a transformer",
        )
    if not roots:
        raise ConfigError(
            what=f"{function} changes a model, and there is none",
            got=model.__name__ if isinstance(model, type) else repr(model),
            why="it puts operators into a torch.nn.Module that is loaded, or into the modules that an object holds",
            fix=f"load it first: {function}(AutoModelForQuestionAnswering.from_pretrained('bert-base-uncased'));"
            " of several models, call it for each",
        )
    return roots


def require_no_balance(model: Any) -> None:
    """Raise ConfigError for experts whose balance is learnt: a loop of the user's own would leave it out."""
    settings = settings_of(getattr(model, "config", None))
    if settings is None or not (settings.aux_loss_coef or settings.z_loss_coef):
        return
    raise ConfigError(
        what="whet.optimize does not train the routers of this model's experts",
        got=f"{type(model).__name__} with {settings.experts} experts",
        why="their balance loss is a part of the loss of whet's commands, and of no other loop",
        fix="train it with a command of whet and --moe_experts; or set aux_loss_coef and z_loss_coef of "
        "model.config.whet_experts to 0 if the loop has a balance loss of its own",
    )


def _components_of(model: Any) -> str:
    names = [name for name, _ in getattr(model, "components", [])]
    return f"components: {', '.join(names)}" if names else "without components"


def _require_unwrapped(module: nn.Module, name: str) -> None:
    if isinstance(module, torch._dynamo.OptimizedModule):
        raise ConfigError(
            what="whet.optimize cannot change a model that is compiled already",
            got=f"{name}, the result of torch.compile" if name else "the result of torch.compile",
            why="it changes the modules that torch.compile reads",
            fix="change the model inside, then compile it: torch.compile(whet.optimize(model._orig_mod))",
        )
    if isinstance(module, _PARALLEL):
        raise ConfigError(
            what="whet.optimize takes the model inside of this wrapper",
            got=f"{name}, a {type(module).__name__}" if name else type(module).__name__,
            why="the wrapper copies or synchronises the model as it was when it was wrapped",
            fix="pass the model inside, and train that one: whet.optimize(model.module)",
        )


def require_optimizer(optimizer: Any, model: Any) -> None:
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
    own = {id(parameter) for _, root in inside.modules_in(model) for parameter in root.parameters()}
    if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        return
    raise ConfigError(
        what="the optimizer given to whet.optimize belongs to another model",
        got=f"{type(optimizer).__name__} with none of the parameters of this {type(model).__name__}",
        why="its steps would not train this model",
        fix="make it from this model: torch.optim.AdamW(model.parameters()); or leave optimizer out",
    )


def no_family(model: nn.Module) -> ConfigError:
    """Return the refusal of a model of a known family that cannot run without padding."""
    return ConfigError(
        what=f"whet.optimize cannot run this model without padding: {why_padded(model)}",
        got=type(model).__name__,
        why=f"it knows the families {known.names(causal=None)}, and tries other encoders on a copy",
        fix="train it as it is, or with whet's Trainer, which runs such a model padded",
    )


def no_encoder(model: Any) -> ConfigError:
    """Return the refusal of a model in which no encoder can run without padding, with the reason for each."""
    roots = inside.modules_in(model)
    if any(inside.is_known(root) for _, root in roots):
        return no_family(next(root for _, root in roots if inside.is_known(root)))
    found = {
        type(module).__name__: why
        for _, root in roots
        for module in root.modules()
        if (why := _why_not(module)) is not None
    }
    reasons = "; ".join(f"{name}: {why}" for name, why in list(found.items())[:3])
    return ConfigError(
        what="whet.optimize finds no encoder here that it can run without padding",
        got=type(model).__name__ + (f" ({reasons})" if reasons else ", with no model of transformers inside"),
        why=f"it knows the families {known.names(causal=None)}, and tries other encoders on a copy",
        fix="train it as it is, or with whet.Trainer, which runs other models of transformers with their padding",
    )


def _why_not(module: nn.Module) -> str | None:
    """Return why this module is not changed; None for modules that are no model of a library that whet knows."""
    if isinstance(module, PreTrainedModel):
        return why_padded(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "a TorchScript module, which has no parts to exchange: load it without torchscript=True"
    if curated.is_of_library(module) and type(module).__name__.endswith("Encoder"):
        return "whet knows the encoders of curated-transformers 0.1, which spaCy 3 installs"
    return None
