"""Answers: echo '{"question": "...", "context": "..."}' | python serve.py. Needs onnxruntime and tokenizers alone."""
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
LONGEST_ANSWER_TOKENS = 30


def answer(question: str, context: str) -> dict:
    """Return the likeliest stretch of the context, its characters, and its score; an empty text if there is none."""
    pair = (context, question.lstrip()) if HOW["context_first"] else (question.lstrip(), context)
    first, which = TOKENS.encode(*pair), 0 if HOW["context_first"] else 1
    windows = [first, *first.overflowing]
    columns = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    feed = {name: np.array([getattr(one, columns[name]) for one in windows], np.int64) for name in NAMES}
    best, nothing = (-np.inf, 0, 0), np.inf
    for window, start, end in zip(windows, *GRAPH.run(None, feed)[:2], strict=True):
        inside = np.array([text == which for text in window.sequence_ids])
        spans = np.triu(np.outer(inside, inside)) & ~np.triu(np.ones((len(inside),) * 2, bool), LONGEST_ANSWER_TOKENS)
        scores = np.where(spans, start[:, None] + end, -np.inf)
        begin, last = np.unravel_index(scores.argmax(), scores.shape)
        best = max(best, (float(scores[begin, last]), window.offsets[begin][0], window.offsets[last][1]))
        nothing = min(nothing, float(start[0] + end[0]))
    score, begin, last = best
    if score == -np.inf or (HOW["no_answer"] and nothing > score):
        return {"answer": "", "score": nothing}
    return {"answer": context[begin:last], "span": [begin, last], "score": score}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line)), ensure_ascii=False), flush=True)
