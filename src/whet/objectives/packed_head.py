"""Models of known families with a head of transformers: the encoder runs without padding, the head on what it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whet.data import sequences
from whet.data.batch import Batch
from whet.kernels.batch_position import BatchPosition
from whet.log import logger
from whet.models import attention, last_block
from whet.models.packed import PackedModel, explained, position_of
from whet.objectives import heads, unpadding
from whet.objectives.base import IGNORED, Collate, Rows
from whet.objectives.collated import run_seeded, seed_torch
from whet.objectives.heads import Reads
from whet.objectives.own_loss import OwnLoss


class PackedHead(OwnLoss):
    """The model's own loss, on batches of any collator that run without their padding.

    The encoder computes the tokens end to end. The head sees a batch of those tokens alone that it reads: the first of
    each sequence, or, for token labels, those that have a label. Dropout masks follow (seed, step, row, position).
    """

    packed = True
    is_own_loss = False
    facts_of_data: Mapping[str, str] = MappingProxyType({"padding": "not computed"})
    """Kept in checkpoints: a padded run takes its dropout masks from torch's generator."""

    def __init__(
        self, model: nn.Module, packed: PackedModel, collate: Collate, reads: Reads, columns: frozenset[str]
    ) -> None:
        super().__init__(model, collate)
        self.packed_model: PackedModel | None = packed
        self._packed, self._reads, self._columns = packed, reads, columns
        self._told: set[str] = set()
        self.needs_logits = True
        """Whether evaluation wants the logits of all tokens; the loss alone needs those of tokens with a label."""

    def batch(self, dataset: Any, rows: Rows, first_slot: int, padded_to: np.ndarray | None = None) -> Batch:
        batch = super().batch(dataset, rows, first_slot, padded_to)
        why = self._why_padded(batch.inputs)
        if why is None:
            return unpadding.without_padding(batch, causal=self._packed.family.causal)
        if why not in self._told:
            self._told.add(why)
            logger.warning("whet.Trainer runs with their padding: %s", why)
        splits = self._packed.family.causal and batch.inputs.get("attention_mask") is None
        own = str(getattr(self._packed.module.base_model.config, "_attn_implementation", ""))  # pyright: ignore
        sequences.require_kept_apart(batch.inputs, why, attention=own, by_position=splits)
        return batch

    def forward(self, batch: Batch, *, seed: int, step: int) -> Any:
        if batch.columns is None:
            return run_seeded(self.model, batch, seed, step)
        if self.model.training:  # dropouts that have no site draw from torch's generator: a resumed run draws the same
            seed_torch(seed, step, batch.first_slot)
        position, columns = (
            self._position(batch, seed, step),
            unpadding.packed_columns(batch, self._packed, self._columns),
        )
        with explained(self.model, batch.inputs, batch.columns):
            places = self._places(batch)
            of_head = replace(position, slots=position.slots[places], positions=position.positions[places])
            encode = partial(self._encode, columns, position, places)
            with _encoder_runs(self._packed.module, encode), self._packed.placement.at(of_head):
                return self.model(**self._of_head(batch, places))

    def _why_padded(self, inputs: Mapping[str, Any]) -> str | None:
        """Return why a collated batch has to run with its padding; None if it need not.

        Hooks and wrappers may have come since the Trainer was made.
        """
        if (why := heads.why_not_parts(self.model)) is not None:
            return f"calls of the complete model, since {why}"
        if not attention.is_routed(self._packed.module.base_model.config):  # pyright: ignore
            return "models whose attention implementation was changed afterwards"
        if (changed := self._packed.why_other_attention) is not None:
            return f"models in which {changed}"
        first_tokens = self._reads == "first tokens"
        return unpadding.why_padded(inputs, first_tokens=first_tokens, causal=self._packed.family.causal)

    def loss_sum(self, output: Any, batch: Batch) -> Tensor:
        if self._reads == "tokens" and not self.count(batch):  # the model's mean of nothing is not a number
            return output["logits"].float().sum() * 0.0
        return super().loss_sum(output, batch)

    def logits(self, output: Any, batch: Batch) -> tuple[np.ndarray, ...]:
        if self._reads == "tokens" and batch.columns is not None:
            output = {"logits": self._with_padding(output["logits"], batch)}
        return super().logits(output, batch)

    def _with_padding(self, values: Tensor, batch: Batch) -> Tensor:
        """Return values (1, M, C) of the tokens that the head has read as (rows, T, C), all other places -100.

        (M, C), of tokens with a label alone, where ModernBERT's sparse_prediction leaves the others out.
        """
        assert batch.columns is not None
        columns, shape = batch.columns[: batch.n_tokens], batch.inputs["input_ids"].shape
        if values.dim() == 2:
            ignored: Any = getattr(self._packed.module, "sparse_pred_ignore_index", IGNORED)
            columns, values = columns[batch.inputs["labels"].flatten()[columns] != ignored], values[None]
        assert values.shape[:-1] == (1, len(columns))
        wide = values.new_full((shape.numel(), values.shape[-1]), IGNORED)
        wide[columns] = values[0]
        return wide.view(*shape, values.shape[-1])

    def _position(self, batch: Batch, seed: int, step: int) -> BatchPosition:
        """Return the position of the encoder's pass; sequences of one row follow each other in the step's batch."""
        assert batch.cu_seqlens is not None
        per_row = (len(batch.cu_seqlens) - 1) // batch.n_rows
        return position_of(replace(batch, first_slot=batch.first_slot * per_row), seed=seed, step=step)

    def _places(self, batch: Batch) -> Tensor:
        """Return which packed tokens the head reads."""
        assert batch.cu_seqlens is not None
        assert batch.columns is not None
        if self._reads == "first tokens":
            return batch.cu_seqlens[:-1].long()
        real = batch.columns[: batch.n_tokens]
        for_loss = self.model.training or not self.needs_logits
        if not for_loss or batch.inputs.get("labels") is None:
            return torch.arange(len(real), device=real.device)
        (labelled,) = (batch.inputs["labels"].flatten()[real] != IGNORED).nonzero(as_tuple=True)
        return labelled if len(labelled) else labelled.new_zeros(1)

    def _of_head(self, batch: Batch, places: Tensor) -> dict[str, Any]:
        """Return what the model is called with: as if its rows had those tokens alone that the head reads."""
        assert batch.columns is not None
        ids = batch.inputs["input_ids"]
        given = {name: value for name, value in batch.inputs.items() if "label" in name and value is not None}
        if self._reads == "first tokens":
            return {"input_ids": ids[..., :1], **given}
        read = batch.columns[places]
        return {name: value.flatten()[read][None] for name, value in {"input_ids": ids, **given}.items()}

    def _encode(
        self, columns: Mapping[str, Tensor], position: BatchPosition, places: Tensor, *_: Any, **options: Any
    ) -> Any:
        """Stand in for the encoder's forward: it computes the packed batch, and returns what the head reads of it."""
        encoder: Any = self._packed.module.base_model
        flags = {name: value for name, value in options.items() if isinstance(value, (bool, int, float, str))}
        self._packed.hooks.look(encoder)
        position = last_block.narrowed(self._packed, position, places)
        with self._packed.placement.at(position):
            out = self._packed.encode(**columns, **flags | {"return_dict": True})
        states = last_block.read_states(out.last_hidden_state, places, position)
        first = self._reads == "first tokens"
        out.last_hidden_state = states[:, None] if first else states[None]
        if first and out.get("pooler_output") is not None:
            out.pooler_output = self._packed.family.pooled(encoder, out.last_hidden_state)
        return out.to_tuple() if flags.get("return_dict") is False else out


@contextmanager
def _encoder_runs(model: Any, forward: Any) -> Iterator[None]:
    """Let calls of the model's encoder run this instead."""
    encoder: nn.Module = model.base_model
    encoder.forward = forward
    try:
        yield
    finally:
        del encoder.forward
