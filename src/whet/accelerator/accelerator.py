"""`whet.Accelerator`: a training loop of your own, in the words of accelerate, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from whet.accelerator import between_ranks, loaders, replay, settings, state
from whet.config.methods import MethodSettings
from whet.errors import ConfigError
from whet.log import logger
from whet.methods import order
from whet.models.packable import why_padded
from whet.models.view import ModelView
from whet.own_loop import curated, inside
from whet.own_loop.changes import changes
from whet.own_loop.optimize import optimize
from whet.train.compat.accelerator import MissingAttributeError

Checkpointing = Literal["blocks", "selective"]
_SETTABLE = ("gradient_accumulation_steps", "sync_gradients", "even_batches")
_SAME = frozenset({
    "accumulate", "autocast", "check_trigger", "clip_grad_norm_", "clip_grad_value_", "device", "distributed_type",
    "end_training", "gather", "get_state_dict", "get_tracker", "gradient_state", "init_trackers",
    "is_last_process", "is_local_main_process", "is_main_process", "join_uneven_inputs", "local_main_process_first",
    "local_process_index", "log", "logging_dir", "main_process_first", "mixed_precision", "no_sync", "num_processes",
    "on_last_process", "on_local_main_process", "on_local_process", "on_main_process", "on_process",
    "optimizer_step_was_skipped", "pad_across_processes", "prepare_optimizer", "prepare_scheduler", "print",
    "process_index", "profile", "project_configuration", "project_dir", "reduce", "scaler", "set_trigger",
    "split_batches", "split_between_processes", "state", "trackers", "unscale_gradients",
    "unwrap_model", "use_distributed", "use_seedable_sampler", "wait_for_everyone", *_SETTABLE,
})  # fmt: skip
"""What accelerate's own Accelerator does here as ever."""


class Accelerator:
    """accelerate's Accelerator, whose models run without padding and whose saved states hold no code.

    `prepare` calls `whet.optimize` on each model first. `gradient_checkpointing` makes them recompute activations in
    the backward pass: True or "blocks" keep the input of each block, "selective" the products too. `cpu=None` uses a
    GPU if there is one. Everything else is accelerate's, or a ConfigError if whet cannot honour it.
    """

    def __init__(
        self,
        *,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool | None = None,
        gradient_checkpointing: bool | Checkpointing = False,
        **more: Any,
    ) -> None:
        policy = "blocks" if gradient_checkpointing is True else gradient_checkpointing or None
        if policy not in (None, "blocks", "selective"):
            raise ConfigError(
                what="whet.Accelerator knows no such gradient_checkpointing",
                got=repr(gradient_checkpointing),
                why="it says what the forward pass keeps for the backward pass",
                fix="use gradient_checkpointing=True, 'blocks' or 'selective'",
            )
        self._checkpointing: Checkpointing | None = policy
        self._kept: list[Any] = []
        self._has_blocks = False
        self._inner = settings.made(mixed_precision, gradient_accumulation_steps, cpu, more)

    def __getattr__(self, name: str) -> Any:
        if name in _SAME:
            return getattr(self._inner, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingAttributeError(
            what=f"whet.Accelerator has no {name}",
            why="it has what a loop on the ranks of a machine or a cluster needs, and refuses the rest of accelerate",
            fix=settings.OTHERWISE,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SETTABLE:
            setattr(self._inner, name, value)
        elif name in _SAME:
            raise MissingAttributeError(
                what=f"{name} of whet.Accelerator cannot be set", why="it follows from the run", fix=settings.OTHERWISE
            )
        else:
            super().__setattr__(name, value)

    def prepare(self, *things: Any, device_placement: list[bool] | None = None) -> Any:
        """Return models, optimizers, loaders and schedules ready for the loop, in the order given."""
        seeds = self._change(*things)
        found = self._inner.prepare(*things, device_placement=device_placement)
        for number, seed in seeds.items():
            replay.replay(found[number] if len(things) > 1 else found, seed)
        return found

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, **options: Any) -> Any:
        """Return one model ready for the loop; `evaluation_mode=True` leaves it without gradients."""
        self._change(model)
        return self._inner.prepare_model(model, device_placement=device_placement, **options)

    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None, **options: Any) -> Any:
        """Return one loader ready for the loop."""
        seeds = self._change(data_loader)
        found = self._inner.prepare_data_loader(data_loader, device_placement=device_placement, **options)
        for seed in seeds.values():
            replay.replay(found, seed)
        return found

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader for the rest of an epoch; its batches are those that the complete epoch would have."""
        found = self._inner.skip_first_batches(dataloader, num_batches)
        replay.replay_rest(found, dataloader, num_batches)
        return found

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Add the gradients of the loss, divided by the number of micro-batches of a step."""
        self._inner.backward(loss, **options)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the values of all processes without the rows that fill up the last batch: tensors, numbers, texts."""
        return between_ranks.gather_for_metrics(self._inner, input_data, use_gather_object)

    def register_for_checkpointing(self, *things: Any) -> None:
        """Save these with the state too: objects with `state_dict` and `load_state_dict`."""
        state.require_stateful(things)
        self._kept += things

    def save_state(self, output_dir: str | Path | None = None, safe_serialization: bool = True) -> str:
        """Write everything that the loop needs to resume into a folder, which appears when it is complete.

        Tensors are safetensors files and the rest is JSON. Raises ConfigError for a folder that holds other files, and
        StorageError if writing fails; an earlier state in the folder then stays.
        """
        _require_safe(safe_serialization, "save_state")
        return str(state.save(self._inner, self._kept, output_dir))

    def load_state(self, input_dir: str | Path | None = None) -> None:
        """Restore what `save_state` wrote, on as many ranks as wrote it; raises StorageError for a damaged folder."""
        state.load(self._inner, self._kept, input_dir)

    def save_model(self, model: nn.Module, save_directory: str | Path, **options: Any) -> None:
        """Write a model's weights as safetensors files."""
        _require_safe(options.get("safe_serialization", True), "save_model")
        self._inner.save_model(model, save_directory, **options)

    def free_memory(self, *things: Any) -> Any:
        """Forget everything that was prepared; return as many Nones as things were given."""
        self._kept, self._has_blocks = [], False
        return self._inner.free_memory(*things)

    clear = free_memory

    def _change(self, *things: Any) -> dict[int, int]:
        """Change models so that they run without padding, and loaders so that their order can be resumed.

        Returns the seed of each loader, by its place among the things.
        """
        seeds, models = {}, []
        for number, one in enumerate(things):
            if loaders.is_loader(one):
                seeds[number] = loaders.agree_on_order(self._inner, one)
                loaders.give_generator(one)
            if isinstance(one, nn.Module) and not getattr(one, "_is_accelerate_prepared", False):
                models += _optimized(one)
        if self._checkpointing is not None and models:
            self._checkpoint_blocks(models, MethodSettings(checkpointing=self._checkpointing))
        return seeds

    def _checkpoint_blocks(self, models: Sequence[nn.Module], settings: MethodSettings) -> None:
        """Let the models that have blocks recompute them; raises ConfigError if none prepared so far has any."""
        with_blocks = [one for one in models if ModelView(one).blocks()]
        for one in with_blocks or ([] if self._has_blocks else models):
            order.apply(ModelView(one), settings)
        self._has_blocks = True
        for one in models:
            if one not in with_blocks:
                logger.info("gradient_checkpointing: %s has no blocks, and keeps its activations", type(one).__name__)


def _optimized(model: nn.Module) -> list[nn.Module]:
    """Let the model run without padding; return the parts of it that may recompute their activations."""
    inside.prove_in(model)
    found = [encoder.model for encoder in inside.encoders_in(model)]
    why = _why_unchanged(found)
    if why is not None:
        logger.warning("%s trains as it is, with its padding: %s", type(model).__name__, why)
        return [model]
    if changes(model) is None:
        optimize(model)
    return found


def _why_unchanged(encoders: list[nn.Module]) -> str | None:
    """Return why these cannot run without padding; None if they can."""
    reasons = [None if curated.is_encoder(one) else why_padded(one) for one in encoders]
    return next(filter(None, reasons), None) if reasons else "no model of transformers in it is known to whet"


def _require_safe(safe: bool, method: str) -> None:
    if not safe:
        raise ConfigError(
            what=f"{method} of whet.Accelerator writes safetensors files alone",
            got="safe_serialization=False",
            why="the other form is pickle, which runs code when it is read",
            fix="leave safe_serialization out",
        )
