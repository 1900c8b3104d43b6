"""The ranks share an optimizer, and a model: each keeps some rows of state, gradients and weights (ZeRO).

Stage 1 shares the optimizer's state (`ReplicatedWeights`), stages 2 and 3 the weights too (`ShardedWeights`); or
DeepSpeed's engine shares them. Rajbhandari et al. 2020, arXiv:1910.02054, section 5.
"""

from __future__ import annotations

import platform
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.config import deepspeed
from whet.config.rules.sharing import runs_deepspeed, stage_of_run
from whet.dist.group import Group
from whet.dist.messages import DTYPES, dtype_name
from whet.dist.shares import RowExchange, Rows, deal, n_rows, rows_in
from whet.dist.zero_engine import ZeroEngine
from whet.engine.run import Prepared
from whet.engine.sync import SHARED, Sharing, mark_unfinished
from whet.engine.update import OptimizerUpdate
from whet.errors import ConfigError
from whet.kernels import shared_memory
from whet.kernels.embedding import RowsInUse, rows_in_use
from whet.log import logger
from whet.models.fused.layers import GRADIENT
from whet.models.view import ModelView
from whet.optim import divisible
from whet.store import schema
from whet.store.optimizer import OptimizerState, names_in, parameters_of
from whet.store.state import State, Stateful, in_file_order, join, split

if TYPE_CHECKING:
    from whet.dist.sharded_model import ShardedModel

_PIECE_BYTES = 16 << 20
"""Bytes that a rank sends at a time while rank 0 writes."""
_Forms = Mapping[str, tuple[Any, Mapping[str, tuple[tuple[int, ...], str]]]]
"""Parameter -> its state with references instead of tensors, and shape and dtype of each tensor."""


class Weights(Protocol):
    """The weights that the ranks update together."""

    shapes: Sequence[tuple[int, ...]]
    """The shapes of the optimizer's parameters, in the order of its groups."""
    rows: Sequence[Sequence[Rows]]
    """For each parameter of the optimizer, the rows that each rank updates."""
    kept: Sequence[nn.Parameter | None]
    """What this rank updates of each parameter; None: nothing."""

    def take_gradients(self) -> None:
        """Show the optimizer the gradients of what this rank updates."""
        ...

    def give(self) -> None:
        """Let the other ranks have what this rank has updated."""
        ...


class CollectedState(ABC):
    """The state of the optimizer, which the ranks share. Rank 0 may have shapes alone, if there are `pieces`."""

    _complete: State | None = None

    @abstractmethod
    def collect(self) -> State | None:
        """Return the state of all ranks, as one process has it; None on a rank that does not save. All call this."""

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect the state for the block, in which `state` returns it. All ranks enter it."""
        self._complete = self.collect()
        try:
            yield
        finally:
            self._complete = None

    def state(self) -> State:
        """Return the state of all ranks, as one process has it: on rank 0, within `collected`."""
        assert self._complete is not None
        return self._complete

    def load_state(self, saved: State) -> None:
        """Never called: a checkpoint is restored before the ranks share the optimizer."""
        raise AssertionError


class OptimizerShare(CollectedState):
    """One rank's share of an optimizer, whose groups get `weights.kept` in place of the parameters.

    `names` are those of the parameters, in the order of the groups. `unit` is the number of elements that one number of
    the state stands for at most.
    """

    def __init__(
        self, group: Group, optimizer: Optimizer, names: Sequence[str], weights: Weights, unit: int | None
    ) -> None:
        self._group, self._optimizer, self._weights, self._unit = group, optimizer, weights, unit
        self._names = list(names)
        self._own: dict[str, Tensor] = {}
        self._held: dict[str, tuple[Tensor, list[tuple[int, int]]]] = {}
        """Path in the state -> the tensor's form, and the bytes of each rank that holds some of it."""
        self._names_by_group: list[list[str]] = []
        self._kept_by_group: list[list[Tensor]] = []
        self._put_into_groups()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around the optimizer's step: it gets the gradients of this rank's rows, and all ranks get the result."""
        self._require_same_groups()
        self._weights.take_gradients()
        yield
        self._weights.give()

    def _require_same_groups(self) -> None:
        now = [[id(one) for one in group["params"]] for group in self._optimizer.param_groups]
        if now != [[id(one) for one in kept] for kept in self._kept_by_group]:
            raise ConfigError(
                what="the parameters of the optimizer's groups changed while ranks share its state",
                got=f"groups of {_counts(now)} parameters, on this rank at the start {_counts(self._kept_by_group)}",
                why="who keeps which parameter is settled when the training begins",
                fix="give the optimizer all parameters at the start, frozen ones too, or leave --zero_stage, --fsdp "
                "and --deepspeed out",
            )

    def _put_into_groups(self) -> None:
        """Replace the parameters, with their state, by what this rank updates of them."""
        optimizer, numbers = self._optimizer, iter(range(len(self._names)))
        states: dict[Tensor, Any] = {}
        for group in optimizer.param_groups:
            own = [(next(numbers), parameter) for parameter in group["params"]]
            self._names_by_group.append([self._names[number] for number, _ in own])
            group["params"] = []
            for number, parameter in own:
                state, kept = optimizer.state.pop(parameter, None), self._weights.kept[number]
                if kept is None:
                    continue
                group["params"].append(kept)
                if state:
                    states[kept] = _next_to(kept, self._cut(state, number))
            self._kept_by_group.append(list(group["params"]))
        optimizer.state.update(states)

    def _cut(self, state: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Return copies of the rows of the state that this rank keeps."""
        shape, (first, n) = self._weights.shapes[number], self._weights.rows[number][self._group.rank]
        if (first, n) == (0, n_rows(shape)):
            return dict(state)
        assert self._unit is not None
        width = prod(shape[1:])
        blocks = (first * width // self._unit, -(-n * width // self._unit))

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.dim():
                return value
            return value.narrow(0, *((first, n) if tuple(value.shape) == shape else blocks)).clone()

        return {name: cut(value) for name, value in state.items()}

    @contextmanager
    def collected(self) -> Iterator[None]:
        try:
            with super().collected():
                yield
        finally:
            self._own, self._held = {}, {}

    def collect(self) -> State | None:
        names = [name for name, kept in zip(self._names, self._weights.kept, strict=True) if kept is not None]
        own = OptimizerState(self._optimizer, names).state()
        parts = {name: split(values) for name, values in own["state"].items()}
        of_ranks: list[_Forms] = self._group.gather(
            {
                name: (plain, {path: (tuple(one.shape), dtype_name(one.dtype)) for path, one in tensors.items()})
                for name, (plain, tensors) in parts.items()
            },
            schema.object_of(_is_form),
        )
        state: dict[str, Any] = {}
        for name in self._names:
            held: dict[int, Any] = {rank: forms[name] for rank, forms in enumerate(of_ranks) if name in forms}
            if held:
                tensors = parts[name][1] if name in parts else {}
                self._own |= {f"state.{name}.{path}": one for path, one in tensors.items()}
                state[name] = self._described(f"state.{name}.", held)
        groups = [
            {**group, "params": names} for group, names in zip(own["param_groups"], self._names_by_group, strict=True)
        ]
        return {"param_groups": groups, "state": state} if self._group.rank == 0 else None

    def _described(self, prefix: str, held: Mapping[int, Any]) -> Any:
        """Return one parameter's state with tensors on the meta device, and note which rank holds how much of each."""
        plain, shaped = next(iter(held.values()))
        found = {}
        for path, (shape, name) in shaped.items():
            senders = [*held] if shape else [*held][:1]  # a tensor without dims is the same on all
            shapes = {rank: held[rank][1][path][0] for rank in senders}
            complete = (sum(one[0] for one in shapes.values()), *shape[1:]) if shape else ()
            found[path] = torch.empty(complete, dtype=DTYPES[name], device="meta")
            held_bytes = [(rank, prod(one) * DTYPES[name].itemsize) for rank, one in shapes.items()]
            self._held[f"{prefix}{path}"] = found[path], held_bytes
        return join(plain, found)

    def pieces(self) -> Iterator[Tensor]:
        """Yield the bytes of the state on rank 0, (n,) uint8, a few at a time; the others send theirs meanwhile.

        All ranks go through all of it, within `collected`.
        """
        for path in in_file_order({path: one for path, (one, _) in self._held.items()}):
            for rank, n_bytes in self._held[path][1]:
                own = None if self._group.rank != rank else _bytes_of(self._own[path])
                for first in range(0, n_bytes, _PIECE_BYTES):
                    n = min(_PIECE_BYTES, n_bytes - first)
                    piece = None if own is None else own[first : first + n]
                    piece = self._group.to_first(piece, rank, (n,), torch.uint8)
                    if piece is not None:
                        yield piece.cpu()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, (n,) uint8, which share its memory if that is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _is_form(form: Any) -> bool:
    """Return whether this is what a rank says of a parameter's state: plain values, shapes and dtypes of tensors."""
    if not (isinstance(form, tuple) and len(form) == 2 and isinstance(form[1], dict)):
        return False
    return all(_is_described(*one) if isinstance(one, tuple) else False for one in form[1].values())


def _is_described(shape: Any = None, name: Any = None, *more: Any) -> bool:
    return isinstance(shape, tuple) and all(map(schema.count, shape)) and name in DTYPES and not more


def _next_to(kept: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with its tensors on the device of the weight, which may be offloaded."""
    return {name: one.to(kept.device) if isinstance(one, Tensor) and one.dim() else one for name, one in state.items()}


def _counts(groups: Sequence[Sequence[Any]]) -> str:
    return ", ".join(str(len(group)) for group in groups)


class EnginePart(CollectedState):
    """The optimizer as a part of a checkpoint, with the names and shapes of the complete parameters."""

    engine: ZeroEngine

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer, self.parameters = optimizer, parameters_of(optimizer)
        self._names = names_in(optimizer, model)
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]

    def collect(self) -> State:
        states = self.engine.state(self.parameters)
        names, groups = iter(self._names), []
        for group, size in zip(self._optimizer.param_groups, self._sizes, strict=True):
            plain = {name: value for name, value in group.items() if name != "params"}
            groups.append({**plain, "params": [next(names) for _ in range(size)]})
        found = {name: state for name, state in zip(self._names, states, strict=True) if state}
        return {"param_groups": groups, "state": found}


class ReplicatedWeights:
    """The parameters of a model; `kept` are the rows that this rank updates, in the parameters' own memory."""

    def __init__(self, group: Group, parameters: Sequence[nn.Parameter], unit: int | None) -> None:
        for one in parameters:
            one.data = one.data.contiguous()
        self._parameters = list(parameters)
        self.shapes: Sequence[tuple[int, ...]] = [tuple(one.shape) for one in parameters]
        self.rows: Sequence[Sequence[Rows]] = deal(self.shapes, group.n_ranks, unit)
        self._own = [of_rank[group.rank] for of_rank in self.rows]
        self.kept: Sequence[nn.Parameter | None] = [
            _kept(one, rows) for one, rows in zip(self._parameters, self._own, strict=True)
        ]
        self._exchange = RowExchange(group, self._parameters, self.rows)
        self._in_use: dict[int, tuple[RowsInUse, RowsInUse]] = {}

    def take_gradients(self) -> None:
        """Show the optimizer the gradients of the rows that this rank keeps."""
        for number, (parameter, kept) in enumerate(zip(self._parameters, self.kept, strict=True)):
            if kept is None or kept is parameter:
                continue
            kept.data = rows_in(parameter.detach(), self._own[number])  # other code may have moved the parameter
            kept.grad = None
            if parameter.grad is None:
                continue
            kept.grad = gradient = rows_in(parameter.grad, self._own[number])
            if (rows := rows_in_use(parameter.grad)) is not None:
                self._part(number, rows).put_on(gradient)

    def give(self) -> None:
        """Give the updated rows to all ranks."""
        for parameter, kept in zip(self._parameters, self.kept, strict=True):
            if kept is not None and kept is not parameter:
                kept.grad = None
        self._exchange.run(self._parameters)

    def _part(self, number: int, rows: RowsInUse) -> RowsInUse:
        """Return the record of the kept rows, the same one as long as the parameter's record is."""
        found = self._in_use.get(number)
        if found is None or found[0] is not rows:
            found = self._in_use[number] = (rows, rows.part(*self._own[number]))
        return found[1]


def _kept(parameter: nn.Parameter, rows: Rows) -> nn.Parameter | None:
    """Return what the optimizer gets: the parameter itself if this rank keeps all of it, None if it keeps nothing."""
    if not rows[1]:
        return None
    if rows == (0, n_rows(parameter.shape)):
        return parameter
    return nn.Parameter(rows_in(parameter.detach(), rows), requires_grad=parameter.requires_grad)


class ShardedWeights:
    """One rank's rows of a model's parameters, and the sum of their gradients.

    `trained` are the optimizer's parameters, in the order of its groups.
    """

    def __init__(self, group: Group, sharded: ShardedModel, trained: Sequence[nn.Parameter]) -> None:
        self._group, self._sharded = group, sharded
        own = {id(one): _share(sharded, one) for one in sharded.parameters}
        self.shapes: Sequence[tuple[int, ...]] = [sharded.shape_of(one) for one in trained]
        self.rows: Sequence[Sequence[Rows]] = deal(self.shapes, group.n_ranks, 1)
        self.kept: Sequence[nn.Parameter | None] = [own[id(one)] for one in trained]
        self._pairs = [(one, share) for one in sharded.parameters if (share := own[id(one)]) is not None]
        self.parameters = [share for _, share in self._pairs]
        """This rank's rows of all parameters."""
        self._watched = False

    # ---- the optimizer ----

    def take_gradients(self) -> None:
        for parameter, share in self._pairs:
            share.data = self._sharded.share_of(parameter)  # torch may have moved it

    def give(self) -> None:
        """Do nothing: the other ranks get the rows when they need them."""

    # ---- gradients ----

    def compute(self, work: Callable[[], Any]) -> Any:
        return self._sharded.compute(work)

    def watch(self, loss: Tensor) -> Tensor:
        self._watched = True
        return loss

    def finish(self, others: Sequence[nn.Parameter] = ()) -> bool:
        """Show the gradients of this rank's rows; return whether a loss was watched."""
        watched, self._watched = self._watched, False
        if any(self._sharded.has_hooks(one) for one in self._sharded.parameters):
            raise _unseen("a weight has hooks on its gradient", "register_hook of a parameter")
        for parameter, share in self._pairs:
            if share.requires_grad != self._sharded.is_trained(parameter):
                raise _unseen("weights were frozen or unfrozen", "a change of requires_grad during the training")
            gradient = self._sharded.gradient_of(parameter)
            share.grad = gradient if gradient is None or watched else gradient.mul_(1 / self._group.n_ranks)
        return watched


def _share(sharded: ShardedModel, parameter: nn.Parameter) -> nn.Parameter | None:
    own = sharded.share_of(parameter)
    return nn.Parameter(own, requires_grad=parameter.requires_grad) if own.numel() else None


def _unseen(what: str, got: str) -> ConfigError:
    return ConfigError(
        what=f"{what} while ranks share the weights",
        got=got,
        why="torch's fully_shard puts tensors of its own in the place of parameters when the training begins",
        fix="use --zero_stage 1, which leaves parameters as they are, without --fsdp and --deepspeed; or freeze "
        "weights before train(), and change gradients in the loss",
    )


class Shared(Sharing):
    """The ranks share the optimizer's state; from stage 2 on also gradients and weights.

    Stage 2 keeps the weights of a block from its forward pass to its backward pass, stage 3 collects them again.
    """

    def __init__(self, sync: Any, stage: int, *, offloads: bool = False) -> None:
        self._sync, self._group, self._stage = sync, sync.group, stage
        self._offloads = offloads
        self.is_on = False
        self._share: OptimizerShare | None = None
        self._model: ShardedModel | None = None
        self._weights: ShardedWeights | None = None
        self._depth = 0

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        unit, names, trained = divisible.unit_of(optimizer), names_in(optimizer, model), parameters_of(optimizer)
        if self._stage == 1:
            weights = ReplicatedWeights(self._group, trained, unit)
        else:
            weights = self._weights = self._shard(model, trained, unit)
        self._share = OptimizerShare(self._group, optimizer, names, weights, unit)
        self.is_on = True
        setattr(optimizer, SHARED, True)

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        return list(model.parameters()) if self._weights is None else self._weights.parameters

    def stepping(self) -> AbstractContextManager[None]:
        return nullcontext() if self._share is None else self._share.stepping()

    @contextmanager
    def saving(self) -> Iterator[None]:
        with self._complete(everywhere=False), nullcontext() if self._share is None else self._share.collected():
            yield

    def evaluating(self) -> AbstractContextManager[None]:
        return self._complete(everywhere=True)

    def finish(self) -> None:
        if self._model is not None:
            self._model.finish()
        self._model, self.is_on = None, False

    def abandon(self) -> None:
        if self._model is not None:
            mark_unfinished(self._model.model)

    def optimizer_part(self, alone: Stateful) -> Stateful:
        return alone if self._share is None else self._share

    @contextmanager
    def _complete(self, *, everywhere: bool) -> Iterator[None]:
        if self._model is None or self._depth:
            yield
            return
        self._depth += 1
        try:
            with self._model.complete(everywhere=everywhere):
                yield
        finally:
            self._depth -= 1

    def _shard(self, model: nn.Module, trained: Sequence[nn.Parameter], unit: int | None) -> ShardedWeights:
        from whet.dist.sharded_model import ShardedModel  # torch's fully_shard takes 0.5 s to import

        _require_shareable(model, trained, unit, self._stage)
        for module in model.modules():
            module.__dict__.pop(GRADIENT, None)  # gradients of tables are shared like all others
        blocks = _own_blocks(model)
        self._model = sharded = ShardedModel(
            self._group, model, blocks, keeps=self._stage == 2, offloads=self._offloads
        )
        weights = ShardedWeights(self._group, sharded, trained)
        self._sync.share(weights)
        return weights


@dataclass(frozen=True)
class EngineUpdate:
    """The update that DeepSpeed makes of the gradients that it has summed."""

    engine: ZeroEngine
    alone: OptimizerUpdate
    applied: list[bool]
    """Whether the present step was applied: empty before that."""

    def gradient_norm(self) -> float:
        return self.engine.gradient_norm()

    def apply(self, grad_scale: float) -> None:
        self.applied.append(True)
        self.alone.send("on_pre_optimizer_step")
        self.engine.step()  # clips by the norm of all ranks, as grad_scale would
        self.alone.send("on_optimizer_step")

    def clear(self) -> None:
        if not self.applied:
            self.engine.discard()
        self.applied.clear()
        self.alone.clear()


class EngineSharing(Sharing):
    """What DeepSpeed shares: the optimizer's state; from stage 2 on the gradients; at stage 3 the weights."""

    def __init__(self, sync: Any, config: Callable[[nn.Module], dict[str, Any]]) -> None:
        self._sync, self._config = sync, config
        self._part: EnginePart | None = None

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        _require_by_element(optimizer)
        part = EnginePart(model, optimizer)
        states = {one: state for one, state in ((p, optimizer.state.get(p)) for p in part.parameters) if state}
        part.engine = self._sync.engine = ZeroEngine(self._sync.group, model, optimizer, self._config(model), states)
        self._part, self.is_on = part, True
        setattr(optimizer, SHARED, True)

    def update(self, alone: OptimizerUpdate) -> EngineUpdate:
        assert self._sync.engine is not None
        return EngineUpdate(self._sync.engine, alone, [])

    @contextmanager
    def saving(self) -> Iterator[None]:
        if self._part is None:
            yield
            return
        with self._part.engine.complete_weights(), self._part.collected():
            yield

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext() if self._part is None else self._part.engine.complete_weights()

    def optimizer_part(self, alone: Stateful) -> Stateful:
        return alone if self._part is None else self._part

    def abandon(self) -> None:
        if self._part is not None and self._part.engine.stage == 3:
            mark_unfinished(self._part.engine.model)

    def finish(self) -> None:
        """Return the model to a plain one; the optimizer's state ends with the engine."""
        if self._part is not None:
            self._part.engine.end()
            self._part, self._sync.engine, self.is_on = None, None, False


def _require_by_element(optimizer: Optimizer) -> None:
    if divisible.unit_of(optimizer) != 1:
        raise ConfigError(
            what="deepspeed does not go with this optimizer",
            got=type(optimizer).__name__,
            why="DeepSpeed's engine gives it flat parts of the weights, and it reads complete tensors",
            fix="use --optim adamw_whet, or --zero_stage 1 instead of --deepspeed",
        )


def build(prepared: Prepared, optimizer: Optimizer) -> Sharing:
    """Return how the ranks of this run share what it holds, as `zero_stage` says."""
    args, sync = prepared.args, prepared.sync
    by_engine, stage = runs_deepspeed(args), stage_of_run(args)
    if by_engine:
        stage = deepspeed.stage_of(args.deepspeed)
    offloads = _offloads(prepared, alone=sync.n_ranks == 1)
    if stage and sync.n_ranks == 1:
        logger.info("ZeRO stage %d: this process is the only rank and keeps everything itself", stage)
    if not stage or sync.n_ranks == 1:
        return Sharing()
    divisible.require_known(optimizer)
    _require_own_memory(prepared.model, optimizer, f"zero_stage {stage}")
    if by_engine:
        return EngineSharing(sync, lambda model: deepspeed.engine_config(args, _hidden_size(model)))
    if sys.byteorder == "big":
        raise ConfigError(
            what=f"zero_stage {stage} needs a little-endian processor",
            got=platform.machine(),
            why="the ranks send their rows of the state as the checkpoint's file holds them, which is little-endian",
            fix="leave --zero_stage, --fsdp and --deepspeed out",
        )
    if args.deepspeed is not None:
        unused = ", ".join(deepspeed.tunes_engine(args.deepspeed))
        logger.warning(
            "DeepSpeed is not installed: zero_stage %d of whet carries out its configuration%s", stage,
            f"; these keys tune DeepSpeed's engine and have no effect: {unused}" if unused else "",
        )  # fmt: skip
    return Shared(sync, stage, offloads=offloads)


def _offloads(prepared: Prepared, *, alone: bool) -> bool:
    """Return whether weights and state wait in the host's memory, by `offload` or by a file for DeepSpeed."""
    args = prepared.args
    by_file = args.deepspeed is not None and deepspeed.offloads(args.deepspeed)
    if prepared.device.type == "cpu":  # offload itself is refused there
        if by_file:
            logger.info("the file of DeepSpeed offloads to a cpu: weights and state are in the host's memory already")
        return False
    if alone and (by_file or args.offload != "none"):
        raise ConfigError(
            what="offload needs several ranks",
            got=f"offload={args.offload}, one process",
            why="PyTorch offloads what ranks share by fully_shard, and a process alone shares nothing",
            fix="start two ranks or more, with torchrun or whet launch; or leave --offload out and use "
            "--activation_offload, --optim adamw_whet_8bit or --optim adafactor",
        )
    return by_file or args.offload != "none"


def _own_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks none of whose parameters another module has."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    blocks = [block for _, block in ModelView(model).blocks()]
    return [block for block in blocks if all(holders[id(one)] == 1 for one in block.parameters())]


def gathered_bytes(model: nn.Module, stage: int) -> tuple[int, int]:
    """Return the weights that a rank has for a while in a training step, next to its rows, with their gradients.

    The second number is how much of that comes at the end of a backward pass, when activations are gone.

    What is in no block is there for the pass, a block while it computes, or all of them with stage 2. The block that
    computes is there twice: as it travels between the ranks, and as the model reads it. So are gradients of both, if
    they are trained, and pieces of so different sizes leave gaps of about their own size, also those of frozen weights
    (`benchmarks/plan/run.py --only ZeRO`).
    """
    blocks = _own_blocks(model)

    def sizes(n_bytes: Callable[[nn.Module], int]) -> tuple[int, int, int]:
        of_blocks, total = [n_bytes(block) for block in blocks], n_bytes(model)
        return max(of_blocks, default=0), total - sum(of_blocks), total

    largest, rest, total = sizes(lambda part: sum(one.nbytes for one in part.parameters()))
    trained, trained_rest, _ = sizes(lambda part: sum(one.nbytes for one in part.parameters() if one.requires_grad))
    weights = (total if stage == 2 else rest + largest) + largest
    gaps, gradients = 2 * rest + 2 * largest, trained_rest + 2 * trained
    return weights + gaps + gradients, 3 * trained_rest + 2 * trained


def _require_shareable(model: nn.Module, trained: Sequence[nn.Parameter], unit: int | None, stage: int) -> None:
    """Refuse what torch's fully_shard cannot cut by rows."""
    known = {id(one) for one in model.parameters()}
    odd = [name for name, one in model.named_parameters() if not one.dim()]
    problems = {
        "the optimizer reads complete tensors": unit != 1,
        "the optimizer has parameters that the model has not": any(id(one) not in known for one in trained),
        f"a weight has no rows to share: {', '.join(odd[:3])}": bool(odd),
    }
    for why, found in problems.items():
        if found:
            raise ConfigError(
                what=f"zero_stage {stage} does not go with this model and optimizer",
                got=type(model).__name__,
                why=why,
                fix="use --zero_stage 1, which shares the optimizer's state, without --fsdp and --deepspeed",
            )


def _require_own_memory(model: nn.Module, optimizer: Optimizer, what: str) -> None:
    """Refuse a trained parameter that lies in the memory of another weight: ranks would update their rows apart."""
    tensors = {id(one): (name, one) for name, one in (*model.named_parameters(), *model.named_buffers())}
    names, weights = [name for name, _ in tensors.values()], [one for _, one in tensors.values()]
    trained = {id(one) for one in parameters_of(optimizer)}
    for group in shared_memory.overlapping(weights):
        if any(id(weights[number]) in trained for number in group):
            raise ConfigError(
                what=f"{what} does not go with weights that share memory",
                got=", ".join(names[number] for number in group[:3]),
                why="ranks would move these weights to memory of their own, and an update of one would no longer "
                "change the other",
                fix="make them one parameter under several names, or leave --zero_stage, --fsdp and --deepspeed out",
            )


def _hidden_size(model: nn.Module) -> int | None:
    return getattr(getattr(model, "config", None), "hidden_size", None)
