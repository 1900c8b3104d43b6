"""The perplexity of one split."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from whet.data.store import RowStore
from whet.engine.engine import Trainer
from whet.objectives import router_loss
from whet.objectives.own_loss import OwnLoss


@dataclass(frozen=True)
class LmJudge:
    """Judges a language model on one split, by the mean loss of its targets; perplexity leaves routers' loss out."""

    rows: Any
    """A RowStore, or pairs of completions."""

    def follow(self, trainer: Trainer) -> None:
        """Leave the trainer's next evaluations to the loss and the targets it finds: nobody reads all logits."""
        trainer.compute_metrics = None
        if isinstance(trainer.objective, OwnLoss):
            trainer.objective.counts_hits = isinstance(self.rows, RowStore)

    def judge(self, trainer: Trainer, prefix: str) -> dict[str, float]:
        """Return the metrics of the trainer's model on the split."""
        self.follow(trainer)
        found = dict(trainer.evaluate(self.rows, metric_key_prefix=prefix))
        if not isinstance(self.rows, RowStore):
            return found
        routers = router_loss.share_of(trainer.model, found.get(f"{prefix}_aux_loss", 0.0))
        return found | {f"{prefix}_perplexity": perplexity(found[f"{prefix}_loss"] - routers)}


def perplexity(loss: float) -> float:
    """Return the exponential of a mean loss; infinity where a float ends."""
    return math.exp(loss) if loss < math.log(1e300) else math.inf
