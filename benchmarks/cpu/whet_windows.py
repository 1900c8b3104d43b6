"""A worker that cuts windows as whet does."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from protocol import Channel

from whet.models.loading.load import ModelSource, load_tokenizer
from whet.tasks.qa.read import read_questions
from whet.tasks.qa.windows import WindowOptions, make_windows


def windows(path: Path, tokenizer: Any) -> dict[str, Any]:
    """Return how long the windows of a file of questions took, and how long reading it."""
    started_s = time.perf_counter()
    questions = read_questions(path)
    read_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    found = make_windows(questions, tokenizer, WindowOptions())
    seconds = time.perf_counter() - started_s
    start_sum = int(found.rows.labels["start_positions"].sum())
    return {"seconds": seconds, "read_s": read_s, "n_windows": len(found), "start_sum": start_sum}


def main() -> None:
    """Cut the windows of each file that a command names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    options, channel = parser.parse_args(), Channel()
    tokenizer = load_tokenizer(ModelSource(model=options.model))
    channel.answer(tokenizer=type(tokenizer).__name__)
    while (command := channel.read())["do"] != "stop":
        channel.answer(**windows(Path(command["file"]), tokenizer))


if __name__ == "__main__":
    main()
