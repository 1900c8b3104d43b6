"""The forward and backward passes that a proof compares: padded as transformers runs them, and packed as whet does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from whet.data.batch import pack
from whet.data.padding import NO_PADDING
from whet.kernels.batch_position import BatchPosition
from whet.models.packed import PackedModel, position_of
from whet.models.proof.rows import ProofRows

_SEED = 20


@dataclass(frozen=True)
class Passed:
    """What one pass gave."""

    states: Tensor
    """The last hidden states of the tokens (N, D), rows end to end."""
    of_inputs: Tensor | None = None
    """The gradient of the token embeddings (N, E)."""
    of_weights: Mapping[str, Tensor] | None = None
    """The gradient of each distinct weight."""


class NoStates(Exception):  # noqa: N818
    """The model's output, or its input, is not that of an encoder."""


@dataclass(frozen=True)
class Trial:
    """A copy of the encoder, and the weights that its layers share."""

    model: Any
    weights: Mapping[str, nn.Parameter]

    def padded(self, rows: ProofRows, *, gradients: bool = False, all_columns: bool = True) -> Passed:
        """Run the rows padded; the states of padding are left out."""
        real = rows.real()
        return self._run(rows.padded(all_columns=all_columns), real.flatten(), gradients=gradients)

    def padded_places(self, rows: ProofRows) -> Tensor:
        """Return the states of all places (B x T, D) of the padded rows, given input_ids alone."""
        every = torch.ones(rows.real().numel(), dtype=torch.bool)
        return self._run(rows.padded(all_columns=False), every, gradients=False).states

    def packed(self, packed: PackedModel, rows: ProofRows, *, gradients: bool = False) -> Passed:
        """Run the rows end to end."""
        inputs, position, n_tokens = _batch(packed, rows, with_padding=False)
        real = torch.arange(inputs["input_ids"].shape[1]) < n_tokens
        with packed.placement.at(position):
            return self._run(inputs, real, gradients=gradients)

    def packed_places(self, packed: PackedModel, rows: ProofRows) -> Tensor:
        """Return the states of all places (B x T, D) of the packed rows with all of their padding, as in the loss."""
        alone = replace(rows.store, tokens={"input_ids": rows.store.tokens["input_ids"]})
        inputs, position, n_tokens = _batch(packed, replace(rows, store=alone), with_padding=True)
        real = torch.arange(inputs["input_ids"].shape[1]) < n_tokens
        with packed.placement.at(position):
            return self._run(inputs, real, gradients=False).states

    def _run(self, inputs: Mapping[str, Tensor], tokens: Tensor, *, gradients: bool) -> Passed:
        seen: list[Tensor] = []
        handle = self.model.get_input_embeddings().register_forward_hook(lambda *call: seen.append(call[2]))
        try:
            with nullcontext() if gradients else torch.no_grad():
                states = _states(self.model(**inputs), tokens)
        finally:
            handle.remove()
        if not gradients:
            return Passed(states)
        if len(seen) != 1 or not seen[0].requires_grad:
            raise NoStates("it does not read its input embeddings once")
        return self._differentiated(states, seen[0], tokens)

    def _differentiated(self, states: Tensor, embedded: Tensor, tokens: Tensor) -> Passed:
        generator = torch.Generator().manual_seed(_SEED)
        loss = (states * torch.randn(states.shape, generator=generator)).sum()
        found = torch.autograd.grad(loss, [embedded, *self.weights.values()], allow_unused=True)
        of_inputs, *rest = found
        of_weights = {name: grad for name, grad in zip(self.weights, rest, strict=True) if grad is not None}
        return Passed(states.detach(), of_inputs.flatten(0, 1)[tokens], of_weights)


def _states(output: Any, tokens: Tensor) -> Tensor:
    states = output.get("last_hidden_state") if hasattr(output, "get") else None
    if not isinstance(states, Tensor) or states.dim() != 3 or states.shape[0] * states.shape[1] != len(tokens):
        raise NoStates("its output has no last_hidden_state (rows, places, width)")
    return states.flatten(0, 1)[tokens]


def _batch(packed: PackedModel, rows: ProofRows, *, with_padding: bool) -> tuple[dict[str, Tensor], BatchPosition, int]:
    """Return the packed columns, their position, and how many tokens are not there to fill the batch up."""
    batch = pack(
        rows.store,
        first_slot=0,
        position_offset=packed.position_offset,
        unnumbered=packed.unnumbered,
        padding=rows.padding if with_padding else NO_PADDING,
    )
    return dict(batch.inputs), position_of(batch, seed=_SEED, step=1), batch.n_in_rows
