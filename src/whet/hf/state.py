"""What loops save: the states of `whet.Accelerator`, and the checkpoint folders of `whet.Trainer`.

A state holds models, optimizers, schedules, loaders, random numbers, and what the user registers. Tensors are
safetensors files and the rest is JSON. The folder appears complete, with checksums of its files, by one rename.

transformers' Trainer writes a checkpoint file by file into its final folder, and the optimizer, the schedule and the
random states as pickles. Here it writes into a hidden folder, which is synced, sealed by `MANIFEST.json` and renamed;
states are `NAME.json`, with their tensors in `NAME.safetensors`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from whet.config.ranks import may_start_again
from whet.errors import ConfigError, StorageError
from whet.hf import between_ranks, replay
from whet.paths import utf8_name
from whet.store import find, manifest, schema, weights, write
from whet.store import state as stored
from whet.store.optimizer import OptimizerState, alike, names_in, without_tensors
from whet.store.state import State, read_parts, split_parts, write_tensors
from whet.system import rename

_KIND = "state of whet.Accelerator"
_NUMBERED = "checkpoint_"
"""What accelerate names numbered states, with their number."""


def save(accelerator: Any, folder: str | Path | None) -> Path:
    """Write the state of all ranks to the folder, and return it; every rank raises what any of them raises.

    The first rank writes, or with `save_on_each_node` the first of each machine. The hooks run on every rank.
    """
    project = accelerator.project_configuration
    with between_ranks.together("the state was not saved"):
        _require_no_gradients(accelerator)
        target = _next_numbered(project) if project.automatic_checkpoint_naming else _named(folder, "save_state")
    writes = _writes(accelerator)
    hooks = [*accelerator._save_model_state_pre_hook.values()]
    facts = between_ranks.gather([random_state(accelerator.device), bool(hooks)], _is_of_rank)
    any_hooks = any(has_hooks for _, has_hooks in facts)
    failed = f"the state in {target} was not saved"
    staged: write.Staged | None = None
    try:
        state_dicts = [model.state_dict() for model in _models(accelerator)] if writes or hooks else []
        if any_hooks:
            with between_ranks.together(failed):
                if writes:
                    staged = _stage(target)
            with between_ranks.together(failed):
                place = _collecting_folder(target)
                for hook in hooks:
                    hook([*accelerator._models], state_dicts, str(place))
        with between_ranks.together(failed):
            if writes:
                staged = staged or _stage(target)
                parts = _collected(accelerator) | {
                    "loop": {"accumulated": accelerator.step, "models": len(state_dicts)},
                    "random": {str(rank): one for rank, (one, _) in enumerate(facts)},
                }
                staged.put(lambda place: _write(parts, state_dicts, place))
                staged.publish({"n_ranks": accelerator.num_processes, "kind": _KIND})
                if project.automatic_checkpoint_naming and project.total_limit is not None:
                    _keep(target, project.total_limit)
    except BaseException:
        if staged is not None:
            staged.discard()
        raise
    project.iteration += 1
    return target


def load(accelerator: Any, folder: str | Path | None, *, strict: bool = True) -> None:
    """Restore the state from the folder, on every rank; raises StorageError if it is not that of this loop.

    Without `strict`, weights may be missing or have no place.
    """
    project = accelerator.project_configuration
    numbered = folder is None and project.automatic_checkpoint_naming
    place = _newest_numbered(project) if numbered else _named(folder, "load_state")
    failed = f"the state in {place} was not loaded"
    with between_ranks.together(failed):
        if _writes(accelerator):
            write.finish_replacement(place)
    with between_ranks.together(failed):
        facts = _require_intact(place)
        _require_ranks(facts, accelerator.num_processes, place)
    models = [*accelerator._models]
    with between_ranks.together(failed):
        for hook in accelerator._load_model_state_pre_hook.values():
            hook(models, str(place))
        try:
            _restore(accelerator, [plain(model) for model in models], read_parts(place), place, strict=strict)
        except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise StorageError(
                what=f"{place} does not fit what was prepared",
                got=f"{type(error).__name__}: {error}"[:300],
                why="a state is loaded into the same models, optimizers, schedules and loaders, in the same order",
                fix="prepare and register the same things in the same order as the loop that saved it",
            ) from error


def _writes(accelerator: Any) -> bool:
    """Return whether this rank writes the files."""
    if accelerator.project_configuration.save_on_each_node:
        return accelerator.is_local_main_process
    return accelerator.is_main_process


def _is_of_rank(value: Any) -> bool:
    """Return whether this is what a rank says before a state is saved: its random numbers, and whether it has hooks."""
    return isinstance(value, list) and len(value) == 2 and schema.json_object(value[0]) and isinstance(value[1], bool)


def _require_ranks(facts: Mapping[str, Any], n_ranks: int, place: Path) -> None:
    if facts.get("n_ranks") != n_ranks:
        raise ConfigError(
            what=f"{place} is the state of another number of ranks",
            got=f"{facts.get('n_ranks')} ranks then, {n_ranks} now",
            why="each rank resumes with random numbers and rows of its own",
            fix=f"start {facts.get('n_ranks')} ranks, or load the weights alone: {place / _weights_name(0)}",
        )


def _collecting_folder(target: Path) -> Path:
    """Return the folder in which the first rank collects the files; raises StorageError if it is not here."""
    place = find.hidden(target, "partial")
    if not place.is_dir():
        raise StorageError(
            what="the folder of the state is not on this machine",
            got=str(place),
            why="hooks of save_state write into it on every rank",
            fix="save to a folder that all machines share; or ProjectConfiguration(save_on_each_node=True)",
        )
    return place


def _next_numbered(project: Any) -> Path:
    """Return the folder of the next state; raises ConfigError if there is one already."""
    target = _checkpoints(project) / f"{_NUMBERED}{project.iteration}"
    if target.exists():
        last = max(map(_number_of, _numbered(target.parent)), default=project.iteration)
        raise ConfigError(
            what=f"{target} is there already",
            got=f"project_configuration.iteration = {project.iteration}",
            why="states of automatic_checkpoint_naming are numbered, and never replaced",
            fix=f"set it to the number of the next state: accelerator.project_configuration.iteration = {last + 1}",
        )
    return target


def _newest_numbered(project: Any) -> Path:
    there = _numbered(_checkpoints(project))
    if not there:
        raise ConfigError(
            what="load_state got no folder, and no numbered state is there",
            got=str(_checkpoints(project)),
            why="automatic_checkpoint_naming has states in checkpoints/ of the project's folder",
            fix="name the folder: load_state('states/step-100')",
        )
    return there[-1]


def _checkpoints(project: Any) -> Path:
    if project.project_dir is None:
        raise ConfigError(
            what="automatic_checkpoint_naming has no folder",
            why="numbered states are written to checkpoints/ of the project's folder",
            fix="name it: ProjectConfiguration(project_dir='run', automatic_checkpoint_naming=True)",
        )
    return Path(project.project_dir) / "checkpoints"


def _named(folder: str | Path | None, method: str) -> Path:
    if folder is None:
        raise ConfigError(
            what=f"{method} got no folder",
            why="folders are numbered with ProjectConfiguration(automatic_checkpoint_naming=True) alone",
            fix=f"name it: {method}('states/step-100')",
        )
    return Path(folder).expanduser()


def _require_no_gradients(accelerator: Any) -> None:
    n_accumulated = accelerator.gradient_accumulation_steps
    if not accelerator.sync_gradients:
        raise ConfigError(
            what="save_state between two micro-batches of a step would lose their gradients",
            got=f"micro-batch {accelerator.step % n_accumulated} of {n_accumulated}",
            why="a state holds weights and moments, and no gradients",
            fix="call it after optimizer.step(): if accelerator.sync_gradients: accelerator.save_state(...)",
        )


def _weights_name(number: int) -> str:
    return "model.safetensors" if number == 0 else f"model_{number}.safetensors"


def plain(model: Any) -> nn.Module:
    """Return a prepared model without the wrappers of several ranks and of torch.compile, which rename weights."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._orig_mod
        else:
            return model


def _models(accelerator: Any) -> list[nn.Module]:
    return [plain(model) for model in accelerator._models]


def _write(parts: dict[str, State], models: Sequence[Mapping[str, Any]], folder: Path) -> None:
    text, tensors = split_parts(parts)
    (folder / find.STATE).write_text(text, "utf-8")
    write_tensors(tensors, folder)
    with utf8_name(folder) as named:
        for number, tensors_of_model in enumerate(models):
            weights.save_module(tensors_of_model, named / _weights_name(number))


def _collected(accelerator: Any) -> dict[str, State]:
    holder = nn.ModuleList(_models(accelerator))
    parts: dict[str, State] = {}
    for number, wrapped in enumerate(accelerator._optimizers):
        parts[f"optimizer_{number}"] = OptimizerState(wrapped.optimizer, names_in(wrapped.optimizer, holder)).state()
    for number, schedule in enumerate(accelerator._schedulers):
        parts[f"schedule_{number}"] = without_tensors(schedule.state_dict())
    for number, loader in enumerate(accelerator._dataloaders):
        parts[f"loader_{number}"] = replay.state_of(loader)
    for number, one in enumerate(accelerator._custom_objects):
        parts[f"registered_{number}"] = _with_names(one)
    if accelerator.scaler is not None:
        parts["scaler"] = dict(accelerator.scaler.state_dict())
    return parts


def _with_names(one: Any) -> State:
    """Return the state of a registered object; raises ConfigError if JSON would change a key."""
    state, left = dict(one.state_dict()), [one.state_dict()]
    while left:
        found = left.pop()
        if isinstance(found, Mapping):
            left += found.values()
            odd = [name for name in found if not isinstance(name, str)]
            if odd:
                raise ConfigError(
                    what=f"the state of {type(one).__name__} has names that are no texts",
                    got=f"{odd[0]!r} ({type(odd[0]).__name__})",
                    why="a saved state is JSON and tensors by name, and would come back with other names",
                    fix="prepare it if it is an optimizer or a schedule; else give state_dict() texts as keys",
                )
        elif isinstance(found, list | tuple):
            left += found
    return state


def _restore(
    accelerator: Any, models: Sequence[nn.Module], saved: dict[str, State], folder: Path, strict: bool
) -> None:
    """Restore everything; `models` are those whose weights no hook has loaded."""
    holder = nn.ModuleList(_models(accelerator))
    wanted = _collected(accelerator).keys() | {"loop", "random"}
    if saved.keys() != wanted or saved["loop"]["models"] != len(models):
        raise ValueError(
            f"the state holds {', '.join(sorted(saved))} and {saved.get('loop', {}).get('models')} models; "
            f"this loop has {', '.join(sorted(wanted))} and {len(models)}"
        )
    with utf8_name(folder) as named:
        for number, model in enumerate(models):
            weights.load_module(model, [named / _weights_name(number)], strict=strict)
    for number, wrapped in enumerate(accelerator._optimizers):
        state = OptimizerState(wrapped.optimizer, names_in(wrapped.optimizer, holder))
        state.load_state(saved[f"optimizer_{number}"])
    for number, schedule in enumerate(accelerator._schedulers):
        schedule.load_state_dict(alike(saved[f"schedule_{number}"], schedule.state_dict()))
    for number, loader in enumerate(accelerator._dataloaders):
        replay.load_state(loader, saved[f"loader_{number}"])
    for number, one in enumerate(accelerator._custom_objects):
        one.load_state_dict(saved[f"registered_{number}"])
    if accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(saved["scaler"])
    accelerator.step = int(saved["loop"]["accumulated"])
    set_random_state(saved["random"][str(accelerator.process_index)], accelerator.device)


# ---- the folder ----


def _stage(target: Path) -> write.Staged:
    """Make the empty folder in which the files are collected; raises ConfigError if the target holds other files."""
    staged = write.Staged(target.parent, 0, name=target.name)
    staged.put(lambda _: _require_free(target))
    return staged


def _numbered(folder: Path) -> list[Path]:
    """Return the numbered states in this folder, the newest last."""
    there = [path for path in folder.glob(f"{_NUMBERED}*") if path.name.removeprefix(_NUMBERED).isdigit()]
    return sorted((path for path in there if path.is_dir()), key=_number_of)


def _number_of(path: Path) -> int:
    """Return the number in a numbered state's name."""
    return int(path.name.removeprefix(_NUMBERED))


def _keep(newest: Path, n_kept: int) -> None:
    """Remove numbered states, the lowest number first, until `n_kept` are left; folders of others stay."""
    earlier = [path for path in _numbered(newest.parent) if path != newest]
    own = [path for path in earlier if (manifest.facts_of(path) or {}).get("kind") == _KIND]
    for path in own[: max(len(own) + 1 - max(n_kept, 1), 0)]:
        write.remove(path)


def _require_intact(folder: Path) -> dict[str, Any]:
    """Return the facts of a saved state; raises StorageError if anything in it is not as it was written."""
    facts = manifest.facts_of(folder) or {}
    if facts.get("kind") != _KIND:
        raise StorageError(
            what=f"{folder} is not a state that whet.Accelerator saved",
            got="no such folder" if not folder.is_dir() else f"files: {', '.join(sorted(_names(folder))[:5])}",
            why="whet reads states of safetensors and JSON files; those of accelerate hold pickle, which can run code",
            fix="name a folder that save_state of whet.Accelerator wrote; or load it with accelerate.Accelerator",
        )
    if problems := manifest.problems_of(folder):
        raise StorageError(
            what=f"the state in {folder} is damaged",
            got="; ".join(problems[:3]),
            why="every file has to be as it was written",
            fix="load an earlier state",
        )
    return facts


def _require_free(target: Path) -> None:
    """Refuse a folder with other files: saving replaces the folder."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise OSError(None, "a link or a file of this name is in the way", str(target))
    if not target.exists() or not _names(target):
        return
    if (manifest.facts_of(target) or {}).get("kind") != _KIND or manifest.problems_of(target, light=True):
        raise ConfigError(
            what=f"{target} holds other files than a saved state",
            got=", ".join(sorted(_names(target))[:5]),
            why="save_state replaces the complete folder, and would remove them",
            fix="use a folder of its own for each state, such as states/step-100",
        )


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


# ---- random states ----


def random_state(device: torch.device) -> State:
    """Return the states of the generators of torch, numpy and Python in this process."""
    kind, words, place, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, following = random.getstate()
    found: State = {
        "torch": torch.get_rng_state(),
        "numpy": {"kind": kind, "words": torch.from_numpy(np.asarray(words, dtype=np.int64)), "place": int(place),
                  "has_gauss": int(has_gauss), "gauss": float(gauss)},
        "python": {"version": version, "words": torch.tensor(numbers), "following": following},
    }  # fmt: skip
    return found | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(saved: State, device: torch.device) -> None:
    """Restore what `random_state` returned."""
    by_numpy, by_python = saved["numpy"], saved["python"]
    torch.set_rng_state(saved["torch"])
    words = by_numpy["words"].numpy().astype(np.uint32)
    np.random.set_state((by_numpy["kind"], words, by_numpy["place"], by_numpy["has_gauss"], by_numpy["gauss"]))
    random.setstate((by_python["version"], tuple(by_python["words"].tolist()), by_python["following"]))
    if device.type == "cuda":
        torch.cuda.set_rng_state(saved["cuda"], device)


# ---- the checkpoint folders of whet.Trainer ----

OPTIMIZER, SCHEDULER, SCALER, RANDOM = "optimizer", "scheduler", "scaler", "rng_state"


def read_state(folder: Path, name: str) -> State | None:
    """Return the state of this name; None if there is none. Raises StorageError for one that is damaged."""
    try:
        return stored.read_state(folder, name)
    except (OSError, ValueError, SafetensorError) as error:
        raise StorageError(
            what=f"{folder / name}.json cannot be read",
            got=f"{type(error).__name__}: {error}"[:300],
            why="its text and its tensors are written together",
            fix="resume from an earlier checkpoint",
        ) from error


class Folders:
    """The checkpoints of one training in an output folder; rank 0 writes, and all ranks learn what became of it."""

    def __init__(
        self, output_dir: Path, resumed_from: Path | None, training: find.Training, *, named: bool = False,
        is_first: bool,
    ) -> None:  # fmt: skip
        """Make it on all ranks together: its lineage has an id that rank 0 draws."""
        self.output_dir, self.is_first = output_dir, is_first
        self._places = [output_dir] if resumed_from is None else [output_dir, resumed_from.absolute().parent]
        own: find.Lineage | None = None
        with between_ranks.together("the checkpoints of this training were not found"):
            if is_first and resumed_from is not None:
                own = find.lineage_after_resume(resumed_from, output_dir, training, named=named)
            elif is_first:
                own = find.new_lineage(training)
        facts = between_ranks.of_first(None if own is None else own.facts(), schema.json_object)
        self.lineage = find.lineage_in(facts)

    def write(
        self, step: int, fill: Callable[[Path], None], facts: Mapping[str, Any], *, leaves_others: bool = False
    ) -> Path:
        """Publish the checkpoint of this step, which `fill(folder)` writes on every rank; return its folder.

        `leaves_others`: those of other trainings stay where they are. Raises StorageError on every rank if it cannot be
        written; earlier checkpoints are untouched then.
        """
        target, failed = self.output_dir / find.folder_name(step), f"the checkpoint of step {step} was not saved"
        staged: write.Staged | None = None
        with between_ranks.together(failed):
            if self.is_first:
                staged = write.Staged(self.output_dir, step, self.lineage, leaves_others=leaves_others)
        # An error of another rank leaves the folder, which the next training removes.
        with between_ranks.together(failed):
            fill(find.hidden(target, "partial")) if staged is None else staged.put(fill)
        with between_ranks.together(failed):
            if staged is not None:
                staged.put(_lift)
                staged.publish(facts)
        return target

    def named(self, known: Path) -> Path | None:
        """Return this training's checkpoint of that name; a folder that was moved may have left its place to others."""
        return find.by_name(known.name, self.lineage, *self._places, known.parent)

    def own(self) -> list[Path]:
        """Return the checkpoints of this training and of those that it resumed from, oldest step first."""
        return find.of_lineage(find.list_all(self.output_dir), self.lineage)

    def complete(self, step: int) -> Path | None:
        """Return the checkpoint of this step from which a run can resume, as rank 0 finds it; None if there is none."""
        folder, found = self.output_dir / find.folder_name(step), False
        with between_ranks.together(f"the checkpoint of step {step} was not found"):
            if self.is_first:
                found = folder in self.own() and not manifest.holds_only_model(folder)
        return folder if between_ranks.of_first(found, _is_yes_or_no) else None


def _is_yes_or_no(value: Any) -> bool:
    return isinstance(value, bool)


def _lift(folder: Path) -> None:
    """Move the files of the folder that transformers has named for the step up into the staging folder."""
    for inside in [path for path in folder.iterdir() if path.is_dir() and find.NAME.fullmatch(path.name)]:
        for path in inside.iterdir():
            rename(path, folder / path.name)
        inside.rmdir()


def training_begins(
    output_dir: Path, identity: Callable[[], tuple[str | None, bool]], *, is_first: bool
) -> find.Training:
    """Return the training that begins now on all ranks, whose machines may each have a launcher of their own.

    `identity` returns a checksum of settings, model and rows, and whether the rows are a part of it; rank 0, which
    looks for checkpoints, asks for it where the training may be started again.
    """
    seen = between_ranks.gather(find.seen_here(), find.is_seen)
    matters = is_first and (may_start_again() or any(one[0] or one[1] for one in seen))
    known, is_sure = identity() if matters else (None, True)
    return find.Training.begins(output_dir, seen, known, is_sure=is_sure)


def folder_to_resume(
    asked: find.Asked, output_dir: Path, training: find.Training | None, *, is_first: bool, cleans_up: bool
) -> Path | None:
    """Return the checkpoint to resume from, the same on every rank; None: the training begins at its first step.

    `training`: as in `find.to_resume`. `cleans_up`: this training has the lock of `output_dir`, so that what is half
    written there is no other run's. True and "auto" take the newest intact one of `output_dir`; True raises ValueError
    if there is none, as in transformers. Raises StorageError for a folder that is damaged, that holds the model alone
    or that whet has not written.
    """
    found: str | None = None

    def look() -> None:
        nonlocal found
        if cleans_up:
            write.clean_up(output_dir)
        try:
            folder = find.to_resume(asked, output_dir, training)
        except StorageError as error:
            if find.is_named(asked) and not Path(str(asked)).is_dir():
                raise ValueError(f"Can't find a valid checkpoint at {asked}") from error  # transformers' own words
            raise
        if folder is None and asked is True:
            raise ValueError(f"No valid checkpoint found in output directory ({output_dir})")
        found = None if folder is None else str(folder)

    with between_ranks.together("no checkpoint was found to resume from"):
        if is_first:
            look()
    found = between_ranks.of_first(found, schema.optional(schema.text))
    return None if found is None else Path(found)
