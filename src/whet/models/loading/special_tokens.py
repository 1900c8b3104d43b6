"""The tokenizer's end, begin and padding tokens, and its side of padding, as the model and its head need them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin, trainer_utils

from whet.errors import ConfigError
from whet.log import logger
from whet.models.adapters import unwrapped
from whet.models.family import after_padding
from whet.models.loading import heads
from whet.models.packable import family_of


def set_padding(model: Any, tokenizer: Any, head: heads.Head) -> None:
    """Let the tokenizer pad rows, in place, as the model with this head reads them.

    Tags are read by their place in the row, and labels at its first token, or at its last one that is no padding: the
    padding goes to the right, except for XLNet's labels, which are read at the last place. A tokenizer without a
    padding token pads with its end token, and the model's configuration gets its number, by which heads of decoders
    find the last token. Raises ConfigError if there is no end token either.
    """
    if head.causal:
        return
    config: Any = unwrapped(model).config
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("the tokenizer has no padding token: rows are padded with its end token %s", tokenizer.eos_token)
    if getattr(config.get_text_config(), "pad_token_id", None) is None:
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if head is heads.QUESTION_ANSWERING:  # its side of padding says which text comes first; most rows need no padding
        return
    if tokenizer.pad_token is None:
        raise no_padding_token(tokenizer.name_or_path)
    if head is heads.TOKEN_CLASSIFICATION or getattr(config, "summary_type", None) != "last":
        tokenizer.padding_side = "right"


def no_padding_token(model: str) -> ConfigError:
    """Return the error of a tokenizer that cannot pad."""
    return ConfigError(
        what="the tokenizer has no padding token",
        got=model,
        why="rows of several lengths are one batch once they are padded",
        fix="set pad_token in tokenizer_config.json, and pad_token_id in config.json",
    )


def align_special_tokens(model: Any, processing_class: Any) -> None:
    """Give the model's configuration, and that of its `generate`, the tokenizer's end, begin and padding tokens.

    A padding token from whose number the model counts positions stays: the weights were trained with it.
    """
    if not isinstance(processing_class, PreTrainedTokenizerBase | ProcessorMixin):
        return
    base = unwrapped(model)
    if not hasattr(getattr(base, "config", None), "get_text_config"):
        return
    config, family = base.config.get_text_config(), family_of(model)
    padding = getattr(config, "pad_token_id", None)
    trainer_utils.align_special_tokens(base, processing_class)
    if family is not None and family.first_position is after_padding and padding is not None:
        config.pad_token_id = padding
