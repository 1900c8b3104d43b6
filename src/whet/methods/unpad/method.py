"""Padded calls of an encoder run without their padding: for training loops that are not whet's.

Where pooling takes a token or two of each row, the last block computes these alone. The encoder's caller gets lazy
states of the others: a second pass with the masks of the first computes them when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whet.card import Card
from whet.config.fields import PaddingInLoss
from whet.config.methods import MethodSettings, Place
from whet.data import sequences
from whet.data.batch import HOLES, has_holes
from whet.errors import ConfigError
from whet.kernels.batch_position import BatchPosition
from whet.kernels.graph import outside
from whet.kernels.operator import is_exporting
from whet.log import logger
from whet.methods.seam import Applied, Cost, Stage
from whet.methods.unpad import calls
from whet.methods.unpad.layout import Layout, computing_in, layout_of, layout_without_padding, scattered
from whet.models import last_block, record
from whet.models.forwards import bind
from whet.models.fused.limits import CameLaterError
from whet.models.lazy_tensor import Known, LazyStates, Origin
from whet.models.packed import PackedModel, explained, packed_model
from whet.models.view import ModelView
from whet.objectives import lazy_logits
from whet.on_host import on_host, sent

CARD = Card(
    name="unpad",
    asked_by="default",
    does="Padded batches run without their padding in `whet.optimize`, and for a loss of your own.",
    improves="both",
    same_result="yes",
    hurts='When a head reads padding: use padding="all".',
    source="Zeng et al. 2022, arXiv:2208.08124, section 3",
    wanted_by="unpad",
    page="speed.md#packing",
)
STAGE = Stage.CALLS
_RESHAPED = "models in which a hook returns another shape than it got"
_GROWN = "models into which a part came afterwards"
_ENCODER = "calls without padding"
"""The entry in the record of the encoder; that of the method is in the record of the model."""
_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {}
"""The forward that the class of each changed encoder had by then."""
# What the last block of fewer tokens may differ by, relative to the largest: sums are cut in other places.
_GAP, _HALF_GAP = 1e-4, 0.05
_SHORT, _SMALL = 64, 64 * 384**2
"""Tokens, and tokens times the square of the width, below which an evaluation is short."""


class _Encoder:
    """What the calls of an encoder share; nothing of a call itself, since several threads may make them at once."""

    def __init__(self, packed: PackedModel, settings: MethodSettings, amount: PaddingInLoss) -> None:
        self.packed = packed
        self.dtype = settings.unpad_dtype
        self.amount: PaddingInLoss = amount
        self.pooled = _places_read(settings.pooled, packed.module.base_model)
        """The tokens of each row that pooling takes, as long as nobody has read others; empty: all may be read."""
        self.needs_labels = False
        """Whether padding tokens are computed in each call that has no labels which leave them out."""
        self.options: Mapping[str, Any] = {}
        """The options of `whet.optimize` that changed the encoder."""
        self.by: str | None = None
        """The class that called `whet.optimize`: a Trainer or an Accelerator; None: the user did."""
        self._warned: set[str] = set()

    def asked(self) -> PaddingInLoss:
        """Return what the running call computes of padding tokens if there are no labels at them."""
        unlabelled = self.needs_labels and not calls.labels_leave_padding_out(self.packed.module)
        return "all" if unlabelled else self.amount

    def warn_if_more(self, amount: PaddingInLoss, asked: PaddingInLoss) -> None:
        """Log once that a call computes more padding tokens than `whet.optimize` was asked for."""
        why = "labels at padding tokens"
        if amount == "all" != asked and why not in self._warned:
            self._warned.add(why)
            logger.warning("whet.optimize: calls with %s compute each of these tokens: set the labels to -100", why)

    def warn_if_together(self, decoder: Any, call: Mapping[str, Any]) -> None:
        """Log once that sequences whose positions restart in a row see each other, as they do in transformers."""
        if "together" in self._warned or (cause := calls.see_each_other(decoder, call)) is None:
            return
        self._warned.add("together")
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
        if why not in self._warned:
            self._warned.add(why)
            logger.warning("whet.optimize: with their padding run %s", why)
        call = calls.named(encoder, given, options)
        if call is not None:
            calls.require_kept_apart(encoder, call, why, causal=self.packed.family.causal)
        return self.as_it_was(encoder, given, options)

    def as_it_was(self, encoder: Any, given: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return what the encoder's own forward gives."""
        dtype = next(encoder.parameters()).dtype
        with self.packed.placement.outside(), computing_in(self.dtype, next(encoder.parameters()).device):
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
    _FORWARDS[type(encoder)] = type(encoder).forward
    record.keep(view.model, CARD.name, calls.note_calls(view.model))
    record.keep(encoder, _ENCODER, _Encoder(packed, settings, settings.unpad))
    encoder.forward = bind(_forward, encoder, signed=True)
    lazy_logits.make_lazy(view.model)
    return Applied(CARD.name, "no padding")


def restore(view: ModelView) -> None:
    """Take it out again, exactly."""
    noting = record.take(view.model, CARD.name)
    if noting is None:
        return
    encoder = _encoder(view.model)
    encoder.__dict__.pop("forward", None)
    record.take(encoder, _ENCODER)
    lazy_logits.restore(view.model)
    for handle in noting:
        handle.remove()


def cost(view: ModelView, settings: MethodSettings) -> Cost:
    """Return no cost: a call computes fewer tokens, and each token costs what it did."""
    return Cost()


def require_labels(model: nn.Module) -> None:
    """Let calls compute each padding token, unless labels in the call leave them out.

    For a model in whose results a loss elsewhere may read padding.
    """
    record.read(_encoder(model), _ENCODER).needs_labels = True


def note_options(model: nn.Module, options: Mapping[str, Any], *, by: str | None) -> None:
    """Note what changed the model; a model that is restored, or changed again, forgets it."""
    encoder: _Encoder = record.read(_encoder(model), _ENCODER)
    encoder.options, encoder.by = dict(options), by


def options_of(model: nn.Module) -> tuple[Mapping[str, Any], str | None]:
    """Return the options that changed the model, and the class that gave them; None: its user did."""
    encoder: _Encoder = record.read(_encoder(model), _ENCODER)
    return encoder.options, encoder.by


def is_on(model: nn.Module) -> bool:
    """Return whether calls of the model run without their padding."""
    return record.read(model, CARD.name) is not None


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """Return what the encoder's products compute in during calls without padding; None: as without whet."""
    return record.read(_encoder(model), _ENCODER).dtype


def padding_of(model: nn.Module) -> PaddingInLoss:
    """Return what padding tokens get in calls of the model, if nobody but its head reads them."""
    return calls.padding_usually_needed(model, record.read(_encoder(model), _ENCODER).amount)


def _encoder(model: Any) -> nn.Module:
    """Return the encoder inside a model of transformers, which may be the model."""
    return model.base_model


def n_computed(packed: PackedModel, inputs: Mapping[str, Any]) -> int:
    """Return how many token places a call of the model with this padded batch computes."""
    mask = on_host(inputs["attention_mask"]).flatten(0, -2).bool()
    if not bool(mask[:, 0].all()) or has_holes(mask):
        return mask.numel()
    amount = calls.padding_needed_by(packed.module, record.read(_encoder(packed.module), _ENCODER).amount, inputs)
    return len(layout_of(mask, amount).columns)


def _forward(self: Any, *given: Any, **options: Any) -> Any:
    """Stand in for the forward of an encoder (B, T) -> hidden states (B, T, D).

    A graph of torch.compile breaks around it: native operators are no part of a graph, and neither are packed sizes.
    """
    if is_exporting():
        return _run(self, given, options, record.read(self, _ENCODER).pooled)
    # Also where this function itself is not compiled: a compiler that gave up on it would follow what it calls.
    places = () if torch.compiler.is_compiling() else record.read(self, _ENCODER).pooled
    return _outside_of_graphs(self, given, options, places)


@outside("an encoder that whet.optimize changed does not compile: leave fullgraph=True out")
def _outside_of_graphs(self: Any, given: Sequence[Any], options: Mapping[str, Any], places: tuple[Place, ...]) -> Any:
    return _run(self, given, options, places)


def _run(self: Any, given: Sequence[Any], options: Mapping[str, Any], places: tuple[Place, ...]) -> Any:
    state: _Encoder = record.read(self, _ENCODER)
    packed, call = state.packed, calls.named(self, given, options)
    causal = packed.family.causal
    if causal and call is not None:
        state.warn_if_together(self, call)
    why = _why_padded(packed, self, call)
    if call is None or why is not None:
        return state.padded(self, why or "", given, options)
    input_ids: Tensor = call["input_ids"]
    mask = call.pop("attention_mask", None)
    by_position = causal and mask is None and not calls.keeps_cache(self, call)
    first_tokens = sequences.first_tokens(call, by_position=by_position)
    every = torch.ones(input_ids.shape, dtype=torch.bool, device="cpu")
    mask = every if mask is None else on_host(mask).bool()
    asked = state.asked()
    amount = calls.padding_needed(packed.module, asked)
    is_full = bool(mask.all())
    if is_full and first_tokens is None and not causal and _is_short(self, input_ids, state.dtype):
        return state.as_it_was(self, given, options)
    if not is_full and (why := _why_with_padding(packed, self, mask, amount)) is not None:
        return state.padded(self, why, given, options)
    state.warn_if_more(amount, asked)
    layout = layout_without_padding(mask, first_tokens) if is_full else layout_of(mask, amount)
    computed, device = layout.columns, input_ids.device  # on the host, as the ids may be known there
    layout = layout.on(device)
    given_ids = {name: value for name, value in call.items() if name not in sequences.COLUMNS}
    call = {name: value for name, value in given_ids.items() if name != "input_ids"}
    if causal:
        call["use_cache"] = False
    positions = packed.family.padded_positions(packed.module, input_ids)
    position, taken = layout.position(), None
    if first_tokens is None:  # otherwise first tokens of rows, which heads read, are not those of sequences
        position, taken = _narrowed(packed, position, layout.row_lengths[: len(mask)], amount, places)
    try:
        with explained(self, given_ids, computed), packed.placement.at(position), computing_in(state.dtype, device):
            ids, packed_options = layout.packed(input_ids), _packed_inputs(call, layout, positions)
            later = None if taken is None else _Pass(self, ids, packed_options)
            with packed.hooks.noise_as_padded(mask.shape[1], ids.shape[1]):
                out = packed.encode(ids, **packed_options)
    except CameLaterError:
        if not packed.hooks.want_padding:
            raise
        packed.hooks.has_grown = True
        return state.padded(self, _GROWN, given, options)
    if not position.is_of(*out.last_hidden_state.shape[:2]):
        packed.hooks.reshape = True
        return state.padded(self, _RESHAPED, given, options)
    if taken is None or later is None:
        out.last_hidden_state = _padded(self, out, mask, layout, amount, is_full=is_full)
    else:
        tokens = _tokens(self, out)
        all_states = partial(_all_states, state, later.expecting(taken.tokens, tokens), position, mask)
        read = Known(tokens, taken.places, taken.index, all_states)
        out.last_hidden_state = LazyStates.of(read, (*mask.shape, tokens.shape[-1]))
    if out.get("pooler_output") is not None:
        out.pooler_output = packed.family.pooled(self, out.last_hidden_state)
    if out.get("router_logits") is not None:  # of each layer (N, X): a loss of the model's reads them by the mask
        out.router_logits = tuple(scattered(one, mask).flatten(0, 1) for one in out.router_logits)
    return out.to_tuple() if calls.wants_tuple(self, options) else out


def _why_padded(packed: PackedModel, encoder: Any, call: Mapping[str, Any] | None) -> str | None:
    """Return why the encoder, or this call of it, needs its padding whatever the mask; None if it can run without."""
    causal, hooks, forward = packed.family.causal, packed.hooks, type(encoder).forward
    if _FORWARDS.get(type(encoder), forward) is not forward:
        return "models whose class got another forward afterwards"
    if (changed := packed.why_other_attention) is not None:
        return f"models in which {changed}"
    if (why := calls.why_padded(encoder, call, causal=causal)) is not None:
        return why
    hooks.look(encoder)
    if hooks.has_grown:
        return _GROWN
    if hooks.row_wise:
        return "calls in which peft gives each row its own adapter"
    if hooks.want_padding and hooks.are_there:
        return "calls that hooks inside the encoder see"
    return _RESHAPED if hooks.reshape else None


def _why_with_padding(packed: PackedModel, encoder: Any, mask: Tensor, amount: PaddingInLoss) -> str | None:
    """Return why a call with padding tokens under this mask needs them; None if it can run without."""
    if not bool(mask[:, 0].all()):  # heads read the first place, which has to be its own
        return "rows that do not begin with a token: pad them on the right"
    if has_holes(mask):
        return HOLES
    if packed.family.causal and amount != "none":
        return "decoders whose hidden states of padding tokens are read"
    is_eager = packed.attention_before == "eager"
    if amount == "all" and is_eager and getattr(encoder.config, "local_attention", None):
        return "models with local attention, loaded as eager, whose padding is read"
    return None


def _is_short(encoder: Any, input_ids: Tensor, dtype: torch.dtype | None) -> bool:
    """Return whether an evaluation without padding has so few tokens that whet's operators cost more than they save.

    Each takes some microseconds more than torch's, and wins with the size of the products: MiniLM from 64 tokens on,
    BERT-base from 16 (`benchmarks/encoders/one_text.py`). A training is as fast from 4 or 8, and its passes without
    gradients need the masks of those with them.
    """
    width = getattr(getattr(encoder, "config", None), "hidden_size", None)
    trains = encoder.training or torch.is_grad_enabled()
    if trains or dtype is not None or input_ids.device.type != "cpu" or not isinstance(width, int):
        return False
    if torch.is_autocast_enabled("cpu") or next(encoder.parameters()).dtype != torch.float32:
        return False
    n_tokens = input_ids.numel()
    return n_tokens < _SHORT and n_tokens * width**2 < _SMALL


def _narrowed(
    packed: PackedModel, position: BatchPosition, lengths: Tensor, amount: PaddingInLoss, places: tuple[Place, ...]
) -> tuple[BatchPosition, _Taken | None]:
    """Return the position of the call's pass, and the tokens that pooling takes if the last block computes no others.

    `lengths` (B,), on the CPU, are those of the call's rows. Where a head reads first tokens alone, the last block
    computes these.
    """
    if amount != "none":
        return position, None
    if places:
        taken = _taken(places, lengths, position.slots.device)
        narrowed = last_block.narrowed(packed, position, taken.tokens)
        return narrowed, None if narrowed.chosen is None else taken
    if not calls.read_first_tokens_alone(packed.module):
        return position, None
    return last_block.narrowed(packed, position, position.cu_seqlens[: len(lengths)].long()), None


def _all_states(state: _Encoder, run: _Pass, position: BatchPosition, mask: Tensor) -> Tensor:
    """Return the hidden states of all places (B, T, D), zeros for padding, of a pass that computed a few."""
    if record.read(run.encoder, _ENCODER) is not state:
        raise _too_late()
    state.compute_all()
    everywhere, device = state.packed.placement.at(position.of_all_tokens()), position.slots.device
    with run.again(), everywhere, computing_in(state.dtype, device):
        tokens = _tokens(run.encoder, run.run())
        run.require_same(tokens)
        return scattered(tokens, mask)


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
    return scattered(tokens, mask) if amount == "none" else layout.padded(tokens)


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


@dataclass(frozen=True)
class _Taken:
    """The tokens of a packed batch that pooling takes, (M,) in rising order, and which each row's are.

    `places` (B, K) are the columns of the padded batch, `index` (B, K) the numbers of their tokens among the M.
    """

    tokens: Tensor
    places: Tensor
    index: Tensor


def _places_read(asked: tuple[Place, ...], encoder: Any) -> tuple[Place, ...]:
    """Return the tokens of each row that are read, if pooling takes those asked for: a pooler reads the first, too."""
    has_pooler = bool(asked) and getattr(encoder, "pooler", None) is not None
    return ("first", *(place for place in asked if place != "first")) if has_pooler else asked


def _taken(places: tuple[Place, ...], lengths: Tensor, device: torch.device) -> _Taken:
    """Return the tokens at these places of a packed batch's rows, which have these lengths (B,) and no padding."""
    lengths = lengths.long()
    starts = lengths.cumsum(0) - lengths
    columns = {"first": torch.zeros_like(lengths), "last": lengths - 1}
    chosen = torch.stack([columns[place] for place in places], dim=1)
    tokens, index = torch.unique(starts[:, None] + chosen, return_inverse=True)
    return _Taken(*(sent(one, device) for one in (tokens, chosen, index)))


class _Pass:
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

    def expecting(self, tokens: Tensor, states: Tensor) -> _Pass:
        """Note the hidden states (M, D) of the tokens (M,) that the pass gave; return itself."""
        self._known = tokens, states.detach()
        return self

    def run(self) -> Any:
        """Return the encoder's output."""
        return type(self.encoder).forward(self.encoder, self.given, **self.options)

    def again(self) -> ExitStack:
        """Return a context in which `run` computes what it would have computed then; raise if it cannot."""
        if self._origin.is_stale or self.encoder.training != self._training:
            raise _too_late()
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
            raise _too_late()


def _too_late() -> ConfigError:
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
