"""Training and evaluation through the methods that users override: `compute_loss` and what calls it.

Batches are padded, as a user's code expects them; a model of a known family computes them without the padding
(`methods/unpad/method.py`). Losses of micro-batches are combined as in transformers' Trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import nested_detach

from whet.data.batch import Batch
from whet.data.columns import read_by
from whet.data.padding import NO_PADDING
from whet.errors import ConfigError, WhetError
from whet.log import logger
from whet.models import attention, packable
from whet.models.bad_batch import explained
from whet.models.called_with import CACHE_NAMES
from whet.models.packed import PackedModel, packed_model
from whet.models.wrapped import unwrapped
from whet.objectives.base import IGNORED, Collate
from whet.objectives.collated import seed_torch, without_cache
from whet.objectives.heads import ALL_LAYERS, asks_for_layers
from whet.objectives.own_loss import OwnLoss, loss_parts_of
from whet.own_loop import held
from whet.own_loop.optimize import optimize
from whet.train.compat import overrides
from whet.train.compat.public import PublicTrainer
from whet.train.step import LossParts, StepLoss

if TYPE_CHECKING:
    from whet.config.arguments import TrainingArguments

_LOSS_KEY = "loss"


class UserLoss:
    """Padded batches for the Trainer's `training_step` and `prediction_step`.

    Only timed passes before the training use `forward` and `loss_sum`: they do not call the user's loss.
    """

    packed = False
    padding = NO_PADDING

    def __init__(self, model: nn.Module, collate: Collate, encoders: Sequence[PackedModel]) -> None:
        self.model, self.encoders = model, tuple(encoders)
        self.packed_model = encoders[0] if encoders else None
        self.watch = held.Watch(self.encoders if held.holds(model) else ())
        self._rows = OwnLoss(model, collate)
        self._read = read_by(model)
        self.parts: dict[str, Tensor] = {}
        """Named parts of the loss that whet's `compute_loss` returned last, if it was the model's own."""

    def batch(
        self, dataset: Any, rows: Sequence[int] | np.ndarray, first_slot: int, padded_to: np.ndarray | None = None
    ) -> Batch:
        return held.with_computed_tokens(self._rows.batch(dataset, rows, first_slot), self.packed_model)

    @property
    def no_labels(self) -> WhetError | None:
        """Why the last batch without labels has none."""
        return self._rows.no_labels

    def count(self, batch: Batch) -> int:
        return self._rows.count(batch)

    def forward(self, batch: Batch, *, seed: int, step: int) -> Any:
        seed_torch(seed, step, batch.first_slot)
        read = {name: value for name, value in batch.inputs.items() if self._read is None or name in self._read}
        with explained(self.model, read), without_cache(self.model):
            return self.model(**read)

    def loss_sum(self, output: Any, batch: Batch) -> Tensor:
        values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else [output]
        sums = [value.float().sum() for value in values if isinstance(value, Tensor) and value.requires_grad]
        return torch.stack(sums).sum()

    def loss_parts(self, output: Any, batch: Batch) -> dict[str, Tensor]:
        return {}

    def logits(self, output: Any, batch: Batch) -> tuple[np.ndarray, ...]:
        return self._rows.logits(output, batch)


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
        return held.with_computed_tokens(super().batch(dataset, rows, first_slot), self.packed_model)


def unpadded(objective: OwnLoss, args: TrainingArguments) -> OwnLoss:
    """Return the objective with a model that does not compute padding; unchanged if it has to."""
    model, packed = objective.model, _without_padding(objective.model, args)
    if not packed:
        return objective
    if held.holds(model):
        return held.HeldLoss(model, objective.collate, packed)
    return UnpaddedLoss(model, objective.collate, packed[0])


def is_used(trainer: PublicTrainer) -> bool:
    """Return whether the user's code or label smoothing takes part in the training batches or their loss."""
    smoothed = bool(trainer.args.label_smoothing_factor)
    by_user = overrides.changed(trainer, *overrides.LOSS, *overrides.LOADER)
    return smoothed or trainer.compute_loss_func is not None or by_user


def build(trainer: PublicTrainer, collate: Collate) -> UserLoss:
    """Return the objective; the model is changed so that it computes padded batches without their padding."""
    if trainer.args.max_tokens_per_batch is not None:
        smoothed = trainer.args.label_smoothing_factor
        asked = "label_smoothing_factor" if smoothed else "a loss of your own"
        raise ConfigError(
            what=f"max_tokens_per_batch does not go with {asked}",
            got=f"label_smoothing_factor={smoothed}" if smoothed else type(trainer).__name__,
            why="the loss gets complete batches: splitting one would change a mean over its rows",
            fix="leave --max_tokens_per_batch out, and lower --per_device_train_batch_size instead",
        )
    return UserLoss(trainer.model, collate, _without_padding(trainer.model, trainer.args))


def gradients(
    trainer: PublicTrainer, batches: Sequence[Batch], *, step: int, between: Callable[[], None] = lambda: None
) -> StepLoss:
    """Leave in .grad the gradient of the losses that `training_step` returns; return their sum.

    Losses are averaged over the ranks; parts of the loss are the means over the micro-batches.
    """
    seed, objective = trainer.args.seed, trainer.objective
    assert isinstance(objective, UserLoss)
    trainer.precision.begin(seed, step)
    n_items = n_items_in(trainer, [batch.inputs for batch in batches])
    n_items = trainer.sync.total_targets(n_items)
    trainer.current_gradient_accumulation_steps = len(batches)
    total, loss_parts = torch.zeros(()), LossParts(len(batches))
    for number, batch in enumerate(batches):
        if number:
            between()
        trainer.sync.begin_micro_batch(is_last=number + 1 == len(batches))
        seed_torch(seed, step, batch.first_slot)
        objective.parts = {}
        loss = trainer.training_step(
            trainer.model, dict(batch.inputs), **overrides.accepted(trainer.training_step, num_items_in_batch=n_items)
        )
        loss = _require_scalar(loss, "training_step", trainer).detach()
        total = total.to(loss.device) + loss
        loss_parts.add(objective.parts)
    n_ranks = trainer.sync.n_ranks
    return StepLoss(total / n_ranks, {name: part / n_ranks for name, part in loss_parts.means.items()})


def training_step(trainer: PublicTrainer, model: nn.Module, inputs: Mapping[str, Any], n_items: Any) -> Tensor:
    """Run one micro-batch forward and backward; return its part of the step's loss."""
    if not model.training:
        model.train()
    inputs = trainer._prepare_inputs(dict(inputs))
    options = overrides.accepted(trainer.compute_loss, num_items_in_batch=n_items)
    with _forward(trainer, model, inputs):
        loss = _require_scalar(trainer.compute_loss(model, inputs, **options), "compute_loss", trainer)
    if not _is_scaled(trainer, n_items if options else None):
        loss = loss / trainer.current_gradient_accumulation_steps
    backward(trainer, loss)
    return loss.detach()


def backward(trainer: PublicTrainer, loss: Tensor) -> None:
    """Run the backward pass of a user's loss: as in transformers, the gradients of the ranks are averaged."""
    n_ranks = trainer.sync.n_ranks
    trainer.precision.backward(trainer.sync.before_backward(loss / n_ranks if n_ranks > 1 else loss))


@contextmanager
def _forward(trainer: PublicTrainer, model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Run a user's loss in the run's precision, exact for targets in padding; explain errors of rows that do not fit.

    The loss may remove columns from `inputs`.
    """
    inputs = dict(inputs)
    objective, training = trainer.objective, torch.is_grad_enabled()
    with ExitStack() as stack:
        if isinstance(objective, UserLoss):
            stack.enter_context(objective.watch.once(training=training))
            inside = [packed.module for packed in objective.encoders]
            stack.enter_context(held.targets_of(inside, inputs))
        else:
            stack.enter_context(held.targets_of([unwrapped(model)], inputs))
        stack.enter_context(trainer.precision.forward())
        stack.enter_context(explained(model, inputs))
        stack.enter_context(without_cache(model))
        yield


def compute_loss(
    trainer: PublicTrainer, model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool, n_items: Any
) -> Any:
    """Return the loss of a padded batch as transformers' Trainer computes it, with the outputs if asked for."""
    inputs = dict(inputs)
    smoother, by_user = trainer.label_smoother, trainer.compute_loss_func
    labels = inputs.pop("labels", None) if smoother is not None or by_user is not None else None
    if trainer.model_accepts_loss_kwargs and n_items is not None:
        inputs["num_items_in_batch"] = n_items
    outputs = model(**inputs)
    if by_user is not None:
        loss = by_user(outputs, labels, **overrides.accepted(by_user, num_items_in_batch=n_items))
    elif labels is not None:
        assert smoother is not None
        loss = smoother(outputs, labels, shift_labels=trainer.loss_shifts_labels, num_items_in_batch=n_items)
    else:
        loss = _loss_in(outputs, getattr(trainer.objective, "no_labels", None))
        if isinstance(trainer.objective, UserLoss):
            trainer.objective.parts = loss_parts_of(outputs)
    if model.training and n_items is not None and (trainer.model_accepts_loss_kwargs or by_user is not None):
        loss = loss * trainer.sync.n_ranks  # it is divided by the targets of all ranks, and then averaged over them
    return (loss, outputs) if return_outputs else loss


def prediction_step(
    trainer: PublicTrainer,
    model: nn.Module,
    inputs: Mapping[str, Any],
    loss_only: bool,
    ignore_keys: Sequence[str] | None,
) -> tuple[Any, Any, Any]:
    """Return loss, predictions and labels of a padded batch; None for each that does not exist."""
    names = trainer.label_names
    has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
    has_loss = has_labels or (not names and (inputs.get("return_loss") or trainer.can_return_loss))
    inputs = trainer._prepare_inputs(dict(inputs))
    labels = nested_detach(tuple(inputs.get(name) for name in names)) if has_loss else None
    loss = None
    with torch.no_grad(), _forward(trainer, model, inputs):
        if has_loss:
            n_items = n_items_in(trainer, [inputs])
            options = overrides.accepted(trainer.compute_loss, num_items_in_batch=n_items)
            loss, outputs = trainer.compute_loss(model, inputs, return_outputs=True, **options)
            loss = loss.detach().mean()
        else:
            outputs = model(**inputs)
    if loss_only:
        return loss, None, None
    logits = nested_detach(predictions_in(outputs, _ignored(trainer, ignore_keys), with_loss=has_loss))
    logits = logits[0] if isinstance(logits, tuple) and len(logits) == 1 else logits
    return loss, logits, labels[0] if labels is not None and len(labels) == 1 else labels


def n_items_in(trainer: PublicTrainer, batches: Sequence[Mapping[str, Any]]) -> Tensor | None:
    """Return the number of targets of a step, labels other than -100; None if no loss divides by it."""
    if not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None):
        return None
    found = [batch.get("shift_labels", batch.get("labels")) for batch in batches]
    if not found or not all(isinstance(labels, Tensor) for labels in found):
        return None
    shifted = [trainer.loss_shifts_labels and "shift_labels" not in batch for batch in batches]
    counts = [
        (labels[..., 1:] if shift else labels).ne(IGNORED).sum() for labels, shift in zip(found, shifted, strict=True)
    ]
    return torch.stack(counts).sum().to(trainer.device)


def predictions_in(outputs: Any, ignored: Sequence[str], *, with_loss: bool) -> Any:
    """Return a model's outputs without its loss and the ignored ones, as transformers' Trainer does."""
    if isinstance(outputs, Mapping):
        left_out = {*ignored, *([_LOSS_KEY] if with_loss else [])}
        return tuple(value for name, value in outputs.items() if name not in left_out)
    return outputs[1:] if with_loss and isinstance(outputs, tuple | list) else outputs


def _ignored(trainer: PublicTrainer, asked: Sequence[str] | None) -> Sequence[str]:
    config = getattr(trainer.model, "config", None)
    names = getattr(config, "keys_to_ignore_at_inference", CACHE_NAMES) if asked is None else asked
    return [*names, *CACHE_NAMES] if set(names) & set(CACHE_NAMES) else names


def _is_scaled(trainer: PublicTrainer, n_items: Any) -> bool:
    """Return whether a loss is already divided by the targets of all micro-batches, as transformers decides."""
    if trainer.loss_is_scaled_for_ga is not None:
        return trainer.loss_is_scaled_for_ga
    return (trainer.model_accepts_loss_kwargs and n_items is not None) or trainer.compute_loss_func is not None


def _loss_in(outputs: Any, why_none: WhetError | None) -> Tensor:
    if isinstance(outputs, Mapping):
        if _LOSS_KEY not in outputs:
            if why_none is not None:
                raise why_none
            raise ConfigError(
                what="the model returned no loss",
                got=f"outputs {', '.join(outputs)}",
                why="compute_loss of whet's Trainer takes the model's own loss",
                fix="give rows with labels, or compute the loss in compute_loss without super()",
            )
        return outputs[_LOSS_KEY]
    return outputs[0] if isinstance(outputs, tuple | list) else outputs


def _require_scalar(found: Any, method: str, trainer: PublicTrainer) -> Tensor:
    if isinstance(found, Tensor) and found.numel() == 1:
        return found.reshape(())
    raise ConfigError(
        what=f"{method} of {type(trainer).__name__} returned no loss",
        got=f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__,
        why="training needs one number to minimise",
        fix=f"return a scalar tensor from {method}, such as loss.mean()",
    )


def _without_padding(model: nn.Module, args: TrainingArguments) -> list[PackedModel]:
    """Make encoders of known families compute padded batches without their padding; return those that do.

    They may be inside a module of the user's own. The span loss of question answering heads reads padding tokens, as
    far as `padding_in_loss` asks for it.
    """
    exact = reads_spans(model) or args.padding_in_loss == "all"
    if held.holds(model):
        return _held_without_padding(model, args, args.padding_in_loss if exact else "auto")
    if (why := why_padded(model, args)) is not None:
        log_padded(model, why, args)
        return []
    optimize(model, padding=args.padding_in_loss if exact else "sampled", last_block_tokens=args.last_block_tokens)
    packed = packed_model(model)
    return [] if packed is None else [packed]


def _held_without_padding(model: nn.Module, args: TrainingArguments, amount: Any) -> list[PackedModel]:
    """Do so for the encoders inside a module; those that the user's own `whet.optimize` changed stay as they are."""
    if before := held.changed_in(model):
        return before
    encoders = held.encoders_in(model)
    for encoder in encoders:
        if (why := held.why_padded(encoder) or why_padded(encoder.model, args)) is not None:
            log_padded(encoder.model, why, args)
            return []
    if encoders:
        optimize(model, padding=amount, last_block_tokens=args.last_block_tokens)
        held.mark(model)
    return held.changed_in(model)


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
    if asks_for_layers(model):
        return f"its configuration asks for {' or '.join(ALL_LAYERS)}, which exist only for padded batches"
    if args.torch_compile:
        return "a compiled model with your own loss or head reads padded batches"
    if args.attn_implementation not in (None, attention.NAME):
        return f"attention {args.attn_implementation} does not support packed rows"
    if reads_spans(model) and args.padding_in_loss == "none":
        return (
            "the model's own loss counts padding; --padding_in_loss sampled runs without most of it, with the loss"
            " within 0.02 % in the mean"
        )
    return None
