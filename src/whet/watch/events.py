"""Calls the callbacks: objects with the methods of transformers' TrainerCallback, in the order they were given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from whet.store import schema
from whet.store.state import State

_RESETS = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_log": ("should_log",),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
}


def does_something(callbacks: Iterable[Any], event: str) -> bool:
    """Return whether one of these callbacks does something at `event`."""
    methods = (getattr(callback, event, None) for callback in callbacks)
    nothing = getattr(TrainerCallback, event)
    return any(method is not None and getattr(method, "__func__", method) is not nothing for method in methods)


class FirstStep(TrainerCallback):
    """Calls a function once a process has taken its first optimizer step: the model is another one then."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


class Events:
    """The callbacks of one Trainer.

    Callbacks may read, and may set the flags of `control`. They must not change weights.
    """

    def __init__(self, args: Any, callbacks: Iterable[Any], *, model: Any, processing_class: Any = None) -> None:
        self.args = args
        self.callbacks: list[Any] = []
        self.control = TrainerControl()
        self.model, self.processing_class = model, processing_class
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        for callback in callbacks:
            self.add_callback(callback)

    def begin(self, optimizer: Any, lr_scheduler: Any) -> None:
        """Begin a training with all flags down; callbacks get its optimizer and schedule."""
        self.control, self.optimizer, self.lr_scheduler = TrainerControl(), optimizer, lr_scheduler

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or a new one of this class."""
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def state(self) -> State:
        """Return the attributes of the callbacks that export a state, as EarlyStoppingCallback does its patience."""
        exporting = [one for one in self.callbacks if isinstance(one, ExportableState)]
        return {"exported": [[type(one).__name__, dict(one.state().get("attributes", {}))] for one in exporting]}

    def load_state(self, saved: State) -> None:
        """Restore the attributes in callbacks of the same classes, in order; settings keep their new values."""
        schema.require_all(saved, {"exported": schema.list_of(_is_export)}, "callbacks")
        left = list(saved["exported"])
        for callback in self.callbacks:
            if not isinstance(callback, ExportableState):
                continue
            found = next((entry for entry in left if entry[0] == type(callback).__name__), None)
            if found is not None:
                left.remove(found)
                for name in callback.state().get("attributes", {}).keys() & found[1].keys():
                    setattr(callback, name, found[1][name])

    def has_listener(self, event: str) -> bool:
        """Return whether a callback does something at `event`."""
        return does_something(self.callbacks, event)

    def send(self, event: str, state: TrainerState, **facts: Any) -> None:
        """Call `event` on every callback that has it."""
        for flag in _RESETS.get(event, ()):
            setattr(self.control, flag, False)
        known = {
            "model": self.model,
            "processing_class": self.processing_class,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
        }
        for callback in list(self.callbacks):
            if (method := getattr(callback, event, None)) is not None:
                returned = method(self.args, state, self.control, **(known | facts))
                self.control = self.control if returned is None else returned


def _is_export(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], dict)
