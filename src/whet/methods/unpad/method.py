"""Padded calls of an encoder run without their padding: for training loops that are not whet's."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whet.card import Card
from whet.config.fields import PaddingInLoss
from whet.config.methods import MethodSettings, Place
from whet.data import sequences
from whet.data.batch import HOLES, has_holes
from whet.kernels.batch_position import BatchPosition
from whet.log import logger
from whet.methods.seam import Applied, Cost, Stage
from whet.methods.unpad import calls as unpad_calls
from whet.methods.unpad import lazy_head, padding_readers, pooled
from whet.methods.unpad.layout import Layout, layout_of, layout_without_padding
from whet.models import last_block, record
from whet.models.bad_batch import explained
from whet.models.binding import bind
from whet.models.fused.decoder import why_other_window
from whet.models.packed import PackedModel, packed_model
from whet.models.view import ModelView

CARD = Card(
    name="unpad",
    asked_by="default",
    does="Calls with padded batches run without their padding: in `whet.optimize`, and for a loss of your own.",
    improves="both",
    same_result="yes",
    hurts='When a head reads hidden states of padding: ask for these with padding="all".',
    source="Zeng et al. 2022, arXiv:2208.08124, section 3",
    page="speed.md#packing",
)
STAGE = Stage.CALLS
_RESHAPED = "models in which a hook returns another shape than it got"
_CALLS = "calls without padding"
"""The entry in the record of the encoder; that of the method is in the record of the model."""


class _Calls:
    """What the calls of one encoder share; nothing of a call itself, since several threads may make them at once."""

    def __init__(self, packed: PackedModel, settings: MethodSettings, amount: PaddingInLoss) -> None:
        self.packed = packed
        self.dtype = settings.unpad_dtype
        self.amount: PaddingInLoss = amount
        self.pooled = pooled.places(settings.pooled, packed.module.base_model)
        """The tokens of each row that pooling takes, as long as nobody has read others; empty: all may be read."""
        self.told_why: set[str] = set()

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context in which the encoder computes."""
        if self.dtype is None:
            return nullcontext()
        if self.dtype == torch.float32:
            return torch.autocast(device.type, enabled=False)
        return torch.autocast(device.type, self.dtype)

    def say_if_more(self, amount: PaddingInLoss) -> None:
        """Log once that a call computes more padding tokens than `whet.optimize` was asked for."""
        why = "labels at padding tokens"
        if amount == "all" != self.amount and why not in self.told_why:
            self.told_why.add(why)
            logger.warning("whet.optimize: calls with %s compute each of these tokens: set the labels to -100", why)

    def say_if_together(self, decoder: Any, call: Mapping[str, Any]) -> None:
        """Log once that sequences whose positions restart in a row see each other, as they do in transformers."""
        if "together" in self.told_why or (cause := unpad_calls.see_each_other(decoder, call)) is None:
            return
        self.told_why.add("together")
        fix = "leave it out" if cause == "attention_mask" else "pass use_cache=False, or set config.use_cache = False"
        logger.warning(
            "whet.optimize: position_ids restart within a row, and its sequences see each other all the same, as in"
            " transformers, because of %s: %s to keep them apart",
            cause,
            fix,
        )

    def compute_all(self) -> None:
        """Let the last block compute all tokens from now on."""
        if self.pooled:
            self.pooled = ()
            logger.info("whet.optimize: token embeddings were read: from now on the last block computes all of them")

    def padded(self, encoder: Any, why: str, given: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return what the encoder's own forward gives, and log once why; also where a hook in a pass asks for it."""
        if why not in self.told_why:
            self.told_why.add(why)
            logger.warning("whet.optimize: with their padding run %s", why)
        call = unpad_calls.named(encoder, given, options)
        if call is not None:
            unpad_calls.require_kept_apart(encoder, call, why, causal=self.packed.family.causal)
        dtype = next(encoder.parameters()).dtype
        with self.packed.placement.outside(), self.autocast(next(encoder.parameters()).device):
            out = type(encoder).forward(encoder, *given, **options)
        return out if self.dtype is None else _in_dtype(out, dtype)


def apply(view: ModelView, settings: MethodSettings) -> Applied | None:
    """Make the encoder inside the model drop padding on the way in and put it back on the way out.

    `settings.unpad` says what padding tokens get: sampled, the states of a few padding tokens a sequence, each for the
    places around it; all, each its own; none, zeros. Products of the encoder compute in `settings.unpad_dtype`, by
    default in that of the weights. Dropout masks follow torch's CPU generator: each call that drops anything draws one
    number from it.
    """
    packed = packed_model(view.model)
    if settings.unpad is None or packed is None:
        return None
    encoder = _encoder(view.model)
    record.keep(view.model, CARD.name, settings.unpad)
    record.keep(encoder, _CALLS, _Calls(packed, settings, settings.unpad))
    encoder.forward = bind(_forward, encoder, signed=True)
    padding_readers.apply(view.model)
    lazy_head.apply(view.model)
    return Applied(CARD.name, "no padding")


def restore(view: ModelView) -> None:
    """Take it out again, exactly."""
    if record.take(view.model, CARD.name) is None:
        return
    encoder = _encoder(view.model)
    encoder.__dict__.pop("forward", None)
    record.take(encoder, _CALLS)
    lazy_head.restore(view.model)
    padding_readers.restore(view.model)


def cost(view: ModelView, settings: MethodSettings) -> Cost:
    """Return no cost: a call computes fewer tokens, and each token costs what it did."""
    return Cost()


def is_on(model: nn.Module) -> bool:
    """Return whether calls of the model run without their padding."""
    return record.read(model, CARD.name) is not None


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """Return what the encoder's products compute in during calls without padding; None: as without whet."""
    return record.read(_encoder(model), _CALLS).dtype


def padding_of(model: nn.Module) -> PaddingInLoss:
    """Return what padding tokens get in calls of the model, if nobody but its head reads them."""
    return padding_readers.usual_amount(model, record.read(_encoder(model), _CALLS).amount)


def _encoder(model: Any) -> nn.Module:
    """Return the encoder inside a model of transformers, which may be the model."""
    return model.base_model


def n_computed(packed: PackedModel, inputs: Mapping[str, Any]) -> int:
    """Return how many token places a call of the model with this padded batch computes."""
    mask = inputs["attention_mask"].flatten(0, -2).bool()
    if not bool(mask[:, 0].all()) or has_holes(mask):
        return mask.numel()
    amount = padding_readers.amount_of(packed.module, record.read(_encoder(packed.module), _CALLS).amount, inputs)
    return len(layout_of(mask, amount).columns)


def _forward(self: Any, *given: Any, **options: Any) -> Any:
    """Stand in for the forward of an encoder (B, T) -> hidden states (B, T, D).

    A graph of torch.compile breaks around it: native operators are no part of a graph, and neither are packed sizes.
    """
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return _outside_of_graphs(self, given, options)
    return _run(self, given, options, record.read(self, _CALLS).pooled)


@torch.compiler.disable(reason="an encoder that whet.optimize changed does not compile: leave fullgraph=True out")
def _outside_of_graphs(self: Any, given: Sequence[Any], options: Mapping[str, Any]) -> Any:
    return _run(self, given, options, ())


def _run(self: Any, given: Sequence[Any], options: Mapping[str, Any], places: tuple[Place, ...]) -> Any:
    calls: _Calls = record.read(self, _CALLS)
    call = unpad_calls.named(self, given, options)
    causal = calls.packed.family.causal
    if causal and call is not None:
        calls.say_if_together(self, call)
    moved = why_other_window(self) if causal else None
    why = f"models in which {moved}" if moved else unpad_calls.why_padded(self, call, causal=causal)
    if call is None or why is not None:
        return calls.padded(self, why or "", given, options)
    input_ids: Tensor = call["input_ids"]
    mask = call.pop("attention_mask", None)
    by_position = causal and mask is None and not unpad_calls.keeps_cache(self, call)
    first_tokens = sequences.first_tokens(call, by_position=by_position)
    mask = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device, torch.bool)
    hooks = calls.packed.hooks
    hooks.look(self)
    if hooks.row_wise:
        return calls.padded(self, "calls in which peft gives each row its own adapter", given, options)
    if hooks.reshape:
        return calls.padded(self, _RESHAPED, given, options)
    amount = padding_readers.amount(calls.packed.module, calls.amount)
    is_full = bool(mask.all())
    if not is_full and (why := _why_with_padding(calls, self, mask, amount)) is not None:
        return calls.padded(self, why, given, options)
    calls.say_if_more(amount)
    layout = layout_without_padding(input_ids, first_tokens) if is_full else layout_of(mask, amount)
    given_ids = {name: value for name, value in call.items() if name not in sequences.COLUMNS}
    call = {name: value for name, value in given_ids.items() if name != "input_ids"}
    if causal:
        call["use_cache"] = False
    positions = calls.packed.family.padded_positions(calls.packed.module, input_ids)
    position, taken = layout.position(), None
    if first_tokens is None:  # otherwise first tokens of rows, which heads read, are not those of sequences
        position, taken = _narrowed(calls, position, len(mask), amount, places)
    with explained(self, given_ids), calls.packed.placement.at(position), calls.autocast(mask.device):
        ids, packed_options = layout.packed(input_ids), _packed_inputs(call, layout, positions)
        later = None if taken is None else pooled.Pass(self, ids, packed_options)
        out = type(self).forward(self, ids, **packed_options)
    if not position.is_of(*out.last_hidden_state.shape[:2]):
        hooks.reshape = True
        return calls.padded(self, _RESHAPED, given, options)
    if taken is None or later is None:
        out.last_hidden_state = _padded(self, out, mask, layout, amount, is_full=is_full)
    else:
        tokens = _tokens(self, out)
        all_states = partial(_all_states, calls, later.expecting(taken.tokens, tokens), position, mask)
        out.last_hidden_state = pooled.states(tokens, taken, mask.shape[1], all_states)
    if out.get("pooler_output") is not None:
        out.pooler_output = calls.packed.family.pooled(self, out.last_hidden_state)
    return out.to_tuple() if unpad_calls.wants_tuple(self, options) else out


def _why_with_padding(calls: _Calls, encoder: Any, mask: Tensor, amount: PaddingInLoss) -> str | None:
    """Return why a call with padding tokens under this mask needs them; None if it can run without."""
    if not bool(mask[:, 0].all()):  # heads read the first place, which has to be its own
        return "rows that do not begin with a token: pad them on the right"
    if has_holes(mask):
        return HOLES
    if calls.packed.family.causal and amount != "none":
        return "decoders whose hidden states of padding tokens are read"
    is_eager = calls.packed.attention_before == "eager"
    if amount == "all" and is_eager and getattr(encoder.config, "local_attention", None):
        return "models with local attention, loaded as eager, whose padding is read"
    return None


def _narrowed(
    calls: _Calls, position: BatchPosition, n_rows: int, amount: PaddingInLoss, places: tuple[Place, ...]
) -> tuple[BatchPosition, pooled.Taken | None]:
    """Return the position of the call's pass, and the tokens that pooling takes if the last block computes no others.

    Where a head reads first tokens alone, the last block computes these.
    """
    if amount != "none":
        return position, None
    if places:
        taken = pooled.taken(places, position.cu_seqlens, n_rows)
        narrowed = last_block.narrowed(calls.packed, position, taken.tokens)
        return narrowed, None if narrowed.chosen is None else taken
    if not padding_readers.read_first_tokens_alone(calls.packed.module):
        return position, None
    return last_block.narrowed(calls.packed, position, position.cu_seqlens[:n_rows].long()), None


def _all_states(calls: _Calls, run: pooled.Pass, position: BatchPosition, mask: Tensor) -> Tensor:
    """Return the hidden states of all places (B, T, D), zeros for padding, of a pass that computed a few."""
    if record.read(run.encoder, _CALLS) is not calls:
        raise pooled.too_late()
    calls.compute_all()
    with run.again(), calls.packed.placement.at(position.of_all_tokens()), calls.autocast(mask.device):
        tokens = _tokens(run.encoder, run.run())
        run.require_same(tokens)
        return _scattered(tokens, mask)


def _packed_inputs(call: dict[str, Any], layout: Layout, positions: Tensor) -> dict[str, Any]:
    """Return the packed call's keyword arguments: token columns as packed, positions that always are there."""
    columns = {
        name: layout.packed(value.expand(layout.sources.shape))
        for name, value in call.items()
        if isinstance(value, Tensor) and value.dim() == 2
    }
    return call | {"position_ids": layout.packed(positions)} | columns | {"return_dict": True}


def _tokens(encoder: Any, out: Any) -> Tensor:
    """Return the packed hidden states (N, D), in what is behind the encoder computes in."""
    return out.last_hidden_state.to(next(encoder.parameters()).dtype)[0]


def _padded(encoder: Any, out: Any, mask: Tensor, layout: Layout, amount: PaddingInLoss, *, is_full: bool) -> Tensor:
    """Return the hidden states as the padded batch has them (B, T, D); a batch that `is_full` has no padding."""
    tokens = _tokens(encoder, out)
    if len(tokens) == len(mask) < int(mask.sum()):  # those of first tokens alone
        return nn.functional.pad(tokens[:, None], (0, 0, 0, mask.shape[1] - 1))
    if is_full:
        return tokens[: mask.numel()].view(*mask.shape, -1)
    return _scattered(tokens, mask) if amount == "none" else layout.padded(tokens)


def _scattered(tokens: Tensor, mask: Tensor) -> Tensor:
    return tokens.new_zeros(*mask.shape, tokens.shape[-1]).masked_scatter(mask[..., None], tokens)


def _in_dtype(out: Any, dtype: torch.dtype) -> Any:
    """Return an encoder's output with its floating point tensors in this dtype."""
    if isinstance(out, Tensor):
        return out.to(dtype) if out.is_floating_point() else out
    if isinstance(out, tuple):
        return tuple(_in_dtype(part, dtype) for part in out)
    if isinstance(out, dict):  # transformers' outputs are
        for name in list(out):
            out[name] = _in_dtype(out[name], dtype)
    return out
