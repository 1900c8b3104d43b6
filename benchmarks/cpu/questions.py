"""Makes many questions of XQuAD's few."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A way to repeat the questions. Every question is distinct in all of them: a number stands before it."""

    words: str
    share: float
    """Part of the wanted number of questions: what takes the peer minutes is measured on fewer."""
    counts: bool


VARIANTS = {
    "repeated": Variant("contexts as they are", 1.0, counts=True),
    "copied": Variant("each copy its contexts", 0.25, counts=False),
    "distinct": Variant("each question its context", 0.25, counts=False),
}
"""whet tokenises each distinct context once, and the guides' function once a question: so repeated contexts flatter
whet (240 of them for 88,000 questions). In `copied` every copy of the data set has contexts of its own, 4.96 questions
for each: about as in SQuAD, which has 4.6. In `distinct` no two questions share a context: the worst case."""


def rows_of(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the questions of a file in SQuAD's nested form, one row each."""
    for article in json.loads(file.read_text("utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                answers = asked["answers"]
                yield {
                    "id": asked["id"],
                    "context": paragraph["context"],
                    "question": asked["question"],
                    "answers": {
                        "text": [answer["text"] for answer in answers],
                        "answer_start": [answer["answer_start"] for answer in answers],
                    },
                }


def numbered(row: dict[str, Any], number: int, mark: str) -> dict[str, Any]:
    """Return the row as a question of its own; `mark` stands before its context."""
    starts = [start + len(mark) for start in row["answers"]["answer_start"]]
    return {
        "id": f"{row['id']}-{number}",
        "context": mark + row["context"],
        "question": f"{number}: {row['question']}",
        "answers": {"text": row["answers"]["text"], "answer_start": starts},
    }


def write_questions(data: Path, file: Path, n_questions: int, variant: str) -> dict[str, int]:
    """Write `n_questions` questions as JSON lines; return how many there are, over how many contexts."""
    rows = [row for split in ("train", "dev") for row in rows_of(data / f"{split}.json")]
    contexts = set()
    with file.open("w", encoding="utf-8") as out:
        for number in range(n_questions):
            marks = {"repeated": "", "copied": f"{number // len(rows)}. ", "distinct": f"{number}. "}
            row = numbered(rows[number % len(rows)], number // len(rows), marks[variant])
            contexts.add(row["context"])
            out.write(json.dumps(row) + "\n")
    return {"questions": n_questions, "contexts": len(contexts)}
