"""Activation checkpointing: backward computes again what the forward pass did not keep (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from whet.card import Card
from whet.config.methods import MethodSettings
from whet.errors import ConfigError
from whet.kernels import grouped, matrix
from whet.kernels.batch_position import Placement
from whet.kernels.graph import outside
from whet.kernels.operator import is_exporting
from whet.kernels.recompute import Recomputing
from whet.methods import compile_blocks, counting, fuse
from whet.methods.seam import Applied, Cost, Stage
from whet.models import record
from whet.models.forwards import Replaced, class_forward
from whet.models.fused.layers import Ending, without_end
from whet.models.fused.parts import ends_a_block, is_fused
from whet.models.packed import PackedModel, packed_model
from whet.models.standard import has_hooks, is_unchanged
from whet.models.view import ModelView

Policy = Literal["blocks", "selective"]
CARD = Card(
    name="checkpointing",
    asked_by="gradient_checkpointing",
    does="Backward recomputes activations that were not kept.",
    improves="memory",
    same_result="yes",
    hurts="When memory is not what limits you: it costs time.",
    source="Chen et al. 2016, arXiv:1604.06174; selective: Korthikanti et al. 2022, arXiv:2205.05198",
    wanted_by="checkpointing",
    page="memory.md#activation-checkpointing",
)
STAGE = Stage.RECOMPUTATION
_INNER = "whet_inner_forward"
_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@dataclass
class _State:
    """What was changed in a model, to put it back."""

    forwards: Replaced = field(default_factory=Replaced)
    policy: Policy | None = None
    """What is kept; None: the blocks follow transformers' own switch."""
    theirs: bool = False
    """Whether transformers' own checkpointing was switched on."""
    inside: list[PackedModel] = field(default_factory=list)
    """Packed encoders inside the model, each with a state of its own."""


@dataclass(frozen=True)
class _How:
    """How a block runs."""

    policy: Policy
    placement: Placement | None
    """Where the forward pass of a packed model stands."""
    wanted: bool | None = True
    """Whether it is computed again; None: as transformers' own switch in the block says."""
    but_its_end: bool = False
    """Whether the block ends as `fused/layers.py` has it, so that its last product need not be computed again."""

    @property
    def is_in_foreign_graph(self) -> bool:
        """Whether somebody else's torch.compile follows a packed model: whet's own graphs know the place."""
        if not torch.compiler.is_compiling() or is_exporting():
            return False
        return self.placement is not None and self.placement.traced is None


def apply(view: ModelView, settings: MethodSettings) -> Applied | None:
    """Make the model recompute activations in backward.

    blocks keeps the input of each block. selective keeps the results of matrix products as well, and of attention if
    the operators are native, and recomputes what lies between them. Losses and gradients stay as they are. theirs
    follows transformers' own switch in the blocks of a packed model. Raises ConfigError for a model without blocks.
    """
    if settings.checkpointing in ("blocks", "selective"):
        return Applied(CARD.name, _put(view, settings.checkpointing, alone=settings.weights_come_and_go))
    packed = packed_model(view.model)
    if settings.checkpointing == "theirs" and packed is not None:
        _follow(view, packed)
    return None


def _put(view: ModelView, policy: Policy, *, alone: bool) -> str:
    """Make the model recompute by this policy; return what was done, for the log.

    `alone`: a block must not read weights of another one, as the recomputation of its end would.
    """
    restore(view)
    model, packed, state = view.model, packed_model(view.model), _State(policy=policy)
    record.keep(model, CARD.name, state)
    if packed is not None and _runs_fused(model, packed) and not compile_blocks.is_on(model) and not alone:
        whole = policy == "blocks"
        _put_blocks(state, _blocks(view), _How("blocks", packed.placement, wanted=whole, but_its_end=whole))
        _put_forward(state, model, _remaking)
        return _IN_WORDS[policy] if whole else "norms, activations and casts are computed again in backward"
    if packed is None and isinstance(model, PreTrainedModel) and model.supports_gradient_checkpointing:
        state.theirs = not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        _enable_theirs(model, partial(_contexts, _How(policy, None)))
        return _IN_WORDS[policy]
    state.inside = [] if packed is not None else _packed_inside(model)
    for inner in state.inside:
        _put(ModelView(inner.module), policy, alone=alone)
    _put_blocks(state, _blocks(view), _How(policy, packed.placement if packed else None))
    return _IN_WORDS[policy]


def _packed_inside(model: nn.Module) -> list[PackedModel]:
    """Return the encoders that `whet.optimize` changed inside a module of the user's own."""
    found = (packed_model(module) for module in model.modules() if module is not model)
    return list({id(packed): packed for packed in found if packed is not None}.values())


def _follow(view: ModelView, packed: PackedModel) -> None:
    """Make a packed model recompute those blocks in which transformers' own switch is on.

    Without this, a block would be recomputed without knowing which sequences it belongs to.
    """
    restore(view)
    state = _State()
    record.keep(view.model, CARD.name, state)
    _put_blocks(state, _stacked(view), _How("blocks", packed.placement, wanted=None))


def is_on(model: nn.Module) -> bool:
    """Return whether the model recomputes its blocks whatever transformers' own switch says."""
    state: _State | None = record.read(model, CARD.name)
    return state is not None and state.policy is not None


def restore(view: ModelView) -> None:
    """Undo `apply` exactly."""
    model = view.model
    state: _State | None = record.take(model, CARD.name)
    if state is None:
        return
    for inner in state.inside:
        if packed_model(inner.module) is inner:  # nobody restored it in the meantime
            _follow(ModelView(inner.module), inner)
    for module, _ in state.forwards.before:
        module.__dict__.pop(_INNER, None)  # a model that shares the block may have been restored before
    state.forwards.undo()
    if state.theirs:
        assert isinstance(model, PreTrainedModel)
        disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
        disable()


def cost(view: ModelView, settings: MethodSettings) -> Cost:
    """Return what checkpointing saves of what the blocks keep, and what it computes again.

    blocks: a block is there in full while it is recomputed. selective: at most what it recomputes of one block.
    """
    if settings.checkpointing in (None, "theirs"):
        return Cost()
    operators = fuse.would_run(view, settings) and settings.compile is None
    without = counting.kept(view, replace(settings, checkpointing=None), operators=operators)
    kept = counting.kept(view, settings, operators=operators)
    found = counting.blocks(view)
    whole = settings.checkpointing == "blocks"
    again = [block.weights - block.last if operators else block.weights for block in found] if whole else []
    attention = [] if operators and not whole else [block.uses * block.attention for block in found]
    n_uses = sum(block.uses for block in found)
    return Cost(
        activation_bytes=kept.fixed - without.fixed,
        activation_bytes_per_token=kept.per_token - without.per_token,
        backward_bytes_per_token=(without.per_token - (0 if whole else kept.per_token)) / max(1, n_uses),
        flop_per_token=2 * sum(block.uses * n_weights for block, n_weights in zip(found, again, strict=False)),
        flop_per_token_pair=4 * sum(attention),
    )


_IN_WORDS = {
    "blocks": "each block is computed again in backward",
    "selective": "all but the products with weights is computed again in backward",
}


def _put_blocks(state: _State, blocks: Sequence[nn.Module], how: _How) -> None:
    done = {id(block) for inner in state.inside for block in _blocks(ModelView(inner.module))}
    for block in blocks:
        if id(block) not in done and not _runs_as(block, how):
            _put_forward(state, block, partial(_block, how))


def _runs_as(block: nn.Module, how: _How) -> bool:
    """Return whether the block runs so already: encoders with tied blocks are changed one after the other."""
    forward = block.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is _block and forward.args[0] == how


def _put_forward(state: _State, module: nn.Module, forward: Callable[..., Any]) -> None:
    module.__dict__[_INNER] = module.__dict__.get("forward")
    new = partial(forward, module)
    setattr(new, "__signature__", signature(module.forward))  # noqa: B010
    state.forwards.put(module, new)


def _inner(module: nn.Module) -> Callable[..., Any]:
    """Return the forward that the module had, as its class has it now where that was its class's."""
    return module.__dict__[_INNER] or class_forward(module)


def _remaking(self: Any, *args: Any, **options: Any) -> Any:
    """Replace the forward of a complete model that has native operators."""
    with Recomputing() if _keeps(self) else nullcontext():
        return _inner(self)(*args, **options)


def _block(how: _How, self: Any, *args: Any, **options: Any) -> Any:
    """Stand in for the forward of a block; a graph of torch.compile that is not whet's breaks around it."""
    if how.is_in_foreign_graph:
        return _outside_of_graphs(how, self, args, options)
    return _run_block(how, self, args, options)


@outside("a block that whet changed does not compile: use whet's Trainer with --torch_compile")
def _outside_of_graphs(how: _How, self: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return _run_block(how, self, args, options)


def _run_block(how: _How, self: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run a block; outside of a pass of whet, a packed block is as its class has it."""
    if how.placement is not None and how.placement.now is None:
        return _outside(how, self, *args, **options)
    run = _inner(self)
    wanted = getattr(self, "gradient_checkpointing", False) if how.wanted is None else how.wanted
    if not (wanted and _keeps(self)):
        return run(*args, **options)
    again = partial(checkpoint, use_reentrant=False, context_fn=partial(_contexts, how))
    if not (how.but_its_end and is_unchanged(self)) or _has_hooks_inside(self):
        return again(run, *args, **options)
    found: list[Ending] = []
    product, residual = again(without_end(run, found), *args, **options)
    return found[0].finish(product, residual) if found else product


def _has_hooks_inside(block: nn.Module) -> bool:
    """Return whether a hook runs within the block: it may call the block's last module, and wants its result."""
    return any(has_hooks(module) for module in block.modules() if module is not block)


def _outside(how: _How, self: Any, *args: Any, **options: Any) -> Any:
    """Run a packed block outside of a pass; its recomputation must know that there was none."""
    if not (getattr(self, "gradient_checkpointing", False) and _keeps(self)):
        return type(self).forward(self, *args, **options)
    again = partial(checkpoint, use_reentrant=False, context_fn=partial(_contexts, how))
    return again(class_forward(self), *args, **options)


def _runs_fused(model: nn.Module, packed: PackedModel) -> bool:
    """Return whether every block ends in a fused operator."""
    ends = [module for module in model.modules() if ends_a_block(module)]
    return fuse.possible(packed) and bool(ends) and all(map(is_fused, ends))


def _keeps(module: nn.Module) -> bool:
    """Return whether a forward pass of the module keeps something for a backward pass."""
    return module.training and torch.is_grad_enabled()


def _contexts(how: _How) -> _Contexts:
    """Return the contexts of a block's forward pass and of its recomputation."""
    forward, again = product_contexts() if how.policy == "selective" else (nullcontext(), nullcontext())
    return forward, again if how.placement is None else _Both(how.placement.back(), again)


class _Both:
    """Two contexts as one that can be entered again, in any thread: a graph may be kept for a second backward pass."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


def _enable_theirs(model: PreTrainedModel, contexts: Callable[[], _Contexts]) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": contexts})


def _stacked(view: ModelView) -> Sequence[nn.Module]:
    """Return the model's blocks: of a stack of one, that transformers' own switch would recompute."""
    found = [block for _, block in view.blocks()]
    return found or [one for one in view.model.modules() if isinstance(one, GradientCheckpointingLayer)]


def _blocks(view: ModelView) -> Sequence[nn.Module]:
    """Return the modules that the model is a stack of."""
    found = _stacked(view)
    if not found:
        raise ConfigError(
            what="gradient_checkpointing finds no blocks in this model",
            got=type(view.model).__name__,
            why="it recomputes complete blocks, and the model has no list of two or more modules of one class",
            fix="leave --gradient_checkpointing out, or call torch.utils.checkpoint inside the model",
        )
    return found


_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "mkldnn::_linear_pointwise", grouped.NAME, matrix.WIDENED})
"""Products with weights. Those of attention grow with the square of the row, and are little work in comparison."""


@dataclass(frozen=True)
class _Kept:
    result: Tensor
    version: int


def product_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts that keep a block's products with weights in its forward pass, and give them to recomputation.

    torch's own selective contexts count every operator, and autocast casts a weight once in a forward pass but again in
    a recomputation; these count products alone.
    """
    kept: list[_Kept] = []
    return _Keeping(kept), _Giving(kept)


class _Keeping(TorchDispatchMode):
    def __init__(self, kept: list[_Kept]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_product(func):
            self._kept.append(_Kept(out.detach(), out._version))
        return out


class _Giving(TorchDispatchMode):
    def __init__(self, kept: list[_Kept]) -> None:
        super().__init__()
        self._kept = kept
        self._next = 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_product(func):
            return func(*args, **(kwargs or {}))
        kept = self._kept[self._next]
        self._next += 1
        if kept.result._version != kept.version:
            raise RuntimeError("a product was changed in place after it was kept for backward")
        return kept.result.detach()


def _is_product(operator: Any) -> bool:
    return operator.name().partition(".")[0] in _PRODUCTS
