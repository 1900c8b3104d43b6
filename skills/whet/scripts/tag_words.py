"""Train a tagger of entities or parts of speech, and tag a file of new sentences.

Usage: tag_words.py MODEL TRAIN DEV NEW OUTPUT_DIR [--OPTION VALUE ...]

TRAIN, DEV: CoNLL, JSON lines with tokens and ner_tags, spaCy, Doccano and others (docs/tag.md); NEW: the same without
tags.
"""

import json
import sys
from pathlib import Path

from whet_json import show, whet

model, train, dev, new, output, *options = sys.argv[1:]
found = whet(
    "tag", "--model_name_or_path", model, "--train_file", train, "--validation_file", dev, "--do_train", "--do_eval",
    "--output_dir", output, *options,
)  # fmt: skip
predictions = Path(output) / "new_tags.jsonl"
whet("predict", output, "--file", new, "--output", predictions)
first = json.loads(predictions.read_text("utf-8").splitlines()[0])
scores = {name: value for name, value in found["metrics"].items()
          if name in ("eval_f1", "eval_f1_macro", "eval_precision", "eval_recall", "eval_accuracy")}  # fmt: skip
show(
    {"model": found["outputs"]["folder"], "scores": scores, "predictions": str(predictions.absolute()), "first": first}
)
