"""The engine of whet's commands under the names that tests of it use; `whet.Trainer` is transformers' loop."""

from typing import Any

from whet.config.arguments import TrainingArguments
from whet.engine import engine as trainer

__all__ = ["Trainer", "TrainingArguments"]


class Trainer(trainer.Trainer):
    """The engine, with the optimizer and the schedule of its last training at hand."""

    @property
    def optimizer(self) -> Any:
        return self.events.optimizer

    @property
    def lr_scheduler(self) -> Any:
        return self.events.lr_scheduler
