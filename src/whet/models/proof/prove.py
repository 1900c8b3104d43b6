"""Prove that an encoder of an unknown family gives packed rows the results of padded ones, or find out why not.

Reasons to keep the padding that need no forward pass come first: they are cheaper and clearer than a failed proof.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from whet.errors import WhetError
from whet.kernels.library import library
from whet.kernels.operator import is_rehearsed
from whet.log import logger
from whet.models.adapters import unwrapped
from whet.models.family import Family, after_padding, by_pooler
from whet.models.forwards import instance_forward, is_whets
from whet.models.fused import parts
from whet.models.fused.decoder import why_rotary_moves
from whet.models.fused.limits import NO_EFFECT
from whet.models.known import Verdict, encoders_inside, keep_verdict, of_classes, verdict_on
from whet.models.packed import PackedModel, prepare, release
from whet.models.proof.trial import (
    MOST_TOKENS,
    Passed,
    ProofRows,
    Trial,
    gap,
    generator_states,
    longest_row,
    proof_rows,
    stand_in,
    untraced,
    wide_rows,
)
from whet.models.view import ModelView

_OF_STATES, _OF_GRADIENTS = 1e-4, 1e-3
"""Largest differences, as shares of the largest value. Rounding differs by about 1e-6 in a layer and grows with depth;
a wrong position, bias or window moves random weights' results by more than 1e-2."""
_RATE = 0.1
"""Dropout in the training passes of a proof: the model's own rate may be zero."""


def ensure(model: nn.Module) -> Verdict | None:
    """Return the verdict on the model's encoder, proving it first if need be; None for a known family.

    None too for a module of a user's own that holds encoders of known families: these run packed, and not what is
    around them. The proof runs a copy on a few short rows, forward and backward: it takes the time of some training
    steps. It leaves no trace in the model or in any generator.
    """
    base = unwrapped(model)
    encoder = getattr(base, "base_model", None)
    config = getattr(base, "config", None)
    if not isinstance(encoder, nn.Module) or config is None or of_classes(base) is not None or encoders_inside(base):
        return None
    if is_rehearsed():  # its results are no numbers
        return None
    found = verdict_on(base)
    if found is None:
        begin = time.perf_counter()
        found = prove(encoder)
        keep_verdict(encoder, found)
        text = "yes" if found.why_padded is None else f"no, {found.why_padded}"
        logger.info("may %s run packed? %s (%.1f s)", type(encoder).__name__, text, time.perf_counter() - begin)
    return found


def prove(encoder: Any) -> Verdict:
    """Return whether the encoder may run packed, by running a copy of it."""
    if (why := _why_without_trial(encoder)) is not None:
        return Verdict(None, why)
    if longest_row(encoder.config) > MOST_TOKENS:
        return Verdict(None, f"its windows reach over {longest_row(encoder.config)} tokens, more than a proof runs")
    try:
        with untraced(), torch.device("cpu"):
            return Verdict(_proven(encoder))
    except _Different as difference:
        return Verdict(None, str(difference))
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        return Verdict(None, f"a trial run of it failed: {type(error).__name__}: {text}")


class _Different(Exception):  # noqa: N818
    """Packed rows differ from padded ones, or from themselves."""


def _proven(encoder: Any) -> Family:
    """Return the family as which the encoder runs packed; raise `_Different` if there is none."""
    model, weights = stand_in(encoder)
    if model.config._attn_implementation not in ("eager", "sdpa"):
        model.set_attn_implementation("sdpa")
    trial, rows = Trial(model, weights), proof_rows(model)
    buffers = _buffers(model)
    calls = _self_attention_calls(trial, rows)
    padded = trial.padded(rows, gradients=True)
    if not bool(padded.states.isfinite().all()):
        raise _Different("with random weights its hidden states are not finite, so nothing can be compared")
    if not torch.equal(trial.padded(rows, gradients=True).states, padded.states):
        raise _Different("its hidden states are random, or depend on earlier calls")
    _require_known_pooler(trial, rows)
    packed = _first_that_agrees(trial, rows, padded, calls)
    _require_gradients(trial.packed(packed, rows, gradients=True), padded)
    _require_apart(trial, packed, rows)
    _require_wide_batches(trial, packed)
    _require_placed_masks(trial, packed, rows)
    _require_no_state(trial, packed, rows, padded, buffers)
    return packed.family


def _self_attention_calls(trial: Trial, rows: ProofRows) -> list[AttentionCall]:
    calls = _attention_calls(trial.model, rows.padded())
    if not calls:
        raise _Different("its attention does not go through transformers' AttentionInterface")
    odd = next((call for call in calls if not call.is_self_attention), None)
    if odd is not None:
        raise _Different(f"its attention ({odd.module.__name__}) has keys of other shapes than its queries")
    return calls


def _first_that_agrees(trial: Trial, rows: ProofRows, padded: Passed, calls: list[AttentionCall]) -> PackedModel:
    """Return the copy, prepared as the first family whose packed states are the padded ones."""
    refused: str | None = None
    for family in _candidates(trial.model, calls):
        packed = prepare(trial.model, family=family)
        assert packed is not None
        if library() is not None:
            parts.put_generic(trial.model, packed.placement)
        try:
            if gap(trial.packed(packed, rows).states, padded.states) <= _OF_STATES:
                return packed
        except WhetError as error:
            refused = error.problems[0].what
        except (IndexError, RuntimeError):
            pass  # positions outside of the model's table
        parts.take_generic(trial.model)
        release(packed)
    why = _why_calls_differ(calls) or refused
    raise _Different(why or "packed rows get other hidden states than padded ones")


def _candidates(model: Any, calls: list[AttentionCall]) -> Iterator[Family]:
    """Yield what the family may be: positions from 0, or as RoBERTa counts them."""
    settings: dict[str, Any] = {
        "model_types": (model.config.model_type,),
        "package": type(model).__module__,
        "attention": tuple(sorted({call.module.__name__ for call in calls})),
        "blocks": tuple(sorted({type(block.module).__name__ for block in ModelView(model).blocks()})),
        "proven": True,
    }
    yield Family(**settings)
    if isinstance(getattr(model.config, "pad_token_id", None), int):
        yield Family(**settings, first_position=after_padding, skips_padding=True)


def _require_known_pooler(trial: Trial, rows: ProofRows) -> None:
    with torch.no_grad():
        output = trial.model(**rows.padded())
        given = output.get("pooler_output")
        if given is None:
            return
        pooler = getattr(trial.model, "pooler", None)
        found = by_pooler(trial.model, output.last_hidden_state[:, :1]) if isinstance(pooler, nn.Module) else None
    if not isinstance(found, Tensor) or found.shape != given.shape or gap(found, given) > _OF_STATES:
        raise _Different("its pooler_output is not its pooler applied to the first token of each row")


def _require_gradients(found: Passed, wanted: Passed) -> None:
    assert found.of_inputs is not None
    assert wanted.of_inputs is not None
    assert found.of_weights is not None
    assert wanted.of_weights is not None
    if gap(found.of_inputs, wanted.of_inputs) > _OF_GRADIENTS:
        raise _Different("packed rows get other gradients than padded ones")
    largest = max(float(grad.abs().max()) for grad in wanted.of_weights.values())
    for name, grad in wanted.of_weights.items():
        other = found.of_weights.get(name)
        floor = 1e-4 * largest  # what cancels to zero is rounding alone
        if other is None or float((other - grad).abs().max()) > _OF_GRADIENTS * max(float(grad.abs().max()), floor):
            raise _Different(f"packed rows give {name} another gradient than padded ones")


def _require_apart(trial: Trial, packed: PackedModel, rows: ProofRows) -> None:
    """Raise if another row's tokens move a row's states or gradients by a single bit."""
    others = rows.unchanged_tokens()
    before, after = (trial.packed(packed, one, gradients=True) for one in (rows, rows.changed()))
    assert before.of_inputs is not None
    assert after.of_inputs is not None
    if torch.equal(before.states[~others], after.states[~others]):
        raise _Different("its hidden states do not depend on its tokens")
    if not torch.equal(before.states[others], after.states[others]):
        raise _Different("a packed row's hidden states depend on the tokens of other rows")
    if not torch.equal(before.of_inputs[others], after.of_inputs[others]):
        raise _Different("a packed row's gradients depend on the tokens of other rows")


def _require_wide_batches(trial: Trial, packed: PackedModel) -> None:
    """Raise if batches with more tokens than a row can have, without optional columns, or padding tokens differ."""
    rows = wide_rows(trial.model)
    with packed.placement.outside():
        padded = trial.padded_places(rows)
    if gap(trial.packed_places(packed, rows), padded) > _OF_STATES:
        raise _Different("many packed rows, or their padding tokens, get other hidden states than padded ones")


def _require_placed_masks(trial: Trial, packed: PackedModel, rows: ProofRows) -> None:
    """Raise if a training pass draws random numbers: masks have to follow rows and positions, not the packing."""
    dropouts = [module for module in trial.model.modules() if isinstance(module, nn.Dropout)]
    rates = [module.p for module in dropouts]
    for module in dropouts:
        module.p = max(module.p, _RATE)
    trial.model.train()
    try:
        before = generator_states()
        one, other = (trial.packed(packed, each).states for each in (rows, rows.changed()))
        drawn = generator_states() != before
    finally:
        trial.model.eval()
        for module, rate in zip(dropouts, rates, strict=True):
            module.p = rate
    if drawn:
        raise _Different("in training it draws random numbers outside of nn.Dropout, which would depend on the packing")
    others = rows.unchanged_tokens()
    if not torch.equal(one[others], other[others]):
        raise _Different("in training a packed row's hidden states depend on the tokens of other rows")


def _require_no_state(
    trial: Trial, packed: PackedModel, rows: ProofRows, padded: Passed, buffers: dict[str, Tensor]
) -> None:
    """Raise if passes leave something behind in the model that later passes read."""
    with packed.placement.outside():
        again = trial.padded(rows, gradients=True)
    if not torch.equal(again.states, padded.states):
        raise _Different("its hidden states depend on earlier calls")
    for name, buffer in _buffers(trial.model).items():
        if name not in buffers or not torch.equal(buffer, buffers[name]):
            raise _Different(f"its forward changes its buffer {name}")


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


MOST_WEIGHTS = 4_000_000_000
"""Weights of an encoder beyond which a proof on a CPU would take minutes."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _why_without_trial(encoder: Any) -> str | None:
    """Return why the encoder needs its padding, as far as its classes and its configuration say; None: prove it."""
    return next((why for reason in _REASONS if (why := reason(encoder)) is not None), None)


def _other_model(encoder: Any) -> str | None:
    if not isinstance(encoder, PreTrainedModel):
        return "it is not a model of transformers"
    if getattr(encoder.config, "is_encoder_decoder", False) or getattr(encoder.config, "is_decoder", False):
        return "it is a decoder, or has one: whet packs encoders"
    return None


def _other_inputs(encoder: Any) -> str | None:
    names = inspect.signature(type(encoder).forward).parameters
    if "input_ids" not in names:
        return "it does not read input_ids"
    return None if "position_ids" in names else "its forward takes no position_ids, which restart in each row"


def _other_attention(encoder: Any) -> str | None:
    if not type(encoder)._can_set_attn_implementation():
        return "its attention does not go through transformers' AttentionInterface"
    return None


def _replaced_forward(encoder: nn.Module) -> str | None:
    for name, module in encoder.named_modules():
        forward = instance_forward(module)
        if forward is not None and not is_whets(forward):
            return f"{name or type(module).__name__} has a forward of its own"
    return None


def _mixing_layer(encoder: nn.Module) -> str | None:
    for module in encoder.modules():
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention | nn.modules.batchnorm._NormBase):
            return f"it holds a {type(module).__name__}, which would mix the tokens of different rows"
        if isinstance(module, nn.modules.conv._ConvNd) and any(size > 1 for size in module.kernel_size):
            return f"it holds a {type(module).__name__}, which would mix the tokens of different rows"
    return None


def _joined_neighbours(encoder: Any) -> str | None:
    if not getattr(encoder.config, "trigram_input", False):
        return None
    return "its embeddings join neighbouring tokens (trigram_input), at the end of a row its padding"


def _experts(encoder: Any) -> str | None:
    configured = encoder.config.to_dict()
    found = next((name for name in _EXPERTS if isinstance(configured.get(name), int) and configured[name] > 1), None)
    if found is None:
        return None
    return (
        f"it routes tokens to {configured[found]} experts, whose capacity and losses may depend on all rows of a batch"
    )


def _odd_weights(encoder: nn.Module) -> str | None:
    n_weights = 0
    for name, parameter in encoder.named_parameters():
        if parameter.is_meta:
            return "its weights are on the meta device and have no values yet"
        if type(parameter) not in (nn.Parameter, Tensor) or not parameter.is_floating_point():
            return f"{name} is a {type(parameter).__name__} of {parameter.dtype}: quantized weights have no proof yet"
        n_weights += parameter.numel()
    if n_weights > MOST_WEIGHTS:
        return f"it has {n_weights / 1e9:.1f} billion weights; a proof is tried up to {MOST_WEIGHTS / 1e9:.0f} billion"
    return None


_REASONS: tuple[Callable[[Any], str | None], ...] = (
    _other_model,
    _other_inputs,
    _other_attention,
    _replaced_forward,
    _mixing_layer,
    _joined_neighbours,
    _experts,
    lambda encoder: why_rotary_moves(encoder.config),
    _odd_weights,
)


_NAME = "whet_observed"
_UNDERSTOOD = NO_EFFECT - {"sliding_window"} | {"is_causal"}


@dataclass(frozen=True)
class AttentionCall:
    """One call of the AttentionInterface."""

    module: type[nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    """Of query, key and value (B, H, T, K)."""
    causal: bool
    biased: bool
    """Whether its mask holds other numbers than those that hide a key."""
    options: tuple[str, ...]
    """Names of options that packed attention does not know."""

    @property
    def is_self_attention(self) -> bool:
        """Whether keys and values are of the same tokens and widths as queries."""
        query, *others = self.shapes
        return all((one[0], one[2], one[3]) == (query[0], query[2], query[3]) for one in others)


_CALLS: ContextVar[list[AttentionCall] | None] = ContextVar("whet_observed_calls", default=None)


def _attention_calls(model: Any, inputs: dict[str, Tensor]) -> list[AttentionCall]:
    """Run the model, which is a copy, and return its calls of the AttentionInterface."""
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    before, calls = model.config._attn_implementation, []
    model.set_attn_implementation(_NAME)
    token = _CALLS.set(calls)
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        _CALLS.reset(token)
        model.set_attn_implementation(before)
    return calls


def _why_calls_differ(calls: list[AttentionCall]) -> str | None:
    """Return what about these calls packed attention would not honour; None: nothing is known."""
    name = calls[0].module.__name__
    if any(call.causal for call in calls):
        return f"its attention ({name}) is causal"
    if any(call.biased for call in calls):
        return f"its attention ({name}) adds a bias of its own to the scores"
    options = sorted({option for call in calls for option in call.options})
    return f"its attention ({name}) asks for {', '.join(options)}" if options else None


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    calls = _CALLS.get()
    asked = tuple(name for name, value in options.items() if value is not None and name not in _UNDERSTOOD)
    if calls is not None:
        shapes = tuple(tuple(tensor.shape) for tensor in (query, key, value))
        causal = bool(options.get("is_causal") or getattr(module, "is_causal", False))
        calls.append(AttentionCall(type(module), shapes, causal, _is_bias(attention_mask), asked))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0], None


def _is_bias(mask: Tensor | None) -> bool:
    if mask is None or not mask.is_floating_point():
        return False
    return bool(((mask != 0) & (mask > torch.finfo(mask.dtype).min / 2)).any())
