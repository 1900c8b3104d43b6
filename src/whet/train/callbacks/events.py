"""Calls the callbacks: objects with the methods of transformers' TrainerCallback, in the order they were given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_callback import ExportableState

from whet.errors import ConfigError
from whet.train.callbacks.progress import SHOWS
from whet.train.resume import schema
from whet.train.state import State

_RESETS = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_log": ("should_log",),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
}
_FACT_OF = {"on_log": "logs", "on_evaluate": "metrics", "on_predict": "metrics"}
"""What transformers passes to an event as its fourth argument."""
_REPLACED_BY: dict[type, tuple[type, ...]] = {ProgressCallback: SHOWS, PrinterCallback: SHOWS}
"""transformers' callbacks -> whet's that show the same."""


class Events:
    """The callbacks of one Trainer, with the methods of transformers' CallbackHandler.

    Callbacks may read, and may set the flags of `control`. They must not change weights.
    """

    def __init__(self, args: Any, callbacks: Iterable[Any], *, model: Any, processing_class: Any = None) -> None:
        self.args = args
        self.callbacks: list[Any] = []
        self.control = TrainerControl()
        self.model, self.processing_class = model, processing_class
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        self.sets_left: int | None = None
        """Evaluation sets that follow the present one; None if there is only one set."""
        self.metric_was_seen = False
        """Whether one of these sets had the metric of the best model."""
        for callback in callbacks:
            self.add_callback(callback)

    def __getattr__(self, event: str) -> Any:
        """Return the method that sends an event, such as `on_evaluate(args, state, control, metrics)`."""
        if event.startswith("on_") and hasattr(TrainerCallback, event):
            return partial(self._sent, event)
        raise AttributeError(event)

    @property
    def callback_list(self) -> str:
        """The names of the callbacks' classes, one per line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or a new one of this class."""
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove this callback, or the first of this class, and return it; None if there is none."""
        found = next((one for one in self.callbacks if _matches(one, callback)), None)
        if found is not None:
            self.callbacks = [one for one in self.callbacks if one is not found]
        return found

    def remove_callback(self, callback: Any) -> None:
        """Remove this callback, or the first of this class if there is one."""
        if self.pop_callback(callback) is None and not isinstance(callback, type):
            raise ConfigError(
                what="the callback to remove is not one of this Trainer's",
                got=type(callback).__name__,
                why=f"it has {', '.join(self.callback_list.split()) or 'none'}",
                fix="pass the object that was added, or its class",
            )

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
        methods = (getattr(callback, event, None) for callback in self.callbacks)
        nothing = getattr(TrainerCallback, event)
        return any(method is not None and getattr(method, "__func__", method) is not nothing for method in methods)

    def send(self, event: str, state: TrainerState, **facts: Any) -> None:
        """Call `event` on every callback that has it."""
        for flag in _RESETS.get(event, ()):
            setattr(self.control, flag, False)
        known = {
            "model": self.model,
            "processing_class": self.processing_class,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "train_dataloader": self.train_dataloader,
            "eval_dataloader": self.eval_dataloader,
        }
        for callback in list(self.callbacks):
            if event == "on_evaluate" and self._waits_for_later_set(callback, facts.get("metrics") or {}):
                continue
            if (method := getattr(callback, event, None)) is not None:
                returned = method(self.args, state, self.control, **(known | facts))
                self.control = self.control if returned is None else returned

    def begin_set(self, n_left: int | None) -> None:
        """Begin one of several evaluation sets, with `n_left` sets after it; None: all are done."""
        self.metric_was_seen = self.metric_was_seen and self.sets_left is not None and n_left is not None
        self.sets_left = n_left

    def _waits_for_later_set(self, callback: Any, metrics: Mapping[str, Any]) -> bool:
        """Return whether early stopping waits for the metric of another evaluation set.

        transformers' callback would warn that it is disabled, at every set but the one that has the metric.
        """
        if not isinstance(callback, EarlyStoppingCallback) or self.sets_left is None:
            return False
        wanted = str(self.args.metric_for_best_model)
        found = (wanted if wanted.startswith("eval_") else f"eval_{wanted}") in metrics
        self.metric_was_seen = self.metric_was_seen or found
        return not found and (self.metric_was_seen or self.sets_left > 0)

    def call_event(self, event: str, args: Any, state: TrainerState, control: TrainerControl, **facts: Any) -> Any:
        """Send an event with these arguments; return the control after it."""
        self.control = control
        self.send(event, state, **facts)
        return self.control

    def _sent(self, event: str, args: Any, state: Any, control: Any, *fourth: Any, **facts: Any) -> TrainerControl:
        named = {_FACT_OF[event]: fourth[0]} if fourth and event in _FACT_OF else {}
        return self.call_event(event, args, state, control, **named, **facts)


def _is_export(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], dict)


def _matches(callback: Any, wanted: Any) -> bool:
    """Return whether this callback is the wanted one, or of the wanted class."""
    if not isinstance(wanted, type):
        return callback is wanted
    return isinstance(callback, (wanted, *_REPLACED_BY.get(wanted, ())))
