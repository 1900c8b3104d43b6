"""The part of `trainer.accelerator` that scripts and overridden methods use, for one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from whet.errors import ConfigError
from whet.train.compat.public import PublicTrainer


class MissingAttributeError(ConfigError, AttributeError):
    """An attribute that whet's accelerator does not have; `hasattr` returns False for it."""


class Accelerator:
    """The part of accelerate's Accelerator that makes sense in one process; anything else raises an error."""

    num_processes, process_index, local_process_index = 1, 0, 0
    is_main_process = is_local_main_process = is_last_process = sync_gradients = True
    use_distributed = False

    def __init__(self, trainer: PublicTrainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        raise MissingAttributeError(
            what=f"trainer.accelerator has no {name}",
            why="whet trains in one process and does not run on accelerate",
            fix="leave it out, or use transformers' own Trainer with whet.optimize(model)",
        )

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._trainer.device

    @property
    def mixed_precision(self) -> str:
        """The number format of the products, in accelerate's words."""
        return {"bf16": "bf16", "fp16": "fp16"}.get(self._trainer.precision.name, "no")

    def backward(self, loss: Tensor, **_: Any) -> None:
        """Add the gradients of the loss, with the loss scale of an fp16 run."""
        self._trainer.precision.backward(loss)

    def autocast(self, *_: Any, **__: Any) -> AbstractContextManager[object]:
        """Return the context of a forward pass in the run's precision."""
        return self._trainer.precision.forward()

    def unwrap_model(self, model: Any, *_: Any, **__: Any) -> Any:
        """Return the model."""
        return model

    def prepare(self, *things: Any, **_: Any) -> Any:
        """Return what was given."""
        return things[0] if len(things) == 1 else things

    prepare_model = prepare_data_loader = prepare_optimizer = prepare_scheduler = unwrap_model

    def gather(self, tensor: Any) -> Any:
        """Return the values of all processes: this one's."""
        return tensor

    def gather_for_metrics(self, values: Any, *_: Any, **__: Any) -> Any:
        """Return the values of all processes: this one's."""
        return values

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Return the sum or mean over all processes: this one's value."""
        return tensor

    def pad_across_processes(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Return the tensor: no other process has a longer one."""
        return tensor

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale gradients down to a norm."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def get_state_dict(self, model: Any, *_: Any, **__: Any) -> dict[str, Any]:
        """Return the model's weights."""
        return model.state_dict()

    def wait_for_everyone(self) -> None:
        """Return at once: there is one process."""

    def free_memory(self, *things: Any) -> Any:
        """Return what was given."""
        return things

    def print(self, *words: Any, **options: Any) -> None:
        """Print."""
        print(*words, **options)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block: this is the main process."""
        yield

    local_main_process_first = main_process_first

    @contextmanager
    def no_sync(self, model: Any = None) -> Iterator[None]:
        """Run the block: nothing is synchronised."""
        yield
