"""Small tokenizers of the kinds that models for questions and answers come with, made from a few sentences."""

from __future__ import annotations

import re
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertTokenizer, PreTrainedTokenizerFast, RobertaTokenizer

_TEXTS = [
    "The river flows through the old town and on to the sea. Who built the bridge over it?",
    "Bats sleep in caves during the day; at night they hunt moths, beetles and mosquitoes.",
    "Pop music is sung in Oslo, Zürich and São Paulo. Żółw śpi. Ĝi fluas. 東京の川 流れる。",
]


def bert(**options: Any) -> BertTokenizer:
    """A WordPiece tokenizer that lowers case and strips accents: [CLS] A [SEP] B [SEP]."""
    words = sorted({word for text in _TEXTS for word in re.findall(r"\w+|[^\w\s]", text.lower())})
    letters = sorted(set("".join(words)))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    vocab = {piece: n for n, piece in enumerate(dict.fromkeys([*pieces, *words[::2]]))}
    return BertTokenizer(vocab=vocab, model_max_length=512, **options)


def roberta(**options: Any) -> RobertaTokenizer:
    """A byte-level BPE tokenizer, several tokens for one rare character: <s> A </s></s> B </s>."""
    vocab, merges = _byte_pairs()
    options |= {"merges": merges}
    return RobertaTokenizer(vocab=vocab, model_max_length=512, **options)


def xlnet_like() -> PreTrainedTokenizerFast:
    """Pads on the left and ends a row with its CLS token, whose type is 2: A </s> B </s> <s>."""
    raw = _byte_level()
    raw.post_processor = processors.TemplateProcessing(
        single="$A:0 </s>:0 <s>:2",
        pair="$A:0 </s>:0 $B:1 </s>:1 <s>:2",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return fast(raw, cls_token="<s>", sep_token="</s>", padding_side="left")


def gpt_like() -> PreTrainedTokenizerFast:
    """Adds no special tokens at all."""
    return fast(_byte_level())


def reversing() -> PreTrainedTokenizerFast:
    """Puts the second text first."""
    raw = _byte_level()
    raw.post_processor = processors.TemplateProcessing(single="$A", pair="$B </s> $A", special_tokens=[("</s>", 2)])
    return fast(raw)


def repeating() -> PreTrainedTokenizerFast:
    """Puts the first text at both ends."""
    raw = _byte_level()
    raw.post_processor = processors.TemplateProcessing(
        single="$A", pair="$A </s> $B </s> $A", special_tokens=[("</s>", 2)]
    )
    return fast(raw)


def adding() -> PreTrainedTokenizerFast:
    """Adds a token in Python to what its Rust part returns."""
    return _Adding(tokenizer_object=_byte_level(), model_max_length=512)


class _Adding(PreTrainedTokenizerFast):
    def __call__(self, *texts: Any, **options: Any) -> Any:
        encoded = super().__call__(*texts, **options)
        encoded["input_ids"].append(2)
        encoded["token_type_ids"].append(0)
        return encoded


def fast(raw: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    """The raw tokenizer as one of transformers."""
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=512, model_input_names=names, **options)


def _byte_level() -> Tokenizer:
    raw = Tokenizer(models.BPE(*_byte_pairs()))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return raw


def _byte_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The bytes, and every second word of the texts put together from its left; nothing is left to chance."""
    merges: dict[tuple[str, str], None] = {}
    for text in _TEXTS:
        for word, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)[::2]:
            merges |= dict.fromkeys((word[:n], word[n]) for n in range(1, len(word)) if word.isascii() or n < 4)
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += ["".join(pair) for pair in merges]
    return {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}, list(merges)
