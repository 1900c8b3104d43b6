"""How rows are padded where nobody says how."""

from typing import Any

from transformers import DataCollatorWithPadding, default_data_collator

from whet.models.objective import Collate


def default_collator(processing_class: Any) -> Collate:
    """Return the tokenizer's way of padding, or plain stacking where there is no tokenizer."""
    if processing_class is None or not hasattr(processing_class, "pad"):
        return default_data_collator
    return DataCollatorWithPadding(processing_class)
