"""A trial of an encoder: a copy to experiment on, the rows that it runs, its passes padded and packed, and their gap.

The copy has the real modules and configuration, and random weights that layers share. Random, because those of the
model may hide what it does: a bias table that starts at zero adds nothing yet. Shared, because two weights of one shape
and kind are one tensor in the copy: the memory of a proof is about that of one layer and the embeddings. Every layer is
there, with its own settings, since layers may alternate.
"""

from __future__ import annotations

import copy
import inspect
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whet.data.batch import pack
from whet.data.padding import NO_PADDING, Padding
from whet.data.store import RowStore
from whet.kernels.batch_position import BatchPosition
from whet.kernels.random import generators_kept
from whet.models.fused.decoder import named_settings
from whet.models.packed import PackedModel, position_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_Key = tuple[tuple[int, ...], str]


def stand_in(model: nn.Module, seed: int = 0) -> tuple[Any, Mapping[str, nn.Parameter]]:
    """Return a copy in float32 on the CPU, without hooks, in evaluation mode; and its distinct weights by name.

    Draws from torch's generator: the caller keeps its state. Raises whatever copying an object may raise.
    """
    torch.manual_seed(seed)
    shared: dict[_Key, nn.Parameter] = {}
    memo: dict[int, Any] = {}
    distinct: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=True):
        kind = _kind(name, parameter)
        key = (tuple(parameter.shape), kind)
        if key not in shared:
            shared[key] = distinct[name] = nn.Parameter(_drawn(parameter.shape, kind))
        memo[id(parameter)] = shared[key]
    made: Any = copy.deepcopy(model, memo)
    made.cpu()
    for module in made.modules():
        _forget(module)
    return made.eval(), distinct


def _forget(module: nn.Module) -> None:
    """Remove what users have hung on the module, and bring its buffers to float32."""
    for hooks in _HOOKS:
        getattr(module, hooks).clear()
    if getattr(module, "gradient_checkpointing", False):
        setattr(module, "gradient_checkpointing", False)  # noqa: B010
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.float()


def _kind(name: str, parameter: Tensor) -> str:
    if parameter.dim() > 1:
        return "table" if "embed" in name or "bias" in name else "matrix"
    return "bias" if name.endswith("bias") else "scale"


def _drawn(shape: torch.Size, kind: str) -> Tensor:
    """Return values of the size that trained weights have; norms scale by about 1."""
    values = torch.randn(shape)
    if kind == "matrix":
        return values * shape[-1] ** -0.5
    return {"table": values * 0.7, "bias": values * 0.3, "scale": 1 + values * 0.2}[kind]


MOST_TOKENS = 2_100
"""The longest row that a proof runs, and the most tokens of rows beyond the position table."""
CHANGED = 2
"""The row that is changed to see whether others move; what fills up a packed batch copies tokens of row 0."""
_REACH = re.compile(r"window|bucket|distance|relative_pos|sliding|local|chunk|block_size|span|stride")
_SPECIAL = re.compile(r"(bos|eos|cls|sep|mask|unk)_token_id$")


@dataclass(frozen=True)
class ProofRows:
    """Rows end to end, and the same rows padded: of many lengths, with special tokens in them."""

    store: RowStore
    padding: Padding

    def padded(self, *, all_columns: bool = True) -> dict[str, Tensor]:
        """Return the columns (B, T) of a padded call, with a mask."""
        real = self.real()
        names = list(self.store.tokens) if all_columns else ["input_ids"]
        made = {name: torch.full(real.shape, self.padding.fill(name)) for name in names}
        for name, column in made.items():
            column[real] = torch.from_numpy(self.store.tokens[name])
        return made | {"attention_mask": real.long()}

    def real(self) -> Tensor:
        """Return which places (B, T) of the padded batch are tokens."""
        lengths = torch.from_numpy(self.store.lengths)
        return torch.arange(int(lengths.max())) < lengths[:, None]

    def changed(self) -> ProofRows:
        """Return the same rows with other tokens in one of them."""
        ids = self.store.tokens["input_ids"].copy()
        own = slice(self.store.cu_seqlens[CHANGED], self.store.cu_seqlens[CHANGED + 1])
        ids[own] = np.roll(ids[own], 1)
        ids[own][0] = ids[own].max() - 1
        return replace(self, store=replace(self.store, tokens=dict(self.store.tokens) | {"input_ids": ids}))

    def unchanged_tokens(self) -> Tensor:
        """Return which packed tokens (N,) belong to other rows than the changed one."""
        rows = np.repeat(np.arange(len(self.store)), self.store.lengths)
        return torch.from_numpy(rows != CHANGED)


def reach(config: Any) -> int:
    """Return the largest window, bucket or distance that the configuration names; 0 if it names none."""
    found = [
        int(value)
        for name, value in named_settings(config.to_dict())
        if _REACH.search(name) and isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return max([0, *found])


def longest_row(config: Any) -> int:
    """Return how long a row has to be to reach beyond everything local, as far as the model has positions."""
    longest = max(40, reach(config) + 17)
    table = getattr(config, "max_position_embeddings", None)
    return min(longest, table - 4) if isinstance(table, int) and table > 8 and not _has_rotary(config) else longest


def proof_rows(encoder: Any, seed: int = 0) -> ProofRows:
    """Return rows of different lengths, one as long as `longest_row`, with each column that the encoder can read."""
    longest = longest_row(encoder.config)
    return _rows(encoder, [5, min(23, longest), 7, longest, 1, 2, min(33, longest)], seed)


def wide_rows(encoder: Any, seed: int = 0) -> ProofRows:
    """Return short rows that are together longer than the position table, as batches of training are."""
    table = getattr(encoder.config, "max_position_embeddings", None) or 0
    n_rows = min(max(table, 64), MOST_TOKENS) // 24 + 2
    return _rows(encoder, [24 if row % 3 else 11 for row in range(n_rows)], seed)


def _rows(encoder: Any, lengths: list[int], seed: int) -> ProofRows:
    numbers, config = np.random.default_rng(seed), encoder.config
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    pad = getattr(config, "pad_token_id", None)
    pad = pad if isinstance(pad, int) and pad >= 0 else 0
    ids = numbers.integers(0, encoder.get_input_embeddings().num_embeddings, starts[-1])
    ids[ids == pad] = (pad + 1) % encoder.get_input_embeddings().num_embeddings
    for place, special in enumerate(_special_ids(config, pad)):
        ids[starts[:-1] + place % np.asarray(lengths)] = special
    tokens = {"input_ids": ids}
    n_types = getattr(config, "type_vocab_size", 0) or 0
    if "token_type_ids" in inspect.signature(type(encoder).forward).parameters and n_types > 1:
        tokens["token_type_ids"] = numbers.integers(0, n_types, starts[-1])
    return ProofRows(RowStore(starts, tokens), Padding("all", token_id=pad))


def _special_ids(config: Any, pad: int) -> list[int]:
    found = {value for name, value in config.to_dict().items() if _SPECIAL.search(name) and isinstance(value, int)}
    return sorted(value for value in found if 0 <= value < (getattr(config, "vocab_size", 0) or 0) and value != pad)


def _has_rotary(config: Any) -> bool:
    return any("rope" in name or "rotary" in name for name, _ in named_settings(config.to_dict()))


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
    """A copy of the encoder, and the weights that its layers share; it runs rows as transformers does, or as whet."""

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


def generator_states() -> tuple[Any, ...]:
    """Return the states of the generators that a forward pass may draw from."""
    of_numpy: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), of_numpy[1].tolist(), of_numpy[2:]


@contextmanager
def untraced() -> Iterator[None]:
    """Run the block in float32 with gradients, and restore all generators and modes after it."""
    dtype = torch.get_default_dtype()
    try:
        with (
            generators_kept(),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.device("cpu"),
        ):
            torch.set_default_dtype(torch.float32)
            yield
    finally:
        torch.set_default_dtype(dtype)


def gap(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, as a share of the largest wanted value; infinite for another shape."""
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
