"""Train a classifier on CSV with the columns text and label, of which some labels are rare.

Usage: classify_imbalanced.py MODEL DATA.csv OUTPUT_DIR [--OPTION VALUE ...]

A fifth of each label is set aside, unchanged. In the rest, rows of rare labels are repeated until each label has half
as many rows as the most frequent one. The epoch with the best macro F1 is kept: accuracy hides rare labels.
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

from whet_json import show, whet

model, data, output, *options = sys.argv[1:]
by_label: dict[str, list[dict[str, str]]] = defaultdict(list)
with Path(data).open(newline="", encoding="utf-8-sig") as file:
    for row in csv.DictReader(file):
        by_label[row["label"]].append({"text": row["text"], "label": row["label"]})
if few := sorted(label for label, rows in by_label.items() if len(rows) < 2):
    sys.exit(f"{data}: labels with a single row cannot be learnt and judged: {', '.join(few)}")

kept = {label: rows[::5] for label, rows in by_label.items()}
learnt = {label: [row for n, row in enumerate(rows) if n % 5] for label, rows in by_label.items()}
wanted = max(map(len, learnt.values())) // 2
repeated = {label: rows * max(1, round(wanted / len(rows))) for label, rows in learnt.items()}
work = Path(f"{output}-data")
work.mkdir(parents=True, exist_ok=True)
for name, groups in {"train": repeated, "dev": kept}.items():
    with (work / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(row for rows in groups.values() for row in rows)

found = whet(
    "classify", "--model_name_or_path", model, "--train_file", work / "train.csv", "--validation_file",
    work / "dev.csv", "--do_train", "--do_eval", "--output_dir", output, "--eval_strategy", "epoch",
    "--save_strategy", "epoch", "--save_total_limit", 1, "--load_best_model_at_end", "--metric_for_best_model",
    "f1_macro", *options,
)  # fmt: skip
metrics = found["metrics"]
show({
    "model": found["outputs"]["folder"], "accuracy": metrics["eval_accuracy"], "f1_macro": metrics["eval_f1_macro"],
    "rows": {label: {"given": len(rows), "trained": len(repeated[label])} for label, rows in by_label.items()},
    "confusion": str(Path(output).absolute() / "eval_confusion.csv"),
})  # fmt: skip
