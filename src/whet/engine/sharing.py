"""What the ranks of a run share instead of each having it: the optimizer's state, gradients and weights (ZeRO).

whet shares them itself, or DeepSpeed's engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from whet.config.rules.sharing import runs_deepspeed, stage_of_run
from whet.engine.run import Prepared
from whet.engine.step import Update
from whet.engine.update import OptimizerUpdate
from whet.errors import ConfigError
from whet.kernels import shared_memory
from whet.log import logger
from whet.models.fused.embeddings import GRADIENT
from whet.models.view import ModelView
from whet.store.optimizer import names_in, parameters_of
from whet.store.state import Stateful

if TYPE_CHECKING:
    from whet.dist.sharded_model import ShardedModel
    from whet.dist.zero_engine import ZeroEngine
    from whet.engine.zero import EnginePart, OptimizerShare, ShardedWeights

SHARED = "whet_shared"
"""Attribute of an optimizer that has a share of a run's state."""


class Sharing:
    """How the ranks share what a run holds: here each has everything."""

    is_on = False
    """Whether a rank alone has less than a checkpoint holds."""

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Share from now on. Model and optimizer are complete until then, and restored."""

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters whose gradients this rank has after a backward pass."""
        return list(model.parameters())

    def stepping(self) -> AbstractContextManager[None]:
        """Return the context of the optimizer's step."""
        return nullcontext()

    def saving(self) -> AbstractContextManager[None]:
        """Return a context in which rank 0 has the complete model and state. All ranks enter it."""
        return nullcontext()

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which each rank has the complete model. All ranks enter it."""
        return nullcontext()

    def finish(self) -> None:
        """Leave the complete model on each rank. All ranks call it."""

    def abandon(self) -> None:
        """End without the other ranks, unless `finish` was called: the model is refused from now on."""

    def update(self, alone: OptimizerUpdate) -> Update:
        """Return how gradients update the weights; `alone` is the update of a rank that has everything."""
        return alone

    def optimizer_part(self, alone: Stateful) -> Stateful:
        """Return the optimizer as a part of a checkpoint; `alone` is that of a rank that shares nothing."""
        return alone


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
        from whet.engine.zero import OptimizerShare, ReplicatedWeights
        from whet.optim import divisible

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
        from whet.engine.zero import ShardedWeights

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
        from whet.dist.zero_engine import ZeroEngine
        from whet.engine.zero import EnginePart

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
    from whet.optim import divisible

    if divisible.unit_of(optimizer) != 1:
        raise ConfigError(
            what="deepspeed does not go with this optimizer",
            got=type(optimizer).__name__,
            why="DeepSpeed's engine gives it flat parts of the weights, and it reads complete tensors",
            fix="use --optim adamw_whet, or --zero_stage 1 instead of --deepspeed",
        )


def build(prepared: Prepared, optimizer: Optimizer) -> Sharing:
    """Return how the ranks of this run share what it holds, as `zero_stage` says."""
    _require_complete(optimizer)
    args, sync = prepared.args, prepared.sync
    by_engine, stage = runs_deepspeed(args), stage_of_run(args)
    if by_engine:
        from whet.config import deepspeed

        stage = deepspeed.stage_of(args.deepspeed)
    offloads = _offloads(prepared, alone=sync.n_ranks == 1)
    if stage and sync.n_ranks == 1:
        logger.info("ZeRO stage %d: this process is the only rank and keeps everything itself", stage)
    if not stage or sync.n_ranks == 1:
        return Sharing()
    from whet.config import deepspeed
    from whet.optim import divisible

    divisible.require_known(optimizer)
    _require_own_memory(prepared.model, optimizer, f"zero_stage {stage}")
    if by_engine:
        return EngineSharing(sync, lambda model: deepspeed.engine_config(args, _hidden_size(model)))
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
    by_file = False
    if args.deepspeed is not None:
        from whet.config import deepspeed

        by_file = deepspeed.offloads(args.deepspeed)
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


def _require_complete(optimizer: Optimizer) -> None:
    """Refuse an optimizer of the user's that an earlier training has shared out."""
    if hasattr(optimizer, SHARED):
        raise ConfigError(
            what="the optimizer has only this rank's share of an earlier training",
            got=type(optimizer).__name__,
            why="with zero_stage, fsdp or deepspeed each rank keeps the state of a part of the weights",
            fix="pass a new optimizer to each training, or train without zero_stage, fsdp and deepspeed",
        )


_left: WeakSet[nn.Module] = WeakSet()
"""Models of which a training that failed left each rank its share alone."""


def mark_unfinished(model: nn.Module) -> None:
    """Note that this model stays without the rows of the other ranks, which may be gone."""
    _left.add(model)


def require_complete(model: nn.Module) -> None:
    """Raise ConfigError if a training has left the model with the weights of this rank alone."""
    if model in _left:
        raise ConfigError(
            what="the model has only this rank's share of the weights",
            got="a model whose training failed",
            why="with zero_stage 2 and 3 the ranks bring the weights together at the end of a "
            "training, and an error of one rank ends it before that",
            fix="build a new model and trainer, and call train(resume_from_checkpoint=True) or load the newest "
            "checkpoint of the run; zero_stage 1 leaves each rank the complete weights",
        )
