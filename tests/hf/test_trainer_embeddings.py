"""Embedding models of the user's own in whet.Trainer: no padding inside, and the curve of a padded run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel

import whet
from tiny import FAMILIES, FIRST_WORD, VOCABULARY, tiny_config

N_STEPS, N_ROWS = 6, 8
TOLERANCE = 1e-4
"""Relative, of a loss after some steps of Adam: sums run in another order without padding."""


def pooled(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Return an embedding of each row (B, D) of hidden states (B, T, D)."""
    if pooling == "cls":
        return states[:, 0]
    if pooling == "last":
        return states[torch.arange(len(states)), mask.sum(1) - 1]
    if pooling == "all places":  # reads padding, as if it were words
        return states.mean(1)
    return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class Embedder(nn.Module):
    """Learns that the two texts of a row belong together, among those of the batch."""

    def __init__(self, pooling: str = "mean", family: str = "bert", dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = AutoModel.from_config(tiny_config(family, dropout=dropout))
        self.project = nn.Linear(32, 16)
        self.pooling = pooling

    def embed(self, ids: Tensor) -> Tensor:
        mask = (ids > 0).long()
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return normalize(self.project(pooled(states, mask, self.pooling)))

    def forward(self, query: Tensor, document: Tensor) -> dict[str, Tensor]:
        scores = self.embed(query) @ self.embed(document).T * 10
        return {"loss": cross_entropy(scores, torch.arange(len(scores))), "scores": scores}


def rows() -> list[dict[str, list[int]]]:
    numbers = np.random.default_rng(3)
    lengths = numbers.integers(3, 30, (N_STEPS * N_ROWS, 2))
    texts = [[numbers.integers(FIRST_WORD, VOCABULARY, n).tolist() for n in pair] for pair in lengths]
    return [{"query": query, "document": document} for query, document in texts]


def collate(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    def column(name: str) -> Tensor:
        return nn.utils.rnn.pad_sequence([torch.tensor(row[name]) for row in batch], batch_first=True)

    return {"query": column("query"), "document": column("document")}


def trainer(
    folder: Path,
    model: nn.Module,
    cls: Any = whet.Trainer,
    settings: Any = whet.TrainingArguments,
    **changes: Any,
) -> Any:
    usual = {
        "use_cpu": True, "per_device_train_batch_size": N_ROWS, "learning_rate": 1e-3, "logging_steps": 1,
        "train_sampling_strategy": "sequential", "num_train_epochs": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "remove_unused_columns": False,
    }  # fmt: skip
    return cls(model, settings(str(folder), **usual | changes), data_collator=collate, train_dataset=rows())


def curve(folder: Path, model: nn.Module, **how: Any) -> list[float]:
    """Return the loss of each step."""
    running = trainer(folder, model, **how)
    running.train()
    return [entry["loss"] for entry in running.state.log_history if "loss" in entry]


def padded_curve(folder: Path, model: nn.Module) -> list[float]:
    """Return the loss of each step of transformers' own Trainer, which computes all padding."""
    return curve(folder, model, cls=transformers.Trainer, settings=transformers.TrainingArguments)


@pytest.mark.each_value
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name in ("bert", "mpnet", "modernbert", "deberta-v2")])
def test_embedder_trains_without_padding_like_a_padded_run(tmp_path: Path, family: str, pooling: str) -> None:
    padded = padded_curve(tmp_path / "padded", Embedder(pooling, family))
    model = Embedder(pooling, family)
    found = curve(tmp_path / "whet", model)
    changed = whet.changes(model)
    assert changed is not None
    assert changed.encoders == ("encoder",)
    assert len(found) == N_STEPS
    assert found[-1] != found[0]
    np.testing.assert_allclose(found, padded, rtol=TOLERANCE)


def test_loss_that_reads_padding_is_exact_if_asked(tmp_path: Path) -> None:
    padded = padded_curve(tmp_path / "padded", Embedder("all places"))
    exact = curve(tmp_path / "all", Embedder("all places"), padding_in_loss="all")
    np.testing.assert_allclose(exact, padded, rtol=TOLERANCE)


def test_what_the_user_asked_of_optimize_stays(tmp_path: Path) -> None:
    model = whet.optimize(Embedder("all places"), padding="all")
    padded = padded_curve(tmp_path / "padded", Embedder("all places"))
    np.testing.assert_allclose(curve(tmp_path / "whet", model), padded, rtol=TOLERANCE)


def test_resumed_run_has_the_same_weights(tmp_path: Path) -> None:
    model = Embedder(dropout=0.1)
    trainer(tmp_path / "one", model).train()
    trainer(tmp_path / "two", Embedder(dropout=0.1), save_strategy="steps", save_steps=3).train()
    resumed = Embedder(dropout=0.1)
    again = trainer(tmp_path / "two", resumed, save_strategy="steps", save_steps=3)
    again.train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-3"))
    for name, weight in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name


def test_decoder_inside_has_the_curve_of_a_padded_run(tmp_path: Path) -> None:
    padded = padded_curve(tmp_path / "padded", Embedder("last", "llama"))
    np.testing.assert_allclose(curve(tmp_path / "whet", Embedder("last", "llama")), padded, rtol=TOLERANCE)
    optimized = whet.optimize(Embedder("last", "llama"), padding="none")
    np.testing.assert_allclose(curve(tmp_path / "optimized", optimized), padded, rtol=TOLERANCE)
