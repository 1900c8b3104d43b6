"""Pairs of completions as rows of a training set, with the log-probabilities of the reference model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from whet.data.store import RowStore
from whet.log import logger
from whet.models import adapters
from whet.objectives.base import IGNORED
from whet.store import compare
from whet.tasks.lm.examples import Examples
from whet.tasks.lm.rows import RowMaker
from whet.train.trainer import Trainer

LENGTH = "length"


class PairRows:
    """A data set of pairs: two rows of tokens each, the chosen completion first."""

    column_names = (LENGTH,)

    def __init__(self, rows: RowStore) -> None:
        self.rows = rows
        self.reference: np.ndarray | None = None
        """Log-probabilities of the completions by the reference model, (pairs, 2) float64."""

    def __len__(self) -> int:
        return len(self.rows) // 2

    def __getitem__(self, pair: int | str) -> Any:
        """Return the two rows of a pair; by the name of the column, how many tokens each pair has."""
        if isinstance(pair, str):
            return self.rows.lengths.reshape(-1, 2).sum(1)
        if not 0 <= pair < len(self):
            raise IndexError(pair)
        both = [self.rows[2 * pair], self.rows[2 * pair + 1]]
        return {name: [row[name] for row in both] for name in both[0]}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the tokens as named arrays; the reference follows from them."""
        return self.rows.arrays()


def pair_rows(maker: RowMaker, name: str, found: Examples) -> PairRows:
    """Return the pairs of a split as rows of tokens; a prompt stands in both rows of its pair."""
    values = [(prompt, one) for prompt, chosen, rejected in found.values for one in (chosen, rejected)]
    places = [place for place in found.places for _ in range(2)]
    inputs = [one for one in found.inputs for _ in range(2)]
    return PairRows(maker.rows(name, Examples(found.source, "completion", values, places, found.left_out, inputs)))


def collate(pairs: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Return pairs as tables (pairs, 2, places), padded on the right; padding is masked and has no label."""

    def table(name: str, fill: int) -> Tensor:
        rows = [torch.as_tensor(row) for pair in pairs for row in pair[name]]
        return pad_sequence(rows, batch_first=True, padding_value=fill).long().unflatten(0, (len(pairs), 2))

    ids = table("input_ids", 0)
    lengths = torch.tensor([[len(row) for row in pair["input_ids"]] for pair in pairs])
    mask = torch.arange(ids.shape[-1]) < lengths[..., None]
    return {"input_ids": ids, "labels": table("labels", IGNORED), "attention_mask": mask.long()}


def add_reference(trainer: Trainer, pairs: PairRows) -> None:
    """Compute the log-probabilities by the model as it is before training, without its new adapter.

    One pass over the pairs replaces a reference model in every step; ranks share it. It computes in the precision of
    the training, so that the rewards of the first step are 0.
    """
    started_s = time.perf_counter()
    wrapped = adapters.names_of(trainer.model) and hasattr(trainer.model, "disable_adapter")
    model: Any = trainer.model
    with model.disable_adapter() if wrapped else nullcontext():
        found = [output["log_probs"].cpu().numpy() for _, output in trainer.forward_batches(pairs)]
    pairs.reference = np.concatenate(trainer.sync.in_order(found, lambda one: isinstance(one, np.ndarray)))
    seconds = time.perf_counter() - started_s
    logger.info("reference log-probabilities of %d pairs: %.1f s", len(pairs), seconds)


def weights_of_reference(model: nn.Module) -> str:
    """Return a checksum of the weights that the reference computes with: all of them, or those under an adapter."""
    return compare.frozen_under_adapters(model) or compare.digest_of_weights(model.named_parameters())
