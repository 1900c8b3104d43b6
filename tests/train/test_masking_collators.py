"""Collators that mask tokens: those drawn at random are the same after a resume, and a masked place keeps its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from override_runs import losses, ours, theirs
from tiny_runs import arguments, assert_same_weights, tiny_bert
from transformers import BertForMaskedLM, BertTokenizer, DataCollatorForLanguageModeling

import engine
from tiny import tiny_config
from whet.errors import ConfigError

N_STEPS, STOP = 6, 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("words") / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(45))]), "utf-8")
    return BertTokenizer(str(path))


def rows(n: int = 24) -> list[dict[str, Any]]:
    numbers = np.random.default_rng(3)
    ids = [[2, *numbers.integers(5, 50, 6 + i % 7).tolist(), 3] for i in range(n)]
    return [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids]


class ByNumpy:
    """A collator of one's own that draws from numpy's global generator."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        batch = self.tokenizer.pad([dict(row) for row in rows], return_tensors="pt")
        chosen = torch.from_numpy(np.random.random(batch["input_ids"].shape) < 0.3) & batch["attention_mask"].bool()
        labels = batch["input_ids"].where(chosen, -100)
        return {**batch, "input_ids": batch["input_ids"].masked_fill(chosen, 4), "labels": labels}


COLLATORS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda tokenizer: DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3),
    "a seed of its own": lambda tokenizer: DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=7),
    "numpy": ByNumpy,
}
PADDED = {"attn_implementation": "eager"}


class Seen:
    """Keeps what a collator made."""

    def __init__(self, collate: Any) -> None:
        self.collate, self.labels = collate, []

    def __call__(self, rows: list[Any]) -> Any:
        batch = self.collate(rows)
        self.labels.append(batch["labels"].tolist())
        return batch


def trained(folder: Path, collate: Any, resume: Any = None, **changes: Any) -> tuple[Any, list[Any]]:
    seen = Seen(collate)
    args = arguments(
        folder, max_steps=changes.pop("max_steps", N_STEPS), save_strategy="steps", save_steps=STOP,
        lr_scheduler_type="constant", train_sampling_strategy="random", **changes,
    )  # fmt: skip
    model = tiny_bert(BertForMaskedLM, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    trainer = engine.Trainer(model, args, train_dataset=rows(), data_collator=seen)
    trainer.train(resume)
    return trainer.model, seen.labels


@pytest.mark.each_value
@pytest.mark.parametrize("name", COLLATORS)
@pytest.mark.parametrize("how", [{}, PADDED], ids=["packed", "padded"])
def test_a_resumed_run_draws_the_same_masks(name: str, how: dict[str, Any], tmp_path: Path, tokenizer: Any) -> None:
    through, masks = trained(tmp_path / "through", COLLATORS[name](tokenizer), **how)
    torch.manual_seed(99)
    np.random.seed(99)
    trained(tmp_path / "out", COLLATORS[name](tokenizer), max_steps=STOP, **how)
    torch.manual_seed(5)
    np.random.seed(5)
    resumed, again = trained(tmp_path / "out", COLLATORS[name](tokenizer), "auto", **how)
    assert again[-(N_STEPS - STOP) :] == masks[-(N_STEPS - STOP) :]
    assert masks[-1] != masks[-2]
    assert_same_weights(resumed, through)


@pytest.mark.parametrize("name", COLLATORS)
def test_masks_are_not_drawn_by_threads(name: str, tmp_path: Path, tokenizer: Any) -> None:
    """Their order would be that of the threads."""
    with pytest.raises(ConfigError, match="dataloader_num_workers"):
        trained(tmp_path, COLLATORS[name](tokenizer), dataloader_num_workers=2)


@pytest.mark.parametrize("family", ["bert", "modernbert", "mpnet", "deberta-v2"])
def test_padding_between_tokens_trains_as_in_transformers(family: str, tmp_path: Path) -> None:
    """A collator may mask places inside of a row: relative positions and local windows then count these places."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        found = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
        found["attention_mask"][:, 4:9] = 0
        return found

    given: Any = [
        {"input_ids": [5 + (7 * i + k) % 40 for k in range(20)], "attention_mask": [1] * 20, "labels": i % 2}
        for i in range(8)
    ]
    found = []
    sides: Any = ((engine.Trainer, ours(tmp_path / "a")), (transformers.Trainer, theirs(tmp_path / "b")))
    for base, args in sides:
        torch.manual_seed(0)
        model = transformers.AutoModelForSequenceClassification.from_config(tiny_config(family))
        trainer = base(model, args, train_dataset=given, data_collator=collate)
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
