"""whet: fine-tune transformer models on the CPUs that you already have."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from whet.optional import quiet_imports
from whet.version import __version__, require_own_files

if TYPE_CHECKING:
    from whet.errors import ConfigError, DataError, WhetError
    from whet.hf.accelerator import Accelerator
    from whet.hf.arguments import TrainingArguments
    from whet.hf.record import RecordCallback
    from whet.hf.trainer import Trainer
    from whet.models.experts.settings import ExpertSettings
    from whet.models.experts.upcycle import upcycle
    from whet.own_loop.changes import changes
    from whet.own_loop.optimize import optimize, restore
    from whet.watch.ray_train import RayReport

_HOME = {
    "Accelerator": "whet.hf.accelerator",
    "ExpertSettings": "whet.models.experts.settings",
    "TrainingArguments": "whet.hf.arguments",
    "Trainer": "whet.hf.trainer",
    "RayReport": "whet.watch.ray_train",
    "RecordCallback": "whet.hf.record",
    "changes": "whet.own_loop.changes",
    "optimize": "whet.own_loop.optimize",
    "restore": "whet.own_loop.optimize",
    "upcycle": "whet.models.experts.upcycle",
    "WhetError": "whet.errors",
    "ConfigError": "whet.errors",
    "DataError": "whet.errors",
}
__all__ = [
    "Accelerator",
    "ConfigError",
    "DataError",
    "ExpertSettings",
    "RayReport",
    "RecordCallback",
    "Trainer",
    "TrainingArguments",
    "WhetError",
    "__version__",
    "changes",
    "optimize",
    "restore",
    "upcycle",
]

require_own_files()
quiet_imports()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'whet' has no attribute {name!r}")
    from whet.optional import quiet_libraries

    with quiet_libraries():
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
