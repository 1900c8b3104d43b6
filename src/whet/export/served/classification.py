"""Labels texts: echo '{"text": "..."}' | python serve.py. Needs onnxruntime and tokenizers alone."""
# pyright: reportMissingImports=false

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

FOLDER = Path(__file__).resolve().parent
HOW = json.loads((FOLDER / "export.json").read_text("utf-8"))["whet"]["serve"]
GRAPH = onnxruntime.InferenceSession(FOLDER / "model.onnx")
NAMES = [one.name for one in GRAPH.get_inputs()]
TOKENS = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
TOKENS.enable_padding(**HOW["padding"])
TOKENS.enable_truncation(**HOW["truncation"])


def answer(text: str, text_pair: str | None = None) -> dict:
    """Return the label of a text, or its labels, or its value, and the score of each label."""
    first = TOKENS.encode(text, text_pair)
    windows = [first, *first.overflowing] if HOW["windows"] else [first]
    columns = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    feed = {name: np.array([getattr(one, columns[name]) for one in windows], np.int64) for name in NAMES}
    logits = getattr(np, HOW["pooling"])(GRAPH.run(None, feed)[0].astype(float), axis=0)
    if HOW["kind"] == "regression":
        return {"value": float(logits[0])}
    if HOW["kind"] == "multi_label_classification":
        scores = dict(zip(HOW["labels"], (1 / (1 + np.exp(-logits))).tolist(), strict=True))
        return {"labels": [name for name, score in scores.items() if score >= HOW["threshold"]], "scores": scores}
    powers = np.exp(logits - logits.max())
    scores = dict(zip(HOW["labels"], (powers / powers.sum()).tolist(), strict=True))
    return {"label": HOW["labels"][logits.argmax()], "scores": scores}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line)), ensure_ascii=False), flush=True)
