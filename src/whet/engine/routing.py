"""What the experts of a model add to a training step: the losses of their routers, and how evenly tokens are spread."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace

import torch
from torch import Tensor, nn

from whet.data.batch import Batch
from whet.engine.step import Routing, StepRouting
from whet.engine.sync import Sync
from whet.errors import ConfigError
from whet.models.adapters import unwrapped
from whet.models.experts import settings as kept
from whet.models.experts.layer import SparseFeedForward, layers_of
from whet.models.experts.routing import Routes, RoutingSums, routing_sums, watched
from whet.models.experts.settings import ExpertSettings


class ExpertRouting(Routing):
    """The routing of a model with experts."""

    def __init__(self, settings: ExpertSettings, layers: Sequence[SparseFeedForward]) -> None:
        self._settings, self._layers = settings, layers

    def of_step(self, batches: Sequence[Batch], sync: Sync) -> StepRouting:
        n_tokens = sum(batch.n_tokens for batch in batches if not batch.is_extra)
        return SparseStep(self._settings, self._layers, max(1, sync.total_targets(n_tokens)))


class SparseStep(StepRouting):
    """A step of a model with experts: sums over tokens, divided by their number in all micro-batches and ranks."""

    def __init__(self, settings: ExpertSettings, layers: Sequence[SparseFeedForward], n_tokens: int) -> None:
        self._settings, self._layers, self._n_tokens, self._n_layers = settings, layers, n_tokens, 1
        self._seen: list[Routes] = []
        self._task = torch.zeros(())
        self._sums = RoutingSums(*(torch.zeros(()) for _ in fields(RoutingSums)))

    def watched(self, batch: Batch) -> AbstractContextManager[object]:
        self._seen = []
        padded = self._settings.capacity_factor is not None and batch.cu_seqlens is None
        rows = rows_of_tokens(batch) if padded else None
        for layer in self._layers:
            layer.padded_rows = rows
        return watched(self._seen)

    def added_to(self, loss: Tensor, batch: Batch) -> Tensor:
        if not self._seen or batch.is_extra:
            return loss
        rows = rows_of_tokens(batch)
        _require_all(self._seen, rows, self._settings)
        found = routing_sums(self._seen, rows)
        self._n_layers, self._seen = len(self._seen), []
        self._task = self._task + loss.detach()
        self._sums = self._sums.plus(found)
        own = self._settings
        return loss + (own.aux_loss_coef * found.balance + own.z_loss_coef * found.z) / self._n_tokens

    def parts(self) -> dict[str, Tensor]:
        """Return the task's loss, means over tokens and layers, and how many uses of experts the step dropped."""
        found, n = self._sums, self._n_tokens * self._n_layers
        return {
            "task_loss": self._task,
            "moe_balance_loss": found.balance / n,
            "moe_z_loss": found.z / n,
            "moe_load_max": found.largest / n,
            "moe_load_min": found.smallest / n,
            "moe_dropped": found.n_dropped,
        }


def rows_of_tokens(batch: Batch) -> Tensor:
    """Return the row of each computed token (N,), -1 for tokens that are padding or fill the batch up."""
    if batch.cu_seqlens is None:
        return _rows_of_padded(batch)
    lengths = batch.cu_seqlens.diff().long()
    rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    if batch.padding is not None:
        real = torch.zeros_like(rows, dtype=torch.bool)
        real[batch.padding.real] = True
        rows = rows.masked_fill(~real, -1)
    return nn.functional.pad(rows, (0, batch.n_computed - len(rows)), value=-1)


def _rows_of_padded(batch: Batch) -> Tensor:
    ids, mask = batch.inputs["input_ids"].flatten(0, -2), batch.inputs.get("attention_mask")
    rows = torch.arange(len(ids), device=ids.device)[:, None].expand(ids.shape)
    return (rows if mask is None else rows.masked_fill(~mask.bool().flatten(0, -2), -1)).flatten()


def routing_of(model: nn.Module) -> Routing:
    """Return the routing of a run of this model; routers that do not learn add nothing."""
    base = unwrapped(model)
    settings = kept.settings_of(getattr(base, "config", None))
    if settings is None or not isinstance(base, nn.Module):
        return Routing()
    layers = [layer for _, layer in layers_of(base)]
    learns = any(weight.requires_grad for layer in layers for weight in layer.router.parameters())
    if not learns and settings.capacity_factor is not None:
        return ExpertRouting(replace(settings, aux_loss_coef=0.0, z_loss_coef=0.0), layers)
    return ExpertRouting(settings, layers) if learns else Routing()


def _require_all(seen: Sequence[Routes], rows: Tensor, settings: ExpertSettings) -> None:
    """Raise ConfigError if the sparse layers have seen other tokens than those of the batch."""
    odd = [len(one.logits) for one in seen if len(one.logits) != len(rows)]
    if odd:
        raise ConfigError(
            what="the tokens that the experts have seen are not those of the batch",
            got=f"{odd[0]} tokens in a layer, {len(rows)} in the batch",
            why="the balance of the experts is that of the tokens of each row",
            fix="use --attn_implementation sdpa, which computes the batch as it is; or train without balance: "
            f"{_without_balance(settings)}",
        )


def require_whets_loss(model: nn.Module) -> None:
    """Raise ConfigError for experts whose balance would be left out: a loss of smoothed labels has none."""
    settings = kept.settings_of(getattr(unwrapped(model), "config", None))
    if settings is None or not (settings.aux_loss_coef or settings.z_loss_coef):
        return
    raise ConfigError(
        what="the balance loss of experts does not go with smoothed labels",
        got=f"aux_loss_coef {settings.aux_loss_coef}, z_loss_coef {settings.z_loss_coef}, and label_smoothing_factor",
        why="whet adds the losses of the routers to its own loss",
        fix=f"leave --label_smoothing_factor out; or train without balance: {_without_balance(settings)}",
    )


def _without_balance(settings: ExpertSettings) -> str:
    return kept.with_factors(settings, aux_loss_coef=0.0, z_loss_coef=0.0)
