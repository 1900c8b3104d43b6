"""What follows from the settings of a run: its device, its ranks, the steps of its warm-up."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from whet.config.fields import TrainingFields
from whet.config.ranks import here

if TYPE_CHECKING:
    import torch
    from transformers.training_args import ParallelMode


class DerivedSettings(TrainingFields):
    """What is derived from the fields of TrainingArguments, under the names of transformers."""

    __slots__ = ()

    if TYPE_CHECKING:

        def to_dict(self) -> dict[str, Any]: ...

    @property
    def device(self) -> torch.device:
        """The device of the model: the first GPU, unless there is none or use_cpu is set."""
        import torch

        return torch.device("cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu")

    @property
    def parallel_mode(self) -> ParallelMode:
        """How the run is distributed, in transformers' words."""
        from transformers.training_args import ParallelMode

        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return here().n_ranks

    @property
    def should_log(self) -> bool:
        """Whether this process logs: rank 0 does."""
        return here().is_first

    @property
    def should_save(self) -> bool:
        """Whether this process writes files: rank 0 does."""
        return here().is_first

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the steps of warm-up in a run of this many steps."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil((self.warmup_steps or self.warmup_ratio) * num_training_steps)
