"""Calls of an encoder whose pooling takes a token or two of each row: the last block computes these alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whet.config.methods import Place
from whet.errors import ConfigError
from whet.methods.unpad.lazy_states import Known, LazyStates
from whet.models.lazy_tensor import Origin

# What the last block of fewer tokens may differ by, relative to the largest: sums are cut in other places.
_GAP, _HALF_GAP = 1e-4, 0.05


@dataclass(frozen=True)
class Taken:
    """The tokens of a packed batch that pooling takes, (M,) in rising order, and which each row's are.

    `places` (B, K) are the columns of the padded batch, `index` (B, K) the numbers of their tokens among the M.
    """

    tokens: Tensor
    places: Tensor
    index: Tensor


def places(asked: tuple[Place, ...], encoder: Any) -> tuple[Place, ...]:
    """Return the tokens of each row that are read, if pooling takes those asked for: a pooler reads the first, too."""
    has_pooler = bool(asked) and getattr(encoder, "pooler", None) is not None
    return ("first", *(place for place in asked if place != "first")) if has_pooler else asked


def taken(places: tuple[Place, ...], cu_seqlens: Tensor, n_rows: int) -> Taken:
    """Return the tokens at these places of a batch's first n_rows rows, which have no padding."""
    starts = cu_seqlens[:n_rows].long()
    lengths = cu_seqlens[1 : n_rows + 1].long() - starts
    columns = {"first": torch.zeros_like(lengths), "last": lengths - 1}
    chosen = torch.stack([columns[place] for place in places], dim=1)
    tokens, index = torch.unique(starts[:, None] + chosen, return_inverse=True)
    return Taken(tokens, chosen, index)


class Pass:
    """A pass of an encoder as it ran, to be run again for all tokens: its state, arguments and random numbers."""

    def __init__(self, encoder: Any, given: Tensor, options: Mapping[str, Any]) -> None:
        self.encoder, self.given, self.options = encoder, given, options
        self._origin = Origin(_weights(encoder))
        self._training = encoder.training
        self._has_grad, self._is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._random = torch.get_rng_state() if encoder.training else None
        device = given.device.type
        self._autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self._known: tuple[Tensor, Tensor] | None = None

    def expecting(self, tokens: Tensor, states: Tensor) -> Pass:
        """Note the hidden states (M, D) of the tokens (M,) that the pass gave; return itself."""
        self._known = tokens, states.detach()
        return self

    def run(self) -> Any:
        """Return the encoder's output."""
        return type(self.encoder).forward(self.encoder, self.given, **self.options)

    def again(self) -> ExitStack:
        """Return a context in which `run` computes what it would have computed then; raise if it cannot."""
        if self._origin.is_stale or self.encoder.training != self._training:
            raise too_late()
        stack = ExitStack()
        if self._random is not None:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.set_rng_state(self._random)
        stack.enter_context(torch.inference_mode(self._is_inference))
        if not self._is_inference:
            stack.enter_context(torch.set_grad_enabled(self._has_grad))
        stack.enter_context(torch.autocast(*self._autocast))
        return stack

    def require_same(self, states: Tensor) -> None:
        """Raise ConfigError if the states of all tokens (N, D) contradict those known: the model is another by now.

        An adapter may be switched off, say. Dropouts that draw random numbers of their own, as adapters have them, make
        other masks for fewer tokens: after them there is nothing to compare.
        """
        if self._known is None or (self._random is not None and not torch.equal(self._random, torch.get_rng_state())):
            return
        tokens, known = self._known
        is_single = states.dtype == torch.float32 and not torch.is_autocast_enabled(states.device.type)
        within = (_GAP if is_single else _HALF_GAP) * float(known.nan_to_num().abs().max())
        found = states.detach().index_select(0, tokens)
        if not torch.allclose(found, known, rtol=0.0, atol=within, equal_nan=True):
            raise too_late()


def states(tokens: Tensor, found: Taken, longest: int, all_states: Callable[[], Tensor]) -> Tensor:
    """Return hidden states (B, longest, D), of which those of the taken tokens (M, D) are computed."""
    shape = (len(found.places), longest, tokens.shape[-1])
    return LazyStates.of(Known(tokens, found.places, found.index, all_states), shape)


def too_late() -> ConfigError:
    """Return the refusal to compute hidden states of weights, or of a mode, that are not there any more."""
    return ConfigError(
        what="the hidden states of this call cannot be computed any more",
        got="token embeddings that are used after the model's weights, adapters, mode or methods have changed",
        why="whet.optimize computes those that pooling does not take when something is computed from them",
        fix="use them, or keep a .clone(), before optimizer.step() and model.eval(); or call"
        " whet.optimize(model, last_block_tokens='all')",
    )


def _weights(module: nn.Module) -> Iterator[Tensor]:
    """Yield the module's parameters; torch's own way takes five times as long, of a step of few tokens a percent."""
    for weight in module._parameters.values():
        if weight is not None:
            yield weight
    for child in module._modules.values():
        if child is not None:
            yield from _weights(child)
