"""The part of `trainer.accelerator` that scripts and overridden methods use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from whet.errors import ConfigError
from whet.train.compat import user_loss
from whet.train.compat.public import PublicTrainer


class MissingAttributeError(ConfigError, AttributeError):
    """An attribute that whet's accelerator does not have; `hasattr` returns False for it."""


class Accelerator:
    """The part of accelerate's Accelerator that Trainers use; anything else raises an error."""

    sync_gradients = True

    def __init__(self, trainer: PublicTrainer) -> None:
        self._trainer = trainer
        place = trainer.sync.place
        self.num_processes, self.process_index, self.local_process_index = place.n_ranks, place.rank, place.local_rank
        self.is_main_process, self.is_local_main_process = place.is_first, place.local_rank == 0
        self.is_last_process = place.rank == place.n_ranks - 1
        self.use_distributed = place.n_ranks > 1

    def __getattr__(self, name: str) -> Any:
        raise MissingAttributeError(
            what=f"trainer.accelerator has no {name}",
            why="whet does not run on accelerate",
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
        """Add the gradients of the loss, with the loss scale of an fp16 run; those of several ranks are averaged."""
        user_loss.backward(self._trainer, loss)

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
        """Return the tensors of all processes, one after the other; tensors in lists and dicts likewise."""
        return _each(lambda *found: torch.cat([torch.atleast_1d(one) for one in found]), self._of_all(tensor))

    def gather_for_metrics(self, values: Any, *_: Any, **__: Any) -> Any:
        """Return the values of all processes; rows are never computed twice, so none is left out."""
        return self.gather(values)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or mean over all processes."""
        if self.num_processes == 1:
            return tensor
        share = scale / (self.num_processes if reduction == "mean" else 1)
        return _each(lambda *found: torch.stack(found).sum(0) * share, self._of_all(tensor))

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Return the tensors, filled up along `dim` to the longest of all processes."""

        def padded(*found: Tensor) -> Tensor:
            own = found[self.process_index]
            if own.dim() <= dim:
                return own
            more = max(one.shape[dim] for one in found) - own.shape[dim]
            filling = own.new_full([*own.shape[:dim], more, *own.shape[dim + 1 :]], pad_index)
            return torch.cat([filling, own] if pad_first else [own, filling], dim)

        return _each(padded, self._of_all(tensor))

    def _of_all(self, tensors: Any) -> list[Any]:
        if self.num_processes == 1:
            return [tensors]
        found = self._trainer.sync.gather(tensors, lambda other: _alike(other, tensors), large=True)
        return [_each(lambda one: one.to(self.device), [of_rank]) for of_rank in found]

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale gradients down to a norm."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def get_state_dict(self, model: Any, *_: Any, **__: Any) -> dict[str, Any]:
        """Return the model's weights."""
        return model.state_dict()

    def wait_for_everyone(self) -> None:
        """Wait for the other processes."""
        self._trainer.sync.wait()

    def free_memory(self, *things: Any) -> Any:
        """Return what was given."""
        return things

    def print(self, *words: Any, **options: Any) -> None:
        """Print, on the main process of each machine."""
        if self.is_local_main_process:
            print(*words, **options)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on the main process first, then on the others."""
        with self._in_turn(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the block on the main process of each machine first, then on the others."""
        with self._in_turn(self.is_local_main_process):
            yield

    @contextmanager
    def _in_turn(self, comes_first: bool) -> Iterator[None]:
        if not comes_first:
            self._trainer.sync.wait()
        yield
        if comes_first:
            self._trainer.sync.wait()

    @contextmanager
    def no_sync(self, model: Any = None) -> Iterator[None]:
        """Run the block: gradients are exchanged in the last backward pass of a step only, in any case."""
        yield


def _alike(one: Any, own: Any) -> bool:
    """Return whether tensors of the same formats are at the same places of these tuples, lists and dicts."""
    if isinstance(own, Mapping):
        return isinstance(one, dict) and one.keys() == own.keys() and all(_alike(one[name], own[name]) for name in own)
    if isinstance(own, tuple | list):
        return isinstance(one, tuple | list) and len(one) == len(own) and all(map(_alike, one, own))
    return (
        isinstance(one, Tensor) and one.dtype == own.dtype if isinstance(own, Tensor) else not isinstance(one, Tensor)
    )


def _each(work: Callable[..., Any], found: Sequence[Any]) -> Any:
    """Return `work` of the tensors that are at the same place in each of these tuples, lists and dicts."""
    first = found[0]
    if isinstance(first, Mapping):
        return {name: _each(work, [one[name] for one in found]) for name in first}
    if isinstance(first, tuple | list):
        return type(first)(_each(work, column) for column in zip(*found, strict=True))
    return work(*found) if isinstance(first, Tensor) else first
