"""Muon (Jordan 2024) for the matrices of the hidden layers, AdamW for everything else; torch's implementations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.log import logger
from whet.optim.entry import STEP_BYTES, Entry, Options, Request, Shapes, Stepping

_ROUTERS = ("router", "gate", "shared_expert_gate")
"""The names of layers that choose or weigh experts, in whet and in transformers."""


class MuonAndAdamW(Stepping):
    """One optimizer over the groups of both; a group with the key ns_steps is Muon's."""

    def __init__(self, muon: Optimizer, adamw: Optimizer) -> None:
        self._parts = (muon, adamw)
        groups = [*muon.param_groups, *adamw.param_groups]
        super().__init__([dict(group) for group in groups], {})

    def _update_all(self) -> None:
        for part, is_muon in zip(self._parts, (True, False), strict=True):
            # set each time: loading a state and a step inside backward replace these lists
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if ("ns_steps" in group) == is_muon]
            part.step()


def matrices(model: nn.Module) -> set[int]:
    """Return the ids of Muon's parameters: the matrices between the embeddings and the head.

    Routers of experts and tables of experts' biases (X, D) are no matrices of hidden layers: AdamW has them.
    """
    body = getattr(model, "base_model", model)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {id(p) for name, p in body.named_parameters() if p.ndim == 2 and not _routes_or_adds(name)} - tables


def _routes_or_adds(name: str) -> bool:
    *path, last = name.split(".")
    return last.endswith("bias") or any(part in _ROUTERS for part in path[-2:])


def build(request: Request) -> Optimizer:
    """Return Muon, by default with AdamW's step size (match_rms_adamw), so that AdamW's learning rates fit."""
    chosen = matrices(request.model)
    _warn_of_experts(request.parameters)
    muon, adamw = [], []
    for group in request.groups:
        for found, mine in ((muon, True), (adamw, False)):
            params = [p for p in group["params"] if (id(p) in chosen) == mine]
            found += [{**group, "params": params}] if params else []
    spare = [nn.Parameter(torch.zeros(1, 1))]  # torch refuses an optimizer without parameters
    options: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", **request.options}
    parts = (
        torch.optim.Muon(muon or spare, lr=request.args.learning_rate, **options),
        torch.optim.AdamW(adamw or spare, **request.adam),
    )
    for part in parts:
        part.param_groups = [group for group in part.param_groups if not _is(group["params"], spare)]
    return MuonAndAdamW(*parts)


def _warn_of_experts(params: Sequence[Tensor]) -> None:
    n = sum(p.ndim == 3 for p in params)
    if n:
        logger.warning("muon: AdamW updates %d weights of experts, which hold several matrices each", n)


def _is(params: list[Tensor], spare: list[nn.Parameter]) -> bool:
    return len(params) == 1 and params[0] is spare[0]


def state_bytes(shapes: Shapes, _options: Options, itemsize: int) -> int:
    """One moment for a matrix; two and the step for anything else. Pass embeddings and heads as vectors."""
    return sum(itemsize * prod(s) if len(s) == 2 else 2 * itemsize * prod(s) + STEP_BYTES for s in shapes)


OPTIMIZERS = (
    Entry(
        name="muon",
        rule="Muon",
        does="Muon of torch for the matrices between embeddings and head, AdamW with its 8 bytes for the rest",
        source="Jordan 2024; torch.optim.Muon",
        options={
            "momentum": "float",
            "nesterov": "bool",
            "ns_steps": "int",
            "adjust_lr_fn": "original|match_rms_adamw",
        },
        betas=True,
        epsilon=True,
        kind=MuonAndAdamW,
        build=build,
        matrices=matrices,
        state_bytes=state_bytes,
    ),
)
