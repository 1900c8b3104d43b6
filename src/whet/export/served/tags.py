"""Tags words: echo '{"tokens": ["...", "..."]}' | python serve.py. Needs onnxruntime and tokenizers alone."""
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


def answer(tokens: list[str]) -> dict:
    """Return the tag of each word, by its first piece; None for a word that is cut off or has no piece."""
    first = TOKENS.encode(tokens, is_pretokenized=True)
    windows = [first, *first.overflowing] if HOW["windows"] else [first]
    columns = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    feed = {name: np.array([getattr(one, columns[name]) for one in windows], np.int64) for name in NAMES}
    found = {}
    for window, logits in zip(windows, GRAPH.run(None, feed)[0], strict=True):
        seen = {}
        for place, word in enumerate(window.word_ids):
            if word is not None and window.offsets[place][0] == 0:
                seen.setdefault(word, logits[place].astype(float))
        for word, values in seen.items():
            found.setdefault(word, []).append(values)
    pooled = {word: getattr(np, HOW["pooling"])(values, axis=0) for word, values in found.items()}
    return {"tags": [HOW["labels"][pooled[n].argmax()] if n in pooled else None for n in range(len(tokens))]}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line)), ensure_ascii=False), flush=True)
