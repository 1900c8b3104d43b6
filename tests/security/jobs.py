"""What the referee watches: model folders being loaded, and whole runs of `whet qa`."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import referee

MEMORY_BYTES = 500 << 20
"""What a process may take beyond what it holds once a good model has been loaded."""


def load_models(good: Path, cases: Path) -> list[dict[str, Any]]:
    """Load every folder in `cases` with as much memory as MEMORY_BYTES more than for the good one; tell what came."""
    import whet
    from whet.errors import WhetError

    _load(good)
    _limit_memory()
    whet_files = (str(Path(whet.__file__).parent),)
    results = []
    for folder in sorted(cases.iterdir()):
        referee.outside([])
        peak, began_s = referee.peak_mib(), referee.now_s()
        told: dict[str, Any] = {"name": folder.name, "code": 0, "error": ""}
        try:
            _load(folder)
        except WhetError as error:
            problem = error.problems[0]
            told |= {"code": error.exit_code, "error": str(error), "got": problem.got is not None}
        except BaseException as error:
            told |= {"code": -1, "error": repr(error)}
        told |= {"seconds": referee.now_s() - began_s, "mib": referee.peak_mib() - peak}
        told["outside"] = referee.outside([folder], whet_files)
        results.append(told)
    return results


def qa_runs(*commands: Path) -> list[int]:
    """Run the command lines in these JSON files one after the other; return their exit codes."""
    from whet.cli.main import run

    return [run(json.loads(command.read_text("utf-8"))) for command in commands]


def _load(folder: Path) -> None:
    from whet.models.loading.load import ModelSource, load_qa_model, load_tokenizer

    source = ModelSource(model=str(folder))
    load_tokenizer(source)
    load_qa_model(source)


def _limit_memory() -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, resource.RLIM_INFINITY))
