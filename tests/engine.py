"""The engine of whet's commands under the names that tests of it use; `whet.Trainer` is transformers' loop."""

from whet.config.arguments import TrainingArguments
from whet.train.trainer import Trainer

__all__ = ["Trainer", "TrainingArguments"]
