"""The saved state of a loop: models, optimizers, schedules, loaders, random numbers, and what the user registers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn

from whet.accelerator import between_ranks, loaders
from whet.accelerator.state_folder import publish, require_intact
from whet.dist import messages
from whet.errors import ConfigError, StorageError, WhetError
from whet.paths import utf8_name
from whet.train.checkpoint import content, weights
from whet.train.checkpoint.optimizer_state import OptimizerState, names_in
from whet.train.resume import schema
from whet.train.resume.parts import alike, without_tensors
from whet.train.state import State


def require_stateful(things: Sequence[Any]) -> None:
    """Refuse things that have no state to save."""
    odd = [one for one in things if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict"))]
    if odd:
        raise ConfigError(
            what="register_for_checkpointing got something without a state",
            got=", ".join(type(one).__name__ for one in odd),
            why="a state is saved by state_dict() and restored by load_state_dict()",
            fix="give it these two methods, or leave it out",
        )


def save(inner: Any, kept: Sequence[Any], folder: str | Path | None) -> Path:
    """Write the state of all ranks to the folder; the first rank writes, and every rank raises what it raises."""
    target = _named(folder, "save_state")
    _require_no_gradients(inner)
    randoms = between_ranks.gather(random_state(inner.device), schema.json_object)
    own: BaseException | None = None
    if inner.is_main_process:
        try:
            parts = _collected(inner, kept) | {"random": {str(rank): one for rank, one in enumerate(randoms)}}
            publish(target, lambda place: _write(inner, parts, place), {"n_ranks": inner.num_processes})
        except BaseException as error:  # such as one of a user's state_dict: the other ranks wait for this one
            own = error
    _fail_together(own, f"the state in {target} was not saved")
    return target


def load(inner: Any, kept: Sequence[Any], folder: str | Path | None) -> None:
    """Restore the state from the folder, on every rank; raises StorageError if it is not that of this loop."""
    place = _named(folder, "load_state")
    own: BaseException | None = None
    try:
        _load(inner, kept, place)
    except BaseException as error:
        own = error
    _fail_together(own, f"the state in {place} was not loaded")


def _fail_together(own: BaseException | None, what: str) -> None:
    """Raise this rank's error; where only others have one, raise the first of theirs, so that none of them waits."""
    found: Any = own and f"{type(own).__name__}: {own}"[:300]
    seen = between_ranks.gather(messages.error_facts(own) if isinstance(own, WhetError) else found, _is_outcome)
    if own is not None:
        raise own
    rank, error = next(((rank, one) for rank, one in enumerate(seen) if one is not None), (0, None))
    if isinstance(error, list):
        raise messages.error_from(error)
    if error is not None:
        raise StorageError(
            what=what,
            got=f"rank {rank}: {error}",
            why="ranks save and load together, so that none waits for one that has failed",
            fix=f"fix what rank {rank} reports",
        )


def _is_outcome(value: Any) -> bool:
    return value is None or isinstance(value, str) or messages.is_error(value)


def _load(inner: Any, kept: Sequence[Any], place: Path) -> None:
    facts = require_intact(place)
    if facts.get("n_ranks") != inner.num_processes:
        raise ConfigError(
            what=f"{place} is the state of another number of ranks",
            got=f"{facts.get('n_ranks')} ranks then, {inner.num_processes} now",
            why="each rank resumes with random numbers and rows of its own",
            fix=f"start {facts.get('n_ranks')} ranks, or load the weights alone: {place / _weights_name(0)}",
        )
    try:
        _restore(inner, kept, content.read(place), place)
    except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise StorageError(
            what=f"{place} does not fit what was prepared",
            got=f"{type(error).__name__}: {error}"[:300],
            why="a state is loaded into the same models, optimizers, schedules and loaders, in the same order",
            fix="prepare and register the same things in the same order as the loop that saved it",
        ) from error


def _named(folder: str | Path | None, method: str) -> Path:
    if folder is None:
        raise ConfigError(
            what=f"{method} got no folder",
            why="whet.Accelerator does not number folders by itself",
            fix=f"name it: {method}('states/step-100')",
        )
    return Path(folder)


def _require_no_gradients(inner: Any) -> None:
    if not inner.sync_gradients:
        raise ConfigError(
            what="save_state between two micro-batches of a step would lose their gradients",
            got=f"micro-batch {inner.step % inner.gradient_accumulation_steps} of {inner.gradient_accumulation_steps}",
            why="a state holds weights and moments, and no gradients",
            fix="call it after optimizer.step(): if accelerator.sync_gradients: accelerator.save_state(...)",
        )


def _weights_name(number: int) -> str:
    return "model.safetensors" if number == 0 else f"model_{number}.safetensors"


def _models(inner: Any) -> list[nn.Module]:
    return [inner.unwrap_model(model) for model in inner._models]


def _write(inner: Any, parts: dict[str, State], folder: Path) -> None:
    text, tensors = content.split_parts(parts)
    (folder / content.STATE).write_text(text, "utf-8")
    content.write_tensors(tensors, folder)
    with utf8_name(folder) as named:
        for number, model in enumerate(_models(inner)):
            weights.save_module(model.state_dict(), named / _weights_name(number))


def _collected(inner: Any, kept: Sequence[Any]) -> dict[str, State]:
    holder = nn.ModuleList(_models(inner))
    parts: dict[str, State] = {"loop": {"accumulated": inner.step, "models": len(holder)}}
    for number, wrapped in enumerate(inner._optimizers):
        parts[f"optimizer_{number}"] = OptimizerState(wrapped.optimizer, names_in(wrapped.optimizer, holder)).state()
    for number, schedule in enumerate(inner._schedulers):
        parts[f"schedule_{number}"] = without_tensors(schedule.state_dict())
    for number, loader in enumerate(inner._dataloaders):
        parts[f"loader_{number}"] = loaders.state_of(loader)
    for number, one in enumerate(kept):
        parts[f"registered_{number}"] = _with_names(one)
    if inner.scaler is not None:
        parts["scaler"] = dict(inner.scaler.state_dict())
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


def _restore(inner: Any, kept: Sequence[Any], saved: dict[str, State], folder: Path) -> None:
    models = _models(inner)
    holder = nn.ModuleList(models)
    wanted = _collected(inner, kept).keys() | {"random"}
    if saved.keys() != wanted or saved["loop"]["models"] != len(models):
        raise ValueError(f"the state holds {', '.join(sorted(saved))}; this loop has {', '.join(sorted(wanted))}")
    with utf8_name(folder) as named:
        for number, model in enumerate(models):
            weights.load_module(model, [named / _weights_name(number)])
    for number, wrapped in enumerate(inner._optimizers):
        state = OptimizerState(wrapped.optimizer, names_in(wrapped.optimizer, holder))
        state.load_state(saved[f"optimizer_{number}"])
    for number, schedule in enumerate(inner._schedulers):
        schedule.load_state_dict(alike(saved[f"schedule_{number}"], schedule.state_dict()))
    for number, loader in enumerate(inner._dataloaders):
        loaders.load_state(loader, saved[f"loader_{number}"])
    for number, one in enumerate(kept):
        one.load_state_dict(saved[f"registered_{number}"])
    if inner.scaler is not None:
        inner.scaler.load_state_dict(saved["scaler"])
    inner.step = int(saved["loop"]["accumulated"])
    set_random_state(saved["random"][str(inner.process_index)], inner.device)


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
