"""CUDA graphs of a packed model's training passes, on a GPU."""

from __future__ import annotations

from whet.card import Card
from whet.config.methods import MethodSettings, have_graphs
from whet.methods.seam import Applied, Cost, Stage
from whet.models import captured, record
from whet.models.packed import GRAPHS, packed_model
from whet.models.view import ModelView

CARD = Card(
    name="cuda graphs",
    asked_by="cuda_graphs",
    does="On a GPU, the encoder's forward and backward passes are recorded and launched as one each.",
    improves="speed",
    same_result="yes",
    hurts="In short runs with batches of many sizes.",
    source="NVIDIA, CUDA C++ Programming Guide, CUDA Graphs",
    wanted_by="cuda_graphs",
    page="speed.md#cuda-graphs",
)
STAGE = Stage.COMPILATION


def apply(view: ModelView, settings: MethodSettings) -> Applied | None:
    """Let training passes of the packed model run as graphs once it is on a GPU; None without one."""
    packed = packed_model(view.model)
    if not settings.cuda_graphs or packed is None or not have_graphs():
        return None
    record.keep(packed.module, GRAPHS, captured.Passes())
    return Applied(CARD.name, "training passes of one size are launched as one")


def restore(view: ModelView) -> None:
    """Launch by launch again."""
    packed = packed_model(view.model)
    record.take(view.model if packed is None else packed.module, GRAPHS)


def cost(view: ModelView, settings: MethodSettings) -> Cost:
    """Return no cost: the graph's activations lie where those of the pass would; gradients stay between steps."""
    return Cost()
