"""Which family a model is of, by the classes of its encoder and its blocks, or by a proof.

Nothing that a family is written with imports this module (`fused/`, `standard.py`, `family.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from whet.models.family import Family, home_of_forward, owner_of, registered
from whet.models.forwards import home_of, instance_forward, is_whets


def known() -> Mapping[str, Family]:
    """Return the family of each `model_type`, sorted by it; this imports all of them."""
    return registered()


def names(*, causal: bool | None = False) -> str:
    """Return the known model types of encoders, of causal decoders, or of both (None), as text for a message."""
    return ", ".join(name for name, family in known().items() if causal in (None, family.causal))


def of_model(model: nn.Module) -> Family | None:
    """Return the family of the model's encoder by its class, or the one that a proof has found for this model."""
    found = of_classes(model)
    verdict = verdict_on(model) if found is None else None
    return found if verdict is None else verdict.family


def of_classes(model: nn.Module) -> Family | None:
    """Return the family that has defined the forward of the model's encoder; None: it is somebody else's.

    The configuration says nothing: modules of a user's own borrow one, or hold encoders of that family.
    """
    encoder = encoder_of(model)
    if encoder is None:
        return None
    home = home_of_forward(type(encoder))
    family, model_type = owner_of(home), getattr(getattr(home, "config_class", None), "model_type", "")
    if family is None or model_type not in family.model_types:
        return None
    return _of_blocks(encoder) or family  # a family may have the forward of another around blocks of its own


def _of_blocks(encoder: nn.Module) -> Family | None:
    """Return the family that defines the blocks of the encoder, as its first one says."""
    owners = ((module, owner_of(type(module))) for module in encoder.modules())
    return next((owner for module, owner in owners if owner is not None and owner.is_block(module)), None)


def encoder_of(model: Any) -> PreTrainedModel | None:
    """Return the encoder of a model of transformers, which may be the model; None for any other module.

    A model of a user's own that keeps its encoder under another name than its class's `base_model_prefix` is itself
    what transformers calls its `base_model`.
    """
    base = model.base_model if isinstance(model, PreTrainedModel) else None
    return base if isinstance(base, PreTrainedModel) and base.base_model is base else None


def encoders_inside(model: nn.Module) -> list[PreTrainedModel]:
    """Return the other encoders of known families that a module holds, next to its own or in place of one."""
    own = encoder_of(model)
    others = (part for part in model.modules() if isinstance(part, PreTrainedModel) and part not in (own, model))
    return [part for part in others if encoder_of(part) is part and of_classes(part) is not None]


@dataclass(frozen=True)
class Verdict:
    """What a proof has found out about an encoder: the family that it runs packed as, or why it needs its padding."""

    family: Family | None
    why_padded: str | None = None


_VERDICTS: WeakKeyDictionary[nn.Module, tuple[int, Verdict]] = WeakKeyDictionary()
_UNREAD = (
    *("name_or_path", "dtype", "torch_dtype", "architectures", "transformers_version", "id2label", "label2id"),
    *("problem_type", "finetuning_task", "task_specific_params"),
    *("use_cache", "return_dict", "output_hidden_states", "output_attentions"),
)
"""Entries of a configuration that no forward pass of an encoder reads, or that each call may say otherwise."""


def keep_verdict(encoder: nn.Module, verdict: Verdict) -> None:
    """Keep the verdict for the encoder as it is now."""
    _VERDICTS[encoder] = (_fingerprint(encoder), verdict)


def verdict_on(model: Any) -> Verdict | None:
    """Return the verdict on the model's encoder; None if there is none, or if its modules have changed since."""
    encoder = getattr(model, "base_model", None)
    found = _VERDICTS.get(encoder) if isinstance(encoder, nn.Module) else None
    if found is None or found[0] != _fingerprint(encoder):
        return None
    return found[1]


def _fingerprint(encoder: Any) -> int:
    """Return a hash of the encoder's classes, replaced forwards and configuration; what whet puts in does not count."""
    config = encoder.config.to_dict() if hasattr(encoder, "config") else {}
    kept = sorted((name, repr(value)) for name, value in config.items() if name not in _UNREAD and name[0] != "_")
    return hash((tuple(_described(encoder)), tuple(kept)))


def _described(encoder: nn.Module) -> Iterator[tuple[str, str, str]]:
    for name, module in encoder.named_modules():
        kind = next(cls for cls in type(module).__mro__ if not cls.__module__.startswith("whet."))
        forward = instance_forward(module)
        replaced = "" if forward is None or is_whets(forward) else f"{home_of(forward)} {id(forward)}"
        yield name, f"{kind.__module__}.{kind.__qualname__}", replaced
