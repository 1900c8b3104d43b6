"""Objectives that run a model's own loss: on padded batches whose encoder computes them without their padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import LabelSmoother

from whet.config.methods import may_use_graphs
from whet.data.batch import Batch
from whet.engine.routing import require_whets_loss
from whet.log import logger
from whet.methods.unpad import calls
from whet.methods.unpad import method as unpad
from whet.models import attention, packable
from whet.models.adapters import unwrapped
from whet.models.packed import PackedModel, packed_model
from whet.objectives.base import Collate, Objective
from whet.objectives.heads import ALL_LAYERS, asks_for_layers
from whet.objectives.own_loss import ACCURACY, NEXT_WORD_HEADS, OwnLoss
from whet.own_loop import locate
from whet.own_loop.optimize import optimize

if TYPE_CHECKING:
    from whet.config.arguments import TrainingArguments


class UnpaddedLoss(OwnLoss):
    """The model's own loss if it is not known what its head reads: the encoder computes padded calls without padding.

    Dropout masks come from torch's generator, which is seeded for each micro-batch.
    """

    packed = True

    def __init__(self, model: nn.Module, collate: Collate, packed_model: PackedModel) -> None:
        super().__init__(model, collate)
        self.packed_model = packed_model

    def batch(
        self, dataset: Any, rows: Sequence[int] | np.ndarray, first_slot: int, padded_to: np.ndarray | None = None
    ) -> Batch:
        return _with_computed_tokens(super().batch(dataset, rows, first_slot), self.packed_model)


class SmoothedLoss(OwnLoss):
    """The cross entropy of smoothed labels, from the model's logits: the model is called without the labels."""

    def __init__(self, model: nn.Module, collate: Collate, packed_model: PackedModel | None, share: float) -> None:
        super().__init__(model, collate)
        self.packed_model = packed_model
        self._smoother = LabelSmoother(epsilon=share)
        self._shifts = type(unwrapped(model)).__name__.endswith(NEXT_WORD_HEADS)

    def batch(
        self, dataset: Any, rows: Sequence[int] | np.ndarray, first_slot: int, padded_to: np.ndarray | None = None
    ) -> Batch:
        given = super().batch(dataset, rows, first_slot)
        inputs = dict(given.inputs)
        labels = {name: inputs.pop(name) for name in ("labels",) if name in inputs}
        return _with_computed_tokens(replace(given, inputs=inputs, labels=labels), self.packed_model)

    def count(self, batch: Batch) -> int:
        return super().count(_with_labels(batch))

    def forward(self, batch: Batch, *, seed: int, step: int) -> Any:
        with calls.targets_of(unwrapped(self.model), {**batch.inputs, **batch.labels}):
            return super().forward(batch, seed=seed, step=step)

    def loss_sum(self, output: Any, batch: Batch) -> Tensor:
        if not batch.labels and self.no_labels is not None:
            raise self.no_labels
        return self._smoother(output, batch.labels["labels"], shift_labels=self._shifts, num_items_in_batch=1).float()

    def loss_parts(self, output: Any, batch: Batch) -> dict[str, Tensor]:
        counts = self.counts_hits and not self.model.training
        return {ACCURACY: self.hits(output, _with_labels(batch)).float()} if counts else {}


def _with_labels(batch: Batch) -> Batch:
    return replace(batch, inputs={**batch.inputs, **batch.labels})


def _with_computed_tokens(batch: Batch, packed: PackedModel | None) -> Batch:
    """Return the batch with the number of tokens that a model changed by `whet.optimize` computes of it.

    A batch without one mask for its token ids stays as it is: what a module computes of it is not known.
    """
    ids, mask = batch.inputs.get("input_ids"), batch.inputs.get("attention_mask")
    shaped = isinstance(ids, Tensor) and isinstance(mask, Tensor) and mask.dim() > 1 and mask.shape == ids.shape
    return replace(batch, n_computed=unpad.n_computed(packed, batch.inputs)) if packed and shaped else batch


def unpadded(objective: Objective, args: TrainingArguments) -> Objective:
    """Return a model's own loss with the model changed so that it computes no padding; as it is if it has to."""
    assert isinstance(objective, OwnLoss)
    packed = _without_padding(objective.model, args)
    return objective if packed is None else UnpaddedLoss(objective.model, objective.collate, packed)


def smoothed(model: nn.Module, collate: Collate, args: TrainingArguments) -> SmoothedLoss:
    """Return the objective of smoothed labels; the model is changed so that it computes batches without padding."""
    require_whets_loss(model)
    return SmoothedLoss(model, collate, _without_padding(model, args), args.label_smoothing_factor)


def _without_padding(model: nn.Module, args: TrainingArguments) -> PackedModel | None:
    """Make a model of a known family compute padded batches without their padding; None: it needs its padding.

    The span loss of question answering heads reads padding tokens, as far as `padding_in_loss` asks for it.
    """
    if (why := why_padded(model, args)) is not None:
        log_padded(model, why, args)
        return None
    exact = reads_spans(model) or args.padding_in_loss == "all"
    padding = args.padding_in_loss if exact else "sampled"
    optimize(model, padding=padding, last_block_tokens=args.last_block_tokens, cuda_graphs=may_use_graphs(args))
    return packed_model(model)


def log_padded(model: nn.Module, why: str, args: TrainingArguments) -> None:
    """Log why batches run padded: as a warning if the model's family and the settings allow running without padding."""
    odd = packable.why_padded(model) is None and args.attn_implementation in (None, attention.NAME)
    say = logger.warning if odd and not reads_spans(model) else logger.info
    say("batches run padded (%s): %s", type(unwrapped(model)).__name__, why)


def reads_spans(model: nn.Module) -> bool:
    """Return whether this is a question answering model: the softmax of its own loss runs over padding too."""
    return type(unwrapped(model)).__name__.endswith("ForQuestionAnswering")


def why_padded(model: nn.Module, args: TrainingArguments) -> str | None:
    """Return why padded batches cannot be computed without their padding; None if they can."""
    if (why := packable.why_padded(model)) is not None:
        return why
    base = unwrapped(model)
    if not isinstance(base, PreTrainedModel) or locate.holds_others(base):
        return "it holds encoders where transformers has none: call whet.optimize(model) first"
    if asks_for_layers(model):
        return f"its configuration asks for {' or '.join(ALL_LAYERS)}, which exist only for padded batches"
    if args.torch_compile:
        return "a compiled model with smoothed labels or an unknown head reads padded batches"
    if args.attn_implementation not in (None, attention.NAME):
        return f"attention {args.attn_implementation} does not support packed rows"
    if reads_spans(model) and args.padding_in_loss == "none":
        return (
            "the model's own loss counts padding; --padding_in_loss sampled runs without most of it, with the loss"
            " within 0.02 % in the mean"
        )
    return None
