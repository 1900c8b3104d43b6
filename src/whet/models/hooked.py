"""Hooks on modules inside a model that runs packed: they get all rows of a batch in one, (1, N, D)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from whet.errors import ConfigError
from whet.log import logger
from whet.models.standard import home_of, is_harmless

_SHOWN = 3
_ROW_WISE = "peft."
"""The package whose hooks hand a layer something for each row, such as the name of its adapter."""


class HookWatch:
    """Looks for hooks inside one encoder, again after a hook was registered anywhere: torch counts them."""

    def __init__(self) -> None:
        self._newest = -1
        self._told = False
        self.row_wise = False
        """Whether a library's hooks give each row something of its own."""
        self.reshape = False
        """Whether a pass has shown that a hook returns another shape than it gets, and hooks are still there."""

    def look(self, encoder: nn.Module) -> None:
        """See which hooks there are, and say once that those of a user's own get packed tensors."""
        newest = RemovableHandle.next_id
        if newest == self._newest and not (self.row_wise or self.reshape):  # torch does not count those removed
            return
        self._newest = newest
        homes = [(name, home_of(hook)) for name, hook in _inside(encoder)]
        names = dict.fromkeys(name for name, home in homes if not home.startswith(_ROW_WISE))
        self.row_wise = any(home.startswith(_ROW_WISE) for _, home in homes)
        self.reshape = self.reshape and bool(names)
        if names and not self._told:
            self._told = True
            _tell([*names])


def not_packed(states: Tensor, n_tokens: int) -> ConfigError:
    """Return the refusal of what a model made of a packed batch (1, n_tokens), if its shape is another."""
    return ConfigError(
        what="the model made something else of a packed batch than states of its tokens",
        got=f"{tuple(states.shape)} in place of (1, {n_tokens}, ...)",
        why="a hook or a module of your own inside the encoder gets all rows in one, and returned another shape",
        fix="let it return what has the shape of its input; or run the model with its padding:"
        " --attn_implementation sdpa",
    )


def _inside(encoder: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the forward hooks on modules inside the encoder that may see or change something, and the module's name."""
    for name, module in encoder.named_modules():
        if name and (module._forward_hooks or module._forward_pre_hooks):
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                if not is_harmless(hook):
                    yield name, hook


def _tell(names: list[str]) -> None:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    logger.warning(
        "hooks on %s%s get packed tensors: all rows of a batch in one, (1, N, D), without padding",
        ", ".join(names[:_SHOWN]),
        more,
    )
