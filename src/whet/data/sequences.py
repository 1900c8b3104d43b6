"""Where sequences begin in a batch whose rows hold several of them end to end, without padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from whet.errors import ConfigError, DataError
from whet.on_host import on_host

_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k")
BOUNDS = (*_OFFSETS, "seq_idx")
"""Columns that name the sequences of a batch. transformers' flash attention reads the first two, and its
DataCollatorWithFlattening makes all three."""
COLUMNS = (*BOUNDS, "max_length_q", "max_length_k")
"""These and the numbers that come with them, which whet counts itself."""


def first_tokens(inputs: Mapping[str, Any], *, by_position: bool) -> Tensor | None:
    """Return which tokens (B, T) are the first of a sequence, on the CPU; None if each row is one sequence.

    The columns of `BOUNDS` say it, whatever the attention is. `by_position`: a token whose position does not follow
    that of the token before it begins a sequence as well. transformers' decoders read a batch so if it has
    position_ids, no mask and no cache; its encoders never do. Raises DataError for columns that do not fit the batch.
    """
    ids: Tensor = inputs["input_ids"]
    named = {name: on_host(value) for name in BOUNDS if isinstance(value := inputs.get(name), Tensor)}
    positions = inputs.get("position_ids") if by_position else None
    if not named and not isinstance(positions, Tensor):
        return None
    begins = torch.zeros(ids.shape, dtype=torch.bool, device="cpu")
    for name in _OFFSETS:
        if (offsets := named.get(name)) is not None:
            _require_offsets(name, offsets, ids)
            begins.view(-1)[offsets[offsets < ids.numel()].long()] = True
    if (numbers := named.get("seq_idx")) is not None:
        _require_numbers(numbers, ids)
        begins[:, 1:] |= numbers[:, 1:] != numbers[:, :-1]
    if isinstance(positions, Tensor):
        begins[:, 1:] |= _restarts(on_host(positions))
    if not bool(begins[:, 1:].any()):
        return None
    begins[:, 0] = True
    return begins


def names_sequences(inputs: Mapping[str, Any]) -> list[str]:
    """Return which columns of `BOUNDS` the batch has."""
    return [name for name in BOUNDS if inputs.get(name) is not None]


def require_kept_apart(inputs: Mapping[str, Any], why: str, *, attention: str, by_position: bool) -> None:
    """Refuse a batch that names several sequences in a row and runs with transformers' own forward: it mixes them.

    `why` it runs so, with which `attention`: only flash attention reads the names. `by_position`: the model keeps apart
    sequences whose positions restart.
    """
    named, ids = names_sequences(inputs), inputs.get("input_ids", inputs.get("inputs_embeds"))
    if not named or not isinstance(ids, Tensor) or ids.is_meta or attention.startswith("flash"):
        return
    rows = {**inputs, "input_ids": ids[..., 0] if "input_ids" not in inputs else ids}  # of embeddings (B, T, D)
    begins = first_tokens(rows, by_position=False)
    if begins is None:
        return
    if by_position:
        positions = {name: rows.get(name) for name in ("input_ids", "position_ids")}
        found = first_tokens(positions, by_position=True)
        if found is not None and torch.equal(found, begins):
            return
    names = ", ".join(named)
    raise ConfigError(
        what=f"the sequences that {named[0]} names would see each other",
        got=why,
        why=f"such batches run with transformers' own forward, and its {attention} attention does not read {names}",
        fix="change what the message names; or give a decoder position_ids that restart with each sequence, without "
        f"attention_mask and cache; if they may see each other, leave {names} out",
    )


def restart(positions: Any) -> bool:
    """Return whether position_ids (B, T) start again within a row."""
    return isinstance(positions, Tensor) and positions.dim() == 2 and bool(_restarts(on_host(positions)).any())


def _restarts(positions: Tensor) -> Tensor:
    """Return which tokens (B, T - 1), from the second on, do not have the position after that of the token before."""
    return positions[:, 1:] != positions[:, :-1] + 1


def _require_offsets(name: str, offsets: Tensor, ids: Tensor) -> None:
    found = offsets.tolist() if offsets.dim() == 1 and not offsets.is_floating_point() else []
    if found and found[0] == 0 and found[-1] == ids.numel() and found == sorted(found):
        return
    raise DataError(
        what=f"{name} does not say where the sequences of this batch begin and end",
        got=f"{found or tuple(offsets.shape)} for input_ids {tuple(ids.shape)}",
        why="it holds offsets into the batch's tokens, from 0 to their number, as for flash attention in transformers",
        fix=f"for sequences of 5 and 6 tokens give [0, 5, 11]; or leave {name} out, and let position_ids restart",
    )


def _require_numbers(numbers: Tensor, ids: Tensor) -> None:
    if numbers.dim() == 2 and numbers.shape[0] in (1, ids.shape[0]) and numbers.shape[1] == ids.shape[1]:
        return
    raise DataError(
        what="seq_idx does not say which sequence each token of this batch belongs to",
        got=f"seq_idx {tuple(numbers.shape)} for input_ids {tuple(ids.shape)}",
        why="it has one number for each token, the same for all tokens of a sequence",
        fix="give seq_idx in the shape of input_ids, as DataCollatorWithFlattening does",
    )
