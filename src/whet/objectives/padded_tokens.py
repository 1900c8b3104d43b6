"""Causal language models that need their padding: the loss of the next tokens, logits a chunk at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from whet.data.batch import Batch
from whet.models.adapters import adds_tokens, unwrapped
from whet.models.bad_batch import explained
from whet.models.known import of_model
from whet.models.packable import predicts_next_tokens
from whet.objectives import heads, router_loss
from whet.objectives.base import IGNORED, Collate
from whet.objectives.collated import seed_torch
from whet.objectives.next_tokens import head_of, loss_and_hits, loss_sum
from whet.objectives.own_loss import OwnLoss

_DECODERS_COLUMNS = frozenset(
    {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "labels"}
)


class PaddedNextTokens(OwnLoss):
    """The model's own loss on batches that keep their padding, without the logits of all tokens.

    Gemma 2 needs it, whose attention caps its scores, and any decoder with transformers' eager or SDPA attention.
    """

    is_own_loss = False

    def __init__(self, model: nn.Module, collate: Collate) -> None:
        super().__init__(model, collate)
        self.needs_logits = True
        """Whether evaluation wants the logits of all tokens."""

    def forward(self, batch: Batch, *, seed: int, step: int) -> Any:
        labels, evaluates = batch.inputs.get("labels"), not self.model.training
        if labels is None or (evaluates and self.needs_logits) or self._is_called(batch):
            return super().forward(batch, seed=seed, step=step)
        seed_torch(seed, step, batch.first_slot)
        base, columns = unwrapped(self.model), {name: one for name, one in batch.inputs.items() if name != "labels"}
        with explained(self.model, batch.inputs):
            out = base.base_model(**columns, use_cache=False, return_dict=True)
            states, targets = _read(out.last_hidden_state, labels)
            head, cap = head_of(base)
            if evaluates and self.counts_hits:
                return dict(zip(("loss_sum", "hits"), loss_and_hits(states, targets, head, cap), strict=True))
            return {"loss_sum": loss_sum(states, targets, head, cap)}

    def _is_called(self, batch: Batch) -> bool:
        """Return whether the model itself must be called: others look at it, or it takes more than its decoder does."""
        return bool(batch.inputs.keys() - _DECODERS_COLUMNS) or not takes(self.model)

    def loss_sum(self, output: Any, batch: Batch) -> Tensor:
        return output["loss_sum"] if "loss_sum" in output else super().loss_sum(output, batch)

    def hits(self, output: Any, batch: Batch) -> Tensor:
        return output["hits"] if "hits" in output else super().hits(output, batch)


def _read(states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hidden states (M, D) of tokens that predict a label, and these labels (M,); one state if none does."""
    following = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    places = following != IGNORED
    if not bool(places.any()):
        return states.flatten(0, -2)[:1], following.flatten()[:1]
    return states[places], following[places]


def takes(model: nn.Module) -> bool:
    """Return whether the model's loss is that of its hidden states, head and cap alone."""
    base = unwrapped(model)
    family = of_model(base) if predicts_next_tokens(model) else None
    if family is None or not family.causal or adds_tokens(model) or heads.why_not_parts(model) is not None:
        return False
    spread = getattr(base, "hf_device_map", None) is not None  # over several devices, by hooks
    return not spread and not router_loss.is_asked_for(base)
