"""CUDA graphs of a packed encoder: a training pass is two launches, one forward and one backward.

A GPU computes a pass in less time than a processor takes to launch its kernels one by one. A graph is a recording of
these launches over tensors that stay where they are, so it serves batches of one size. Packed batches make that cheap:
their tokens lie end to end, so that a size is a number of tokens, rounded up, and what fills it up is a row more.

The graph of a backward pass writes gradients to one place, from which they are added to those of the weights. The first
batch of a size runs launch by launch, with the same result and the same masks: those of the complete pass follow from
(seed, step, first row).
Source: NVIDIA, CUDA C++ Programming Guide, "CUDA Graphs"; torch.cuda.make_graphed_callables.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.utils.stateless import _reparametrize_module

from whet.errors import ConfigError
from whet.kernels.batch_position import BatchPosition, StaticPosition
from whet.kernels.dropout import generator_of, pass_seed, seeded
from whet.kernels.operator import keeping_tables
from whet.log import logger
from whet.models import record
from whet.models.experts.layer import has_experts
from whet.models.fused.limits import NO_EFFECT
from whet.models.packed import PackedModel
from whet.models.standard import is_harmless

_NOT_WITH = ("torch.compile", "offload")
"""Methods that a graph cannot contain, by their names in a model's record."""
_ASKED = ("output_attentions", "output_hidden_states", "output_router_logits")
_MOST_GRAPHS = 48
"""Sizes that have a graph. Those of one model are rarely more than ten or twenty."""
_MOST_SITES = 4096
"""Places of random masks in a model."""
_SHARE = 8
"""Sizes are multiples of the largest power of two below them, divided by this number: a batch is filled up by 6 %."""
_MOST_WASTED = 3
"""Times in a row that graphs may be made in vain, because the encoder changes again, or memory runs out."""
_LEAST_REPLAYS = 8
_LEAST_TOKENS = 64
_LEAST_LENGTH = 128


class Graph(Protocol):
    """A recording of what a function launches."""

    def capture(self, run: Callable[[], Any]) -> Any:
        """Run the function, keep what it launches and return what it returns: tensors that a replay fills again."""
        ...

    def replay(self) -> None:
        """Launch it all again."""
        ...


class CudaGraph:
    """A graph of CUDA. Graphs of one model share memory: only one pass runs at a time."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._graph, self._pool, self._stream = torch.cuda.CUDAGraph(), pool, stream

    def capture(self, run: Callable[[], Any]) -> Any:
        torch.cuda.empty_cache()  # a graph has memory of its own, and cannot take what torch keeps for other passes
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Threads that read ahead may allocate pinned memory meanwhile: only this thread's launches are recorded.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                found = run()
            except BaseException:
                with suppress(RuntimeError):  # that it was invalid: why, says the first error
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return found

    def replay(self) -> None:
        self._graph.replay()


def cuda_graphs(device: torch.device) -> Callable[[], Graph] | None:
    """Return what makes graphs for this device; None if it has none."""
    if device.type != "cuda":
        return None
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    return lambda: CudaGraph(pool, stream)


_FAILURES: Counter[torch.device] = Counter()
"""How many recordings have failed on a device. Each leaves the device another generator, and the graphs that were there
draw from the one before, which nobody seeds any more."""


@dataclass(frozen=True)
class _Size:
    """What a graph is made for: the sizes of its inputs, and all that changes which kernels run."""

    n_tokens: int
    n_rows: int
    longest: int
    columns: tuple[tuple[str, torch.dtype], ...]
    flags: tuple[tuple[str, object], ...]
    has_keys: bool
    has_sizes: bool
    autocast: torch.dtype | None
    deterministic: bool

    @classmethod
    def of(cls, call: Mapping[str, Any], position: BatchPosition) -> _Size:
        n_tokens, step = _rounded(len(position.slots))
        longest = 1 << (max(_LEAST_LENGTH, position.longest) - 1).bit_length()
        n_fill_rows = -(-step // longest)  # what fills a batch up is cut into rows that are no longer than the others
        device = position.slots.device.type
        return cls(
            n_tokens=n_tokens,
            n_rows=-(-(len(position.row_slots) + n_fill_rows) // 8) * 8,
            longest=longest,
            columns=tuple((name, value.dtype) for name, value in call.items() if isinstance(value, Tensor)),
            flags=tuple((name, value) for name, value in call.items() if not isinstance(value, Tensor)),
            has_keys=position.key_counts is not None,
            has_sizes=position.sizes is not None,
            autocast=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )


def _rounded(n_tokens: int) -> tuple[int, int]:
    """Return the rounded size of a batch, and the step between sizes."""
    step = max(_LEAST_TOKENS, (1 << (n_tokens.bit_length() - 1)) // _SHARE)
    return -(-n_tokens // step) * step, step


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a pass of a rounded size, valid everywhere at any time."""

    size: _Size
    columns: dict[str, Tensor]
    """(1, N) each."""
    position: StaticPosition
    fill_ends: Tensor
    """(rows + 1,) int32: where the rows that fill a batch up end, counted from its last token."""

    @classmethod
    def new(cls, size: _Size, call: Mapping[str, Any], given: BatchPosition, source: BatchPosition | None) -> _Inputs:
        """Return new inputs: the batch's first token again and again."""
        device, n, rows = given.slots.device, size.n_tokens, size.n_rows
        columns = {name: call[name][:, :1].expand(1, n).clone() for name, _ in size.columns}
        keyed = source is None
        own = StaticPosition(
            0,
            0,
            given.slots[:1].expand(n).clone(),
            given.positions[:1].expand(n).clone(),
            torch.zeros(rows + 1, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            max_seqlen=torch.tensor(size.longest, device="cpu"),
            key_counts=torch.zeros(rows, dtype=torch.int32, device=device) if size.has_keys else None,
            sizes=torch.ones(n, device=device) if size.has_sizes else None,
            source=source,
            keys=torch.zeros(_MOST_SITES if keyed else 0, 2, dtype=torch.int64, device=device),
            sites={},
            draws=set(),
        )
        ends = torch.arange(rows + 1, dtype=torch.int32, device=device) * size.longest
        found = cls(size, columns, own, ends)
        found.fill(call, given)
        return found

    def fill(self, call: Mapping[str, Any], given: BatchPosition) -> None:
        """Copy a batch into the inputs. What lies behind its tokens keeps tokens of an earlier batch."""
        n, rows, own = len(given.slots), len(given.row_slots), self.position
        for name, buffer in self.columns.items():
            buffer[:, :n].copy_(call[name], non_blocking=True)
        own.slots[:n].copy_(given.slots, non_blocking=True)
        own.slots[n:].fill_(int(given.row_slots[-1]) + 1)
        own.positions[:n].copy_(given.positions, non_blocking=True)
        own.cu_seqlens[: rows + 1].copy_(given.cu_seqlens, non_blocking=True)
        torch.clamp(
            self.fill_ends[: self.size.n_rows - rows + 1] + n, max=self.size.n_tokens, out=own.cu_seqlens[rows:]
        )
        own.row_slots[:rows].copy_(given.row_slots, non_blocking=True)
        if own.key_counts is not None and given.key_counts is not None:
            own.key_counts[:rows].copy_(given.key_counts, non_blocking=True)
            own.key_counts[rows:].copy_(own.cu_seqlens[rows:].diff())
        if own.sizes is not None and given.sizes is not None:
            own.sizes[:n].copy_(given.sizes, non_blocking=True)


@dataclass
class _Pass:
    """The graphs of one size, with their inputs and outputs."""

    inputs: _Inputs
    forward: Graph
    backward: Graph
    states: Tensor
    """(1, N, D): what the encoder returns."""
    grad: Tensor
    """(1, N, D): its gradient."""
    kind: type
    """The class of the encoder's output."""
    pooled: bool
    tables: list[Any]
    """What its kernels read that others keep only for a while."""

    def masks_of(self, given: BatchPosition) -> AbstractContextManager[None]:
        """Set the keys of all masks of the pass; return the context in which the graph draws those of the device."""
        own = self.inputs.position
        if own.sites:
            keys = torch.tensor([given.key(site) for site in own.sites], dtype=torch.int64, device="cpu")
            own.keys[: len(keys)].copy_(keys, non_blocking=True)
        return seeded(generator_of(self.states.device), pass_seed(given)) if own.draws else nullcontext()


@dataclass
class _Ticket:
    """A forward pass whose backward pass may still come."""

    serial: int
    weights: list[tuple[int, int]]
    """Version and place of each weight at the forward pass."""
    position: BatchPosition
    is_read: bool = False
    """Whether a backward pass has read its activations, and thereby overwritten them."""
    is_done: bool = False
    """Whether no backward pass will follow."""


@dataclass
class Passes:
    """The graphs of one encoder. A copy of the model begins with none."""

    why_not: str | None = None
    """Why no pass is captured any more."""
    _passes: dict[_Size, _Pass] = field(default_factory=dict)
    _seen: set[_Size] = field(default_factory=set)
    _state: tuple[object, ...] = ()
    """All of the encoder that the graphs depend on besides the values of its weights."""
    _seen_in: _Look | None = None
    """The encoder when it had this state."""
    _gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    """The weights that a pass trains, and where its graph writes their gradients."""
    _serial: int = 0
    _running: weakref.ref[_Ticket] | None = None
    _graphs: Callable[[], Graph] | None = None
    _token: Tensor | None = None
    _side: Any = None
    """The stream on which passes run before they are recorded: memory of a stream serves no other one."""
    _n_failures: int = 0
    """Recordings that had failed on the device when the first of the graphs was made."""
    _replays: int = 0
    """Passes since the encoder changed."""
    _wasted: int = 0
    """How often graphs were forgotten too early, in a row."""
    _n_pauses: int = 0
    """Blocks that run, in which all passes are launch by launch."""
    _is_trial: bool = False
    """Whether a block runs whose passes are forgotten afterwards."""
    _at_work: Any = field(default_factory=RLock)

    def __deepcopy__(self, memo: object) -> Passes:
        return Passes()

    def __reduce__(self) -> Any:
        return Passes, ()

    def encode(self, packed: PackedModel, given: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Return the output of the encoder's call in the running pass, by a graph; None: it runs launch by launch."""
        if len(given) > 1:
            return None
        encoder: Any = packed.module.base_model
        call = {"input_ids": given[0], **options} if given else dict(options)

        def forward(**call: Any) -> Any:
            return type(encoder).forward(encoder, **call)

        return self.run(packed, forward, {name: value for name, value in call.items() if _counts(name, value)})

    def run(self, packed: PackedModel, forward: Callable[..., Any], call: dict[str, Any]) -> Any:
        """Return the encoder's output for the call, by a graph if there is one or one is made; None if none can be."""
        position = packed.placement.now
        if position is None or self.why_not is not None or not self._suits(packed, position, call):
            return None
        size = _Size.of(call, position)
        # Passes without gradients, and those that a backward pass repeats, have the masks of graphs and are none.
        if not self._records:
            return self._launched(packed, forward, size, call, position)
        with self._at_work:  # while a graph records, the weights have stand-ins that other threads must not train
            return self._run(packed, forward, size, call, position)

    def _run(
        self, packed: PackedModel, forward: Callable[..., Any], size: _Size, call: Mapping[str, Any],
        position: BatchPosition,
    ) -> Any:  # fmt: skip
        found = self._passes.get(size)
        if self._is_running or (found is None and (size not in self._seen or len(self._passes) >= _MOST_GRAPHS)):
            out = self._launched(packed, forward, size, call, position)
            if out["last_hidden_state"].requires_grad:
                self._seen.add(size)  # many sizes come once: their graphs would cost more than they save
            return out
        found = found or self._captured(packed, forward, size, call, position)
        return None if found is None else self._replayed(found, call, position)

    @property
    def _is_running(self) -> bool:
        """Whether a pass waits for its backward pass: its activations lie where the next one would write."""
        running = None if self._running is None else self._running()
        return running is not None and not running.is_done

    def _suits(self, packed: PackedModel, position: BatchPosition, call: Mapping[str, Any]) -> bool:
        """Return whether graphs know all that this pass depends on; forget them if the encoder has changed."""
        encoder = packed.module.base_model
        assert isinstance(encoder, nn.Module)
        if not encoder.training or isinstance(position, StaticPosition) or _has_global_hooks():
            return False
        if position.chosen is not None or any(call.get(name) for name in _ASKED):
            return False
        if not all(_is_column(value, position) or _is_flag(value) for value in call.values()):
            return False
        if _ranks() > 1 or any(record.read(packed.module, name) is not None for name in _NOT_WITH):
            return False
        if self._seen_in is None or not self._seen_in.is_unchanged(encoder):
            state = _state_of(encoder)
            if state is None:
                return False
            if state != self._state and self._records:  # others leave no graph
                if self._is_running:
                    return False  # its backward pass reads what would be forgotten
                self._forget_early("its modes, settings or the places of its weights change all the time")
                self._state = state
            self._seen_in = _Look.at(encoder) if state == self._state else None
        device = position.slots.device
        if self._n_failures != _FAILURES[device]:
            if self._is_running:
                return False
            self._forget()
        if self._graphs is None:
            self._graphs, self._n_failures = cuda_graphs(device), _FAILURES[device]
        return self._graphs is not None and self.why_not is None

    @property
    def _records(self) -> bool:
        """Whether passes may be recorded and replayed now."""
        return not self._n_pauses and _is_of_a_training()

    def pause(self) -> None:
        """Launch all passes kernel by kernel, with the masks that graphs have, until as many calls of `resume`."""
        self._n_pauses += 1

    def resume(self) -> None:
        """End what `pause` has begun."""
        self._n_pauses -= 1

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Forget after the block what its passes have shown of the encoder: graphs, changes, and why none can be made.

        Weights may have stood in for the encoder's own, and a trial may need more memory than the training.
        """
        before, self._is_trial = (self.why_not, self._is_trial), True
        try:
            yield
        finally:
            self._forget()
            self._state, self._seen_in, self._wasted = (), None, 0
            self.why_not, self._is_trial = before

    def _forget_early(self, why: str) -> None:
        """Forget all graphs; give up if they have been made in vain several times in a row, for this reason."""
        self._wasted = self._wasted + 1 if self._passes and self._replays < _LEAST_REPLAYS else 0
        self._forget()
        if self._wasted >= _MOST_WASTED:
            self._give_up(why)

    def _launched(
        self, packed: PackedModel, forward: Callable[..., Any], size: _Size, call: Mapping[str, Any],
        position: BatchPosition,
    ) -> Any:  # fmt: skip
        """Return the output of a pass launch by launch, with the masks that a graph of this size would have.

        If memory does not suffice for it next to graphs, these go.
        """
        try:
            return self._launched_once(packed, forward, size, call, position)
        except torch.OutOfMemoryError:
            if not self._made_room():
                raise
        if position.slots.device.type == "cuda":
            torch.cuda.empty_cache()
        return self._launched_once(packed, forward, size, call, position)

    def _made_room(self) -> bool:
        """Forget the graphs; return False if there are none, or if a pass still waits for its backward pass."""
        with self._at_work:
            if not self._passes or self._is_running:
                return False
            self._forget_early(_NO_MEMORY)
            return True

    def _launched_once(
        self, packed: PackedModel, forward: Callable[..., Any], size: _Size, call: Mapping[str, Any],
        position: BatchPosition,
    ) -> Any:  # fmt: skip
        inputs = _Inputs.new(size, call, position, position)
        generator = generator_of(position.slots.device)
        before = generator.get_state()
        try:
            with packed.placement.at(inputs.position):
                out = forward(**inputs.columns, **dict(size.flags))
        finally:
            if inputs.position.draws:
                generator.set_state(before)
        if not isinstance(out, dict):
            raise _not_kept(out)
        out["last_hidden_state"] = out["last_hidden_state"][:, : len(position.slots)]
        return out

    def _forget(self) -> None:
        self._passes.clear()
        self._seen.clear()
        self._serial += 1
        self._gradients, self._running = [], None
        self._graphs, self._token, self._side = None, None, None  # of the device on which the weights were
        self._replays = 0

    def _captured(
        self, packed: PackedModel, forward: Callable[..., Any], size: _Size, call: Mapping[str, Any],
        position: BatchPosition,
    ) -> _Pass | None:  # fmt: skip
        """Return the graphs of this size, made now; None if this encoder's pass cannot be captured."""
        generator = generator_of(position.slots.device)
        before = generator.get_state()
        apart = generator.clone_state() if generator.device.type == "cuda" else None
        try:
            self._passes[size] = self._capture(packed, forward, size, call, position)
        except torch.OutOfMemoryError:
            self._give_up(_NO_MEMORY)
        except Exception as error:
            self._give_up(" ".join(str(error).split())[:200])
        found = self._passes.get(size)
        if found is None:
            _FAILURES[position.slots.device] += 1
            if apart is not None:
                generator.graphsafe_set_state(apart)  # its own believes for ever that a graph records
        generator.set_state(before)
        return found

    def _give_up(self, why: str) -> None:
        self._forget()
        self.why_not = why
        if self._is_trial:
            logger.info("CUDA graphs: off in this trial, which runs launch by launch: %s", why)
        else:
            logger.warning("CUDA graphs: off, this model runs launch by launch: %s", why)

    def _capture(
        self, packed: PackedModel, forward: Callable[..., Any], size: _Size, call: Mapping[str, Any],
        given: BatchPosition,
    ) -> _Pass:  # fmt: skip
        assert self._graphs is not None
        inputs, encoder = _Inputs.new(size, call, given, None), packed.module.base_model
        assert isinstance(encoder, nn.Module)
        trained = {name: one for name, one in encoder.named_parameters() if one.requires_grad}

        def run() -> Any:
            with packed.placement.at(inputs.position), _autocast(given.slots.device.type, size.autocast):
                return _only_states(forward(**inputs.columns, **dict(size.flags)))

        if self._side is None and given.slots.device.type == "cuda":
            self._side = torch.cuda.Stream(given.slots.device)
        # The weights stand in for themselves as new leaves: autograd would otherwise wait for the stream in which an
        # earlier pass has used them, which a graph must not.
        leaves = {name: one.detach().requires_grad_() for name, one in trained.items()}
        tables: list[Any] = []
        with _reparametrize_module(encoder, leaves, tie_weights=True), keeping_tables(tables):
            with _on_the_side(self._side):  # kernels are loaded and chosen here, not while a graph records
                states = run().last_hidden_state
                zeros = torch.zeros_like(states)
                wanted = [*leaves.values(), *trained.values()]
                grads = torch.autograd.grad(states, wanted, zeros, allow_unused=True)
                del states
            if any(grad is not None for grad in grads[len(leaves) :]):
                raise RuntimeError("a weight of the encoder is used from elsewhere than its module")
            used = [name for name, grad in zip(leaves, grads, strict=False) if grad is not None]
            del grads
            self._keep_gradients([trained[name] for name in used])
            kept = [grad for _, grad in self._gradients]
            forward_graph, backward_graph = self._graphs(), self._graphs()
            out = forward_graph.capture(run)
            states, kind, pooled = out.last_hidden_state, type(out), out.get("pooler_output") is not None
            del out
            inside = [leaves[name] for name in used]

            def back() -> None:
                """Afterwards the activations are free for other graphs: one pass runs at a time."""
                torch._foreach_copy_(kept, torch.autograd.grad(states, inside, zeros))  # pyright: ignore

            backward_graph.capture(back)
        return _Pass(inputs, forward_graph, backward_graph, states.detach(), zeros, kind, pooled, tables)

    def _keep_gradients(self, used: list[nn.Parameter]) -> None:
        if self._gradients:
            if [id(one) for one, _ in self._gradients] != [id(one) for one in used]:
                raise RuntimeError("two passes train different weights")
            return
        if len({(one.dtype, one.device) for one in used}) != 1:
            raise RuntimeError("the weights have several formats")
        self._gradients = [(one, torch.zeros_like(one, requires_grad=False)) for one in used]

    def _replayed(self, found: _Pass, call: Mapping[str, Any], position: BatchPosition) -> Any:
        if self._token is None:
            self._token = torch.empty(0, device=position.slots.device, requires_grad=True)
        self._serial, self._replays = self._serial + 1, self._replays + 1
        ticket = _Ticket(self._serial, self._versions(), position)
        self._running = weakref.ref(ticket)
        found.inputs.fill(call, position)
        with found.masks_of(position):
            found.forward.replay()
        weights = [one for one, _ in self._gradients]
        states = _Replayed.apply(self._token, self, found, ticket, len(position.slots), *weights)
        return found.kind(last_hidden_state=states, **({"pooler_output": states[:, 0]} if found.pooled else {}))

    def differentiate(self, found: _Pass, ticket: _Ticket, grad: Tensor) -> None:
        """Add the gradients of a forward pass to `.grad` of all weights; new ones get memory of their own."""
        self._differentiate(found, ticket, grad)
        present = [(weight.grad, kept) for weight, kept in self._gradients if weight.grad is not None]
        if present:
            torch._foreach_add_(*map(list, zip(*present, strict=True)))  # pyright: ignore
        if len(present) < len(self._gradients):
            for (weight, _), fresh in zip(self._gradients, self._copies(), strict=True):
                if weight.grad is None:
                    weight.grad = fresh

    def gradients(self, found: _Pass, ticket: _Ticket, grad: Tensor) -> list[Tensor]:
        """Return the gradients of a forward pass, for whoever asks for those of chosen tensors; `.grad` stays."""
        self._differentiate(found, ticket, grad)
        return self._copies()

    def _copies(self) -> list[Tensor]:
        """Return the gradients, each in memory of its own: who keeps one keeps no other."""
        return list(torch._foreach_mul([kept for _, kept in self._gradients], 1.0))  # pyright: ignore

    def _versions(self) -> list[tuple[int, int]]:
        return [(one._version, one.data_ptr()) for one, _ in self._gradients]

    def _differentiate(self, found: _Pass, ticket: _Ticket, grad: Tensor) -> None:
        is_stale = ticket.is_read and self._n_failures != _FAILURES[grad.device]
        if ticket.is_done or is_stale or ticket.serial != self._serial:
            raise ConfigError(
                what="the activations of a forward pass are gone before its backward pass",
                got="a second backward pass without retain_graph=True in the first, or a model that has changed since",
                why="CUDA graphs keep the activations of one pass, until its last backward pass",
                fix=_WITHOUT_GRAPHS,
            )
        if ticket.weights != self._versions():
            raise ConfigError(
                what="weights have changed between a forward pass and its backward pass",
                why="the gradients would be those of neither",
                fix="call backward() first",
            )
        if ticket.is_read:  # no other pass has taken its inputs and the keys of its masks since
            with found.masks_of(ticket.position):
                found.forward.replay()
        n = grad.shape[1]
        found.grad[:, :n].copy_(grad)
        found.grad[:, n:].zero_()
        found.backward.replay()
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore
        ticket.is_read, ticket.is_done = True, not keeps_graph


class _Replayed(Function):
    """A pass by graphs, in autograd's graph: `token` stands for "all weights", which are inputs as well."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, passes: Passes, found: _Pass, ticket: _Ticket, n_tokens: int, *weights: Tensor
    ) -> Tensor:
        ctx.of = (passes, found, ticket)
        return found.states[:, :n_tokens].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        passes, found, ticket = ctx.of
        if torch.is_grad_enabled():
            raise ConfigError(
                what="a pass by CUDA graphs has no second derivatives",
                got="a backward pass with create_graph=True",
                why="a graph replays one backward pass",
                fix=_WITHOUT_GRAPHS,
            )
        token = ctx.next_functions[0][0]
        if torch._C._will_engine_execute_node(token):  # a backward pass to all leaves, and not to chosen ones
            passes.differentiate(found, ticket, grads[0])
            return (None,) * len(ctx.needs_input_grad)
        return (*(None,) * _NO_WEIGHTS, *passes.gradients(found, ticket, grads[0]))


_NO_WEIGHTS = 5
"""Arguments of `_Replayed` before the weights."""
_NO_MEMORY = "the GPU's memory does not suffice for them"
_WITHOUT_GRAPHS = "use cuda_graphs=False; run a script of whet run with WHET_RUN=off"


def _only_states(out: Any) -> Any:
    """Return the encoder's output; raise ConfigError if it holds more than the last hidden states."""
    extra = {name for name, value in out.items() if value is not None} if isinstance(out, Mapping) else {"a tuple"}
    if extra - {"last_hidden_state", "pooler_output"}:
        raise _not_kept(out)
    return out


def _not_kept(out: Any) -> ConfigError:
    return ConfigError(
        what="the encoder returns more than a graph keeps",
        got=sorted(out) if isinstance(out, Mapping) else type(out).__name__,
        why="a graph keeps the last hidden states",
        fix=_WITHOUT_GRAPHS,
    )


def _autocast(device: str, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Return autocast without its cache, whose copies of weights would be those of another pass."""
    return torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False)


@contextmanager
def _on_the_side(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run the block on this stream, as graphs are recorded on one of their own; None: where it is."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(stream.device).wait_stream(stream)


def _counts(name: str, value: Any) -> bool:
    """Return whether an argument may change the pass; numbers of transformers' losses, say, do not."""
    if value is None or name not in NO_EFFECT:
        return value is not None
    return not (value.__class__ is int or (isinstance(value, Tensor) and value.dim() == 0))


def _is_column(value: Any, position: BatchPosition) -> bool:
    return type(value) is Tensor and value.shape == (1, len(position.slots)) and not value.is_floating_point()


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, str))


@dataclass(frozen=True)
class _Look:
    """What an encoder was made of at a moment, to see in a few comparisons that `_state_of` would find the same.

    It is asked in every pass, and a graph's pass takes the program no more than some milliseconds.
    """

    modules: list[nn.Module]
    classes: list[type]
    attributes: list[tuple[dict[str, Any], tuple[object, ...]]]
    """Each module's attributes, and those of the configuration, with their values."""
    empty: list[Any]
    filled: list[tuple[Any, Any]]
    """Lists and dicts among the values, with a copy of each."""
    tensors: list[Tensor]
    of_tensors: list[tuple[object, ...]]

    @classmethod
    def at(cls, encoder: nn.Module) -> _Look:
        modules = list(encoder.modules())
        owners = [vars(one) for one in modules] + [vars(encoder.config)]  # pyright: ignore[reportArgumentType]
        inside = [value for own in owners for value in own.values() if isinstance(value, (dict, list))]
        tensors = [one for part in modules for one in (*part._parameters.values(), *part._buffers.values())]
        known = [one for one in tensors if one is not None]
        return cls(
            modules,
            [one.__class__ for one in modules],
            [(own, tuple(own.values())) for own in owners],
            [one for one in inside if not one],
            [(one, copy.copy(one)) for one in inside if one],
            known,
            [_of_tensor(one) for one in known],
        )

    def is_unchanged(self, encoder: nn.Module) -> bool:
        try:
            return (
                encoder is self.modules[0]
                and [one.__class__ for one in self.modules] == self.classes
                and all(tuple(own.values()) == values for own, values in self.attributes)
                and not any(self.empty)
                and all(now == then for now, then in self.filled)
                and [_of_tensor(one) for one in self.tensors] == self.of_tensors
            )
        except Exception:  # a new value that cannot be compared, such as a tensor
            return False


def _of_tensor(one: Tensor) -> tuple[object, ...]:
    hooked = bool(one._backward_hooks or _hooks_after(one))
    return one.data_ptr(), one.stride(), one.requires_grad, hooked


def _state_of(encoder: nn.Module) -> tuple[object, ...] | None:
    """Return what graphs of the encoder depend on besides the values of its weights; None if they cannot be used."""
    if has_experts(encoder):
        return None  # the program reads which experts tokens use, and the loss reads the routes of the batch's tokens
    found: list[object] = []
    is_trained, left = False, [encoder]
    while left:
        module = left.pop()
        own = module.__dict__
        if own.get("gradient_checkpointing") or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return None
        if not module.__class__.__module__.startswith(_KNOWN):
            return None  # it may read anything, or draw numbers on the CPU
        found.append(module.__class__)
        if module is not encoder:
            if not all(map(is_harmless, (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()))):
                return None
            found.append(own.get("forward"))
        for value in own.values():
            kind = value.__class__
            if kind in _SETTINGS:
                found.append(value)
            elif kind is list or kind is tuple:  # as of adapters' names
                found += [one for one in value if one.__class__ in _SETTINGS]
            elif kind is dict and value:  # as of adapters' factors
                found += [item for item in value.items() if item[1].__class__ in _SETTINGS]
        for parameter in own["_parameters"].values():
            if parameter is not None:
                if not parameter.is_leaf or parameter._backward_hooks or _hooks_after(parameter):
                    return None
                is_trained = is_trained or parameter.requires_grad
                found += (id(parameter), parameter.data_ptr(), parameter.stride(), parameter.requires_grad)
        found += [buffer.data_ptr() for buffer in own["_buffers"].values() if buffer is not None]
        left += [child for child in own["_modules"].values() if child is not None]
    config = vars(encoder.config)  # pyright: ignore[reportArgumentType]
    found += [value for value in config.values() if value.__class__ in _SETTINGS]
    return tuple(found) if is_trained else None


_KNOWN = ("torch.", "transformers.", "peft.", "whet.")
"""Packages whose modules compute from what `_state_of` sees."""
_SETTINGS = frozenset({bool, int, float, str})
"""Classes of attributes that a module's forward may branch by, or multiply with: training, p, an active adapter."""


def _hooks_after(parameter: Tensor) -> Any:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


def _has_global_hooks() -> bool:
    """Return whether hooks look at all modules of the process."""
    module = nn.modules.module
    of_backward = module._global_backward_hooks or module._global_backward_pre_hooks
    return bool(module._global_forward_hooks or module._global_forward_pre_hooks or of_backward)


def _is_of_a_training() -> bool:
    """Return whether a pass keeps its activations for a backward pass, and nobody else looks at its operators."""
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1 or torch.is_anomaly_enabled():
        return False
    if torch._C._len_torch_dispatch_stack():
        return False
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(False) is None  # pyright: ignore
    except (AttributeError, TypeError):  # not in every torch; a graph then keeps its activations as it does
        return True


def _ranks() -> int:
    """Return how many ranks train together: their exchange happens within a backward pass, where no graph sees it."""
    group = torch.distributed
    return group.get_world_size() if group.is_available() and group.is_initialized() else 1
