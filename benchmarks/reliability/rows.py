"""The rows of the table in docs/reliability.md, and the tests behind each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One promise: its tests below tests/, which of them (`chosen`, pytest's -k), or why there are none."""

    name: str
    what: str
    tests: tuple[str, ...] = ()
    chosen: str = ""
    missing: str = ""


_R, _S = "reliability", "security"
_ONE_PROCESS = "whet trains in one process so far"
_TWICE = "twice_is_the_same"

ROWS = (
    Row("R1", "kill -9, resume, compare bitwise with a run that was not killed", (f"{_R}/test_kill.py",)),
    Row("R2", "SIGKILL at every system call of a save", (f"{_R}/test_kill_calls.py",)),
    Row("R3", "power cut, by a model of what POSIX promises", (f"{_R}/test_power_cut.py",)),
    Row("R4", "damaged checkpoints: found, named, the one before is used", (f"{_R}/test_damage.py",)),
    Row("R5", "disk full, quota, I/O error, read-only at every system call of a save", (f"{_R}/test_disk_errors.py",)),
    Row("R6", "SIGTERM, SIGINT, SIGUSR1 at any time", (f"{_R}/test_signals.py", f"{_R}/test_signals_library.py")),
    Row("R7", "another number of ranks on resume", missing=_ONE_PROCESS),
    Row("R8", "death of a worker under a launcher", missing=_ONE_PROCESS),
    Row("R9", "steps that are not finite, and loss spikes, are not applied", (f"{_R}/test_non_finite_kinds.py",)),
    Row("R10", "memory limits", (f"{_R}/test_memory.py",)),
    Row("R11", "saving behind the run: same bytes, one at a time", (f"{_R}/test_async.py",)),
    Row("R12", "two runs, one output folder", (f"{_R}/test_lock.py",)),
    Row("R13", "clocks that jump, files with odd times", (f"{_R}/test_clocks.py",)),
    Row("R14", "odd output places", (f"{_R}/test_output_place.py",)),
    Row("R15", "leaks over thousands of steps", (f"{_R}/test_leaks.py",)),
    Row("R16", "where a run may stop and what may change", (f"{_R}/test_bookkeeping.py",), f"not {_TWICE}"),
    Row("R17", "the same run twice is the same", (f"{_R}/test_bookkeeping.py",), _TWICE),
    Row("S1", "no pickle is read", (f"{_S}/test_pickle_carriers.py", "rules/test_safety.py")),
    Row("S2", "hostile model folders", (f"{_S}/test_hostile_models.py",)),
    Row("S3", "paths and links out of whet's own folders", (f"{_S}/test_own_folders.py",)),
    Row("S4", "bad SQuAD data is refused with the place named", (f"{_S}/test_bad_squad.py",)),
    Row("S5", "fuzzing of the parsers: only whet's own errors", (f"{_S}/test_fuzz.py",)),
    Row("S6", "secrets are neither printed nor saved", (f"{_S}/test_secrets.py",)),
    Row("S7", "no connection that was not asked for", (f"{_S}/test_network.py",)),
    Row("S8", "Kubernetes manifests", missing="whet writes none so far"),
    Row("S9", "dependencies: few, without known holes", (f"{_S}/test_dependencies.py",)),
)
