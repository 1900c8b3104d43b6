"""The engine of whet's commands as tests of it call it; `whet.Trainer` is transformers' loop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.engine.engine import Engine, RunSpec
from whet.engine.prepare import Ready

__all__ = ["Trainer", "TrainingArguments"]


class Trainer(Engine):
    """The engine, made from the arguments of a Trainer, with what it was given and made at hand."""

    def __init__(
        self,
        model: Any,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        compute_metrics: Callable[..., Mapping[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        evaluation: Callable[[Engine], dict[str, float]] | None = None,
        padded_length: int | None = None,
    ) -> None:
        prepared: list[Ready] = []

        def own(ready: Ready) -> Any:
            prepared.append(ready)
            return ready.objective

        spec = RunSpec(
            model=model, args=args or TrainingArguments(), train_dataset=train_dataset, eval_dataset=eval_dataset,
            processing_class=processing_class, data_collator=data_collator, padded_length=padded_length,
            compute_metrics=compute_metrics, preprocess_logits=preprocess_logits_for_metrics, evaluation=evaluation,
            callbacks=callbacks or (), optimizers=optimizers, objective=own,
        )  # fmt: skip
        super().__init__(spec)
        self.collate = prepared[0].collate

    @property
    def optimizer(self) -> Any:
        return self.events.optimizer

    @property
    def lr_scheduler(self) -> Any:
        return self.events.lr_scheduler

    @property
    def train_dataset(self) -> Any:
        return self.spec.train_dataset

    @property
    def eval_dataset(self) -> Any:
        return self.spec.eval_dataset

    @property
    def processing_class(self) -> Any:
        return self.spec.processing_class

    @processing_class.setter
    def processing_class(self, value: Any) -> None:
        self.spec = replace(self.spec, processing_class=value)
