"""Encoders inside a module of the user's own, as whet's Trainer trains them: without padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.data.batch import Batch
from whet.log import logger
from whet.methods.unpad import calls
from whet.methods.unpad import method as unpad
from whet.models import record
from whet.models.adapters import unwrapped
from whet.models.packable import family_of
from whet.models.packed import PackedModel, packed_model
from whet.objectives.base import Collate, Rows
from whet.objectives.own_loss import OwnLoss
from whet.own_loop import locate
from whet.own_loop.changes import changes
from whet.own_loop.optimize import restore

_BY_TRAINER = "encoders of the Trainer"
"""The entry in the record of a module whose encoders a Trainer has changed."""


class NestedLoss(OwnLoss):
    """The loss of a module that holds encoders: these compute padded calls without padding.

    The loss may compare the rows of a batch with each other, so a batch stays in one piece. Dropout masks come from
    torch's generator, which is seeded for each micro-batch.
    """

    def __init__(self, model: nn.Module, collate: Collate, packed: Sequence[PackedModel]) -> None:
        super().__init__(model, collate)
        self.nested = packed
        self.packed_model = self.nested[0]
        self._padding_check = PaddingCheck(self.nested)

    def batch(self, dataset: Any, rows: Rows, first_slot: int, padded_to: np.ndarray | None = None) -> Batch:
        return with_computed_tokens(super().batch(dataset, rows, first_slot, padded_to), self.packed_model)

    def forward(self, batch: Batch, *, seed: int, step: int) -> Any:
        with (
            targets_of([packed.module for packed in self.nested], batch.inputs),
            self._padding_check.once(training=self.model.training),
        ):
            return super().forward(batch, seed=seed, step=step)


class PaddingCheck:
    """Looks once whether a loss reads hidden states of padding, of which a few stand for all, and logs it."""

    def __init__(self, packed: Sequence[PackedModel]) -> None:
        sampled: list[Any] = [one.module for one in packed if unpad.padding_of(one.module) == "sampled"]
        self._encoders: list[nn.Module] = [model.base_model for model in sampled]
        self._is_done = self._has_warned = False

    @contextmanager
    def once(self, *, training: bool) -> Iterator[None]:
        """Watch the gradients of the encoders' results that are computed in the block, the first time in training."""
        if self._is_done or not training:
            yield
            return
        self._is_done = True
        with ExitStack() as hooks:
            for encoder in self._encoders:
                hooks.callback(encoder.register_forward_hook(self._look, with_kwargs=True).remove)
            yield

    def _look(self, encoder: nn.Module, given: tuple[Any, ...], options: Mapping[str, Any], out: Any) -> None:
        call = calls.named(encoder, given, options) or {}
        mask, states = call.get("attention_mask"), getattr(out, "last_hidden_state", None)
        if not (isinstance(mask, Tensor) and isinstance(states, Tensor)) or mask.shape != states.shape[:2]:
            return
        if states.requires_grad:
            states.register_hook(lambda grad: self._warn_if_read(encoder, grad, mask))

    def _warn_if_read(self, encoder: nn.Module, grad: Tensor, mask: Tensor) -> None:
        padding = mask.to(grad.device) == 0
        if self._has_warned or not bool((grad.detach().abs().amax(-1) * padding).any()):
            return
        self._has_warned = True
        logger.warning(
            "the loss reads hidden states of padding of %s: a few padding tokens a row stand for all, and the loss is"
            " near that of a padded run; --padding_in_loss all computes each of them",
            type(encoder).__name__,
        )


@contextmanager
def targets_of(models: Sequence[nn.Module], inputs: Mapping[str, Any]) -> Iterator[None]:
    """Note a batch's labels for every one of these models: those at padding tokens need each of these tokens."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(calls.targets_of(model, inputs))
        yield


def holds(model: nn.Module) -> bool:
    """Return whether the model's encoders are somewhere inside of it, and not where transformers has the one of a head.

    So it is with modules that are no model of transformers, and with models of a user's own that hold encoders of known
    families under names of their own, or several.
    """
    base = unwrapped(model)
    return not isinstance(base, PreTrainedModel) or locate.holds_others(base)


def encoders_in(model: nn.Module) -> list[locate.Encoder]:
    """Return the encoders inside a module; each of an unknown family is tried first."""
    locate.prove_in(model)
    return [found for found in locate.encoders_in(model) if isinstance(unwrapped(found.model), PreTrainedModel)]


def why_padded(encoder: locate.Encoder) -> str | None:
    """Return why padded batches of an encoder inside a module cannot be computed without padding."""
    family = family_of(encoder.model)
    if family is not None and family.causal and not encoder.padding_is_masked:
        return (
            "a decoder's hidden states of padding may be read; if they are not, call whet.optimize(model,"
            " padding='none') before the Trainer is made"
        )
    return None


def changed_in(model: nn.Module) -> list[PackedModel]:
    """Return the encoders in the module that run without padding."""
    found = [packed_model(encoder.model) for encoder in locate.encoders_in(model)]
    return [packed for packed in found if packed is not None and changes(packed.module) is not None]


def mark_by_trainer(model: nn.Module) -> None:
    """Note that a Trainer has changed the encoders in the module: the next one may change them otherwise."""
    record.keep(model, _BY_TRAINER, True)


def restore_marked(model: nn.Module) -> None:
    """Undo what an earlier Trainer did to the encoders inside; what the user's `whet.optimize` did stays."""
    if record.take(model, _BY_TRAINER):
        restore(model)


def with_computed_tokens(batch: Batch, packed: PackedModel | None) -> Batch:
    """Return the batch with the number of tokens that a model changed by `whet.optimize` computes of it.

    A batch without one mask for its token ids stays as it is: what a module computes of it is not known.
    """
    ids, mask = batch.inputs.get("input_ids"), batch.inputs.get("attention_mask")
    shaped = isinstance(ids, Tensor) and isinstance(mask, Tensor) and mask.dim() > 1 and mask.shape == ids.shape
    return replace(batch, n_computed=unpad.n_computed(packed, batch.inputs)) if packed and shaped else batch
