"""What the ranks of a loop send each other besides tensors: whet's messages in the place of accelerate's pickles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import accelerate
import torch

from whet.dist import messages
from whet.errors import ConfigError, StorageError, WhetError


def gather(value: Any, valid: messages.Check, *, large: bool = False) -> list[Any]:
    """Return the values of all ranks; see `messages.gather`."""
    state = accelerate.PartialState()
    if state.num_processes == 1:
        return [value]
    return messages.gather(value, valid, n_ranks=state.num_processes, device=_device(state), large=large)


def of_first(value: Any, valid: messages.Check) -> Any:
    """Return the value of rank 0; see `messages.of_first`."""
    state = accelerate.PartialState()
    if state.num_processes == 1:
        return value
    return messages.of_first(value, valid, rank=state.process_index, device=_device(state))


@contextmanager
def together(failed: str) -> Iterator[None]:
    """Run the block on every rank; if it fails on any, all raise an error, so that none of them waits."""
    own: BaseException | None = None
    try:
        yield
    except BaseException as error:  # such as one of a user's state_dict
        own = error
    _fail_together(own, failed)


def _fail_together(own: BaseException | None, what: str) -> None:
    """Raise this rank's error; where only others have one, raise the first of theirs, so that none of them waits."""
    found: Any = own and f"{type(own).__name__}: {own}"[:300]
    seen = gather(messages.error_facts(own) if isinstance(own, WhetError) else found, _is_outcome)
    if own is not None:
        raise own
    rank, error = next(((rank, one) for rank, one in enumerate(seen) if one is not None), (0, None))
    if isinstance(error, list):
        raise messages.error_from(error)
    if error is not None:
        raise StorageError(
            what=what,
            got=f"rank {rank}: {error}",
            why="ranks save and load together, so that none waits for one that has failed",
            fix=f"fix what rank {rank} reports",
        )


def _is_outcome(value: Any) -> bool:
    return value is None or isinstance(value, str) or messages.is_error(value)


def _device(state: Any) -> torch.device:
    """Return where exchanged numbers have to be."""
    return state.device if "nccl" in str(state.backend) else torch.device("cpu")


def gather_items(values: Any) -> list[Any]:
    """Return the items of all ranks in one list, as accelerate gathers what are no tensors."""
    listed = values if _is_listed(values) else list(values)
    return [item for of_rank in gather(listed, _is_listed, large=True) for item in of_rank]


def _is_listed(value: Any) -> bool:
    return isinstance(value, list | tuple | dict | str)


def dispatch_by_messages(prepared: Any) -> None:
    """Let a loader whose batches rank 0 reads for all send their forms as messages; they travel as tensors anyway."""
    package = accelerate
    if isinstance(prepared, package.data_loader.DataLoaderDispatcher) and package.PartialState().num_processes > 1:
        fetch = _with(type(prepared)._fetch_batches, broadcast_object_list=_broadcast_forms)
        prepared._fetch_batches = MethodType(fetch, prepared)


def _broadcast_forms(info: list[Any]) -> list[Any]:
    """Replace, in place, [the forms of a batch, whether there is none] by those of rank 0."""
    rank = accelerate.PartialState().process_index
    forms, ended = of_first([_plain_forms(info[0]), bool(info[1])] if rank == 0 else None, _is_info)
    info[:] = [_forms(forms), ended]
    return info


def _plain_forms(forms: Any) -> Any:
    """Return accelerate's description of a batch as a value that can travel."""
    if isinstance(forms, accelerate.utils.TensorInformation):
        return {_FORM: [list(forms.shape), messages.dtype_name(forms.dtype)]}
    if isinstance(forms, dict):
        return {name: _plain_forms(one) for name, one in forms.items()}
    if isinstance(forms, list | tuple):
        return type(forms)(_plain_forms(one) for one in forms)
    return forms


def _forms(plain: Any) -> Any:
    if isinstance(plain, dict) and [*plain] == [_FORM]:
        shape, name = plain[_FORM]
        return accelerate.utils.TensorInformation(shape=torch.Size(shape), dtype=messages.DTYPES[name])
    if isinstance(plain, dict):
        return {name: _forms(one) for name, one in plain.items()}
    return type(plain)(_forms(one) for one in plain) if isinstance(plain, list | tuple) else plain


def _is_info(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[1], bool) and _are_forms(value[0])


def _are_forms(plain: Any) -> bool:
    if isinstance(plain, dict) and [*plain] == [_FORM]:
        return _is_form(*plain[_FORM])
    inside = plain.values() if isinstance(plain, dict) else plain if isinstance(plain, list | tuple) else ()
    return all(map(_are_forms, inside))


def _is_form(shape: Any = None, name: Any = None, *more: Any) -> bool:
    is_shape = isinstance(shape, list) and all(type(one) is int and one >= 0 for one in shape)
    return is_shape and name in messages.DTYPES and not more


_FORM = "$form"


def _with(function: Callable[..., Any], **replaced: Any) -> Callable[..., Any]:
    """Return accelerate's function, in which these global names mean something else."""
    inside: Any = function
    if not isinstance(inside, FunctionType) or not set(replaced) <= {*inside.__code__.co_names}:
        raise ConfigError(
            what="whet.Accelerator does not know this version of accelerate",
            got=f"accelerate {accelerate.__version__}",
            why=f"its {getattr(function, '__name__', function)} does not call {', '.join(replaced)}, the pickle that "
            "whet replaces on several ranks",
            fix="install accelerate 1.15, or start one rank",
        )
    own = FunctionType(
        inside.__code__, {**inside.__globals__, **replaced}, inside.__name__, inside.__defaults__, inside.__closure__
    )
    own.__kwdefaults__ = inside.__kwdefaults__
    return own
