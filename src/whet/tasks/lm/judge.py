"""The perplexity of one split."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from whet.data.store import RowStore
from whet.engine.engine import Engine
from whet.objectives import router_loss


@dataclass(frozen=True)
class LmJudge:
    """Judges a language model on one split, by the mean loss of its targets; perplexity leaves routers' loss out."""

    rows: Any
    """A RowStore, or pairs of completions."""

    def while_training(self) -> dict[str, Any]:
        """Leave evaluations in a training to the loss and the targets it finds: nobody reads all logits."""
        return {}

    def judge(self, engine: Engine, prefix: str) -> dict[str, float]:
        """Return the metrics of the engine's model on the split."""
        found = dict(engine.evaluate(self.rows, prefix))
        if not isinstance(self.rows, RowStore):
            return found
        routers = router_loss.share_of(engine.model, found.get(f"{prefix}_aux_loss", 0.0))
        return found | {f"{prefix}_perplexity": perplexity(found[f"{prefix}_loss"] - routers)}


def perplexity(loss: float) -> float:
    """Return the exponential of a mean loss; infinity where a float ends."""
    return math.exp(loss) if loss < math.log(1e300) else math.inf
