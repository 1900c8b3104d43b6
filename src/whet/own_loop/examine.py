"""Whether a model trains without padding, found out by the code that training prepares a model with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from whet.config.methods import MethodSettings
from whet.kernels.library import library
from whet.methods import fuse, order
from whet.models.known import Verdict, known
from whet.models.loading.heads import CAUSAL_LM, OF_ENCODERS, Head, head_named
from whet.models.loading.load import ModelSource, load_config, load_model
from whet.models.packable import why_padded
from whet.models.packed import packed_model, prepare
from whet.models.proof import prove
from whet.models.view import ModelView
from whet.objectives.base import Objective
from whet.objectives.choose import choose

_ENCODER = Head(
    auto="AutoModel",
    mapping="MODEL_MAPPING",
    task="hidden states",
    gives="each token has a hidden state",
    learns="compute hidden states",
    command="whet.Trainer",
    peft="FEATURE_EXTRACTION",
)


@dataclass(frozen=True, kw_only=True)
class ModelFindings:
    """Whether a model trains without padding here, and which of its parts run fused: what `whet doctor MODEL` shows."""

    model: str
    model_type: str
    model_class: str
    packed: bool
    """Whether its encoder runs without padding."""
    how: str
    """What the answer rests on: a family's file, a proof, or why the model needs its padding."""
    head: str
    """How batches reach the head in whet's own training."""
    fused: dict[str, int]
    """How many modules of each class run on native operators."""
    called: dict[str, str]
    """Parts inside of these that are called as they are, and why."""
    isa: str | None
    """The instruction set of the native operators; None: they are not in use."""


def examine(name: str) -> ModelFindings:
    """Return what training would do with the model; raises WhetError if it cannot be loaded."""
    source = ModelSource(model=name, flag="MODEL")
    model: Any = load_model(source, _head_in(load_config(source)) or _ENCODER)
    verdict = prove.ensure(model)
    why = why_padded(model)
    reads = _prepare(model, packed=why is None)
    order.apply(ModelView(model), MethodSettings(operators="auto"))
    packed, native = packed_model(model), library()
    fused = fuse.changed_in(model) or {}
    return ModelFindings(
        model=name,
        model_type=model.config.model_type,
        model_class=type(model).__name__,
        packed=why is None,
        how=_how(model, verdict) if why is None else why,
        head=reads,
        fused=dict(fused),
        called={} if packed is None or not fused else fuse.called(packed),
        isa=native.isa if native is not None and fused else None,
    )


def _head_in(config: Any) -> Head | None:
    """Return the head that the configuration names; None for any other, and for one of next tokens on an encoder."""
    head, family = head_named(config.architectures, (*OF_ENCODERS, CAUSAL_LM)), known().get(config.model_type)
    is_decoder = family is not None and family.causal
    return None if head is CAUSAL_LM and not is_decoder else head


def _how(model: Any, verdict: Verdict | None) -> str:
    if verdict is None:
        return f"whet knows the family {model.config.model_type}"
    return "proven on a copy with random weights: packed rows equal padded ones, forward and backward"


def _prepare(model: nn.Module, *, packed: bool) -> str:
    """Prepare the model; return how batches reach its head."""
    if model.base_model is model:
        prepare(model)
        return "none: the model is loaded without one"
    if not packed:
        return "reads padded batches"
    objective: Objective = choose(model, None, _no_collator)
    if objective.packed:
        return "reads packed rows"
    prepare(model, encoder_only=True)
    return "reads hidden states that get their padding back: it may read more than whet knows"


def _no_collator(_: list[Any]) -> dict[str, Any]:
    raise AssertionError("the doctor makes no batches")
