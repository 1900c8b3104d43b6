"""Models that compute their own loss, on batches that a collator pads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from whet.data.batch import Batch
from whet.data.padding import NO_PADDING
from whet.errors import ConfigError, DataError, WhetError
from whet.models import bad_batch
from whet.models.adapters import unwrapped
from whet.models.packed import PackedModel
from whet.objectives.base import IGNORED, Collate, Rows
from whet.objectives.collated import collated, run_seeded

ACCURACY = "mean_token_accuracy"
"""TRL's name for the share of a language model's targets that it finds most likely."""
NEXT_WORD_HEADS = ("ForCausalLM", "LMHeadModel")


class OwnLoss:
    """Any module that returns its own mean loss, on batches that a collator pads."""

    packed = False
    is_own_loss = True
    packed_model: PackedModel | None = None
    padding = NO_PADDING

    def __init__(self, model: nn.Module, collate: Collate) -> None:
        self.model = model
        self.collate = collate
        self.counts_hits = False
        """Whether evaluations of a language model count the tokens that it finds most likely."""
        self.no_labels: DataError | None = None
        """Why the last batch that had no labels has none."""

    def batch(self, dataset: Any, rows: Rows, first_slot: int, padded_to: np.ndarray | None = None) -> Batch:
        taken = [dataset[int(row)] for row in rows]
        batch = collated(self.collate, taken, first_slot, ())
        if "labels" not in batch.inputs:
            self.no_labels = bad_batch.missing_labels(unwrapped(self.model), taken, batch.inputs)
        return batch

    def count(self, batch: Batch) -> int:
        """Return the targets that the model's mean runs over: token labels other than -100, or else the rows.

        A model of next words compares each token with the label after it: a row's first label is no target.
        """
        labels = batch.inputs.get("labels")
        if isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim() > 1:
            first = 1 if type(unwrapped(self.model)).__name__.endswith(NEXT_WORD_HEADS) else 0
            return int((labels[:, first:] != IGNORED).sum())
        return batch.n_rows

    def forward(self, batch: Batch, *, seed: int, step: int) -> Any:
        return run_seeded(self.model, batch, seed, step)

    def loss_sum(self, output: Any, batch: Batch) -> Tensor:
        loss, count = loss_of(output, self.no_labels).float(), self.count(batch)
        return loss * count if count else _no_loss(output, loss)

    def loss_parts(self, output: Any, batch: Batch) -> dict[str, Tensor]:
        count = self.count(batch)
        found = {name: part * count if count else part.new_zeros(()) for name, part in loss_parts_of(output).items()}
        if self.counts_hits and not self.model.training:
            found[ACCURACY] = self.hits(output, batch).float()
        return found

    def hits(self, output: Any, batch: Batch) -> Tensor:
        """Return how many labels are the token that the model finds most likely in their place, ()."""
        return (output["logits"][:, :-1].argmax(-1) == batch.inputs["labels"][:, 1:]).sum()

    def logits(self, output: Any, batch: Batch) -> tuple[np.ndarray, ...]:
        if isinstance(output, Mapping):
            found = [value for name, value in output.items() if name != "loss"]
        else:
            found = list(output) if isinstance(output, tuple | list) else [output]
        return tuple(
            value.detach().float().cpu().numpy()
            for value in found
            if isinstance(value, Tensor) and value.dim() > 0 and len(value) == batch.n_rows
        )


def _no_loss(output: Any, loss: Tensor) -> Tensor:
    """Return the loss 0 of a batch without targets, whose mean is NaN; each weight that took part has a gradient, 0."""
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return found.float().sum() * 0.0 if isinstance(found, Tensor) else loss.nan_to_num() * 0.0


def loss_parts_of(output: Any) -> dict[str, Tensor]:
    """Return the single numbers in a module's output whose names end in `_loss`, without their graph.

    Models that add several losses to `loss` return them under such names: `aux_loss` is that of a router of experts.
    """
    entries = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    return {
        name: value.detach().float().reshape(())
        for name, value in entries.items()
        if str(name).endswith("_loss") and isinstance(value, Tensor) and value.numel() == 1
    }


def loss_of(output: Any, why_none: WhetError | None = None) -> Tensor:
    """Return the one number in a module's output that it wants minimised; raise `why_none` where there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    if isinstance(output, Tensor):
        loss = output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        if why_none is not None:
            raise why_none
        raise ConfigError(
            what="the model returned no loss",
            got=type(output).__name__,
            why="training needs one number to minimise: output.loss, output['loss'], output[0] or the output itself",
            fix="give rows with labels, or a model whose forward returns a loss",
        )
    return loss
