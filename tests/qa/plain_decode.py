"""Answers from a saved model by transformers alone, padded, window by window: what whet's answers are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_qa import DOC_STRIDE, MAX_SEQ_LENGTH
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

_N_BEST = 20
_LONGEST = 30


@dataclass(frozen=True)
class Found:
    """The best answer to a question."""

    text: str
    score: float
    ahead: float
    """How far its score is above that of the best answer with another text."""
    null_odds: float
    """The score of the window where "no answer" scores lowest, minus the best answer's."""


def answers(folder: Path, asked: list[dict[str, Any]]) -> dict[str, Found]:
    """Return the best answer to each question, as the guides' script chooses it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    return {question["id"]: _answer(model, tokenizer, question) for question in asked}


def n_windows(folder: Path, asked: list[dict[str, Any]]) -> int:
    """Return how many rows the questions take."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return sum(len(_rows(tokenizer, question)["input_ids"]) for question in asked)


def _rows(tokenizer: Any, question: Mapping[str, Any]) -> Any:
    return tokenizer(
        question["question"], question["context"], truncation="only_second", max_length=MAX_SEQ_LENGTH,
        stride=DOC_STRIDE, return_overflowing_tokens=True, return_offsets_mapping=True, padding="max_length",
        return_tensors="pt",
    )  # fmt: skip


def _answer(model: Any, tokenizer: Any, question: Mapping[str, Any]) -> Found:
    rows = _rows(tokenizer, question)
    with torch.no_grad():
        output = model(**{name: rows[name] for name in ("input_ids", "token_type_ids", "attention_mask")})
    hidden = rows["attention_mask"] == 0
    starts, ends = (side.masked_fill(hidden, -torch.inf) for side in (output.start_logits, output.end_logits))
    found = sorted(
        (
            (score, question["context"][first:last])
            for row in range(len(starts))
            for score, first, last in _spans(
                starts[row], ends[row], rows["offset_mapping"][row], rows.sequence_ids(row)
            )
        ),
        reverse=True,
    )
    (score, text), *others = found
    other = max((score for score, told in others if told != text), default=-torch.inf)
    null = float((starts[:, 0] + ends[:, 0]).min())
    return Found(text, score, score - other, null - score)


def _spans(
    starts: torch.Tensor, ends: torch.Tensor, offsets: torch.Tensor, sides: list[int | None]
) -> Iterator[tuple[float, int, int]]:
    """Yield (score, first character, one past the last) of the likeliest starts and ends that fit together."""
    for start in starts.topk(_N_BEST).indices.tolist():
        for end in ends.topk(_N_BEST).indices.tolist():
            if sides[start] == sides[end] == 1 and start <= end < start + _LONGEST:
                yield float(starts[start] + ends[end]), int(offsets[start][0]), int(offsets[end][1])
