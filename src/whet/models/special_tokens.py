"""The tokenizer's end, begin and padding tokens in a model's configuration, so that its `generate` knows them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin, trainer_utils

from whet.models.adapters import unwrapped
from whet.models.family import after_padding
from whet.models.packable import family_of


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
