"""Train a search on CSV of texts that belong together (question, answer), and search the second column.

Usage: embed_and_search.py MODEL PAIRS.csv OUTPUT_DIR QUERY [--OPTION VALUE ...]

Needs: pip install 'whet-train[embed]'
"""

import csv
import sys
from pathlib import Path

from whet_json import show, whet

model, pairs, output, query, *options = sys.argv[1:]
found = whet(
    "embed", "--model_name_or_path", model, "--train_file", pairs, "--validation_split_percentage", 20, "--do_train",
    "--do_eval", "--output_dir", output, *options,
)  # fmt: skip
with Path(pairs).open(newline="", encoding="utf-8-sig") as file:
    second = next(csv.reader(file))[1]
searched = whet("search", output, "--corpus", pairs, "--text_column_names", second, "--query", query, "--top_k", 3)
metrics = found["metrics"]
gained = {
    name.removeprefix("eval_"): {"before": metrics.get(name.replace("eval_", "start_", 1)), "after": value}
    for name, value in metrics.items()
    if name.startswith("eval_") and name.endswith(("ndcg@10", "mrr@10"))
}
show({"model": found["outputs"]["folder"], "scores": gained, "hits": searched["results"][0]["hits"]})
