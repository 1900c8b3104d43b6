"""Requests to torch.compile that torch or this machine cannot fulfil, and the report of a backend's failure."""

from __future__ import annotations

import torch
from torch import nn
from torch._dynamo.backends.registry import list_backends
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import list_mode_options
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from whet.config.rules.computing import DEFAULT_BACKEND
from whet.errors import ConfigError
from whet.models.experts import native
from whet.models.experts.layer import layers_of

_GRAPHS_OF_A_GPU = ("cudagraphs", "reduce-overhead")
"""The backend, and the mode of inductor, that are nothing but CUDA graphs."""


def require(backend: str, mode: str | None, model: nn.Module) -> None:
    """Raise ConfigError for a backend or a mode that torch, or this machine, does not have."""
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


def require_no_experts(model: nn.Module) -> None:
    """Raise ConfigError for a model with experts: the number of tokens of each is known only when it runs."""
    if not layers_of(model) and not native.has_experts(model):
        return
    raise ConfigError(
        what="torch_compile does not go with the experts of this model",
        got=type(model).__name__,
        why="a graph would be compiled again for each number of tokens that an expert gets",
        fix="leave --torch_compile out: the products of experts are native without it",
    )


def failed(backend: str, error: BackendCompilerFailed) -> ConfigError:
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
    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError) as error:
        raise ConfigError(
            what="torch.compile finds no C++ compiler",
            got=" ".join(str(error).split())[:200],
            why="on a CPU inductor writes C++ and compiles it before the first step",
            fix="install g++ (apt install g++) or name one in the variable CXX, or leave --torch_compile out",
        ) from error
