"""Reports metrics and checkpoints of a run to Ray Train, which stores them and restarts workers from them."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from whet.errors import ConfigError
from whet.optional import require
from whet.store import find

_INSTALL = "'ray[train]'"


class RayReport(TrainerCallback):
    """Call `ray.train.report` after each evaluation and save, and at the end of the training.

    For `callbacks` of a Trainer in the `train_loop_per_worker` of Ray's TorchTrainer. Rank 0 hands over the checkpoint;
    all ranks report, because Ray waits for all. Metrics keep the names of the log.
    """

    def __init__(self) -> None:
        self._train = _ray_train()
        self._metrics: dict[str, Any] = {}

    @staticmethod
    def last_checkpoint() -> str | None:
        """Return a folder with the last checkpoint that was reported, for `resume_from_checkpoint`; None at a start.

        After a failure, Ray starts the workers again, maybe on other machines, and hands them this checkpoint. One that
        is not in a folder of this machine is copied to a temporary folder of this process, which goes with it.
        """
        found = _ray_train().get_checkpoint()
        return None if found is None else folder_of(found)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        self._metrics |= {"step": state.global_step} | dict(logs or {})
        if "train_runtime" in (logs or {}):  # the figures of the complete training
            self._train.report(dict(self._metrics))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._train.report(dict(self._metrics))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        checkpoint = None
        if state.is_world_process_zero and (folders := find.list_all(Path(args.output_dir))):
            checkpoint = self._train.Checkpoint.from_directory(str(folders[-1]))
        self._train.report(dict(self._metrics), checkpoint=checkpoint)


def folder_of(checkpoint: Any) -> str:
    """Return a folder with the files of a Ray Checkpoint: its own, or a copy for this process alone.

    Ray's own temporary folder is shared by the workers of a node, and the second of them writes its files again while
    the first reads them.
    """
    path = Path(checkpoint.path)
    if path.is_absolute() and path.is_dir() and type(checkpoint.filesystem).__name__ == "LocalFileSystem":
        return str(path)
    copy = tempfile.mkdtemp(prefix="whet-checkpoint-")
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    return checkpoint.to_directory(copy)


def _ray_train() -> Any:
    """Return the module ray.train; raises ConfigError outside of a worker of Ray Train."""
    train = require("ray.train", needed_for="RayReport", install=_INSTALL)
    try:
        train.get_context().get_world_rank()
    except Exception as error:  # the class differs between versions of Ray
        raise ConfigError(
            what="RayReport works inside of a Ray Train worker",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            why="it reports to the TorchTrainer that started the worker",
            fix="make the Trainer and RayReport() in train_loop_per_worker, or leave RayReport out",
        ) from error
    return train
