"""Experts of transformers' own models with one native product for each expert, through its ExpertsInterface."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.integrations import moe

from whet.card import Card
from whet.config.methods import MethodSettings
from whet.kernels.activation import gated_act_joined
from whet.kernels.grouped import grouped_linear
from whet.methods import fuse
from whet.methods.seam import Applied, Cost, Stage
from whet.models import record
from whet.models.experts.layer import in_order_of_experts, in_order_of_tokens
from whet.models.experts.routing import by_expert
from whet.models.standard import ACTIVATIONS, why_called
from whet.models.view import ModelView

CARD = Card(
    name="grouped experts",
    asked_by="default",
    does="The experts of Mixtral and its like multiply their tokens in one product each.",
    improves="speed",
    same_result="yes",
    hurts="Never so far (WHET_KERNELS=reference).",
    source="Gale et al. 2022, arXiv:2211.15841",
    wanted_by="operators",
    needs="_apply_gate",
)
STAGE = Stage.OPERATORS
NAME = "whet_grouped"
"""The name in the interface, and of `experts_implementation` in a model that has it."""


class Grouped(str):
    """That name in the configuration of a model, whose copy in another process makes it known to transformers there."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return _loaded_again, ()


def _loaded_again() -> Grouped:
    """Return the name in the process that has loaded the model: transformers there knows nothing of whet yet."""
    register()
    return Grouped(NAME)


def apply(view: ModelView, settings: MethodSettings) -> Applied | None:
    """Let the experts of a packed model on the CPU run in whet's grouped products."""
    model = view.model
    if not fuse.would_run(view, settings) or not (found := experts_of(model)):
        return None
    register()
    record.keep(model, CARD.name, model.get_experts_implementation())
    model.set_experts_implementation(Grouped(NAME))
    return Applied(CARD.name, f"{len(found)} layers of experts")


def restore(view: ModelView) -> None:
    """Give the model its own implementation again."""
    before = record.take(view.model, CARD.name)
    if before is not None:
        view.model.set_experts_implementation(before)


def cost(view: ModelView, settings: MethodSettings) -> Cost:
    """Return no cost: the same products, without copies of weights."""
    return Cost()


def register() -> None:
    """Make the implementation known to transformers."""
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_of(model: nn.Module) -> list[Any]:
    """Return the modules of the model that call the interface, and that this implementation can serve."""
    # wrappers of peft pass names on to what they hold, but their classes do not have them
    own = [module for module in model.modules() if hasattr(type(module), "_apply_gate")]
    return [module for module in own if hasattr(module, "_is_expert_parallel") and _is_served(module)]


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted results (N, D) of the experts (N, top_k) of tokens (N, D)."""
    if not _is_served(self):
        return moe.grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    order = by_expert(top_k_index, self.num_experts)
    inner = grouped_linear(in_order_of_experts(hidden_states, order), self.gate_up_proj, None, order.ends)
    found = grouped_linear(_gated(self, inner), self.down_proj, None, order.ends)
    found = in_order_of_tokens(found, order).unflatten(0, top_k_index.shape)
    return (found * top_k_weights.to(found.dtype)[..., None]).sum(1).to(hidden_states.dtype)


def _is_served(module: Any) -> bool:
    """Return whether the experts are gated parts without biases, laid out as most models have them."""
    odd = module.has_bias or module.is_transposed or module._is_expert_parallel
    odd = odd or not module.has_gate or not module.is_concatenated or getattr(module, "has_post_expert_norm", False)
    return not odd and type(module)._apply_gate is moe._default_apply_gate


def _gated(module: Any, inner: Tensor) -> Tensor:
    if why_called(module.act_fn) is not None:
        return module._apply_gate(inner)
    return gated_act_joined(inner, ACTIVATIONS[type(module.act_fn)])
