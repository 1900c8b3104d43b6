"""Say how a run went: state, scores, what was confused, and the worst examples; works while it runs, too.

Usage: read_report.py OUTPUT_DIR [N]
"""

import csv
import json
import sys
from pathlib import Path

from whet_json import show, whet

folder, n_worst = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5
(run,) = whet("watch", folder)["runs"]
page = whet("report", folder)["outputs"]["report"]
errors, matrix = folder / "errors.jsonl", folder / "eval_confusion.csv"
worst = [json.loads(line) for line in errors.read_text("utf-8").splitlines()[:n_worst]] if errors.exists() else []
confused = []
if matrix.exists():
    with matrix.open(newline="", encoding="utf-8") as file:
        _, *labels = next(rows := csv.reader(file))
        found = [(int(n), expected, label) for expected, *row in rows for n, label in zip(row, labels, strict=True)]
    confused = sorted((one for one in found if one[0] and one[1] != one[2]), reverse=True)[:n_worst]
show({
    "status": run["status"], "step": run["step"], "of": run["of"], "left_s": run["eta_s"], "error": run["error"],
    "metrics": run["metrics"], "report": page, "worst": worst,
    "confused": [{"times": n, "expected": expected, "predicted": label} for n, expected, label in confused],
})  # fmt: skip
