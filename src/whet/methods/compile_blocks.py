"""torch.compile of a model's blocks: one compiled graph serves all layers, and batches of any length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from whet.card import Card
from whet.config.methods import MethodSettings
from whet.config.rules.computing import DEFAULT_BACKEND
from whet.errors import ConfigError
from whet.kernels import graph
from whet.kernels.batch_position import BatchPosition, KeyedPosition, Placement, Site
from whet.kernels.library import library
from whet.methods.seam import Applied, Cost, Stage
from whet.models import record
from whet.models.adapters import unwrapped
from whet.models.attention import SITE
from whet.models.experts.layer import has_experts
from whet.models.forwards import Replaced, as_function, class_forward
from whet.models.fused.layers import PlacedDropout
from whet.models.packed import PackedModel, packed_model
from whet.models.view import ModelView

if TYPE_CHECKING:
    from torch._dynamo.exc import BackendCompilerFailed

CARD = Card(
    name="torch.compile",
    asked_by="torch_compile",
    does="Each block becomes a graph, for all its layers and batches of any length.",
    improves="speed",
    same_result="yes",
    hurts="In short runs, which wait for the compiler; packed models on a CPU gain little.",
    source="Ansel et al. 2024, PyTorch 2 (ASPLOS)",
    wanted_by="compile",
    page="speed.md#compiled-blocks",
)
STAGE = Stage.COMPILATION
_VARIANTS = 32
"""Graphs that torch may make of one block: training and evaluation, formats, and where models differ between layers.
With more of them torch would give up and run plain code, without a word."""


@dataclass
class _State:
    """What was changed in a model, to put it back."""

    forwards: Replaced = field(default_factory=Replaced)
    sites: list[tuple[nn.Module, str, Site]] = field(default_factory=list)
    """Modules whose site got a number within its block, with the site's attribute and the site."""
    on: bool = True
    """Whether the compiled code runs; a probe turns it off to compare."""


@dataclass(frozen=True)
class _Block:
    """What runs one block."""

    state: _State
    compiled: Callable[..., Any]
    forward: Any
    """The block's forward without compilation."""
    placement: Placement | None = None
    sites: tuple[Site, ...] = ()
    """The block's sites, by their number within it."""

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            what="a model with compiled blocks cannot be pickled",
            got=type(getattr(self.forward, "__self__", None)).__name__,
            why="compiled code belongs to the process that made it",
            fix="save it with save_pretrained, or call whet.restore(model) first",
        )


def apply(view: ModelView, settings: MethodSettings) -> Applied | None:
    """Compile the model's blocks, or the complete model if it has none.

    Nothing is compiled before the first pass. Weights and their names stay. Raises ConfigError for what torch, or this
    machine, cannot do.
    """
    if settings.compile is None:
        return None
    restore(view)
    _require_no_experts(view.model)
    model, packed = view.model, packed_model(view.model)
    backend, mode = settings.compile.backend, settings.compile.mode
    compiled = _compiler(backend, mode, model, whole=packed is not None)
    state = _State()
    record.keep(model, CARD.name, state)
    blocks = [block for _, block in view.blocks()] or [model]
    for block in blocks:
        _put(state, block, compiled, packed)
    what = f"{len(blocks)} blocks" if blocks != [model] else f"{type(model).__name__} as one"
    return Applied(CARD.name, f"{what} by {backend}{f', mode {mode}' if mode else ''}")


def restore(view: ModelView) -> None:
    """Undo `apply` exactly."""
    state: _State | None = record.take(view.model, CARD.name)
    if state is None:
        return
    state.forwards.undo()
    for module, name, site in state.sites:
        setattr(module, name, site)


def cost(view: ModelView, settings: MethodSettings) -> Cost:
    """Return no cost: the backend decides what a graph keeps, and no product is added. Measure it."""
    return Cost()


def is_on(model: nn.Module) -> bool:
    """Return whether the model's blocks are compiled."""
    return record.read(unwrapped(model), CARD.name) is not None


@contextmanager
def off(model: nn.Module) -> Iterator[None]:
    """Run the block with the model as it is without compilation."""
    state: _State = record.read(unwrapped(model), CARD.name)
    state.on = False
    try:
        yield
    finally:
        state.on = True


def _compiler(backend: str, mode: str | None, model: nn.Module, *, whole: bool) -> Callable[..., Any]:
    """Return the compiled form of `_run`, shared by all blocks. `whole` refuses to leave the graph within a block."""
    from torch._dynamo.exc import BackendCompilerFailed  # importing torch's compiler takes 0.5 s
    from torch._inductor import list_mode_options

    _require_known(backend, mode, model)
    options = None
    if backend == DEFAULT_BACKEND:
        # Masks of models that run padded come from torch's generator: drawn as they are without compilation.
        options = dict(list_mode_options(mode)) if mode else {}
        options["fallback_random"] = True

    # torch keeps graphs with the code that they were made from: a copy of it holds those of this model alone.
    own = FunctionType(_run.__code__.replace(), _run.__globals__)
    compiled = torch.compile(own, backend=backend, options=options, dynamic=True, fullgraph=whole)
    graph.register()
    graph.Traced.operators = True

    def limited(*given: Any, **named: Any) -> Any:
        graph.Traced.native = library() is not None
        with torch._dynamo.config.patch(recompile_limit=_VARIANTS, specialize_float=True):
            try:
                return compiled(*given, **named)
            except BackendCompilerFailed as error:
                raise _failed(backend, error) from error

    return limited


def _run(
    forward: Callable[..., Any], placement: Placement | None, position: KeyedPosition | None, *given: Any, **named: Any
) -> Any:
    """Run the block. Only a trace reads what is set here, and it has set it itself: threads do not meet in it."""
    if placement is None:
        return forward(*given, **named)
    placement.traced = position
    result = forward(*given, **named)
    placement.traced = None
    return result


def _put(state: _State, module: nn.Module, compiled: Callable[..., Any], packed: PackedModel | None) -> None:
    forward = module.__dict__.get("forward") or class_forward(module)
    if packed is None:
        block = _Block(state, compiled, forward)
    else:
        block = _Block(state, compiled, forward, packed.placement, _numbered(state, module))
    state.forwards.put(module, MethodType(partial(_forward, block), module))


def _numbered(state: _State, block: nn.Module) -> tuple[Site, ...]:
    """Number the sites of a block from 0; return them in this order."""
    found: list[Site] = []
    for module in block.modules():
        name = "site" if isinstance(module, PlacedDropout) else SITE
        site: Site | None = module.__dict__.get(name)
        if site is not None:
            state.sites.append((module, name, site))
            setattr(module, name, replace(site, local=len(found)))
            found.append(site)
    return tuple(found)


def _forward(block: _Block, self: Any, *args: Any, **options: Any) -> Any:
    """Stand in for the forward of a block; outside of a pass of whet, a packed block is as its class has it."""
    placement = block.placement
    position = None if placement is None else placement.now
    if not block.state.on or (placement is not None and position is None):
        return as_function(block.forward)(self, *args, **options)  # `block` of a copy is the original's
    function = as_function(block.forward)
    if position is None:
        return block.compiled(function, None, None, self, *args, **options)
    return block.compiled(function, placement, _keyed(position, block.sites), self, *map(_no_view, args), **options)


def _keyed(position: BatchPosition, sites: tuple[Site, ...]) -> KeyedPosition:
    """Return the position with the keys of this use of the block's sites."""
    keys = torch.tensor([position.key(site.use(position)) for site in sites], dtype=torch.int64, device="cpu")
    # One row alone would be a size of 1, for which torch makes a graph of its own: one more slot, which nobody reads.
    row_slots = torch.nn.functional.pad(position.row_slots, (0, 1))
    counts = None if position.key_counts is None else torch.nn.functional.pad(position.key_counts, (0, 1))
    return KeyedPosition(
        0,
        0,
        position.slots,
        position.positions,
        position.cu_seqlens,
        row_slots,
        keys,
        words=None if position.slots.device.type == "cpu" else keys.to(position.slots.device, non_blocking=True),
        max_seqlen=position.max_seqlen,
        key_counts=counts,
        sizes=position.sizes,
    )


def _no_view(value: Any) -> Any:
    """Return a view as a tensor of its own: the first block's input is one, and would get a graph of its own."""
    return value.clone() if isinstance(value, torch.Tensor) and value._is_view() else value


_GRAPHS_OF_A_GPU = ("cudagraphs", "reduce-overhead")
"""The backend, and the mode of inductor, that are nothing but CUDA graphs."""


def _require_known(backend: str, mode: str | None, model: nn.Module) -> None:
    """Raise ConfigError for a backend or a mode that torch, or this machine, does not have."""
    from torch._dynamo.backends.registry import list_backends
    from torch._inductor import list_mode_options

    names = list_backends(None)
    if backend not in names:
        raise ConfigError(
            what="torch.compile does not know this backend",
            got=backend,
            why=f"torch {torch.__version__} has {', '.join(names)}",
            fix=f"use --torch_compile_backend {DEFAULT_BACKEND}, or another of these",
        )
    if mode is not None and mode not in list_mode_options():
        raise ConfigError(
            what="torch.compile does not know this mode",
            got=mode,
            why=f"inductor of torch {torch.__version__} has {', '.join(list_mode_options())}",
            fix="use --torch_compile_mode default, or another of these",
        )
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        _require_on_cpu(backend, mode)


def _require_no_experts(model: nn.Module) -> None:
    """Raise ConfigError for a model with experts: the number of tokens of each is known only when it runs."""
    if not has_experts(model):
        return
    raise ConfigError(
        what="torch_compile does not go with the experts of this model",
        got=type(model).__name__,
        why="a graph would be compiled again for each number of tokens that an expert gets",
        fix="leave --torch_compile out: the products of experts are native without it",
    )


def _failed(backend: str, error: BackendCompilerFailed) -> ConfigError:
    """Return the error for a backend that could not compile a block: what it said, in short."""
    inner = getattr(error, "inner_exception", error)
    other = f"use --torch_compile_backend {DEFAULT_BACKEND}, or " if backend != DEFAULT_BACKEND else ""
    return ConfigError(
        what=f"the backend {backend} of torch.compile cannot compile this model here",
        got=f"{type(inner).__name__}: {' '.join(str(inner).split())[:250]}",
        why="torch lists backends that need a package or options of their own, or that cannot train",
        fix=f"{other}leave --torch_compile out",
    )


def _require_on_cpu(backend: str, mode: str | None) -> None:
    asked = {"torch_compile_backend": backend, "torch_compile_mode": mode}
    useless = [f"{name}={value}" for name, value in asked.items() if value in _GRAPHS_OF_A_GPU]
    if useless:
        raise ConfigError(
            what="CUDA graphs are asked for on the CPU",
            got=", ".join(useless),
            why="they save the launches of a GPU's kernels, and torch would skip them here",
            fix=f"use --torch_compile_backend {DEFAULT_BACKEND} without a mode, or leave --torch_compile out",
        )
    if backend == DEFAULT_BACKEND:
        _require_compiler()


def _require_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError) as error:
        raise ConfigError(
            what="torch.compile finds no C++ compiler",
            got=" ".join(str(error).split())[:200],
            why="on a CPU inductor writes C++ and compiles it before the first step",
            fix="install g++ (apt install g++) or name one in the variable CXX, or leave --torch_compile out",
        ) from error
