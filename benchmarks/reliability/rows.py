"""The rows of the table in docs/reliability.md, and the tests behind each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One promise: its tests below tests/, which of them (`chosen`, pytest's -k), or why there are none.

    `counted` names the cases to count if a test is one trial and prints no count of its own.
    """

    name: str
    what: str
    tests: tuple[str, ...] = ()
    chosen: str = ""
    missing: str = ""
    counted: tuple[str, str] = ("", "")
    """What the cases are, and a regular expression for their names."""


_R, _S = "reliability", "security"
_TWICE = "twice_is_the_same"
_BATCHES = "train/test_batch_size.py"
_FEWER_ROWS = ("fewer_rows_where_memory_ends_and_the_same_curve", "not_even_one_row")
_LIMITED = "grows_saves|guard_comes|no_step_fits|kernel|fewer_rows|not_even"

ROWS = (
    Row("R1", "kill -9, resume, compare bitwise with a run that was not killed", (f"{_R}/test_kill.py",)),
    Row("R2", "SIGKILL at every system call of a save", (f"{_R}/test_kill_calls.py",)),
    Row("R3", "power cut, by a model of what POSIX promises", (f"{_R}/test_power_cut.py",)),
    Row("R4", "damaged checkpoints: detected, named, the previous one is used", (f"{_R}/test_damage.py",)),
    Row(
        "R5",
        "disk full, quota, I/O error, read-only at every system call of a save",
        (
            f"{_R}/test_disk_errors.py",
            "train/test_checkpoint_replacing.py",
            *(f"train/test_full_disk.py::test_a_{what}_that_does_not_fit" for what in ("checkpoint", "model")),
        ),
    ),
    Row(
        "R6",
        "SIGTERM, SIGINT, SIGUSR1 at any time",
        (f"{_R}/test_signals.py", f"{_R}/test_signals_library.py"),
        counted=("signals while importing, tokenising, training, evaluating, saving: no step lost", "test_(in|while)_"),
    ),
    Row(
        "R7",
        "another number of ranks on resume",
        ("ranks/test_other_world_size.py", "ranks/test_zero.py"),
        "world_size or other_numbers",
        counted=(
            "paths of ranks (1, 2, 4), shared or not, killed in between: the curve of one process",
            "numbers_of_ranks",
        ),
    ),
    Row(
        "R8",
        "death of a worker under a launcher",
        (
            "ranks/test_torchrun.py",
            "ranks/test_shared_decisions.py",
            "reliability/test_hosts_faults.py",
            "reliability/test_hosts_restart.py",
        ),
        "torchrun or hosts or dies or hangs or lost or error_of or signal",
        counted=("deaths, hangs, cut links: an error in time, no process left, no step lost", "."),
    ),
    Row(
        "R9",
        "steps that are not finite, and loss spikes, are not applied",
        (f"{_R}/test_non_finite_kinds.py",),
        counted=(
            "kinds of non-finite numbers, none of them applied, saved or averaged away",
            "changes_no_bit|bad_initial|nan_in_an|nan_just",
        ),
    ),
    Row(
        "R10",
        "memory limits",
        (f"{_R}/test_memory.py", f"{_R}/test_cgroup.py", *(f"{_BATCHES}::test_{name}" for name in _FEWER_ROWS)),
        counted=("runs whose limit is too small: nothing saved is lost, or fewer rows are taken at a time", _LIMITED),
    ),
    Row("R11", "asynchronous saves: same bytes, one at a time", (f"{_R}/test_async.py",)),
    Row("R12", "two runs, one output folder", (f"{_R}/test_lock.py",)),
    Row("R13", "clocks that jump, files with odd times", (f"{_R}/test_clocks.py",)),
    Row(
        "R14",
        "unusual output folders",
        (f"{_R}/test_output_place.py", f"{_R}/test_odd_names.py"),
        counted=("output folders that work, or are refused before a model is loaded", "."),
    ),
    Row("R15", "leaks over thousands of steps", (f"{_R}/test_leaks.py",)),
    Row(
        "R16",
        "where a run may stop and what may change",
        (f"{_R}/test_bookkeeping.py",),
        f"not {_TWICE}",
        counted=("places to stop, and changes refused or logged", "."),
    ),
    Row("R17", "the same run twice is the same", (f"{_R}/test_bookkeeping.py",), _TWICE),
    Row(
        "R18",
        "resuming from an older checkpoint, moved folders: a run uses only its own checkpoints",
        (f"{_R}/test_lines.py",),
        counted=("ways to resume, move, copy and mix: the right checkpoint is used, none is lost", "."),
    ),
    Row(
        "R19",
        "every optimizer: saved, killed, resumed",
        (f"{_R}/test_optimizers.py",),
        counted=("optimizers whose run resumes bitwise", "bitwise"),
    ),
    Row(
        "R20",
        "result files on a full or failing disk, tokenizer files in sub-folders",
        (f"{_R}/test_result_files.py", "train/test_processing_files.py"),
    ),
    Row(
        "R21",
        "standard output and error that break",
        (f"{_R}/test_outputs.py",),
        counted=("ways in which outputs break, and the run or command ends correctly", "."),
    ),
    Row("R22", "signals inside native calls, a second signal, nohup", (f"{_R}/test_signals_native.py",)),
    Row("S1", "no pickle is read", (f"{_S}/test_pickle_carriers.py", "rules/test_safety.py")),
    Row("S2", "hostile model folders", (f"{_S}/test_hostile_models.py",)),
    Row(
        "S3",
        "paths and links that lead out of whet's folders",
        (f"{_S}/test_own_folders.py",),
        counted=("such paths and links, through which nothing outside changes", "."),
    ),
    Row(
        "S3b",
        "links, pipes and hard links planted in the output folder and the cache",
        (f"{_S}/test_planted_links.py",),
        counted=("planted files, through which nothing outside is written", "."),
    ),
    Row("S4", "bad SQuAD data is refused, and the error names the position", (f"{_S}/test_bad_squad.py",)),
    Row("S5", "fuzzing of the parsers: only whet's own errors", (f"{_S}/test_fuzz.py",)),
    Row("S6", "secrets are neither printed nor saved", (f"{_S}/test_secrets.py",)),
    Row("S7", "no connection without a request", (f"{_S}/test_network.py",)),
    Row(
        "S8",
        "Kubernetes manifests: no finding by the definitions, no rights, no secrets in clear",
        ("k8s/test_k8s_schema.py", "k8s/test_k8s_refusals.py", "k8s/test_k8s_plan.py"),
        counted=("plans and planted faults, each judged as it should be", "."),
    ),
    Row("S9", "dependencies: few, without known holes", (f"{_S}/test_dependencies.py",)),
    Row(
        "S10",
        "data in messages neither controls the terminal nor forges a line",
        (f"{_S}/test_printed_data.py",),
        counted=("ways for data to reach a message, all escaped and shortened", "."),
    ),
    Row(
        "S11",
        "forged checkpoints with valid checksums",
        (f"{_S}/test_forged_checkpoints.py",),
        counted=("forged checkpoints refused", "_is_refused"),
    ),
)
