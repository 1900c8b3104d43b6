"""Where the encoders are in what other libraries train: a SentenceTransformer, a SetFitModel, spaCy's pipelines.

None of these libraries is imported. thinc keeps a PyTorch module in a shim, which is no attribute that a module could
be found by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from whet.config.methods import Place
from whet.methods.unpad import method as unpad
from whet.models import known
from whet.models.adapters import unwrapped
from whet.models.packable import family_of, why_padded
from whet.models.proof import prove
from whet.own_loop import curated

_SENTENCE_TRANSFORMERS = "sentence_transformers."
_MASKING = ("Pooling", "SpladePooling")
"""Its modules that multiply what they read of padding tokens by zero."""
_PLACES: dict[str, Place] = {"cls": "first", "lasttoken": "last"}
"""Which token of each row a pooling mode takes."""


@dataclass(frozen=True)
class Encoder:
    """A model of a known family inside something else."""

    name: str
    """Where it is, as a path of attributes; empty if it is what was given."""
    model: nn.Module
    padding_is_masked: bool
    """Whether the module that reads its hidden states is known to multiply those of padding tokens by zero."""
    padding_is_read: bool = False
    """Whether that module is another one of sentence-transformers: a convolution, say, reads padding without a mask."""
    pooled: tuple[Place, ...] = ()
    """Which tokens of each row that module takes; empty: all, or not known."""


def modules_in(holder: Any) -> list[tuple[str, nn.Module]]:
    """Return the holder itself if it is a module, else the modules among its attributes, with their names.

    SetFit's SetFitModel and transformers' pipelines are no modules, and hold one. So do spaCy's pipelines, in thinc's
    shims.
    """
    if isinstance(holder, nn.Module):
        return [("", holder)]
    if is_of_spacy(holder):
        return _modules_of_spacy(holder)
    attributes = getattr(holder, "__dict__", {})
    return [(name, value) for name, value in attributes.items() if isinstance(value, nn.Module)]


def encoders_in(holder: Any) -> list[Encoder]:
    """Return the outermost models of known families in the holder; one that is there twice is returned once."""
    found: dict[int, Encoder] = {}
    for name, root in modules_in(holder):
        for path, model in _known_in(root):
            whole = ".".join(part for part in (name, path) if part)
            reader = _reader_after(root, path)
            of_library = reader is not None and type(reader).__module__.startswith(_SENTENCE_TRANSFORMERS)
            is_masked = of_library and type(reader).__name__ in _MASKING
            places = _places_of(reader) if is_masked else ()
            found.setdefault(id(model), Encoder(whole, model, is_masked, of_library and not is_masked, places))
    return list(found.values())


def prove_in(holder: Any) -> None:
    """Find out about each encoder of an unknown family in the holder whether it may run packed."""
    for _, root in modules_in(holder):
        outer: list[str] = []
        for path, module in root.named_modules():
            if isinstance(module, PreTrainedModel) and not any(path.startswith(f"{name}.") for name in outer):
                prove.ensure(module)
                if _runs_packed(module):
                    outer.append(path)


def is_known(model: nn.Module) -> bool:
    """Return whether the model itself is of a family that whet knows or has proven, or changed; wrapped by peft or not.

    One with further encoders, such as a teacher's, is a module that holds several.
    """
    base = unwrapped(model)
    if not isinstance(base, PreTrainedModel):
        return False
    return unpad.is_on(base) or (known.of_model(base) is not None and not holds_others(base))


def holds_others(base: nn.Module) -> bool:
    """Return whether a model holds encoders that can run packed next to, or in place of, one of its own."""
    return any(family_of(encoder) is not None for encoder in known.encoders_inside(base))


def _known_in(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if is_known(root) or curated.is_encoder(root):
        yield "", root
        return
    outer: list[str] = []
    for path, module in root.named_modules():
        inside = any(path.startswith(f"{name}.") for name in outer)
        if path and not inside and _can_change(module):
            outer.append(path)
            yield path, module


def _can_change(module: nn.Module) -> bool:
    """Return whether the module is a model of transformers or of curated-transformers that can run packed, or does."""
    return unpad.is_on(module) or _runs_packed(module) or curated.is_encoder(module)


def _runs_packed(module: nn.Module) -> bool:
    """Return whether the module is a model of transformers that can run packed, and holds no further ones."""
    return isinstance(module, PreTrainedModel) and family_of(module) is not None and not holds_others(module)


def _reader_after(root: nn.Module, path: str) -> nn.Module | None:
    """Return the module that comes after the encoder at this path in the innermost sequence that continues."""
    parts = path.split(".") if path else []
    for end in reversed(range(len(parts))):
        parent = root.get_submodule(".".join(parts[:end]))
        if isinstance(parent, nn.Sequential):
            names = [child for child, _ in parent.named_children()]
            after = names[names.index(parts[end]) + 1 :]
            if after:
                return parent.get_submodule(after[0])
    return None


def _places_of(pooling: Any) -> tuple[Place, ...]:
    """Return the tokens of each row that the pooling takes; empty if it takes others too."""
    if type(pooling).__name__ != "Pooling" or not getattr(pooling, "include_prompt", True):
        return ()
    modes = getattr(pooling, "pooling_mode", None)
    if modes is None:  # before sentence-transformers 6 there is a switch for each
        modes = pooling.get_pooling_mode_str().split("+")
    names = [modes] if isinstance(modes, str) else list(modes)
    return tuple(_PLACES[name] for name in names) if _PLACES.keys() >= set(names) else ()


def why_unchanged(encoders: Sequence[nn.Module]) -> str | None:
    """Return why these cannot run without padding; None if they can."""
    reasons = [None if curated.is_encoder(one) else why_padded(one) for one in encoders]
    return next(filter(None, reasons), None) if reasons else "no model of transformers in it is known to whet"


def why_elsewhere(model: nn.Module) -> str | None:
    """Return why nothing can be computed with the model's weights as they are; None if it can."""
    for one in model.parameters():
        if one.is_meta or hasattr(one, "ds_id") or type(one.data).__name__ == "DTensor":
            return "its weights are not all here: they are offloaded, or shared among ranks"
    return None


_SPACY = ("spacy.", "thinc.")


def is_of_spacy(holder: Any) -> bool:
    """Return whether this is an object of spaCy or thinc, or of a class that is derived from theirs."""
    return not isinstance(holder, type) and any(f"{cls.__module__}.".startswith(_SPACY) for cls in type(holder).__mro__)


def _modules_of_spacy(holder: Any) -> list[tuple[str, nn.Module]]:
    """Return the PyTorch modules of every component, also of disabled ones, each once and with a name."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, model in _thinc_models(holder):
        modules = [module for module in _in_shims(model) if id(module) not in found]
        for number, module in enumerate(modules):
            found[id(module)] = (f"{name}.{number}" if len(modules) > 1 else name, module)
    return list(found.values())


def _thinc_models(holder: Any) -> Iterator[tuple[str, Any]]:
    components = getattr(holder, "components", None)  # of a Language: (name, component)
    for name, one in components if components is not None else [(getattr(holder, "name", ""), holder)]:
        model = one if hasattr(one, "walk") else getattr(one, "model", None)
        if hasattr(model, "walk"):
            yield str(name), model


def _in_shims(model: Any) -> Iterator[nn.Module]:
    for node in model.walk():
        for shim in node.shims:
            module = getattr(shim, "_model", None)
            if isinstance(module, nn.Module):
                yield module
