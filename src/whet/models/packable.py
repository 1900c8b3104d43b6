"""Whether whet can run a model without its padding, and if not, why."""

import inspect
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import nn

from whet.models import attention
from whet.models.adapters import adds_tokens, unwrapped
from whet.models.family import Family, home_of_forward
from whet.models.forwards import is_whets, other_forward
from whet.models.fused.attention import why_more_than_dropout
from whet.models.known import encoder_of, known, of_model, verdict_on
from whet.models.standard import is_trusted, learn


def family_of(model: nn.Module) -> Family | None:
    """Return the family of the model, or None for one that whet cannot run without padding."""
    return None if why_padded(model) is not None else of_model(unwrapped(model))


def why_padded(model: nn.Module, within: nn.Module | None = None) -> str | None:
    """Return why the model needs its padding; None if whet can run it without.

    Rows that lie end to end must not see each other: only attention may mix the tokens of a row, and it must be that of
    the family. `within` is the part of the model that is to run without padding, by default all of it.
    """
    base = unwrapped(model)
    family = of_model(base)
    if family is None:
        return _why_unknown(base)
    if adds_tokens(model):
        return "its adapter puts tokens of its own before each row"
    if not family.causal and getattr(base.config, "is_decoder", False):
        return "its configuration makes it a decoder (is_decoder), whose attention is causal"
    if (why := _why_other_encoder(base)) is not None:
        return why
    if (why := attention.why_other_function(base)) is not None:
        return why
    if (why := family.why_padded(base)) is not None or family.proven:
        return why
    if family.causal and (why := _why_other_decoder(base, family)) is not None:
        return why
    if (why := why_other_direction(attentions_of(base, family), family)) is not None:
        return why
    if (why := why_other_window(base, family)) is not None:
        return why
    if (why := _why_other_positions(base.base_model, family)) is not None:
        return why
    blocks = [module for module in base.modules() if family.is_block(module)]
    if (other := _other_block(base.base_model, family)) is not None or not blocks:
        return f"it has {other or 'no block'} in place of {' or '.join(family.blocks)} of {family.package}"
    for block in blocks:
        if not any(family.is_attention(part) for part in block.modules()):
            return _other_attention(block, family)
    for module in (within or base).modules():
        if family.is_attention(module) and not runs_forward_of(module, family.attention):
            return f"{type(module).__name__} has a forward of its own, and may mix the tokens of different rows"
        if family.adds_masks and family.is_attention(module) and type(module).__name__ not in family.attention:
            return f"{type(module).__name__} is not exactly {' or '.join(family.attention)}"
        if family.adds_masks and family.is_attention(module) and (why := why_more_than_dropout(module.dropout)):
            return why
        if isinstance(module, _MIXERS):
            return f"it holds a {type(module).__name__}, which would mix the tokens of different rows"
    return None


def _why_unknown(base: nn.Module) -> str:
    """Return why the model has no family: what the proof has found, if there was one."""
    verdict, cls = verdict_on(base), type(encoder_of(base) or base)
    found = "whet does not know its family" if verdict is None or verdict.why_padded is None else verdict.why_padded
    given = next((one for one in cls.__mro__[1:] if any(family.owns(one) for family in known().values())), None)
    if given is None or "forward" not in vars(given):
        return found
    return f"its {cls.__name__} has a forward of its own in place of that of {given.__name__}, and {found}"


def _why_other_encoder(base: Any) -> str | None:
    """Return what computes in place of the forward that the class of the model's encoder has in its source."""
    encoder = base.base_model
    home = home_of_forward(type(encoder))
    if runs_forward_of(encoder, (home.__name__,)) or not is_trusted(home):
        return None
    return f"the forward of its {type(encoder).__name__} was replaced"


def _why_other_positions(encoder: nn.Module, family: Family) -> str | None:
    """Return which embeddings of a user's own may number positions in a way of their own: a packed pass numbers them.

    Blocks and attention are given the positions that the embeddings have.
    """
    for module in encoder.modules():
        cls = type(module)
        if module is encoder or family.is_block(module) or family.is_attention(module) or not _takes_positions(cls):
            continue
        if _is_replaced(module) or not is_trusted(home_of_forward(cls)):
            return f"its {cls.__name__} has a forward of its own, and may number the positions in another way"
    return None


@cache
def _takes_positions(cls: type[nn.Module]) -> bool:
    """Return whether the forward that the class defines takes positions."""
    return "position_ids" in inspect.signature(cls.forward).parameters


def predicts_next_tokens(model: nn.Module) -> bool:
    """Return whether the model is a causal language model of transformers, with its own forward."""
    base = unwrapped(model)
    heads = [cls for cls in type(base).__mro__ if cls.__name__.endswith(_NEXT_TOKEN_HEADS) and is_trusted(cls)]
    return bool(heads) and runs_forward_of(base, tuple(cls.__name__ for cls in heads))


def _why_other_decoder(base: Any, family: Family) -> str | None:
    """Return why a decoder of a known family needs its padding."""
    if base is not base.base_model and not predicts_next_tokens(base):
        if any(cls.__name__.endswith(_NEXT_TOKEN_HEADS) and is_trusted(cls) for cls in type(base).__mro__):
            return f"its {type(base).__name__} has a forward of its own, which may read any hidden state"
        return "of decoders, whet packs causal language models; other heads read the last token of each row"
    config = base.config
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        return "its configuration makes its attention bidirectional"
    return None


def attentions_of(model: nn.Module, family: Family) -> list[nn.Module]:
    """Return the modules of the model that are the family's attention."""
    return [module for module in model.modules() if family.is_attention(module)]


def why_other_direction(attentions: Iterable[nn.Module], family: Family) -> str | None:
    """Return which attention is causal in an encoder, or not in a decoder; transformers asks each module for it."""
    for module in attentions:
        causal = bool(getattr(module, "is_causal", family.causal))
        if causal != family.causal:
            return f"{type(module).__name__} is {'causal' if causal else 'bidirectional'} (its is_causal is {causal})"
    return None


def why_other_window(model: Any, family: Family) -> str | None:
    """Return which block has another window than transformers masks it by, as one that was moved there.

    A packed pass takes the windows of the attention modules, and masks follow the configuration as it is now.
    """
    if family.windows is None:
        return None
    for n, block in enumerate(getattr(model.base_model, "layers", ())):
        attn = getattr(block, "self_attn", None) or getattr(block, "attn", None)
        if not isinstance(attn, nn.Module):
            continue
        own, wanted = family.windows.of_attention(attn), family.windows.of_mask(model.config, n, block)
        if own != wanted:
            return f"block {n} has {_window(own)}, and its place in the configuration {_window(wanted)}"
    return None


def _window(size: int | None) -> str:
    return "no window" if size is None else f"a window of {size}"


def _other_block(encoder: nn.Module, family: Family) -> str | None:
    """Return the class that stands among the encoder's blocks and holds none: its attention may be of any kind."""
    for stack in encoder.modules():
        members = list(stack) if isinstance(stack, nn.ModuleList) else []
        odd = [one for one in members if not any(map(family.is_block, one.modules()))]
        if odd and len(odd) < len(members):
            return f"{type(odd[0]).__module__}.{type(odd[0]).__qualname__}"
    return None


def _other_attention(block: nn.Module, family: Family) -> str:
    """Return what stands in a block in place of the family's attention; a class may have its name and be another."""
    kinds = [type(part) for part in block.modules() if "attention" in type(part).__name__.lower()]
    found = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if not is_trusted(kind)]
    return f"a block of it has {found[0] if found else 'an attention'} in place of {_named(family)}"


def _named(family: Family) -> str:
    return f"{' or '.join(family.attention)} of {family.package}"


def answers_questions(model: nn.Module) -> bool:
    """Return whether the model is an extractive question answering model of transformers, with its own forward."""
    base = unwrapped(model)
    if adds_tokens(model):
        return False
    heads = [cls for cls in type(base).__mro__ if cls.__name__.endswith(_SPAN_HEADS) and is_trusted(cls)]
    names = tuple(cls.__name__ for cls in heads if cls.__name__ not in _BEAM_HEADS)
    return bool(names) and runs_forward_of(base, names)


def _is_replaced(module: nn.Module) -> bool:
    """Return whether the object has a forward that is neither its class's nor whet's."""
    own = other_forward(module)
    return own is not None and not is_whets(own)


def runs_forward_of(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Return whether the module runs the forward that was written for one of these classes, or whet's."""
    if _is_replaced(module):
        return False
    given = [cls for cls in type(module).__mro__ if cls.__name__ in names and learn(cls)]
    return any(type(module).forward is cls.forward for cls in given)


_SPAN_HEADS = ("ForQuestionAnswering", "ForQuestionAnsweringSimple")
_BEAM_HEADS = ("XLNetForQuestionAnswering", "XLMForQuestionAnswering", "FlaubertForQuestionAnswering")
"""Heads that search for an answer's end by its start: they give no logits for each token."""
_NEXT_TOKEN_HEADS = ("ForCausalLM", "LMHeadModel")
_MIXERS = (nn.RNNBase, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.modules.batchnorm._NormBase)
"""Layers of torch whose result for one token depends on others."""
