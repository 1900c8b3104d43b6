"""A worker that cuts windows as the guides' question answering script does: a function mapped over a data set.

Written from what that script is known to do: the question first, the context cut into overlapping windows, each padded
to the longest allowed, and the answer's characters looked up among the tokens, window by window, in Python.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
from protocol import Channel
from transformers import AutoTokenizer

MAX_LENGTH, STRIDE = 384, 128


def answer_tokens(offsets: list[tuple[int, int]], parts: list[int | None], begin: int, end: int) -> tuple[int, int]:
    """Return first and last token of the answer at these characters; (0, 0) where the window does not hold it."""
    first = 0
    while parts[first] != 1:
        first += 1
    last = len(parts) - 1
    while parts[last] != 1:
        last -= 1
    if offsets[first][0] > begin or offsets[last][1] < end:
        return 0, 0
    while first < len(offsets) and offsets[first][0] <= begin:
        first += 1
    while offsets[last][1] >= end:
        last -= 1
    return first - 1, last + 1


def prepare_train_features(tokenizer: Any) -> Callable[[dict[str, Any]], Any]:
    """Return the function that the guides map over the questions, a batch at a time."""

    def prepare(examples: dict[str, Any]) -> Any:
        features = tokenizer(
            [question.lstrip() for question in examples["question"]], examples["context"], truncation="only_second",
            max_length=MAX_LENGTH, stride=STRIDE, return_overflowing_tokens=True, return_offsets_mapping=True,
            padding="max_length",
        )  # fmt: skip
        question_of, all_offsets = features.pop("overflow_to_sample_mapping"), features.pop("offset_mapping")
        spans = []
        for i, offsets in enumerate(all_offsets):
            answers = examples["answers"][question_of[i]]
            if not answers["answer_start"]:
                spans.append((0, 0))
                continue
            begin = answers["answer_start"][0]
            spans.append(answer_tokens(offsets, features.sequence_ids(i), begin, begin + len(answers["text"][0])))
        features["start_positions"] = [start for start, _ in spans]
        features["end_positions"] = [end for _, end in spans]
        return features

    return prepare


def windows(path: str, tokenizer: Any, cache: Path) -> dict[str, Any]:
    """Return how long the windows of a file of questions took, and how long reading it."""
    started_s = time.perf_counter()
    questions = datasets.load_dataset("json", data_files=path, split="train", cache_dir=str(cache))
    read_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    found = questions.map(
        prepare_train_features(tokenizer), batched=True, remove_columns=questions.column_names,
        load_from_cache_file=False,
    )  # fmt: skip
    seconds = time.perf_counter() - started_s
    positions = sum(found["start_positions"])
    return {"seconds": seconds, "read_s": read_s, "n_windows": len(found), "start_sum": positions}


def main() -> None:
    """Cut the windows of each file that a command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    options, channel = parser.parse_args(), Channel()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    datasets.disable_progress_bars()
    channel.answer(tokenizer=type(tokenizer).__name__)
    while (command := channel.read())["do"] != "stop":
        cache = Path(tempfile.mkdtemp(prefix="whet-bench-"))
        try:
            channel.answer(**windows(command["file"], tokenizer, cache))
        finally:
            shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    main()
