"""How each model family answers a method: which can run packed, and how it counts positions."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from whet.errors import ConfigError


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


def family_of(model: nn.Module) -> Family | None:
    """Return the family of the model, or None where whet knows none: such a model runs padded.

    A decoder of a known family (`is_decoder`) counts as unknown: its attention is causal.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_decoder", False):
        return None
    return FAMILIES.get(getattr(config, "model_type", ""))
