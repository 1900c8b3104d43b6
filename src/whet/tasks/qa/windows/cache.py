"""Windows stored on disk under a hash of everything they depend on."""

from __future__ import annotations

from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whet.data.store import RowStore
from whet.jobs.tokenising.cache import Cache, Key
from whet.tasks.qa.types import Questions, Windows
from whet.tasks.qa.windows.cut import WindowOptions, make_windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LAYOUT = 1
"""Increase this when the same input gives other windows, or the file has another form."""
_PER_ROW = [field.name for field in fields(Windows) if field.name != "rows"]


def cached_windows(
    questions: Questions,
    tokenizer: PreTrainedTokenizerBase,
    options: WindowOptions,
    *,
    cache_dir: Path | None = None,
    overwrite_cache: bool = False,
    n_threads: int | None = None,
) -> Windows:
    """Return the windows of all questions: from the cache (`Cache`) if it has them, else from `make_windows`.

    The number of threads changes neither the windows nor their name.
    """

    def made() -> dict[str, np.ndarray]:
        windows = make_windows(questions, tokenizer, options, n_threads=n_threads)
        return windows.rows.arrays() | {name: getattr(windows, name) for name in _PER_ROW}

    cache = Cache(rows="windows", folder=cache_dir, overwrite=overwrite_cache)
    arrays = cache.take(windows_key(questions, tokenizer, options), made)
    return Windows(rows=RowStore.from_arrays(arrays), **{name: arrays[name] for name in _PER_ROW})


def windows_key(questions: Questions, tokenizer: PreTrainedTokenizerBase, options: WindowOptions) -> str:
    """Return 32 hex digits a hash of everything that windows depend on: texts, answers, tokenizer, options, code."""
    key = Key(_LAYOUT, tokenizer, asdict(options))
    key.add_texts(questions.questions)
    key.add_texts(questions.contexts)
    key.add_numbers(questions.context_of)
    key.add_texts(list(chain.from_iterable(answers.texts for answers in questions.answers)))
    key.add_numbers([len(answers.texts) for answers in questions.answers])
    key.add_numbers(list(chain.from_iterable(answers.starts for answers in questions.answers)))
    return key.hex()
