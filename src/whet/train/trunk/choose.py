"""Whether the results of a run's frozen layers can be kept, and what keeps them."""

from __future__ import annotations

from whet.data.store import RowStore
from whet.errors import ConfigError
from whet.models import last_block
from whet.models.experts.layer import has_experts
from whet.models.trunk import Trunk
from whet.models.view import ModelView
from whet.objectives.distilled import without_teacher
from whet.own_loop.nested import NestedLoss
from whet.train.own_losses import SmoothedLoss
from whet.train.run import Run
from whet.train.trunk.cache import Cached
from whet.train.trunk.computed import Computed, StepTrunk


def trunk_of(run: Run) -> StepTrunk:
    """Return what runs the frozen layers in this run; raises ConfigError if their results cannot be kept."""
    args = run.args
    if not args.cache_frozen_trunk:
        return Computed()
    assert args.freeze_layers is not None
    if (why := _why_not(run)) is not None:
        raise ConfigError(
            what="cache_frozen_trunk does not go with this training",
            got=why,
            why="the hidden states of each row are kept from one epoch to the next, in packed batches of one process",
            fix="leave --cache_frozen_trunk out: --freeze_layers alone saves the backward pass of these layers",
        )
    n_blocks = args.freeze_layers
    if n_blocks == len(ModelView(run.model).blocks()):
        assert run.objective.packed_model is not None
        last_block.switch_off(run.objective.packed_model.module)  # it would leave out states that are kept
    student = without_teacher(run.objective)  # a teacher's pass is no part of filling the cache
    return Cached(Trunk(run.model, n_blocks), student, run.train_dataset, run.output_dir)


def _why_not(run: Run) -> str | None:
    model, packed = run.model, run.objective.packed_model
    reasons = {
        "label_smoothing_factor": isinstance(run.objective, SmoothedLoss),
        f"{type(model).__name__}, whose batches run padded": packed is None,
        f"{type(model).__name__}, which holds its encoder": isinstance(run.objective, NestedLoss),
        f"{type(model).__name__}, of a family that whet has no file for": packed is not None and packed.family.proven,
        "experts, whose balance is that of all tokens": has_experts(model),
        f"rows in a {type(run.train_dataset).__name__}; whet's commands make a RowStore of theirs": not isinstance(
            run.train_dataset, RowStore
        ),
        f"{run.place.n_ranks} ranks": run.place.n_ranks > 1,
        f"the {run.device.type.upper()}": run.device.type != "cpu",
    }
    return next((text for text, holds in reasons.items() if holds), None)
