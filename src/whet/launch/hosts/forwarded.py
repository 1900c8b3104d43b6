"""What the ranks of other hosts get from the launcher: its variables, and its working folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from whet.errors import ConfigError, Problem

PREFIXES = (
    "DNNL_", "GLOO_", "GOMP_", "HF_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "PYTHON", "TOKENIZERS_", "TORCH_",
    "TRANSFORMERS_", "WHET_",
)  # fmt: skip
"""Variables that begin so are passed without being named."""


def variables(named: Sequence[str], own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables for the ranks: those of PREFIXES, and those of `--env`; raises ConfigError."""
    found = {name: value for name, value in own.items() if name.startswith(PREFIXES)}
    missing: list[Problem] = []
    for word in named:
        name, given, value = word.partition("=")
        if given:
            found[name] = value
        elif name in own:
            found[name] = own[name]
        else:
            missing.append(
                Problem(
                    what="a variable that is to be passed is not set",
                    got=f"--env {name}",
                    why="without a value after =, the value of the launcher's own environment is passed",
                    fix=f"set it before the launcher starts, or give the value: --env {name}=VALUE",
                )
            )
    if missing:
        raise ConfigError.of(missing)
    return found


def working_folder() -> str:
    """Return the current folder as the user named it: other hosts may mount it under that name only."""
    named = os.environ.get("PWD", "")
    if named and Path(named).is_absolute() and Path(named).exists() and Path(named).samefile(Path.cwd()):
        return named
    return str(Path.cwd())
