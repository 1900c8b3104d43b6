"""The native operators: the library's file, its instruction set, or why it cannot be used."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import whet.kernels
from whet.doctor.findings import Native
from whet.hardware.cgroup import ROOT
from whet.hardware.cpu import features

_V3 = {"avx2", "fma", "bmi1", "bmi2"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_MOST_ERROR = 1e-4
"""fp32 operators of a hundred terms are exact to about 1e-6; a larger error is not rounding."""
_COMPILERS = ("c++", "g++", "clang++")


def examine(root: Path = ROOT) -> Native:
    """Return the state of the library. Loads it, after torch, and compares it with plain torch."""
    path, isa, error = _try()
    trees = [Path(place).parents[2] for place in whet.kernels.__path__]  # an editable install has two folders
    tree = next((one for one in trees if (one / "CMakeLists.txt").exists()), None)
    compilers = (os.environ.get("CXX"), *_COMPILERS)
    return Native(
        path=path,
        isa=isa,
        best_isa=best_isa(root),
        error=error,
        asked_isa=os.environ.get("WHET_ISA"),
        asked_kernels=os.environ.get("WHET_KERNELS") or None,
        source_tree=None if tree is None else str(tree),
        cmake=shutil.which("cmake"),
        compiler=next((found for name in compilers if name and (found := shutil.which(name))), None),
    )


def best_isa(root: Path = ROOT) -> str:
    """Return the best of the library's instruction sets that this processor has."""
    machine = platform.machine().lower()
    if machine not in ("x86_64", "amd64"):
        return "neon" if machine in ("aarch64", "arm64") else "baseline"
    has = features(root)
    return "x86-64-v4" if has >= _V4 else "x86-64-v3" if has >= _V3 else "x86-64"


def _try() -> tuple[str | None, str | None, str | None]:
    """Return the library's path, its instruction set, and its error."""
    try:
        from whet.kernels import library
    except Exception as error:  # torch, which must be loaded first
        return None, None, f"torch cannot be loaded: {error}"
    path = library.find()
    if path is None:
        return None, None, None
    try:
        isa = library.load(path).isa
    except (OSError, AttributeError, ValueError) as error:
        return str(path), None, str(error)
    error = _largest_error()
    wrong = None if error < _MOST_ERROR else f"its results are off by {error:.1e}"
    return str(path), None if wrong else isa, wrong


def _largest_error() -> float:
    """Return the largest difference of two operators from plain torch in float64."""
    import torch

    from whet.kernels.activation import bias_act, bias_act_reference
    from whet.kernels.norm import Norm, add_norm, add_norm_reference

    x = torch.linspace(-3, 3, 6400).view(64, 100)
    norm = Norm(torch.linspace(0, 1, 100), torch.linspace(1, 0, 100), 1e-5)
    exact_norm = Norm(norm.weight.double(), norm.weight.double().flip(0), 1e-5)
    found = [bias_act(x, None, "gelu"), add_norm(x, x, norm)[0]]
    exact = [bias_act_reference(x.double(), None, "gelu"), add_norm_reference(x.double(), x.double(), exact_norm)[0]]
    return max(float((ours - theirs).abs().max()) for ours, theirs in zip(found, exact, strict=True))
