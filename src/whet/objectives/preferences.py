"""Direct preference optimization: a language model learns to prefer one completion of a prompt to another.

Rafailov et al. 2023 (arXiv:2305.18290), equation 7; with label smoothing, Mitchell 2023 (cDPO). Metrics have the names
of TRL.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from whet.data.batch import Batch
from whet.errors import ConfigError
from whet.objectives import router_loss
from whet.objectives.base import IGNORED, Rows
from whet.objectives.next_tokens import PackedNextTokens, head_of, token_losses

REFERENCE = "reference"
"""The input with the log-probabilities of the reference model, (pairs, 2) float64."""
CHOSEN, REJECTED = 0, 1


@dataclass(frozen=True, kw_only=True)
class Preference:
    """How much the model shall prefer the chosen completions."""

    beta: float
    """The weight of staying near the reference model: a small one lets the model move away from it."""
    label_smoothing: float = 0.0
    """The share of pairs whose preference is assumed to be wrong."""
    reference: str | None = None
    """A checksum of the weights of the reference model, once it has computed its log-probabilities."""


class PackedPreferences(PackedNextTokens):
    """The DPO loss of pairs of completions, which run without padding.

    A row of the data set is a pair: two sequences, the chosen one first. Each is a sequence of its own in the packed
    batch. The loss is the mean over pairs; the logits of some hundred tokens exist at a time.
    """

    reads_rows_first = True
    """Whether the model as it is before the first step computes every row of every split."""

    def __init__(self, plain: PackedNextTokens, preference: Preference) -> None:
        assert plain.packed_model is not None
        super().__init__(plain.model, plain.packed_model, plain.collate, plain.columns)
        self.preference = preference

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the checkpoint."""
        how = self.preference
        facts = {"kind": "dpo", "beta": how.beta, "label_smoothing": how.label_smoothing}
        return facts | {"model_name_or_path": f"weights {how.reference}"}

    def batch(self, dataset: Any, rows: Rows, first_slot: int, padded_to: np.ndarray | None = None) -> Batch:
        batch = super().batch(dataset, rows, first_slot, padded_to)
        if batch.columns is None:
            raise _no_packing(self.model)
        reference = getattr(dataset, REFERENCE, None)
        if reference is None:
            return batch
        return replace(batch, inputs={**batch.inputs, REFERENCE: torch.from_numpy(reference[np.asarray(rows)])})

    def count(self, batch: Batch) -> int:
        """Return the number of pairs."""
        return batch.n_rows

    def n_logits(self, batch: Batch) -> int:
        """Return how many tokens the loss reads the logits of."""
        return int((batch.inputs["labels"][..., 1:] != IGNORED).sum())

    def forward(self, batch: Batch, *, seed: int, step: int) -> Any:
        """Return the summed log-probabilities of the completions, (pairs, 2) float64."""
        return {"log_probs": self.run(batch, partial(log_probs, self._packed.module, batch), seed=seed, step=step)}

    def loss_sum(self, output: Any, batch: Batch) -> Tensor:
        """Return the summed losses of the pairs, () float32."""
        return self.by_pair(output, batch)[0].sum().float()

    def by_pair(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each pair, and by how much the reward of its chosen completion is the larger, (pairs,)."""
        rewards = self._rewards(output["log_probs"], batch)
        margin, smoothing = rewards[:, CHOSEN] - rewards[:, REJECTED], self.preference.label_smoothing
        return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin), margin

    def loss_parts(self, output: Any, batch: Batch) -> dict[str, Tensor]:
        """Return TRL's metrics, each summed over the pairs."""
        found = output["log_probs"].detach()
        rewards = self._rewards(found, batch)
        chosen, rejected = rewards.unbind(1)
        parts = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "rewards/margins": chosen - rejected,
            "logps/chosen": found[:, CHOSEN],
            "logps/rejected": found[:, REJECTED],
        }
        return {name: part.sum().float() for name, part in parts.items()}

    def logits(self, output: Any, batch: Batch) -> tuple[np.ndarray, ...]:
        """Return the log-probabilities: a pair has no other prediction."""
        return (output["log_probs"].detach().float().cpu().numpy(),)

    def _rewards(self, found: Tensor, batch: Batch) -> Tensor:
        """Return beta times the log-ratio of the model to the reference, (pairs, 2).

        Passes that are timed before the training begins have no reference yet: there, the model is its own.
        """
        is_known = self.preference.reference is not None
        return self.preference.beta * (found - (batch.inputs[REFERENCE].to(found) if is_known else found.detach()))


def log_probs(model: Any, batch: Batch, states: Tensor, places: Tensor, targets: Tensor) -> Tensor:
    """Return the summed log-probability of the targets of each sequence, (pairs, 2) float64.

    `places` (M,) are the packed tokens that the states (M, D) belong to.
    """
    assert batch.cu_seqlens is not None
    losses = token_losses(states, targets, *head_of(model))
    ends = batch.cu_seqlens[1:].to(places)
    sums = losses.new_zeros(len(ends), dtype=torch.float64)
    sums = sums.index_add(0, torch.bucketize(places, ends, right=True), -losses.double())
    return sums.view(batch.n_rows, 2)


def _no_packing(model: nn.Module) -> ConfigError:
    return ConfigError(
        what="the DPO loss needs a model that runs without padding",
        got=type(model).__name__,
        why="the two completions of a pair lie end to end, and each keeps to itself",
        fix="leave --attn_implementation out, and use a model of a family that whet packs (docs/families.md); or use "
        "TRL's DPOTrainer",
    )


def preferences(objective: Any, preference: Preference) -> PackedPreferences:
    """Return the objective with the DPO loss in place of that of the next tokens; ConfigError if it runs padded."""
    if type(objective) is not PackedNextTokens:
        raise _no_packing(objective.model)
    router_loss.require_none(objective.model, "the DPO loss")
    return PackedPreferences(objective, preference)
