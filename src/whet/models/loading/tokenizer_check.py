"""A tokenizer.json is hostile until it is checked: what multiplies text, and ids without an embedding in the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whet.errors import ConfigError
from whet.hardware import memory
from whet.models.loading.folder_check import TOKENIZER, bad_model

_MOST_GROWTH = 64
"""Characters that a tokenizer may make of one; those of published models make 3 at most."""
_MOST_WORD_CHARS = 10_000
"""Characters of a word that WordPiece may look at, which takes their square in time; BERT's looks at 100."""
_OTHER = "use the model's own tokenizer, copied again from where it comes, or another model"


def check_tokenizer_file(folder: Path) -> None:
    """Refuse a tokenizer.json that would take far more memory or time than its texts."""
    path = folder / TOKENIZER
    if not path.exists():
        return
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise bad_model(f"{path}: cannot be read", got=str(error), why="it has to be JSON", fix=_OTHER) from None
    if not isinstance(values, dict):
        raise bad_model(f"{path}: holds no object", got=type(values).__name__, why="settings have names", fix=_OTHER)
    factor = 1.0
    for part in _parts(values.get("normalizer")):
        factor = min(factor * _growth(part), 1e30)
    if factor > _MOST_GROWTH:
        raise bad_model(
            f"{path}: the normalizer multiplies text",
            got=f"up to {factor:,.0f} characters for one",
            why="a small file of questions would fill the memory",
            fix=_OTHER,
        )
    _check_words(path, values.get("model"))


def check_special_ids(tokenizer: Any, config: Any, name: str, *, grows: bool = False) -> None:
    """Refuse ids and token types that the tokenizer adds to a row and the model has no embedding for.

    `grows`: the model gets embeddings for all ids.
    """
    with rust_errors(name):
        row = tokenizer("a", "a", return_token_type_ids=True, verbose=False)
    with_types = "token_type_ids" in tokenizer.model_input_names
    settings = {"input_ids": "vocab_size", "token_type_ids": "type_vocab_size"}
    for column, setting in [*settings.items()][grows:]:
        known = getattr(config, setting, None) or None  # 0 is how DeBERTa says that it reads no types
        largest = max(row[column], default=0)
        if known is not None and largest >= known and (with_types or column == "input_ids"):
            raise ConfigError(
                what=f"the tokenizer gives {column} that the model does not know",
                got=f"{name}: {largest:,} in a row of two texts",
                why=f"the model has embeddings for {known:,} ({setting}), counted from 0",
                fix="name a model and a tokenizer that were trained together",
            )


@contextmanager
def rust_errors(name: str) -> Iterator[None]:
    """Raise ConfigError instead of what the tokenizers library raises when its Rust code cannot continue."""
    try:
        yield
    except BaseException as error:
        if not (is_panic(error) or type(error) is Exception):
            raise
        raise memory.lack(error) or ConfigError(
            what="the tokenizer cannot tokenise this text",
            got=name,
            why=" ".join(str(error).split())[:300],
            fix=_OTHER,
        ) from error


def is_panic(error: BaseException) -> bool:
    """Return whether Rust code of the tokenizers library gave up."""
    return type(error).__name__ == memory.PANIC


def _parts(normalizer: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer, sequences in sequences included."""
    left = [normalizer]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            inner = one.get("normalizers")
            left += inner if isinstance(inner, list) else []
            yield one


def _growth(part: Mapping[str, Any]) -> float:
    """Return how many characters this step makes of one at most."""
    added = part.get("content", part.get("prepend", ""))
    n_added = len(added) if isinstance(added, str) else 0
    if part.get("type") == "Prepend":
        return 1 + n_added
    pattern = part.get("pattern")
    kind, text = next(iter(pattern.items()), ("", "")) if isinstance(pattern, Mapping) else ("", "")
    if kind == "String" and isinstance(text, str) and text:
        return max(1.0, n_added / len(text))
    return max(1, n_added + _matches_nothing(text)) if part.get("type") == "Replace" else 1


def _matches_nothing(pattern: Any) -> bool:
    """Return whether the pattern matches between two characters, which adds text without taking any away."""
    try:
        return re.search(pattern, "") is not None
    except (re.error, TypeError, RecursionError, OverflowError):
        return True


def _check_words(path: Path, model: Any) -> None:
    most = model.get("max_input_chars_per_word") if isinstance(model, Mapping) else None
    if isinstance(most, int) and most > _MOST_WORD_CHARS:
        raise bad_model(
            f"{path}: max_input_chars_per_word is too large",
            got=most,
            why=f"a long word takes its square in time; at most {_MOST_WORD_CHARS:,} are read",
            fix=_OTHER,
        )
