"""The splits of the data that a run reads: their questions and windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whet.console import columns_line, plural
from whet.data.store import RowStore
from whet.jobs.fields import file_of, limit_of
from whet.log import logger
from whet.tasks.qa.arguments import QaArguments
from whet.tasks.qa.read import READ, read_questions
from whet.tasks.qa.types import Questions, Windows
from whet.watch import printing


@dataclass(frozen=True)
class Split:
    """Questions and the rows that a model reads to answer them."""

    questions: Questions
    windows: Windows

    @property
    def rows(self) -> RowStore:
        """The data set of windows."""
        return self.windows.rows


def read_split(qa: QaArguments, name: str) -> Questions:
    """Return the questions of the split `train`, `validation` or `test`, from its file or from the data set."""
    limit, need = limit_of(qa, name), name != "test"
    if (file := file_of(qa, name)) is not None:
        return _logged(name, read_questions(file, limit=limit, require_answers=need, skip_bad=qa.skip_bad))
    from whet.jobs.hub_data import HubSource
    from whet.tasks.qa.read import read_hub

    return _logged(name, read_hub(HubSource.of(qa, name), limit, require_answers=need, skip_bad=qa.skip_bad))


def _logged(name: str, questions: Questions) -> Questions:
    questions.left_out.log(name, "question")
    read = ", ".join(one for one in READ if one in questions.fields)
    not_read = [one for one in questions.fields if one not in READ]
    n_without = sum(not answers.texts for answers in questions.answers)
    without = f", {n_without:,} of them without an answer" if n_without and name != "test" else ""
    size = f"{plural(len(questions), 'question')}{without}"
    printing.show_wrapped(f"{name}: {size}; {columns_line({'read': read}, not_read)}")
    return questions


def cut(questions: Questions, tokenizer: Any, qa: QaArguments, *, with_labels: bool) -> Split:
    """Return the questions with their windows, from the cache if they are in it."""
    from whet.tasks.qa.windows import WindowOptions, cached_windows  # imports torch: bad data is refused before that

    options = WindowOptions(max_seq_length=qa.max_seq_length, doc_stride=qa.doc_stride, with_labels=with_labels)
    windows = cached_windows(
        questions,
        tokenizer,
        options,
        overwrite_cache=qa.overwrite_cache,
        n_threads=qa.preprocessing_num_workers,
    )
    return Split(questions, windows)


def describe(name: str, split: Split, max_seq_length: int) -> None:
    """Log the size of the split, and the cost of padding."""
    n_rows, n_tokens = len(split.rows), int(split.rows.cu_seqlens[-1])
    logger.info(
        "%s: %d questions, %d windows; %.0f of %d tokens real: packing computes %.0f %% of what padding would",
        name,
        len(split.questions),
        n_rows,
        n_tokens / n_rows,
        max_seq_length,
        100 * n_tokens / (n_rows * max_seq_length),
    )
