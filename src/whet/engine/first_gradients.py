"""Which weights got a gradient in the first step of a training: one that gets none would never learn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from whet.engine.sync import Sync
from whet.errors import ConfigError
from whet.log import logger
from whet.models import adapters
from whet.models.experts.layer import layers_of
from whet.store import schema

_MOST_NAMED = 3
_ONE_OF_MANY = re.compile(r"\.experts\.(expert_)?\d+\.")
"""A module for each expert: those that get no token in a step have no gradient in it, and may have one in the next."""
_LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


class FirstGradients(TrainerCallback):
    """Ends a run in whose first step a weight of an adapter, or of experts, got no gradient on any rank.

    Of other models it logs these weights: a pooler that the head does not read is one in many of them. The experts of a
    layer of whet are one weight, and those that got no token have a gradient of 0 in it. Gradients of weights that
    ranks share are read before the first update, after the exchange: torch calls no hooks of such weights. So are those
    of weights that are only logged: torch copies a gradient with a hook into another layout, whose norm is another in
    the last bits. With `optimizer_in_backward` the optimizer steps once for each gradient, which counts its weight.
    A resumed training logs nothing: what it names had no gradient in the first step of all.
    """

    def __init__(self, sync: Sync, *, in_backward: bool) -> None:
        self._sync, self._in_backward = sync, in_backward
        self._hooks: list[Any] = []
        self._read_at_update: dict[str, Tensor] = {}
        self._without: set[str] = set()
        self._done = True

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Look at the first step of each training."""
        self._done = False

    def on_step_begin(self, _: Any, state: Any, *__: Any, model: Any = None, optimizer: Any = None, **___: Any) -> None:
        """Look for gradients from here on."""
        if self._done:
            return
        self._done = True
        required = _required(model)
        for name, weight in model.named_parameters():
            if not weight.requires_grad or _ONE_OF_MANY.search(name) or (state.global_step and name not in required):
                continue
            self._without.add(name)
            if _is_share(weight) or name not in required:
                self._read_at_update[name] = weight
            else:
                self._hooks.append(weight.register_post_accumulate_grad_hook(self._arrived(name)))
        if self._read_at_update:
            self._hooks.append(optimizer.register_step_pre_hook(self._read_some if self._in_backward else self._read))
            if self._in_backward:  # for this step alone: whoever hears each update keeps clipping out of it
                vars(self)["on_optimizer_step"] = self._read

    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        """Raise ConfigError or log for weights without a gradient; wait if their first update was left out."""
        if not self._hooks or self._read_at_update:
            return
        of_ranks = self._sync.gather(sorted(self._without), schema.list_of(schema.text))
        without = set.intersection(*map(set, of_ranks))
        self._forget()
        if found := sorted(without & _required(model)):
            raise _never_learns(found, has_adapter=bool(adapters.names_of(model)))
        if without and getattr(self._sync, "engine", None) is None:  # DeepSpeed's has ways of its own
            logger.info("no gradient in the first step, as the loss does not read them: %s", _named(sorted(without)))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Leave nothing on the weights of a run that ended in its first step."""
        self._forget()

    def _forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        vars(self).pop("on_optimizer_step", None)
        self._hooks, self._read_at_update, self._without = [], {}, set()

    def _read(self, *_: Any, **__: Any) -> None:
        """Read what is left: what the optimizer does not update, too."""
        self._without -= {name for name, share in self._read_at_update.items() if share.grad is not None}
        self._read_at_update = {}

    def _read_some(self, optimizer: Any, *_: Any) -> None:
        """Read the gradients of the weights that this step of the optimizer updates: one, or the rest of them."""
        taken = {
            id(weight) for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None
        }
        self._without -= {name for name, weight in self._read_at_update.items() if id(weight) in taken}

    def _arrived(self, name: str) -> Any:
        return lambda _: self._without.discard(name)


def _required(model: nn.Module) -> set[str]:
    """Return the names of the weights that have to learn: all next to an adapter, and those of whet's experts.

    Where a step leaves out blocks by chance, none of them.
    """
    config = getattr(model, "config", None)
    if any(getattr(config, name, 0.0) for name in _LAYER_DROPS):
        return set()
    names = [name for name, _ in model.named_parameters()]
    if adapters.names_of(model):
        return set(names)
    inside = tuple(f"{name}." for name, _ in layers_of(model))
    return {name for name in names if name.startswith(inside)}


def _never_learns(names: Sequence[str], *, has_adapter: bool) -> ConfigError:
    return ConfigError(
        what="weights that are to be trained got no gradient",
        got=_named(names),
        why="the loss of the first step does not depend on them, so that they would never learn",
        fix="leave these layers out of --lora_target_modules, or of target_modules and modules_to_save in the "
        "LoraConfig"
        if has_adapter
        else "train a model whose loss reads all of its blocks",
    )


def _named(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return f"{', '.join(names[:_MOST_NAMED])}{f' and {more} more' if more > 0 else ''}"


def _is_share(weight: Tensor) -> bool:
    """Return whether ranks share this weight, so that this one has some of its rows."""
    return type(weight).__name__ == "DTensor"  # importing the class takes long
