"""Every command of `whet`: those of the tasks (`whet.tasks`), and those that belong to none."""

from collections.abc import Sequence
from importlib import import_module

from whet import tasks
from whet.config.command_line import Command


def _texts(does: tasks.Does) -> dict[str, str]:
    return {name: entry.text for name, entry in tasks.entries().items() if entry.does == does}


_TRAIN, _ANSWER, _DEMONSTRATE = _texts("trains"), _texts("answers"), _texts("demonstrates")
COMMANDS = {
    **_TRAIN,
    **_ANSWER,
    "plan": "forecast what a training will take, before it runs",
    "tune": "search settings by training, and keep the best model",
    "merge": "fold a trained adapter into its model",
    "predict": "write the predictions of a trained model for a file",
    "export": "write a trained model for ONNX Runtime or OpenVINO, checked",
    **_DEMONSTRATE,
    "watch": "show how runs are going",
    "run": "run an unmodified script of another library at whet's speed",
    "launch": "start a command on this machine's cores, once for each rank",
    "k8s": "train on Kubernetes: render, submit, status, logs, delete",
    "migrate": "turn a command line of other programs into whet's",
    "bench-methods": "measure each training technique on your model and machine",
    "report": "write a page about a run, or several: errors, curves, settings",
    "bundle": "write whet and its packages into one file, to install offline",
    "doctor": "check this machine and installation, with advice",
}
"""Name -> its line in `whet --help`."""
RESUMABLE = frozenset({*_TRAIN, "tune"})
"""The commands that continue with --resume_from_checkpoint."""
RANKED = frozenset(_TRAIN)
"""The commands that several ranks can run together."""
STOPPABLE = RESUMABLE | _DEMONSTRATE.keys()
"""The commands that a signal ends with a checkpoint."""
TRAINING = STOPPABLE | {"bench-methods"}
"""The commands that train."""
ANSWERING = {*_ANSWER, "predict", "export"}
"""The commands that read a text with a trained model."""
WITHOUT_TORCH = {"bundle", "run", "launch", "k8s", "migrate", "watch", "report"}
"""The commands that do not import torch."""


def command(name: str, words: Sequence[str] = ()) -> Command:
    """Return the command of this name, with its options; a plan has those of the task in the words after it."""
    if name in tasks.entries():
        return tasks.command(name)
    module = import_module(f"whet.cli.{name.replace('-', '_')}")
    return module.command_for(words) if hasattr(module, "command_for") else module.COMMAND
