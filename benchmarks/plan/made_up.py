"""Models with random weights, each with a tokenizer of made-up words: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCABULARY = 30_000
MINILM: Mapping[str, Any] = {
    "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536,
}  # fmt: skip
BERT_BASE: Mapping[str, Any] = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
}  # fmt: skip
LLAMA: Mapping[str, Any] = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "tie_word_embeddings": True,
}  # fmt: skip
"""The sizes of SmolLM2 135M."""


def word(number: int) -> str:
    """Return one of the words, of any number."""
    return f"w{number % (VOCABULARY - 5)}"


def write_model(folder: Path, kind: str, sizes: Mapping[str, Any], auto: str, n_positions: int) -> None:
    """Write a model of this kind and of these sizes, of a class of transformers' by the name of its automatic one."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(word, range(VOCABULARY - 5))]
    raw = Tokenizer(models.WordLevel({one: n for n, one in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        max_position_embeddings=n_positions,
        pad_token_id=0,
        eos_token_id=3,
        bos_token_id=2,
        **sizes,
    )
    getattr(transformers, auto).from_config(config).save_pretrained(folder)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
               "mask_token": "[MASK]", "eos_token": "[SEP]", "bos_token": "[CLS]"}  # fmt: skip
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **special).save_pretrained(folder)
