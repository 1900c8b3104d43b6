"""Run by test_full_disk.py as a process of its own: runs whose files may not grow beyond a limit."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_runs import arguments, span_rows, tiny_bert, toy_trainer

import engine
from whet.errors import WhetError

CASES = {
    "module": ("toy", 200),
    "configuration": ("bert", 200),
    "weights": ("bert", 20_000),
    "optimizer": ("bert", 100_000),
}
"""What is the first file that does not fit -> the model, and the bytes that a file may have."""


def main(folder: Path) -> None:
    """Print what became of the runs, as one JSON line."""
    found = {}
    for name, (_, limit) in CASES.items():
        _trainer(folder, name, max_steps=1).train()
        found[name] = _refused(limit, _trainer(folder, name, max_steps=2).train)
    found["final model"] = _refused(200, _trainer(folder, "module").save_model, str(folder / "saved"))
    print(json.dumps(found))


def _trainer(folder: Path, name: str, **changes: Any) -> engine.Trainer:
    changes |= {"save_strategy": "steps", "resume_from_checkpoint": "auto"}
    if CASES[name][0] == "toy":
        return toy_trainer(folder / name, **changes)
    return engine.Trainer(model=tiny_bert(), args=arguments(folder / name, **changes), train_dataset=span_rows())


def _refused(limit: int, work: Callable[..., Any], *given: Any) -> dict[str, Any]:
    """Do the work on a disk that refuses; return how it ended."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        work(*given)
        return {}
    except WhetError as error:
        return {"exit": error.exit_code, "message": str(error)}
    except Exception as error:
        return {"raised": type(error).__name__, "message": str(error)}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
