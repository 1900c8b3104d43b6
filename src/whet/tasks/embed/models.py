"""Models of sentence-transformers: loaded from safetensors in float32, and no code of their folder runs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from whet.errors import ConfigError
from whet.log import logger
from whet.models.loading.load import max_positions
from whet.models.loading.quiet import quiet
from whet.optional import require
from whet.tasks.embed.arguments import INSTALL, PACKAGE, PairFields, require_package
from whet.tasks.embed.folders import Kind, kind_of_folder


def library(part: str = "") -> ModuleType:
    """Return sentence-transformers, or a part of it; raises ConfigError with what installs it."""
    require_package()
    package = require(PACKAGE, needed_for="this command", install=INSTALL)
    return import_module(f"{PACKAGE}.{part}") if part else package


def load(kind: Kind, name: str, flag: str, *, job: PairFields | None = None, use_cpu: bool = False, **more: Any) -> Any:
    """Return the model of this folder or name of the hub; raises ConfigError, naming `flag`, if it cannot be loaded.

    `more` goes to its class. Weights are read from safetensors, and become float32.
    """
    found = kind_of_folder(Path(name))
    if found == "CrossEncoder" and kind != found:
        raise ConfigError(
            what=f"{flag} names a reranker",
            got=f"{name}: a {found}",
            why="it scores pairs of texts, and here a text becomes a vector",
            fix="name an embedding model, or a plain encoder",
        )
    from_hub = {} if job is None else {
        "cache_folder": job.cache_dir, "revision": job.model_revision, "token": job.token
    }  # fmt: skip
    if Path(name).is_dir():
        from_hub = {}
    device = "cuda" if torch.cuda.is_available() and not use_cpu else "cpu"
    try:
        with quiet():
            model = getattr(library(), kind)(
                name, device=device, trust_remote_code=False,
                model_kwargs={"dtype": torch.float32, "use_safetensors": True}, **from_hub, **more,
            )  # fmt: skip
    except ConfigError:
        raise
    except Exception as error:  # of transformers, of the hub's client, of safetensors or of a damaged file
        raise ConfigError(
            what=f"{flag}: the model cannot be loaded",
            got=f"{name}: {type(error).__name__}: {error}",
            why="it is a folder of sentence-transformers or of transformers with weights in safetensors, or a name on "
            "the hub",
            fix=f"correct {flag}; weights in .bin files: load and save the model once with save_pretrained",
        ) from error
    return model


def set_length(model: Any, asked: int | None) -> int | None:
    """Let the model cut texts after so many tokens; return its length. ConfigError if it has not the positions."""
    backbone = model.transformers_model
    most = None if backbone is None else max_positions(backbone)
    if asked is not None and most is not None and asked > most:
        raise ConfigError(
            what="max_seq_length is longer than the model",
            got=asked,
            why=f"it has {most} positions",
            fix=f"use --max_seq_length {most} or less",
        )
    if asked is not None:
        model.max_seq_length = asked
    elif most is not None and (model.max_seq_length is None or model.max_seq_length > most):
        model.max_seq_length = most
    return model.max_seq_length


def optimized(model: Any, precision: str = "fp32") -> Any:
    """Return the model, changed by `whet.optimize` if it knows its encoder; the log says why not."""
    import whet

    try:
        return whet.optimize(model, dtype=torch.bfloat16 if precision == "bf16" else None)
    except ConfigError as error:
        if precision == "bf16":
            raise
        logger.info("%s runs as it is, with its padding: %s", type(model).__name__, error)
        return model
