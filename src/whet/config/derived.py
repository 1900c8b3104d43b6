"""What scripts read from TrainingArguments besides its fields: devices, ranks, sizes, names that whet refuses."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from whet.config import ranks
from whet.config.fields import TrainingFields
from whet.config.names.aliases import ALIASES
from whet.config.names.off_values import OFF, off_value
from whet.config.ranks import here
from whet.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers.training_args import ParallelMode


_LEVELS = {
    "debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR,
    "critical": logging.CRITICAL,
}  # fmt: skip
_SETTERS = {
    "set_training": "per_device_train_batch_size=16, learning_rate=3e-5",
    "set_evaluate": "eval_strategy='epoch'",
    "set_testing": "per_device_eval_batch_size=32, do_predict=True",
    "set_save": "save_strategy='epoch'",
    "set_logging": "logging_steps=50",
    "set_push_to_hub": "output_dir='out'",
    "set_optimizer": "optim='adamw_torch', learning_rate=3e-5",
    "set_lr_scheduler": "lr_scheduler_type='cosine', warmup_steps=100",
    "set_dataloader": "per_device_train_batch_size=16, dataloader_num_workers=2",
}
"""Methods of transformers' class that change it in place -> the fields that each of them sets."""

_ABSENT = ("deepspeed_plugin", "distributed_state", "fsdp_plugin_args")
"""Objects of transformers for runs of several processes."""


class DerivedSettings(TrainingFields):
    """Properties and methods of transformers' TrainingArguments that are derived from its fields."""

    __slots__ = ()

    if TYPE_CHECKING:

        def to_dict(self) -> dict[str, Any]: ...

    @property
    def device(self) -> torch.device:
        """The device of the model: the first GPU, unless there is none or use_cpu is set."""
        import torch

        return torch.device("cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu")

    @property
    def n_gpu(self) -> int:
        """Number of GPUs in use: 1 or 0."""
        return int(self.device.type == "cuda")

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
    def process_index(self) -> int:
        """Number of this process among all."""
        return here().rank

    @property
    def local_process_index(self) -> int:
        """Number of this process on its machine."""
        return here().local_rank

    @property
    def should_log(self) -> bool:
        """Whether this process logs: rank 0 does."""
        return here().is_first

    @property
    def should_save(self) -> bool:
        """Whether this process writes files: rank 0 does."""
        return here().is_first

    @property
    def place_model_on_device(self) -> bool:
        """Whether the Trainer moves the model to the device."""
        return True

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """How long processes wait for each other."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def train_batch_size(self) -> int:
        """Rows in one forward and backward pass."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Rows in one forward pass of an evaluation."""
        return self.per_device_eval_batch_size

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the steps of warm-up in a run of this many steps."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil((self.warmup_steps or self.warmup_ratio) * num_training_steps)

    def get_process_log_level(self) -> int:
        """Return log_level as a number of the logging module; for passive the level of transformers."""
        from transformers.utils import logging as theirs

        return _LEVELS.get(self.log_level, theirs.get_verbosity())

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the block on the first process of this machine (or of all) first, then on the others."""
        place = here()
        if place.n_ranks == 1:
            yield
            return
        comes_first, wait = (place.local_rank == 0) if local else place.is_first, ranks.joined(self)
        if not comes_first:
            wait()
        yield
        if comes_first:
            wait()

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return every field by name with values that trackers accept: numbers, bools and texts."""
        sizes = {"train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        values = self.to_dict() | sizes
        return {name: value if type(value) in (bool, int, float, str) else str(value) for name, value in values.items()}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return what scripts read: a refused field's off value, the field of an older name, a setter."""
            if name in _SETTERS:
                return _refusing(name)
            if name in _ABSENT:
                return None
            if name == "accelerator_config":
                return _NoAccelerate()
            if name in OFF:
                return off_value(name)
            alias = ALIASES.get(name)
            if alias is not None and alias.reads:
                return alias.read_as if alias.to is None else getattr(self, alias.to)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)


class _NoAccelerate:
    """A placeholder for accelerate's settings, which raises when transformers' own Trainer reads them."""

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(
            what="these are TrainingArguments of whet",
            got=f"a read of accelerator_config.{name}, as transformers' own Trainer does",
            why="transformers' Trainer needs settings that whet does not have",
            fix="use whet.Trainer; or transformers.TrainingArguments, and whet.optimize(model) for the speed",
        )


def replacing(settings: str) -> str:
    """Return how to change settings."""
    return f"make new ones: args = dataclasses.replace(args, {settings})"


def _refusing(name: str) -> Any:
    def setter(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            what=f"{name} cannot change these TrainingArguments",
            got=f"args.{name}(...)",
            why="whet checks settings once, when they are made, and a run can rely on them from then on",
            fix=replacing(_SETTERS[name]) + "; the fields have the names of the constructor",
        )

    setter.__name__ = name
    return setter
