"""`whet.Accelerator`: accelerate's Accelerator, whose models run without padding and whose loops resume bitwise.

What accelerate does, it does here: ranks, accumulation, clipping, gathering, trackers, profiles, its engines. This file
holds what whet changes: the constructor's defaults, models on their way through `prepare`, loaders whose batches come
again, gathered values without pickles, and the form of saved states.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import accelerate
import torch
from torch import nn
from torch.utils.data import DataLoader

from whet.config import ranks
from whet.config.methods import MethodSettings
from whet.errors import ConfigError, Problem
from whet.hf import between_ranks, replay, state
from whet.log import logger
from whet.methods import checkpoint_blocks, order
from whet.models import record
from whet.models.forwards import take_off_mixed_precision
from whet.models.view import ModelView
from whet.own_loop import locate
from whet.own_loop.optimize import change_for

Checkpointing = Literal["blocks", "selective"]
_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "MEGATRON_LM",
}
"""Variables that ask accelerate for an engine, also set by the constructor's plugins, and its type if it runs."""
_JOINS_WITHIN_S = 1800.0
"""torch's own default, which accelerate has."""


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator for models that run without padding, with the arguments of accelerate's own.

    `prepare` calls `whet.optimize` on each model; one that cannot run without padding trains as it is, and the log says
    why. Added arguments: `fp16=True` and `bf16=True`, as older guides have them, and `gradient_checkpointing`: True or
    "blocks" keep the input of each block for the backward pass, "selective" the products too.

    Other defaults: ranks on a machine without a GPU train together on its CPU, and shuffled rows have the order of the
    seedable sampler. Raises ConfigError for fp16 on a CPU, on which accelerate would compute in float32, for an engine
    that accelerate would leave out there, and for ranks that it would leave to themselves.
    """

    def __init__(
        self,
        *arguments: Any,
        fp16: bool = False,
        bf16: bool = False,
        gradient_checkpointing: bool | Checkpointing = False,
        **settings: Any,
    ) -> None:
        asked = inspect.signature(accelerate.Accelerator.__init__).bind(self, *arguments, **settings).arguments
        del asked["self"]
        self._checkpointing: Checkpointing | None = _policy(gradient_checkpointing)
        self._mark = object()  # a copy of a model has a copy of it, and is prepared again
        asked["mixed_precision"] = _with_older_names(asked.get("mixed_precision"), fp16=fp16, bf16=bf16)
        asked["dataloader_config"] = _loader_config(asked.get("dataloader_config"), asked.pop("split_batches", None))
        asked["cpu"] = bool(asked.get("cpu")) or (ranks.here().n_ranks > 1 and not _has_device())
        if asked["cpu"]:
            _join_here(asked.get("kwargs_handlers"))
        self._begin(asked)
        self._made_for = self.mixed_precision

    def _begin(self, asked: Mapping[str, Any]) -> None:
        """Let accelerate begin; leave no trace in the process if the result has to be refused."""
        configuration = accelerate.state.AcceleratorState
        is_first = not configuration._shared_state
        before = {name: os.environ.get(name) for name in _ENGINES}  # which accelerate sets for its plugins
        try:
            super().__init__(**asked)
            if problems := self._problems():
                raise ConfigError.of(problems)
        except BaseException:
            if is_first:
                configuration._reset_state()
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
            raise

    def _problems(self) -> list[Problem]:
        """Return what accelerate would do otherwise than it was asked, without a word."""
        found = []
        if self.mixed_precision == "fp16" and self.device.type == "cpu":
            found.append(
                Problem(
                    what="mixed_precision='fp16' would have no effect on a CPU",
                    got="a CPU, on which accelerate computes in float32 instead",
                    why="accelerate has float16 for GPUs alone",
                    fix="use bf16 there; or the command of your task, which trains in fp16 on a CPU: --precision fp16",
                )
            )
        running = self.distributed_type.name
        found += [
            Problem(
                what=f"{engine} was asked for, and accelerate would train without it",
                got=f"{self.num_processes} ranks on {self.device.type}: {running}",
                why="accelerate has its engines for the ranks of torchrun or accelerate launch, on GPUs",
                fix=f"start it so; or leave the plugin out, or the variable: unset {variable}",
            )
            for variable, engine in _ENGINES.items()
            if _is_true(variable) and engine != running
        ]
        place = ranks.here()
        if place.n_ranks > 1 and self.num_processes == 1:
            found.append(
                Problem(
                    what="accelerate would leave the ranks to themselves",
                    got=f"rank {place.rank} of {place.n_ranks}, alone on {self.device}",
                    why="each would train on all rows, and none would hear of the others' gradients",
                    fix="make whet.Accelerator before anything else uses accelerate's state; or use cpu=True",
                )
            )
        return found

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Return models, optimizers, loaders and schedules ready for the loop, in the order given."""
        self._change(args)
        with format_in_state(self, self._made_for):
            return super().prepare(*args, device_placement=device_placement)

    def prepare_model(self, model: nn.Module, *arguments: Any, **options: Any) -> Any:
        """Return one model ready for the loop; `evaluation_mode=True` leaves it without an exchange of gradients."""
        self._change([model])
        with format_in_state(self, self._made_for):
            return super().prepare_model(model, *arguments, **options)

    def _change(self, things: Sequence[Any]) -> None:
        """Let the models among these run without padding, and recompute activations if that was asked for.

        One that another Accelerator or a Trainer has prepared since, or `whet.restore` has undone, is changed and
        prepared again, as this one is asked to.
        """
        fresh = []
        for one in [one for one in things if isinstance(one, nn.Module)]:
            is_prepared = getattr(one, "_is_accelerate_prepared", False)
            inner = state.plain(one) if is_prepared else one
            if record.read(inner, record.PREPARED_BY) is self._mark or (is_prepared and self._has_state_of_its_own()):
                continue
            if inner is one:
                forget_preparation(one)
            fresh.append(inner)
        parts = [part for model in fresh for part in _optimized(model, cuda_graphs=self._checkpointing is None)]
        if self._checkpointing is None:
            _keep_activations(parts)
        elif parts:
            self._checkpoint_blocks(parts, MethodSettings(checkpointing=self._checkpointing))
        for model in fresh:
            record.keep(model, record.PREPARED_BY, self._mark)

    def _checkpoint_blocks(self, models: Sequence[nn.Module], settings: MethodSettings) -> None:
        """Let the models that have blocks recompute them; raises ConfigError if none prepared so far has any."""
        with_blocks = [one for one in models if ModelView(one).blocks()]
        had_blocks = any(ModelView(state.plain(one)).blocks() for one in self._models)
        for one in with_blocks or ([] if had_blocks else models):
            order.apply(ModelView(one), settings)
        for one in models:
            if one not in with_blocks:
                logger.info("gradient_checkpointing: %s has no blocks, and keeps its activations", type(one).__name__)

    def prepare_data_loader(self, data_loader: DataLoader[Any], *arguments: Any, **options: Any) -> Any:
        """Return one loader ready for the loop; its order and random numbers follow from (seed, epoch, batch)."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, *arguments, **options)
        config = self.dataloader_config
        asked = config.data_seed
        seed = config.data_seed = replay.seed_of_order(data_loader, asked, stateful=self.use_stateful_dataloader)
        replay.give_generator(data_loader)
        try:
            prepared = super().prepare_data_loader(data_loader, *arguments, **options)
        finally:
            config.data_seed = asked
        replay.replay(prepared, seed)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader for the rest of an epoch; its batches are those that the complete epoch would have."""
        rest = super().skip_first_batches(dataloader, num_batches)
        replay.replay_rest(rest, dataloader, num_batches)
        return rest

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the values of all ranks without the rows that fill up the last batch.

        What is no tensor travels as JSON and arrays: numbers, texts, tensors, in lists, tuples and dicts. accelerate
        would send pickles.
        """
        if self.num_processes == 1 or not (use_gather_object or _holds_other_than_tensors(input_data)):
            return super().gather_for_metrics(input_data, use_gather_object=use_gather_object)
        gathered = between_ranks.gather_items(input_data)
        n_rows = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        return gathered[:n_rows] if n_rows > 0 else gathered

    def save_state(
        self, output_dir: str | Path | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Any:
        """Write all that the loop needs to resume into a folder, which appears when it is complete; return the folder.

        Tensors are safetensors files and the rest is JSON, with checksums. Hooks of `register_save_state_pre_hook` get
        the folder before it has its name. Raises ConfigError for a folder that holds other files, and StorageError if
        writing fails; an earlier state in the folder then stays.

        DeepSpeed, FSDP, Megatron, TPUs and a `parallelism_config` keep weights of their own: with these it is
        accelerate's own `save_state`, in accelerate's form, which holds pickles.
        """
        if self._has_state_of_its_own():
            named = None if output_dir is None else str(output_dir)
            return super().save_state(named, safe_serialization, **save_model_func_kwargs)
        if not safe_serialization:
            raise ConfigError(
                what="save_state of whet.Accelerator writes safetensors files alone",
                got="safe_serialization=False",
                why="the other form is pickle, which runs code when it is read",
                fix="leave it out; save_model(model, folder, safe_serialization=False) writes weights so",
            )
        return state.save(self, output_dir)

    def load_state(
        self, input_dir: str | Path | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Restore what `save_state` wrote, on as many ranks as wrote it; raises StorageError for a damaged folder.

        `strict=False` accepts weights that are missing, or have no place. `load_kwargs` and `map_location` are for the
        files of accelerate's own form, which is read with the engines that `save_state` names.
        """
        if self._has_state_of_its_own():
            super().load_state(None if input_dir is None else str(input_dir), load_kwargs, **options)
        else:
            state.load(self, input_dir, **{name: one for name, one in options.items() if name != "map_location"})

    def _has_state_of_its_own(self) -> bool:
        """Return whether an engine of accelerate, or a device that whet does not know, keeps weights or numbers."""
        engines = {*_ENGINES.values(), "XLA"}
        sharded = getattr(self, "parallelism_config", None) is not None
        return self.distributed_type.name in engines or sharded or self.device.type not in ("cpu", "cuda")


@contextmanager
def format_in_state(accelerator: Any, precision: str) -> Iterator[None]:
    """Let accelerate's state name the format of this Accelerator: all of a process share one, and go by the last."""
    shared, name = vars(accelerator.state), "_mixed_precision"
    before = shared.get(name)
    if before is not None:  # else the state has been reset
        shared[name] = precision
    try:
        yield
    finally:
        if before is not None:
            shared[name] = before


def forget_preparation(model: nn.Module) -> None:
    """Let a model be prepared again: accelerate does so once, in the number format of the first Accelerator."""
    record.take(model, record.PREPARED_BY)
    take_off_mixed_precision(model)
    for name in ("_original_forward", "_is_accelerate_prepared"):
        vars(model).pop(name, None)


def _keep_activations(models: Sequence[nn.Module]) -> None:
    """Undo the recomputation of blocks that another Accelerator was asked for."""
    for view in map(ModelView, models):
        if checkpoint_blocks.is_on(view.model):
            checkpoint_blocks.restore(view)
            checkpoint_blocks.apply(view, MethodSettings(checkpointing="theirs"))
            text = "%s keeps its activations from now on, as this Accelerator has no gradient_checkpointing"
            logger.info(text, type(view.model).__name__)


def _policy(asked: Any) -> Checkpointing | None:
    policy = "blocks" if asked is True else asked or None
    if policy not in (None, *get_args(Checkpointing)):
        raise ConfigError(
            what="whet.Accelerator knows no such gradient_checkpointing",
            got=repr(asked),
            why="it says what the forward pass keeps for the backward pass",
            fix="use gradient_checkpointing=True, 'blocks' or 'selective'",
        )
    return policy


def _with_older_names(mixed_precision: Any, **flags: bool) -> Any:
    """Return the format that was asked for: by accelerate's name, or by one of the flags that it had before."""
    asked = {*([] if mixed_precision is None else [str(mixed_precision)]), *(name for name, on in flags.items() if on)}
    if len(asked) > 1:
        raise ConfigError(
            what="whet.Accelerator was asked for several formats",
            got=", ".join(sorted(asked)),
            why="products run in one of them; fp16=True and bf16=True are the older spelling of mixed_precision",
            fix="keep one: mixed_precision='bf16'",
        )
    return next(iter(asked), None)


def _loader_config(given: Any, split_batches: bool | None) -> Any:
    """Return how loaders are dealt out; accelerate itself takes no notice of `split_batches` since it is in there."""
    config = given or accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
    if split_batches is not None:
        config.split_batches = split_batches
    return config


def _has_device() -> bool:
    """Return whether accelerate has another device here than the CPU."""
    return torch.accelerator.is_available() or accelerate.utils.is_torch_xla_available()


def _join_here(handlers: Any) -> None:
    """Join CPU ranks of one machine over its loopback interface, unless the user says how; accelerate joins all others.

    accelerate's store and torch's gloo listen on every interface.
    """
    from whet.dist import group

    says = any("backend" in vars(one) for one in handlers or ())  # accelerate's InitProcessGroupKwargs
    place = ranks.here()
    if place.n_ranks > 1 and place.one_machine and "RANK" in os.environ and not says:
        group.join("gloo", _JOINS_WITHIN_S)


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


def _optimized(model: nn.Module, *, cuda_graphs: bool) -> list[nn.Module]:
    """Let the model run without padding; return the parts of it that may recompute their activations."""
    why = locate.why_elsewhere(model)
    if why is None:
        locate.prove_in(model)
        encoders = [encoder.model for encoder in locate.encoders_in(model)]
        why = locate.why_unchanged(encoders)
        if why is None:
            options = {"padding": "auto", "last_block_tokens": "read", "cuda_graphs": cuda_graphs}
            change_for("whet.Accelerator", model, options)
            return encoders
    logger.warning("%s trains as it is, with its padding: %s", type(model).__name__, why)
    return [model]


def _holds_other_than_tensors(values: Any) -> bool:
    try:
        accelerate.utils.recursively_apply(lambda one: one, values, error_on_other_type=True)
    except TypeError:
        return True
    return False
