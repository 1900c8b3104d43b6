"""Calls the callbacks: objects with the methods of transformers' TrainerCallback, in the order they were given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

_RESETS = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_log": ("should_log",),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
}


class Events:
    """The callbacks of one Trainer. They read, and may set the flags of `control`; weights are not theirs."""

    def __init__(self, args: Any, callbacks: Iterable[Any], **known: Any) -> None:
        self.args = args
        self.callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        self.control = TrainerControl()
        self.known = known

    def heard(self, event: str) -> bool:
        """Return whether a callback does something at `event`."""
        methods = (getattr(callback, event, None) for callback in self.callbacks)
        nothing = getattr(TrainerCallback, event)
        return any(method is not None and getattr(method, "__func__", method) is not nothing for method in methods)

    def send(self, event: str, state: TrainerState, **facts: Any) -> None:
        """Call `event` on every callback that has it."""
        for flag in _RESETS.get(event, ()):
            setattr(self.control, flag, False)
        for callback in self.callbacks:
            if (method := getattr(callback, event, None)) is not None:
                returned = method(self.args, state, self.control, **self.known, **facts)
                self.control = self.control if returned is None else returned
