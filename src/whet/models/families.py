"""How each model family answers a method: which can run packed, and how it counts positions."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from whet.errors import ConfigError
from whet.models.binding import bound
from whet.models.standard import learn
from whet.models.wrapped import adds_tokens, only_wraps, unwrapped


@dataclass(frozen=True)
class Family:
    """What whet knows about one `model_type` of transformers."""

    position_offset: Callable[[nn.Module], int]
    """The first position id of a row."""
    attention: tuple[str, ...]
    """Class names of the modules that call transformers' AttentionInterface."""
    blocks: tuple[str, ...]
    """Class names of the modules that the model is a stack of."""
    skips_padding: bool = False
    """Whether a padded call numbers tokens that are no padding; other families number columns, padding included."""


def _from_zero(_: nn.Module) -> int:
    return 0


def _after_padding(model: nn.Module) -> int:
    """RoBERTa's embeddings number positions from padding_idx + 1 (fairseq's make_positions)."""
    padding_id: int | None = model.config.pad_token_id  # pyright: ignore
    if padding_id is None:
        raise ConfigError(
            what="the model's configuration names no padding token",
            got="pad_token_id null",
            why="this family counts positions from the number of its padding token",
            fix='set "pad_token_id" in config.json to what the model was trained with: 1 for RoBERTa and XLM-R',
        )
    return padding_id + 1


FAMILIES: dict[str, Family] = {
    "albert": Family(_from_zero, ("AlbertAttention",), ("AlbertLayer",)),
    "bert": Family(_from_zero, ("BertSelfAttention",), ("BertLayer",)),
    "distilbert": Family(_from_zero, ("DistilBertSelfAttention",), ("TransformerBlock",)),
    "electra": Family(_from_zero, ("ElectraSelfAttention",), ("ElectraLayer",)),
    "roberta": Family(_after_padding, ("RobertaSelfAttention",), ("RobertaLayer",), skips_padding=True),
    "xlm-roberta": Family(_after_padding, ("XLMRobertaSelfAttention",), ("XLMRobertaLayer",), skips_padding=True),
}


def is_one_of(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Return whether the module's class is one of these classes of transformers, or made from one."""
    return any(cls.__name__ in names and cls.__module__.startswith("transformers.") for cls in type(module).__mro__)


def family_of(model: nn.Module) -> Family | None:
    """Return the family of the model, or None for one that whet cannot run without padding."""
    return None if why_padded(model) is not None else _of_type(unwrapped(model))


def why_padded(model: nn.Module, within: nn.Module | None = None) -> str | None:
    """Return why the model needs its padding; None where whet can run it without.

    Rows that lie end to end must not see each other: only attention may mix the tokens of a row, and it must be that of
    transformers. `within` is the part of the model that is to run without padding, by default all of it.
    """
    base = unwrapped(model)
    family = _of_type(base)
    if family is None:
        return "whet does not know its family"
    if adds_tokens(model):
        return "its adapter puts tokens of its own before each row"
    if not only_wraps(model):
        return f"something is around its {type(model).__name__}: hooks, or a forward of its own"
    blocks = [module for module in base.modules() if is_one_of(module, family.blocks)]
    if not all(any(is_one_of(part, family.attention) for part in block.modules()) for block in blocks):
        return f"a block of it has an attention that is not {' or '.join(family.attention)}"
    for module in (within or base).modules():
        if is_one_of(module, family.attention) and not has_forward_of(module, family.attention):
            return f"{type(module).__name__} has a forward of its own, and may mix the tokens of different rows"
        if isinstance(module, _MIXERS):
            return f"it holds a {type(module).__name__}, which would mix the tokens of different rows"
    return None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that the model's family names; none for a model of an unknown family."""
    family = _of_type(model)
    return [] if family is None else [module for module in model.modules() if is_one_of(module, family.blocks)]


def answers_questions(model: nn.Module) -> bool:
    """Return whether the model is an extractive question answering model of transformers, with its own forward."""
    base = unwrapped(model)
    if adds_tokens(model):
        return False
    heads = tuple(cls.__name__ for cls in type(base).__mro__ if cls.__name__.endswith(_SPAN_HEADS))
    heads = tuple(name for name in heads if name not in _BEAM_HEADS)
    return is_one_of(base, heads) and has_forward_of(base, heads)


def has_forward_of(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Return whether the module runs the forward that transformers wrote for one of these classes, or whet's."""
    own = bound(module)
    if own is not None and not getattr(getattr(own, "func", own), "__module__", "").startswith("whet."):
        return False
    given = [cls for cls in type(module).__mro__ if cls.__name__ in names and learn(cls)]
    return any(type(module).forward is cls.forward for cls in given)


def _of_type(model: nn.Module) -> Family | None:
    """Return the family of the model's type. A decoder of a known one counts as unknown: its attention is causal."""
    config = getattr(model, "config", None)
    if getattr(config, "is_decoder", False):
        return None
    return FAMILIES.get(getattr(config, "model_type", ""))


_SPAN_HEADS = ("ForQuestionAnswering", "ForQuestionAnsweringSimple")
_BEAM_HEADS = ("XLNetForQuestionAnswering", "XLMForQuestionAnswering", "FlaubertForQuestionAnswering")
"""Heads that search for an answer's end by its start: they give no logits for each token."""
_MIXERS = (nn.RNNBase, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.modules.batchnorm._NormBase)
"""Layers of torch whose result for one token depends on others."""
