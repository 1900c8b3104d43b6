"""What all operators are made of: the choice and the call of the native one, its gradient, formats of the reference.

An operator has one file here and one in native/. The file here has the function that everybody calls; the reference, in
plain torch, which runs without the library; the call of the native operator, whose arguments are declared in C++; and
what a compiled graph needs of it (`graph.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.autograd import function
from torch.profiler import record_function
from torch.utils._python_dispatch import _disable_current_modes

from whet.errors import ConfigError
from whet.kernels.library import Library, library

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The numbers of `Dtype` in native/operator.h."""


def native_for(*tensors: Tensor | None) -> Library | None:
    """Return the library if it can work on these tensors: all on the CPU and of one dtype, fp32 or bf16.

    None if torch follows the operators: a tracer would record results as constants, a compiler can fuse plain torch,
    and a transform needs operators that it knows.
    """
    if is_followed():
        return None
    dtype = None
    for tensor in tensors:
        if tensor is None:
            continue
        dtype = dtype or tensor.dtype
        if tensor.device.type != "cpu" or tensor.dtype != dtype:
            return None
    return library() if dtype in DTYPES else None


def is_followed() -> bool:
    """Return whether torch now compiles, traces or transforms what runs (torch.compile, jit.trace, torch.func)."""
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        return True
    return torch._C._get_tracing_state() is not None


def is_exporting() -> bool:
    """Return whether torch.export runs. torch 2.11 answers yes to its own question in every graph of torch.compile."""
    return bool(torch.compiler._is_exporting_flag)


def misfit(operator: str, *tensors: Tensor | None) -> ValueError:
    """Return the error for tensors that do not fit together: an operator of the library reads and writes unchecked."""
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors if tensor is not None)
    return ValueError(f"{operator}: tensors of these shapes do not fit together: {shapes}")


def has_rows(cu_seqlens: Tensor, n_tokens: int) -> bool:
    """Return whether rows begin at 0, end at n_tokens and do not overlap."""
    starts = cu_seqlens.tolist()
    return bool(starts) and starts[0] == 0 and starts[-1] == n_tokens and starts == sorted(starts)


def call(name: str, **arguments: Any) -> None:
    """Run one operator of the library with arguments by the names of its declaration; those left out are zero or null.

    A pointer is a tensor, an address or None, and those of an array are named `ids[0]`, `ids[1]`. A `View` is a tensor
    or None; any other structure is what `Library.pack` made. Memory must stay valid until the operator returns.
    A profiler sees the operator under its name, since it cannot look into ctypes.
    """
    found = library()
    assert found is not None  # callers ask native_for first
    if _REHEARSED[0]:
        return
    pack, function = found.operators.get(name) or found.load_operator(name)
    if _profiler_enabled():
        with record_function(f"whet::{name}"):
            function(pack(arguments))
    else:
        function(pack(arguments))


def float32(tensor: Tensor | None) -> Tensor | None:
    """Return a parameter as the native operators read it: fp32 and contiguous."""
    if tensor is None or (tensor.dtype is torch.float32 and tensor.is_contiguous()):
        return tensor
    return tensor.detach().float().contiguous()


_REHEARSED = [0]
"""How many blocks of `rehearsed` run."""


@contextmanager
def rehearsed() -> Iterator[None]:
    """Run the block without computing in native operators: `whet/plan/rehearsal.py` only asks what is allocated."""
    _REHEARSED[0] += 1
    try:
        yield
    finally:
        _REHEARSED[0] -= 1


def is_rehearsed() -> bool:
    """Return whether such a block runs: weights have sizes and no values, and nothing can be learnt from results."""
    return _REHEARSED[0] > 0


def kept_table(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what a function makes of plain arguments, tables of numbers: its last 256 results.

    Later passes read them, so they do not depend on what runs at the first call. A rehearsal has no numbers, autograd
    keeps no tensor of inference mode, and torch's default device may be a GPU.
    """

    @lru_cache(maxsize=256)
    def made(*given: Any) -> Any:
        as_they_are = _disable_current_modes() if is_rehearsed() else nullcontext()
        with torch.inference_mode(False), torch.device("cpu"), as_they_are:
            return function(*given)

    @wraps(function)
    def found(*given: Any) -> Any:
        table = made(*given)
        for keeper in _KEEPERS:
            keeper.append(table)
        return table

    return found


_KEEPERS: list[list[Any]] = []
"""Who keeps the tables that are read now."""


@contextmanager
def keeping_tables(kept: list[Any]) -> Iterator[None]:
    """Append to `kept` the tables that the block reads: a CUDA graph reads them by their address, whenever it runs.

    Those that other threads read meanwhile are among them, as torch runs backward passes in threads of its own.
    """
    _KEEPERS.append(kept)
    try:
        yield
    finally:
        del _KEEPERS[next(n for n, one in enumerate(_KEEPERS) if one is kept)]


def rows_of(x: Tensor) -> tuple[int, int]:
    """Return the number of rows of x, all dimensions but the last, and their width."""
    n, width = x.numel(), x.shape[-1]
    return n // width if n else 0, width


def floats(*shape: int) -> Tensor:
    """Return a new, uninitialised fp32 tensor on the CPU, whatever torch's default device is."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def wide(x: Tensor) -> Tensor:
    """Return x in the dtype that a reference computes in: float64 unchanged, everything else in float32."""
    return x if x.dtype == torch.float64 else x.float()


def rounded(x: float) -> float:
    """Return x rounded to float32, as the native operators use it."""
    return float(torch.tensor(x, dtype=torch.float32, device="cpu"))


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward of an autograd Function, without second derivatives; ConfigError if they are requested.

    torch's own `once_differentiable` raises only if a backward pass reaches the operator itself. A second
    `torch.autograd.grad` of chosen weights does not reach it: it would omit these terms and return wrong numbers.
    """
    once = function.once_differentiable(backward)

    @wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        if isinstance(ctx, function.FunctionCtx):
            raise ConfigError(
                what="whet's native operators have no second derivatives",
                got="a backward pass with create_graph=True",
                why="they compute gradients in one pass, which torch cannot differentiate again",
                fix="call whet.restore(model) first: the model's own operators have them (attention: eager); "
                "run a script of whet run with WHET_RUN=off",
            )
        return once(ctx, *grads)

    return guarded
