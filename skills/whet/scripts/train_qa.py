"""Train a model that answers questions about a text, from SQuAD's JSON or from CSV: question, context, answer.

Usage: train_qa.py MODEL DATA OUTPUT_DIR [--OPTION VALUE ...]

CSV needs no positions: an answer is looked up in its context, and an empty one means that the context has none. A fifth
of the contexts is set aside for the evaluation, so that no question about a context that was learnt is judged.
"""

import csv
import json
import sys
from pathlib import Path
from typing import Any

from whet_json import show, whet

model, data, output, *options = sys.argv[1:]


def paragraphs_of_csv(path: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the questions by context in SQuAD's form, and the rows whose answer is not in its context."""
    by_context: dict[str, list[dict[str, Any]]] = {}
    missing = []
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        for number, row in enumerate(csv.DictReader(file), start=1):
            answer, start = row["answer"], row["context"].find(row["answer"])
            if start < 0:
                missing.append(number)
                continue
            answers = [{"text": answer, "answer_start": start}] if answer else []
            question = {"id": str(number), "question": row["question"], "answers": answers, "is_impossible": not answer}
            by_context.setdefault(row["context"], []).append(question)
    return [{"context": context, "qas": questions} for context, questions in by_context.items()], missing


if data.endswith(".csv"):
    paragraphs, not_found = paragraphs_of_csv(data)
else:
    document = json.loads(Path(data).read_text("utf-8"))
    paragraphs = [paragraph for article in document["data"] for paragraph in article["paragraphs"]]
    not_found = []
if len(paragraphs) < 2:
    sys.exit(f"{data}: questions about two contexts or more are needed, one of them for the evaluation")
has_none = any(not one["answers"] for paragraph in paragraphs for one in paragraph["qas"])
work = Path(f"{output}-data")
work.mkdir(parents=True, exist_ok=True)
for name, part in {"dev": paragraphs[::5], "train": [one for n, one in enumerate(paragraphs) if n % 5]}.items():
    (work / f"{name}.json").write_text(json.dumps({"data": [{"title": name, "paragraphs": part}]}), "utf-8")

found = whet(
    "qa", "--model_name_or_path", model, "--train_file", work / "train.json", "--validation_file", work / "dev.json",
    "--do_train", "--do_eval", "--output_dir", output, *(["--version_2_with_negative"] if has_none else []), *options,
)  # fmt: skip
scores = {name: found["metrics"][f"eval_{name}"] for name in ("exact_match", "exact", "f1")
          if f"eval_{name}" in found["metrics"]}  # fmt: skip
show({"model": found["outputs"]["folder"], "scores": scores, "rows_without_their_answer": not_found,
      "report": found["outputs"].get("report"), "seconds": found["seconds"]})  # fmt: skip
