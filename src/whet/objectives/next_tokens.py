"""Causal language models without padding: each token predicts the next one of its row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from whet.data.batch import Batch
from whet.errors import ConfigError
from whet.kernels.cross_entropy import chunk_rows, linear_cross_entropy
from whet.kernels.operator import native_for
from whet.models.packed import PackedModel, explained, other_shape
from whet.models.standard import why_called
from whet.objectives import router_loss, unpadding
from whet.objectives.base import IGNORED, Collate
from whet.objectives.collated import run_seeded, seed_torch
from whet.objectives.own_loss import OwnLoss
from whet.objectives.packed_head import PackedHead

Read = Callable[[Tensor, Tensor, Tensor], Any]
"""Reads hidden states (M, D), the packed tokens that they belong to (M,), and their targets (M,)."""


class PackedNextTokens(PackedHead):
    """The model's own loss, on batches of any collator that run without their padding.

    The label of a token is that of the place after it in its padded row, as in transformers. Hidden states of tokens
    without a label are not read, and the logits of the others exist a chunk at a time.
    """

    def __init__(self, model: nn.Module, packed: PackedModel, collate: Collate, columns: frozenset[str]) -> None:
        super().__init__(model, packed, collate, "tokens", columns)
        self.columns = columns

    def forward(self, batch: Batch, *, seed: int, step: int) -> Any:
        if batch.columns is None:
            return run_seeded(self.model, batch, seed, step)
        return self.run(batch, lambda states, _, targets: self._output(batch, states, targets), seed=seed, step=step)

    def run(self, batch: Batch, read: Read, *, seed: int, step: int) -> Any:
        """Return what `read` makes of the hidden states, within the pass of a packed batch."""
        if (why := self._packed.why_other_attention) is not None:
            raise _changed_since(why)
        if self.model.training:  # dropouts that have no site draw from torch's generator: a resumed run draws the same
            seed_torch(seed, step, batch.first_slot)
        places, targets = self._targets(batch)
        position = self._position(batch, seed, step)
        columns = unpadding.packed_columns(batch, self._packed, self._columns)
        encoder: Any = self._packed.module.base_model
        self._packed.hooks.look(encoder)
        routers = {"output_router_logits": True} if router_loss.is_asked_for(self._packed.module) else {}
        with explained(self.model, batch.inputs, batch.columns), self._packed.placement.at(position):
            with self._packed.by_graphs():
                out = encoder(**columns, use_cache=False, return_dict=True, **routers)
            if not position.is_of(*out.last_hidden_state.shape[:2]):
                raise other_shape(out.last_hidden_state, len(position.slots))
            found = read(out.last_hidden_state[0].index_select(0, places), places, targets)
        has_loss = isinstance(found, dict) and "loss_sum" in found
        return self._with_balance(found, batch, out.router_logits) if routers and has_loss else found

    def loss_sum(self, output: Any, batch: Batch) -> Tensor:
        if batch.columns is None or "loss_sum" not in output:  # which raises if the rows have no labels
            return OwnLoss.loss_sum(self, output, batch)
        return output["loss_sum"]

    def by_target(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        return (output["losses"], output["best"]) if "losses" in output else super().by_target(output, batch)

    def _why_padded(self, inputs: Mapping[str, Any]) -> str | None:
        why, labels, mask = super()._why_padded(inputs), inputs.get("labels"), inputs.get("attention_mask")
        if why is not None or not isinstance(labels, Tensor) or mask is None:
            return why
        if labels.shape != mask.shape:
            return "batches whose labels differ in shape from input_ids"
        behind_padding = (labels[..., 1:] != IGNORED) & ~mask[..., :-1].bool()
        return "rows with labels right after padding: pad them on the right" if bool(behind_padding.any()) else None

    def _targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return which packed tokens have hidden states that are read (M,), and the labels of these (M,)."""
        assert batch.columns is not None
        real, labels = batch.columns[: batch.n_tokens], batch.inputs.get("labels")
        every = torch.arange(len(real), device=real.device)
        if labels is None:
            return every, torch.full_like(every, IGNORED)
        following = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].flatten()[real]
        if self.needs_logits and not self.model.training:
            return every, following
        (labelled,) = (following != IGNORED).nonzero(as_tuple=True)
        labelled = labelled if len(labelled) else every[:1]
        return labelled, following[labelled]

    def _output(self, batch: Batch, states: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the summed loss, and the logits (1, N, V) if an evaluation reads them."""
        head, cap = head_of(self._packed.module)
        found: dict[str, Tensor] = {}
        if batch.inputs.get("labels") is not None and self.counts_hits and not self.model.training:
            found |= found_of_targets(states, targets, head, cap)
        elif batch.inputs.get("labels") is not None:
            found["loss_sum"] = loss_sum(states, targets, head, cap)
        if self.needs_logits and not self.model.training:
            found["logits"] = logits_of(states, head, cap)[None]
        return found

    def _with_balance(self, found: dict[str, Tensor], batch: Batch, router_logits: Any) -> dict[str, Tensor]:
        """Return the output with the balance loss of the routers, which is added to the mean over targets."""
        model: Any = self._packed.module
        balance = router_loss.router_loss(model, router_logits, batch.n_tokens)
        total = found["loss_sum"] + model.router_aux_loss_coef * balance * self.count(batch)
        return found | {"loss_sum": total, "aux_loss": balance}


def _changed_since(why: str) -> ConfigError:
    return ConfigError(
        what="the model was changed after its Trainer was made, so that it needs its padding",
        got=why,
        why="transformers masks by config.layer_types, and rows without padding have the windows of their blocks",
        fix="change the model before Trainer(...), or use --attn_implementation sdpa, which trains with padding",
    )


def head_of(model: Any) -> tuple[Any, float | None]:
    """Return the layer that turns hidden states into logits, and the number that caps these; None: nothing does."""
    return model.get_output_embeddings(), getattr(model.config, "final_logit_softcapping", None)


def loss_sum(states: Tensor, targets: Tensor, head: Any, cap: float | None = None) -> Tensor:
    """Return the summed cross entropy () of the targets (M,) for hidden states (M, D), logits a chunk at a time.

    A head that is not a plain linear layer is called; backward calls it again.
    """
    if why_called(head, nn.Linear) is None and native_for(head.weight) is not None:
        return linear_cross_entropy(states, head.weight, targets, cap, head.bias)
    return chunked_loss_sum(states, targets, head, cap, chunk_rows(head.weight))


def chunked_loss_sum(states: Tensor, targets: Tensor, head: Any, cap: float | None, n_rows: int) -> Tensor:
    """Return `loss_sum` by calling the head for `n_rows` hidden states at a time, again in backward."""
    if states.device.type != "cpu" and len(states) <= n_rows:  # a GPU has the memory for one chunk, and keeps it
        return _chunk_loss(states, targets, head, cap)
    total = states.new_zeros((), dtype=torch.float32)
    for part, labels in zip(states.split(n_rows), targets.split(n_rows), strict=True):
        total = total + checkpoint(_chunk_loss, part, labels, head, cap, use_reentrant=False)
    return total


def found_of_targets(states: Tensor, targets: Tensor, head: Any, cap: float | None = None) -> dict[str, Tensor]:
    """Return what an evaluation finds, without gradients: the summed cross entropy of the targets, `loss_sum` ().

    Of each target, in order, `losses` (M,) are its cross entropy, and `best` (M,) the token with the largest logit.
    """
    n_rows = chunk_rows(head.weight)
    losses, best = [], []
    with torch.no_grad():
        for part, labels in zip(states.split(n_rows), targets.split(n_rows), strict=True):
            logits = logits_of(part, head, cap).float()
            losses.append(nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none"))
            best.append(logits.argmax(-1))
    real = targets != IGNORED
    of_each = torch.cat(losses)[real]
    return {"loss_sum": of_each.double().sum().float(), "losses": of_each, "best": torch.cat(best)[real]}


def token_losses(states: Tensor, targets: Tensor, head: Any, cap: float | None = None) -> Tensor:
    """Return the cross entropy of each target (M,) float32, logits a chunk at a time; backward computes them again."""
    n_rows = chunk_rows(head.weight)
    parts = zip(states.split(n_rows), targets.split(n_rows), strict=True)
    found = [checkpoint(_chunk_losses, part, labels, head, cap, use_reentrant=False) for part, labels in parts]
    return torch.cat(found)


def _chunk_losses(states: Tensor, targets: Tensor, head: nn.Module, cap: float | None) -> Tensor:
    logits = logits_of(states, head, cap).float()
    return nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")


def _chunk_loss(states: Tensor, targets: Tensor, head: nn.Module, cap: float | None) -> Tensor:
    logits = logits_of(states, head, cap).float()
    return nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def logits_of(states: Tensor, head: nn.Module, cap: float | None) -> Tensor:
    """Return the logits (M, V) of hidden states (M, D)."""
    logits = head(states)
    if cap is None:
        return logits
    if logits.requires_grad or why_called(head, nn.Linear) is not None:  # others may hold what the head returned
        return torch.tanh(logits / cap) * cap
    return logits.div_(cap).tanh_().mul_(cap)
