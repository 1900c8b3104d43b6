"""Padded calls of an encoder run without their padding: for training loops that are not whet's."""

from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from whet.data.batch import filled_length
from whet.kernels.place import DrawnPlace, Place
from whet.log import logger
from whet.models.packed import PackedModel, with_filling

_STATE = "whet_unpad"


class _Calls:
    """What the calls of one encoder share; nothing of a call itself, since several threads may make them at once."""

    def __init__(self, packed: PackedModel, dtype: torch.dtype | None) -> None:
        self.packed = packed
        self.dtype = dtype
        self.told_padded = False

    def tell_padded(self) -> None:
        """Say, once, that batches whose rows do not begin with a token run as they come."""
        if not self.told_padded:
            logger.warning("whet.optimize: rows padded on the left run with their padding; pad them on the right")
        self.told_padded = True

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context in which the encoder computes."""
        if self.dtype is None:
            return nullcontext()
        if self.dtype == torch.float32:
            return torch.autocast(device.type, enabled=False)
        return torch.autocast(device.type, self.dtype)

    def padded(self, encoder: Any, *given: Any, **options: Any) -> Any:
        """Return what the encoder's own forward gives, also where a hook within one of its passes asks for it."""
        with self.packed.placement.outside():
            return type(encoder).forward(encoder, *given, **options)

    def place(self, mask: Tensor) -> Place:
        """Return the place of the rows under a mask (B, T) of real tokens; what fills the batch up is a row more."""
        lengths = mask.sum(1, dtype=torch.int32)
        n_tokens = int(lengths.sum())
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
        starts = with_filling(starts, n_tokens, filled_length(n_tokens))
        row_slots = torch.arange(len(starts) - 1, dtype=torch.int32)
        positions = nn.functional.pad(mask.cumsum(1, dtype=torch.int32)[mask] - 1, (0, int(starts[-1]) - n_tokens))
        return DrawnPlace(
            seed=0,
            step=0,
            slots=row_slots.to(mask.device).repeat_interleave(starts.diff()),
            positions=positions,
            row_starts=starts,
            row_slots=row_slots,
            longest=starts.diff().max().cpu(),
        )


def apply(packed: PackedModel, dtype: torch.dtype | None = None) -> None:
    """Make the encoder inside the model drop padding on the way in and put it back, as zeros, on the way out.

    Its products compute in `dtype`, in that of the weights where it is None. Dropout masks follow torch's CPU
    generator: each call that drops anything draws one number from it.
    """
    encoder = packed.module.base_model
    assert isinstance(encoder, nn.Module)
    setattr(encoder, _STATE, _Calls(packed, dtype))
    encoder.forward = MethodType(_forward, encoder)


def restore(packed: PackedModel) -> None:
    """Take it out again, exactly."""
    encoder = packed.module.base_model
    assert isinstance(encoder, nn.Module)
    encoder.__dict__.pop("forward", None)
    encoder.__dict__.pop(_STATE, None)


def _forward(
    self: Any, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, *rest: Any, **options: Any
) -> Any:
    """Stand in for the forward of an encoder (B, T) -> hidden states (B, T, D).

    Rows that begin with padding run padded: heads read the state there, which would be zeros.
    """
    calls: _Calls = getattr(self, _STATE)
    asked = any(options.get(name) for name in ("output_attentions", "output_hidden_states"))
    if rest or asked or input_ids is None or (attention_mask is not None and attention_mask.dim() != 2):
        return calls.padded(self, input_ids, attention_mask, *rest, **options)
    mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if not bool(mask[:, 0].all()):
        calls.tell_padded()
        return calls.padded(self, input_ids, attention_mask, **options)
    place = calls.place(mask)
    with calls.packed.placement.at(place), calls.autocast(mask.device):
        packed_options = _packed_inputs(options, mask, place, _positions(input_ids, calls.packed))
        out = type(self).forward(self, _flat(input_ids, mask, place), **packed_options)
    return _padded(self, out, mask, as_tuple=options.get("return_dict") is False)


def _positions(input_ids: Tensor, packed: PackedModel) -> Tensor:
    """Return the positions (B, T) that the untouched encoder gives these places, padding between tokens included."""
    if not packed.family.skips_padding:
        return torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
    words = input_ids != packed.position_offset - 1
    return words.cumsum(1) * words + packed.position_offset - 1


def _packed_inputs(options: dict[str, Any], mask: Tensor, place: Place, positions: Tensor) -> dict[str, Any]:
    """Return the packed call's keyword arguments: token columns without padding, positions that always are there."""
    given = {name: value for name, value in options.items() if value is not None}
    columns = {
        name: _flat(value.expand(mask.shape), mask, place)
        for name, value in given.items()
        if isinstance(value, Tensor) and value.shape[-1:] == mask.shape[-1:] and value.dim() == 2
    }
    return given | {"position_ids": _flat(positions, mask, place)} | columns | {"return_dict": True}


def _flat(column: Tensor, mask: Tensor, place: Place) -> Tensor:
    """Return a column (B, T) without what the mask hides (1, N), filled up with its first tokens."""
    kept = column[mask]
    return torch.cat([kept, kept[: len(place.positions) - len(kept)]])[None]


def _padded(self: Any, out: Any, mask: Tensor, *, as_tuple: bool) -> Any:
    tokens = out.last_hidden_state.to(next(self.parameters()).dtype)  # what is behind the encoder computes in
    out.last_hidden_state = tokens.new_zeros(*mask.shape, tokens.shape[-1]).masked_scatter(mask[..., None], tokens)
    if out.get("pooler_output") is not None:
        out.pooler_output = _pooled(self, out.last_hidden_state)
    return out.to_tuple() if as_tuple else out


def _pooled(self: Any, hidden: Tensor) -> Tensor:
    """Return the encoder's summary of each row; ALBERT's pooler is a plain linear layer, the others' take (B, T, D)."""
    if hasattr(self, "pooler_activation"):
        return self.pooler_activation(self.pooler(hidden[:, 0]))
    return self.pooler(hidden)
