"""What ranks say to each other besides exchanging tensors: JSON and arrays of numbers, whose reading runs no code.

torch's object collectives (`all_gather_object`, `broadcast_object_list` and others) are pickles: whoever connects in
the place of a rank can run commands on all others with one message. Here a message is one tensor of bytes: the length
of a text, the text, which is JSON, and the contents of the arrays that it describes. Its size is limited, and the
caller says which values it takes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor

from whet.errors import ConfigError, DataError, NonFiniteError, OutputError, Problem, StorageError, WhetError
from whet.hardware import memory
from whet.strict_json import BadJson, parse_document

Check = Callable[[Any], bool]
"""Whether a value is of the form that the caller sends itself."""
_MOST_BYTES = 64 << 20
"""The largest text, and the largest message that is not compared with the memory that is left."""
_LENGTH = struct.Struct("<Q")
_LONGEST_REASON = 500


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32, the name under which `DTYPES` has it if it travels."""
    return str(dtype).removeprefix("torch.")


DTYPES: Mapping[str, torch.dtype] = {
    dtype_name(one): one
    for one in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.complex64, torch.complex128,
    )
}  # fmt: skip
"""Formats of tensors that travel, by their names."""
_KINDS_OF_NUMPY = "biufcU"
"""Numbers and texts of a fixed length; never objects or records."""
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_PICKLE = 0x80


class MessageError(WhetError):
    """A message that no rank of this run sends: another program, or another version of whet, is in a rank's place."""


def gather(value: Any, valid: Check, *, n_ranks: int, device: torch.device, large: bool = False) -> list[Any]:
    """Return the values of all ranks, in the order of their numbers; `large`: they may fill the memory that is left.

    A value is None, a bool, a number, a text, a tensor or an array of numpy, or a list, a tuple or a dict of these.
    Raises ConfigError on all ranks if one has anything else, and MessageError for a message that is not valid.
    """
    own = _encoded(value, large)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(n_ranks)]
    torch_dist.all_gather(sizes, torch.tensor([own.numel()], device=device))
    of_rank = [int(one) for one in sizes]
    for rank, size in enumerate(of_rank):
        _require_size(size, rank, n_ranks * max(of_rank), large)
    sent = torch.zeros(max(of_rank), dtype=torch.uint8, device=device)
    sent[: own.numel()] = own.to(device)
    found = [torch.empty_like(sent) for _ in of_rank]
    torch_dist.all_gather(found, sent)
    return [_read(one[:size], rank, valid) for rank, (one, size) in enumerate(zip(found, of_rank, strict=True))]


def of_first(value: Any, valid: Check, *, rank: int, device: torch.device) -> Any:
    """Return the value of rank 0, of the kinds that `gather` takes; the other ranks' own values are not looked at."""
    own = _encoded(value, large=False) if rank == 0 else None
    size = torch.tensor([0 if own is None else own.numel()], device=device)
    torch_dist.broadcast(size, src=0)
    _require_size(int(size), 0, int(size), large=False)
    sent = torch.empty(int(size), dtype=torch.uint8, device=device) if own is None else own.to(device)
    torch_dist.broadcast(sent, src=0)
    return _read(sent, 0, valid)


def _require_size(size: int, rank: int, n_bytes: int, large: bool) -> None:
    """Refuse a message that is too large to be one; `n_bytes` is what all messages of the exchange take together."""
    left = (memory.available_bytes() or n_bytes) if large and size > _MOST_BYTES else _MOST_BYTES
    if not size > 0 or (size > _MOST_BYTES and (not large or n_bytes > left)):
        raise _not_ours(rank, f"a message of {size} bytes; {left} bytes are the most")


def _not_ours(rank: int, got: str) -> MessageError:
    return MessageError(
        what=f"rank {rank} sent a message that no rank of this run sends",
        got=got[:_LONGEST_REASON],
        why="ranks send each other JSON and tensors, and nothing else is read",
        fix="start all ranks with the same version of whet, in a network in which no other program can take the place "
        "of a rank (docs/ranks.md, whom ranks trust)",
    )


# ---- writing ----


class _UnsendableError(Exception):
    """The value is of no kind that travels."""


def _encoded(value: Any, large: bool) -> Tensor:
    """Return a message with the value, or with the reason why it cannot travel: the other ranks wait for one."""
    arrays: list[np.ndarray] = []
    try:
        text = json.dumps({"value": _tree(value, arrays)}, allow_nan=False).encode()
        n_bytes = len(text) + sum(one.nbytes for one in arrays)
        if len(text) > _MOST_BYTES or (n_bytes > _MOST_BYTES and not large):
            raise _UnsendableError(f"{n_bytes} bytes, and at most {_MOST_BYTES} travel")
    except (_UnsendableError, RecursionError, ValueError) as error:
        arrays = []
        text = json.dumps({"unsendable": (str(error) or type(error).__name__)[:_LONGEST_REASON]}).encode()
    head = np.frombuffer(_LENGTH.pack(len(text)) + text, np.uint8)
    return torch.from_numpy(np.concatenate([head, *arrays]))


def _tree(value: Any, arrays: list[np.ndarray]) -> Any:
    """Return the value as JSON; the bytes of its arrays are appended to `arrays`."""
    if isinstance(value, np.generic):
        return {"number": _array(np.asarray(value), arrays)}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        return {"tensor": _tensor(value, arrays)}
    if isinstance(value, np.ndarray):
        return {"array": _array(value, arrays)}
    if isinstance(value, Mapping):
        return {"dict": [[_tree(name, arrays), _tree(one, arrays)] for name, one in value.items()]}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [_tree(one, arrays) for one in value]}
    raise _UnsendableError(f"{type(value).__module__}.{type(value).__qualname__}")


def _array(value: np.ndarray, arrays: list[np.ndarray]) -> list[Any]:
    if value.dtype.kind not in _KINDS_OF_NUMPY:
        raise _UnsendableError(f"an array of {value.dtype}")
    plain = np.ascontiguousarray(value)
    arrays.append(plain.reshape(-1).view(np.uint8) if plain.size else np.empty(0, np.uint8))
    return [value.dtype.str, list(value.shape)]


def _tensor(value: Tensor, arrays: list[np.ndarray]) -> list[Any]:
    name = dtype_name(value.dtype)
    if name not in DTYPES or value.layout != torch.strided:
        raise _UnsendableError(f"a tensor of {value.dtype}, {value.layout}")
    plain = value.detach().cpu().contiguous().reshape(-1)
    arrays.append(plain.view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8))
    return [name, list(value.shape)]


# ---- reading ----


def _read(message: Tensor, rank: int, valid: Check) -> Any:
    """Return the value of a message; raises MessageError unless all of it is what a rank of this run sends."""
    data = message.cpu().numpy()
    try:
        (length,) = _LENGTH.unpack(data[: _LENGTH.size].tobytes())
        if length > min(_MOST_BYTES, len(data) - _LENGTH.size):
            raise ValueError("its text would be longer than the message")
        document = parse_document(data[_LENGTH.size : _LENGTH.size + length].tobytes().decode())
        arrays = _Arrays(data[_LENGTH.size + length :])
        match document:
            case {"unsendable": str(reason)} if len(document) == 1:
                raise _unsendable(rank, reason)
            case {"value": tree} if len(document) == 1:
                value = _value(tree, arrays)
            case _:
                raise ValueError("its text is JSON of another form")
        arrays.require_end()
    except (BadJson, RecursionError, RuntimeError, OverflowError, TypeError, ValueError, struct.error) as error:
        reason = "a pickle, which can run code and is not read" if data[:1] == _PICKLE else str(error)
        raise _not_ours(rank, reason) from None
    if not valid(value):
        raise _not_ours(rank, f"another value than is sent at this point of a run: {str(value)[:100]}")
    return value


def _unsendable(rank: int, reason: str) -> ConfigError:
    return ConfigError(
        what=f"a value of rank {rank} cannot travel to the other ranks",
        got=reason,
        why="ranks exchange numbers, texts, tensors and arrays of numbers, in lists, tuples and dicts; never pickles, "
        "which can run code",
        fix="let the method, the callback or the metric that returns it return such values",
    )


class _Arrays:
    """The bytes of a message's arrays, which are taken one after the other."""

    def __init__(self, data: np.ndarray) -> None:
        self._data, self._at = data, 0

    def take(self, shape: Any, item_bytes: int) -> np.ndarray:
        """Return the bytes of the next array, in memory of its own."""
        if not isinstance(shape, list) or not all(type(one) is int and one >= 0 for one in shape):
            raise ValueError("an array has no shape")
        end = self._at + math.prod(shape) * item_bytes
        if end > len(self._data):
            raise ValueError("an array is cut off")
        self._at, found = end, self._data[self._at : end].copy()
        return found

    def require_end(self) -> None:
        """Refuse bytes that belong to no array."""
        if self._at != len(self._data):
            raise ValueError("bytes follow the last array")


def _value(tree: Any, arrays: _Arrays) -> Any:
    if not isinstance(tree, dict):
        if isinstance(tree, list):
            raise ValueError("a list without its kind")
        return tree
    ((kind, content),) = tree.items()
    return _READERS[kind](content, arrays) if kind in _READERS else _unknown(kind)


def _unknown(kind: str) -> Any:
    raise ValueError(f"{kind[:40]!r} is no kind of value")


def _values(content: Any, arrays: _Arrays) -> Iterator[Any]:
    if not isinstance(content, list):
        raise ValueError("a list without its values")
    return (_value(one, arrays) for one in content)


def _dict(content: Any, arrays: _Arrays) -> dict[Any, Any]:
    return {_value(name, arrays): _value(one, arrays) for name, one in content}


def _numpy(content: Any, arrays: _Arrays) -> np.ndarray:
    name, shape = content
    dtype = np.dtype(name) if isinstance(name, str) and len(name) <= 12 else None
    if dtype is None or dtype.kind not in _KINDS_OF_NUMPY or not dtype.itemsize:
        raise ValueError("an array of no plain numbers")
    data = arrays.take(shape, dtype.itemsize)
    return data.view(dtype).reshape(shape) if len(data) else np.zeros(shape, dtype)


def _torch(content: Any, arrays: _Arrays) -> Tensor:
    name, shape = content
    if name not in DTYPES:
        raise ValueError("a tensor of no plain numbers")
    dtype = DTYPES[name]
    data = torch.from_numpy(arrays.take(shape, dtype.itemsize))
    return data.view(dtype).reshape(shape) if len(data) else torch.zeros(shape, dtype=dtype)


def _not_finite(content: Any, _: _Arrays) -> float:
    return _NOT_FINITE[content] if content in _NOT_FINITE else _unknown(str(content))


_READERS: Mapping[str, Callable[[Any, _Arrays], Any]] = {
    "list": lambda content, arrays: list(_values(content, arrays)),
    "tuple": lambda content, arrays: tuple(_values(content, arrays)),
    "dict": _dict,
    "float": _not_finite,
    "number": lambda content, arrays: _numpy(content, arrays)[()],
    "array": _numpy,
    "tensor": _torch,
}


# ---- errors as values ----

_ERRORS: Mapping[str, type[WhetError]] = {
    one.__name__: one for one in (ConfigError, DataError, NonFiniteError, OutputError, StorageError, WhetError)
}


def error_facts(error: WhetError) -> list[Any]:
    """Return an error as a value that can travel: its kind, and the four parts of each problem."""
    kind = next(one.__name__ for one in type(error).__mro__ if one.__name__ in _ERRORS)
    problems = [[one.what, None if one.got is None else str(one.got), one.why, one.fix] for one in error.problems]
    return [kind, problems]


def is_error(value: Any) -> bool:
    """Return whether this is a value that `error_facts` returns."""
    if not (isinstance(value, list) and len(value) == 2 and value[0] in [*_ERRORS] and isinstance(value[1], list)):
        return False
    return bool(value[1]) and all(isinstance(one, list) and _is_problem(*one) for one in value[1])


def _is_problem(what: Any = None, got: Any = None, why: Any = None, fix: Any = None, *more: Any) -> bool:
    return all(isinstance(one, str) for one in (what, why, fix)) and isinstance(got, str | None) and not more


def error_from(facts: Sequence[Any]) -> WhetError:
    """Return the error of another rank, with its kind and its exit code."""
    kind, problems = facts
    return _ERRORS[kind].of([Problem(what=what, got=got, why=why, fix=fix) for what, got, why, fix in problems])
