"""Ranks that exchange messages, among them programs in the place of a rank, and what the other ranks make of them."""

from __future__ import annotations

import math
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from jobs_of_ranks import arguments, left_by
from tiny_runs import Toy, toy_rows

import engine
from whet.dist import group, messages
from whet.errors import DataError
from whet.store.schema import anything


class Evil:
    """Unpickling it in another process creates a file: what a program in a rank's place sends."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return create, (self.path, os.getpid())


def create(path: str, sender: int) -> None:
    """Create the file, unless the sender reads its own pickle."""
    if os.getpid() != sender:
        Path(path).touch()


def meets_rogue(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Join, and exchange texts with a rank that is no rank of whet: it sends pickles, or the bytes of the job."""
    created = Path(job["folder"]) / "created"
    joined = group.join(None, 20)
    assert joined is not None
    said = []
    for message in job["messages"]:
        if rank == job["rogue"]:
            _send(message, Evil(created))
            continue
        try:
            exchange = joined.of_first if message == "to all" else joined.gather
            said.append(["none", str(exchange("mine", _is_text))])
        except Exception as error:
            said.append([type(error).__name__, str(error)])
    return {"said": said, "created": created.exists()}


def _send(message: Any, evil: Evil) -> None:
    """Send a pickle by torch's own collectives, or these bytes, or say that more bytes will come."""
    if message == "to all":
        torch_dist.broadcast_object_list([evil], src=0)
        return
    if message == "pickle":
        with suppress(Exception):  # what rank 0 sends is no pickle
            torch_dist.all_gather_object([None, None], evil)
        return
    content = bytes.fromhex(message) if isinstance(message, str) else b""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    torch_dist.all_gather(sizes, torch.tensor([len(content) if content else message]))
    if content:
        own = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
        own[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        torch_dist.all_gather([torch.empty_like(own) for _ in sizes], own)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def trains_with_rogue(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train, evaluate and save; rank 1 sends pickles in the place of every message."""
    created = Path(job["folder"]) / "created"
    if rank == 1:
        sent = torch.frombuffer(bytearray(pickle.dumps(Evil(created))), dtype=torch.uint8)
        messages._encoded = lambda value, large: sent  # pyright: ignore
    trainer = engine.Trainer(Toy(), arguments(job), train_dataset=toy_rows(), eval_dataset=toy_rows())
    try:
        trainer.train()
        trainer.evaluate()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "created": created.exists()}
    return left_by(trainer)


def exchanges(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Exchange a value of each kind, and one that cannot travel."""
    joined = group.join(None, 20)
    assert joined is not None
    values = kinds_of_values(rank)
    found = joined.gather(values, anything)
    first = joined.of_first(values, anything)
    same = [same_value(one, kinds_of_values(other)) for other, one in enumerate(found)]
    try:
        joined.gather(object() if rank == 1 else 1, anything)
        refused = ""
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    return {"same": same, "first": same_value(first, kinds_of_values(0)), "refused": refused}


def copies(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Overwrite tensors of every layout and type by those of rank 0, and return whether all else stayed."""
    joined = group.join(None, 20)
    assert joined is not None
    (held, views), (_, wanted) = _layouts(rank), _layouts(0)
    joined.copy_from_first(list(views.values()))
    beyond = held[:, 3:].tolist() == _layouts(rank)[0][:, 3:].tolist()
    return {"same": [name for name in views if views[name].tolist() == wanted[name].tolist()], "beyond": beyond}


def _layouts(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return memory of this rank, and tensors of which some are parts of it."""
    held = torch.arange(24.0).reshape(4, 6) + 100 * rank
    row = torch.arange(6) + rank
    types = {str(one): row.to(one) for one in (torch.int16, torch.complex64, torch.bool, torch.bfloat16)}
    return held, {
        "columns": held[:, :3], "turned": (torch.arange(6.0).reshape(2, 3) + rank).t(), "number": torch.tensor(rank),
        "expanded": torch.tensor([[5.0 + rank], [7.0 + rank]]).expand(2, 4), "empty": torch.zeros(0), **types,
    }  # fmt: skip


def kinds_of_values(rank: int) -> dict[str, Any]:
    """Return a value of each kind that travels."""
    error = messages.error_facts(DataError(what="a", got=[1], why="b", fix="c"))
    return {
        "plain": [None, True, rank, 2**62 + rank, 0.1, "\U0001f600 \udc80", "\x00"],
        "not finite": (math.inf, -math.inf, math.nan),
        "tuple": ((), [(rank,)], {}),
        "names": {1: "one", (1, None): "two"},
        "tensors": {name: torch.arange(6 + rank).to(dtype).reshape(-1, 1) for name, dtype in messages.DTYPES.items()},
        "empty": [torch.zeros(0, 3), np.zeros((2, 0)), torch.zeros(())],
        "strided": torch.arange(12.0).reshape(3, 4).t()[1:],
        "arrays": [np.arange(3, dtype=">i4"), np.array(["a", "bcd"]), np.ones((2, 2), np.float16)],
        "numbers": [np.float32(0.1), np.int64(3)],
        "error": error,
    }


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values are the same, with their types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other)
    if isinstance(one, dict):
        return [*one] == [*other] and all(same_value(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    return one == other or (one != one and other != other)
