"""Runs passes for their sizes alone, and counts what memory would hold.

Under a `Rehearsal`, operators of torch return results of the right size and format at addresses that no memory stands
behind: a mapping that is reserved and never touched. whet's native operators do nothing. Integers, such as token ids,
labels and the boundaries of sequences, are computed as ever, so that a rehearsed pass takes the way of a real one.
Autograd, checkpointing, adapters and the methods run as they are: what is counted is what they keep.
"""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from whet import system
from whet.errors import WhetError
from whet.hardware import memory
from whet.kernels import matrix
from whet.kernels.operator import rehearsed

_SPACES = (1 << 42, 1 << 38, 1 << 36)
"""Sizes of the mapping, the first that the system grants."""
_LEAST_SPACE = 1 << 28
"""Under a limit on addresses, the mapping has half of what is left, and no less than this."""
_ALIGNED = 64
_LEAST_HOLLOW = 1 << 20
"""Elements from which on a table of integers that is made, not computed, has no memory behind it either."""
_ALIASES = frozenset({"aten::_unsafe_view", "aten::lift_fresh", "aten::set_", "aten::resize_"})
"""Operators that compute nothing, and whose schema does not say so."""
_MADE = frozenset({"aten::zeros", "aten::empty", "aten::full", "aten::ones", "aten::zeros_like", "aten::empty_like",
                   "aten::full_like", "aten::ones_like", "aten::new_empty", "aten::new_zeros", "aten::new_full",
                   "aten::empty_strided"})  # fmt: skip


_ONEDNN = "mkldnn::_linear_pointwise"
_PRODUCTS = frozenset({_ONEDNN, "aten::mm", "aten::addmm", "aten::bmm"})
"""Products; torch's own of fp32 run in MKL."""
_PICKING = frozenset({"aten::topk", "aten::argmax", "aten::sort", "aten::max"})
"""Operators whose results say which of several places a value has, where the pass continues by them."""


@dataclass(frozen=True)
class Memory:
    """One piece of memory that a rehearsal has allocated."""

    n_bytes: int
    shape: tuple[int, ...]
    """That of the tensor that it was made for."""
    in_backward: bool
    """Whether a backward pass made it."""


@dataclass
class Trace:
    """What was allocated and freed, in order: the number of a memory when it is allocated, ~number when it is freed."""

    memories: list[Memory] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    products: set[tuple[int, ...]] = field(default_factory=set)
    """The sizes of the different products that ran in oneDNN, which keeps code for each."""

    @property
    def turnover_bytes(self) -> int:
        """All that was allocated, whether it was freed again or not."""
        return sum(memory.n_bytes for memory in self.memories)

    @property
    def left_bytes(self) -> int:
        """What was not freed again."""
        return sum(self.memories[n].n_bytes if n >= 0 else -self.memories[~n].n_bytes for n in self.events)

    def without(self, numbers: Set[int]) -> Trace:
        """Return the same as if these memories had never been allocated."""
        kept = [one for one in self.events if (one if one >= 0 else ~one) not in numbers]
        return Trace(self.memories, kept, self.products)

    def peak(self) -> tuple[int, set[int]]:
        """Return the most bytes that were alive at a time, and the numbers of the memories that were."""
        alive, most, at = 0, 0, 0
        for place, number in enumerate(self.events):
            alive += self.memories[number].n_bytes if number >= 0 else -self.memories[~number].n_bytes
            if alive > most:
                most, at = alive, place
        found: set[int] = set()
        for number in self.events[: at + 1] if most else ():
            found.add(number) if number >= 0 else found.discard(~number)
        return most, found


class Rehearsal(TorchDispatchMode):
    """A context whose operators compute nothing but integers; `trace` is what they would allocate in its blocks.

    One rehearsal can be entered several times, and its tensors last from one block to the next.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self._space = _Space()
        self._results: dict[Any, Any] = {}
        self._entered: list[ExitStack] = []
        for ask in (matrix.by_pairs, matrix.is_widened):
            ask()  # a native operator, which answers once

    def __enter__(self) -> Any:
        block = ExitStack()
        block.enter_context(rehearsed())
        self._entered.append(block)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered.pop().close()

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of the memory behind this tensor in the trace; None: it was there before."""
        return self._space.numbers.get(tensor.untyped_storage()._cdata)

    def restart(self) -> Trace:
        """Begin a new trace, and return the last as it is now; what is alive now is there before the new one."""
        last, self.trace = self.trace, Trace()
        self._space.numbers.clear()
        return Trace([*last.memories], [*last.events], last.products)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of an operator: computed for integers, of the right size alone for all else."""
        kwargs = kwargs or {}
        how = _how(func)
        if how.is_composite:  # as within `_widened`, or in inference mode: what it consists of is counted
            with self:
                return func.decompose(*args, **kwargs)
        if how.is_view:
            return func(*args, **kwargs)
        if how.name == matrix.WIDENED:
            with self:
                return _widened(*args)
        tensors = [one for one in _flat((*args, *kwargs.values())) if isinstance(one, Tensor)]
        if how.name in _PRODUCTS and (how.name == _ONEDNN or tensors[0].dtype != torch.float32):
            self.trace.products.add(tuple(n for one in tensors for n in (*one.shape, *one.stride())))
        hollow = any(one.is_floating_point() or self._space.holds(one) for one in tensors)
        if how.name == "aten::_local_scalar_dense":
            return _value(tensors[0]) if self._space.holds(tensors[0]) else func(*args, **kwargs)
        if how.written:
            if not hollow:
                return func(*args, **kwargs)
            return self._written(how, func, args, kwargs)
        if not hollow and not self._makes_hollow(how, func, args, kwargs):
            return self._counted(func(*args, **kwargs))
        return self._sized(how, func, args, kwargs)

    def _makes_hollow(self, how: _How, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether an operator on nothing but integers, or on nothing, makes what needs no memory here."""
        if how.name not in _MADE:
            return how.name == "aten::_to_copy" and getattr(kwargs.get("dtype"), "is_floating_point", False)
        made = _ruled(how, args, kwargs) or _size_of(self._meta(func, args, kwargs))
        return made.dtype.is_floating_point or prod(made.shape) >= _LEAST_HOLLOW

    def _written(self, how: _How, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operator returns that writes to its arguments, as they are; a result may get its size here."""
        written = [_argument(place, args, kwargs) for place in how.written]
        for one in written:
            if isinstance(one, Tensor) and how.written[0].is_out and not one.numel():
                made = _ruled(how, args, kwargs) or _size_of(self._meta(func, args, kwargs))
                one.set_(self._new(_Size(made.shape, made.stride, one.dtype)))
        if how.n_returns == 0:
            return None
        return written[0] if how.n_returns == 1 else tuple(written)

    def _sized(self, how: _How, func: Any, args: Any, kwargs: Any) -> Any:
        """Return new tensors of the sizes of the operator's results."""
        if how.name == "aten::index":
            args = (args[0], _places(args[1]))
        key = (func, _key(args), _key(tuple(sorted(kwargs.items()))))
        if key not in self._results:
            ruled = _ruled(how, args, kwargs)
            self._results[key] = ruled if ruled is not None else _map(self._meta(func, args, kwargs), _size_of)
        made = _map(self._results[key], self._new)
        return _picked(made, args[0]) if how.name in _PICKING else made

    def _meta(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of the operator on tensors without memory."""
        options = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        if "device" in kwargs or _how(func).has_device:
            options["device"] = "meta"
        return func(*_map(args, _as_meta), **_map(options, _as_meta))

    def _new(self, size: Any) -> Any:
        return self._counted(self._space.tensor(size)) if isinstance(size, _Size) else size

    def _counted(self, result: Any) -> Any:
        """Return the result; memory that is new in it belongs to the trace, until it is freed."""
        for one in _flat((result,)):
            if isinstance(one, Tensor):
                self._count(one)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, numbers, trace = storage._cdata, self._space.numbers, self.trace
        if key in numbers or not storage.nbytes():
            return
        number = numbers[key] = len(trace.memories)
        in_backward = torch._C._current_graph_task_id() != -1
        trace.memories.append(Memory(storage.nbytes(), tuple(tensor.shape), in_backward))
        trace.events.append(number)
        weakref.finalize(storage, _freed, trace, numbers, key, number).atexit = False


def _freed(trace: Trace, numbers: dict[int, int], key: int, number: int) -> None:
    trace.events.append(~number)
    if numbers.get(key) == number:
        del numbers[key]


class _Space:
    """Addresses without memory, each given once."""

    def __init__(self) -> None:
        self._map = next((one for size in _sizes() if (one := system.addresses_without_memory(size)) is not None), None)
        if self._map is None:
            raise _no_space("the system grants none without memory behind them")
        self._end, self._next = len(self._map), _ALIGNED
        self._begin = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        self.numbers: dict[int, int] = {}
        """The address of a storage object -> the number of its memory in the trace."""

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor is one of these."""
        return 0 <= tensor.data_ptr() - self._begin < self._end

    def tensor(self, size: _Size) -> Tensor:
        """Return a tensor of this size."""
        steps = zip(size.shape, size.stride, strict=True)
        extent = 0 if 0 in size.shape else 1 + sum((n - 1) * step for n, step in steps)
        if not extent:
            return torch.empty_strided(size.shape, size.stride, dtype=size.dtype)
        begin, n_bytes = self._next, extent * size.dtype.itemsize
        if _ALIGNED + n_bytes > self._end:
            raise _no_space(f"one tensor takes {n_bytes:,} bytes, and there are {self._end:,} addresses for all")
        if begin + n_bytes > self._end:
            begin = _ALIGNED  # what had these addresses first is gone by now, or is not read either
        self._next = -(-(begin + n_bytes) // _ALIGNED) * _ALIGNED
        flat = torch.frombuffer(self._map, dtype=size.dtype, count=extent, offset=begin)
        return flat.as_strided(size.shape, size.stride)


class NoSpaceError(WhetError):
    """The system grants no addresses for a rehearsal."""


def _no_space(why: str) -> NoSpaceError:
    limit = memory.address_space_bytes()
    return NoSpaceError(
        what="memory cannot be forecast here",
        got="no limit on addresses" if limit is None else f"a limit on addresses of {limit:,} bytes (ulimit -v)",
        why=f"a forecast takes addresses for what a run would hold: {why}",
        fix="raise the limit: ulimit -v unlimited; --memory says what the run may use"
        if system.has_addresses_without_memory()
        else "forecast it on Linux or macOS: Windows gives no addresses without memory",
    )


def _sizes() -> Iterator[int]:
    """Yield the sizes to ask for, in falling order."""
    yield from _SPACES
    if (limit := memory.address_space_bytes()) is not None:
        gc.collect()  # the model of an earlier rehearsal keeps its mapping
        if (half := (limit - (memory.mapped_bytes() or 0)) // 2) >= _LEAST_SPACE:
            yield half // mmap.PAGESIZE * mmap.PAGESIZE


# ---- operators ----


@dataclass(frozen=True)
class _Place:
    """An argument of an operator."""

    number: int
    name: str
    is_out: bool


@dataclass(frozen=True)
class _How:
    """What the schema of an operator says."""

    name: str
    is_composite: bool
    is_view: bool
    written: tuple[_Place, ...]
    n_returns: int
    has_device: bool


@cache
def _how(func: Any) -> _How:
    schema, name = func._schema, func.name().partition(".")[0]
    written = tuple(
        _Place(number, one.name, one.kwarg_only)
        for number, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    )
    aliases = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
    has_device = any(one.name == "device" for one in schema.arguments)
    is_view = aliases or name in _ALIASES
    return _How(name, func._can_decompose(), is_view, written, len(schema.returns), has_device)


def _ruled(how: _How, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Size | None:
    """Return the size of the result of common operators; None for any other.

    torch computes it in Python, and imports sympy for that: half a second at the start of a training.
    """
    name, dtype = how.name, kwargs.get("dtype")
    if name in ("aten::index_add", "aten::index_copy"):
        return _Size(tuple(args[0].shape), _contiguous(args[0].shape), args[0].dtype)
    if name in _COPIES:
        source = args[0]
        dense = kwargs.get("memory_format") in (None, torch.preserve_format) and _is_dense(source)
        stride = source.stride() if dense else _contiguous(source.shape)
        return _Size(tuple(source.shape), stride, dtype or source.dtype)
    if name in ("aten::new_empty", "aten::new_zeros", "aten::new_full"):
        return _Size(tuple(args[1]), _contiguous(args[1]), dtype or args[0].dtype)
    if name in ("aten::empty", "aten::zeros", "aten::ones"):
        return _Size(tuple(args[0]), _contiguous(args[0]), dtype or torch.get_default_dtype())
    if name in ("aten::select_backward", "aten::slice_backward"):
        return _Size(tuple(args[1]), _contiguous(args[1]), args[0].dtype)
    if name in _ELEMENTWISE:
        return _broadcast([one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)])
    if name in ("aten::mm", "aten::addmm"):
        a, b = args[-2:]
        return _Size((a.shape[0], b.shape[1]), _contiguous((a.shape[0], b.shape[1])), a.dtype)
    if name in ("aten::sum", "aten::mean"):
        return _reduced(args[0], args[1:], kwargs)
    if name == "aten::embedding":
        shape = (*args[1].shape, args[0].shape[1])
        return _Size(shape, _contiguous(shape), args[0].dtype)
    if name == "aten::embedding_dense_backward":
        shape = (args[2], args[0].shape[-1])
        return _Size(shape, _contiguous(shape), args[0].dtype)
    if name == "aten::cat":
        return _joined([one for one in args[0] if one.numel()], args[1] if len(args) > 1 else kwargs.get("dim", 0))
    if name == "aten::index_select":
        shape = tuple(args[2].numel() if n == args[1] % args[0].dim() else m for n, m in enumerate(args[0].shape))
        return _Size(shape, _contiguous(shape), args[0].dtype)
    if name == "mkldnn::_linear_pointwise":
        shape = (*args[0].shape[:-1], args[1].shape[0])
        return _Size(shape, _contiguous(shape), args[0].dtype)
    return None


_ELEMENTWISE = frozenset(
    f"aten::{name}"
    for name in ("add", "sub", "mul", "div", "cos", "sin", "rsqrt", "sqrt", "pow", "neg", "exp", "log", "tanh", "silu",
                 "sigmoid", "gelu", "relu", "rsub", "masked_fill")
)  # fmt: skip


def _broadcast(given: Sequence[Tensor]) -> _Size | None:
    """Return the size of the result of an operator on each element of these tensors."""
    first = given[0]
    if not all(one.is_floating_point() for one in given):
        given = [one for one in given if one.is_floating_point()]
    if not given or any(one.dim() and one.dtype != given[0].dtype for one in given):
        return None
    n_dims = max(one.dim() for one in given)
    padded = [(1,) * (n_dims - one.dim()) + tuple(one.shape) for one in given]
    shape = tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))
    like = first.shape == shape and _is_dense(first)
    return _Size(shape, first.stride() if like else _contiguous(shape), given[0].dtype)


def _reduced(source: Tensor, more: Sequence[Any], named: Mapping[str, Any]) -> _Size:
    """Return the size of a sum or a mean."""
    dims = more[0] if more and more[0] is not None else named.get("dim")
    keeps = more[1] if len(more) > 1 else named.get("keepdim", False)
    dims = range(source.dim()) if dims is None else [dims] if isinstance(dims, int) else dims or range(source.dim())
    gone = {dim % max(source.dim(), 1) for dim in dims}
    shape = tuple(1 if n in gone else size for n, size in enumerate(source.shape) if keeps or n not in gone)
    return _Size(shape, _contiguous(shape), named.get("dtype") or source.dtype)


def _joined(parts: Sequence[Tensor], dim: int) -> _Size | None:
    """Return the size of tensors that are concatenated; None if there are none."""
    if not parts:
        return None
    dtype = parts[0].dtype
    for one in parts[1:]:
        dtype = torch.promote_types(dtype, one.dtype)
    shape = list(parts[0].shape)
    shape[dim] = sum(one.shape[dim] for one in parts)
    return _Size(tuple(shape), _contiguous(shape), dtype)


_COPIES = frozenset({"aten::zeros_like", "aten::empty_like", "aten::ones_like", "aten::full_like", "aten::_to_copy",
                     "aten::clone"})  # fmt: skip


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor's memory has no gaps, in whatever order its dimensions are."""
    expected = 1
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n != 1:
            if step != expected:
                return False
            expected *= n
    return True


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step *= max(n, 1)
    return tuple(reversed(steps))


def _argument(place: _Place, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[place.number] if place.number < len(args) else kwargs.get(place.name)


def _value(tensor: Tensor) -> bool | int | float:
    """Return what a number reads as that is not there: one, as nothing is to look odd."""
    return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None, n_rows: int | None) -> Tensor:
    """Run `matrix.widened_product` with what it allocates on its way."""
    result = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16)
    return matrix.widened_product_into(result, x, weight, bias, n_rows=n_rows)


def _picked(made: Any, source: Tensor) -> Any:
    """Return the results of a choice, such as that of experts: each place is chosen equally often."""

    def places(one: Any) -> Any:
        if not isinstance(one, Tensor) or one.dtype != torch.int64:
            return one
        return (torch.arange(one.numel()) % max(source.shape[-1], 1)).view(one.shape)

    return _map(made, places)


def _places(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the indices, masks as the places that they choose: how many these are, only their values say."""
    found: list[Tensor | None] = []
    for one in indices:
        found += [one] if one is None or one.dtype not in (torch.bool, torch.uint8) else one.nonzero().unbind(1)
    return found


def _as_meta(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _key(value: Any) -> Any:
    """Return what the sizes of results may depend on."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return (type(value), *map(_key, value))
    return float if isinstance(value, float) else value


@dataclass(frozen=True, slots=True)
class _Size:
    """The form of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _size_of(result: Any) -> Any:
    return _Size(tuple(result.shape), result.stride(), result.dtype) if isinstance(result, Tensor) else result


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the value with all in its lists, tuples and dicts changed."""
    if isinstance(value, dict):
        return {name: _map(one, change) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map(one, change) for one in value)
    return change(value)


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value
