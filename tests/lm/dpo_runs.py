"""Preferences for a tiny decoder, and DPO by its formula: a plain loop with padded rows and a copy of the model."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from text_tasks import BAKING, GARDEN, SAILING

PAIRS = [
    {"prompt": f"{ask.split()[1]}?", "chosen": f" {good}", "rejected": f" {bad}" + " again" * (n % 3)}
    for n, (ask, good, bad) in enumerate(zip(SAILING * 2, BAKING + SAILING, GARDEN + BAKING, strict=True))
]
"""Eight pairs of different lengths."""
MARGIN, CHOSEN = "rewards/margins", "rewards/chosen"


def without_dropout(decoder: Path, folder: Path) -> Path:
    """Return a copy of the decoder without dropout."""
    shutil.copytree(decoder, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.0}), "utf-8")
    return folder


def by_formula(
    folder: Path, n_steps: int, rate: float, epsilon: float, *, beta: float = 0.1, smoothing: float = 0.0
) -> Any:
    """Return loss, margin and chosen reward of each step over all pairs at once: Rafailov et al., equation 7.

    The reference is in float64, the model in float32.
    """
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    rows = [_row(tokenizer, pair["prompt"], pair[name]) for pair in PAIRS for name in ("chosen", "rejected")]
    with torch.no_grad():
        reference = _log_probs(copy.deepcopy(model).double(), rows)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=rate, eps=epsilon, weight_decay=0.0), []
    for _ in range(n_steps):
        rewards = beta * (_log_probs(model, rows).double() - reference)
        margin = rewards[:, 0] - rewards[:, 1]
        loss = (-(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)).mean()
        found.append({"loss": loss.item(), MARGIN: margin.mean().item(), CHOSEN: rewards[:, 0].mean().item()})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return found


def _row(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], int]:
    """Return the tokens, and how many of them belong to the prompt."""
    ids = tokenizer(prompt + completion)["input_ids"]
    return [*ids, tokenizer.eos_token_id], len(tokenizer(prompt)["input_ids"])


def _log_probs(model: Any, rows: list[tuple[list[int], int]]) -> Tensor:
    """Return the summed log-probability of each completion, (pairs, 2), from a padded batch."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one, _ in rows], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(one)).long() for one, _ in rows], batch_first=True)
    logits = model(input_ids=ids, attention_mask=mask).logits
    sums = [
        -cross_entropy(logits[n, n_prompt - 1 : len(one) - 1], ids[n, n_prompt : len(one)], reduction="sum")
        for n, (one, n_prompt) in enumerate(rows)
    ]
    return torch.stack(sums).view(-1, 2)
