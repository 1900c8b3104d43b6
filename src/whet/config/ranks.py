"""Which rank of a run this process is, from the variables that launchers set, or from torch's process group.

torchrun, `whet launch`, Kubeflow and Ray set RANK and WORLD_SIZE; MPI launchers and Slurm have names of their own.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from whet import system
from whet.config.environment import LAUNCH, RESUME
from whet.errors import ConfigError, Problem, WhetError


@dataclass(frozen=True)
class Place:
    """The place of a process among the ranks of its run."""

    rank: int = 0
    n_ranks: int = 1
    local_rank: int = 0
    """Number among the ranks of this machine."""
    n_local: int = 1
    launcher: str | None = None
    """Who started the ranks; None for a process alone."""

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes files: rank 0."""
        return self.rank == 0

    @property
    def one_machine(self) -> bool:
        """Whether all ranks run on this machine."""
        return self.n_local == self.n_ranks


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """What the settings' rules ask a machine, for a machine that is not this one."""

    n_ranks: int
    has_deepspeed: bool


_elsewhere: ContextVar[Elsewhere | None] = ContextVar("whet_elsewhere", default=None)


def elsewhere() -> Elsewhere | None:
    """Return where the settings that are checked now will run; None if that is this process."""
    return _elsewhere.get()


@contextmanager
def checked_for(place: Elsewhere) -> Iterator[None]:
    """Check settings in this block as a process at that place would."""
    before = _elsewhere.set(place)
    try:
        yield
    finally:
        _elsewhere.reset(before)


@dataclass(frozen=True)
class _Launcher:
    """The variables of a launcher; the first that is set of each group counts."""

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


_LAUNCHERS = (
    _Launcher("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Launcher(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        "MVAPICH",
        ("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"), ("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"),
        ("MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK"),
        ("MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"),
    ),
    _Launcher(
        "Intel MPI or MPICH",
        ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    _Launcher("PALS", ("PALS_RANKID",), ("PALS_SIZE",), ("PALS_LOCAL_RANKID",), ("PALS_LOCAL_SIZE",)),
    _Launcher(
        "Slurm",
        ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        ("SLURM_LOCALID",), ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ),
)  # fmt: skip
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "GROUP_RANK"),
    "PMIx": ("PMIX_RANK",),
    "Flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    "Horovod": ("HOROVOD_RANK", "HOROVOD_SIZE"),
}
"""Launcher -> variables that show ranks, but not all that whet has to know."""
_ALONE_UNLESS_SIZED = {"TORCHELASTIC_RUN_ID", "PMIX_RANK", "FLUX_TASK_RANK"}
"""Of these, those that are also set for a process alone, next to a size of 1."""
_SLURM_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
_WITHIN_SLURM = ("Slurm", "Intel MPI or MPICH")
"""Launchers whose local ranks are in Slurm's variables: srun --mpi=pmi2 sets those of PMI, without local ones."""
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
"""Slurm's ranks of a node, and of how many nodes: 2(x4)."""
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm numbers the batch script, and the shell of salloc, from the end of the range: one process each."""
_MOST_RESTARTS, _ELASTIC_RUN = "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"
ALONE = Place()


def here() -> Place:
    """Return the place of this process: in torch's process group if it has joined one, or as its launcher says.

    While settings for another machine are checked it is that of rank 0 there. Raises ConfigError for variables that
    leave the place open.
    """
    if (other := elsewhere()) is not None:
        return Place(n_ranks=other.n_ranks, launcher="torchrun" if other.n_ranks > 1 else None)
    return _in_group() or place_in(os.environ)


def place_in(environment: Mapping[str, str]) -> Place:
    """Return the place that these variables name; raises ConfigError if they show ranks, but not which."""
    for launcher in _LAUNCHERS:
        if launcher.name == "Slurm" and not _is_slurm_step(environment):
            continue
        found = _place(environment, launcher)
        if found is not None:
            return found
    if problem := _incomplete(environment):
        raise ConfigError.of([problem])
    return ALONE


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that number this rank among all; no process but this rank's own has the same."""
    names = [name for launcher in _LAUNCHERS for name in launcher.rank]
    return {name: environment[name] for name in names if name in environment}


def place_or_alone() -> Place:
    """Return the place that this process's variables name; a process alone where they leave it open."""
    try:
        return place_in(os.environ)
    except ConfigError:
        return ALONE


def restarted(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher has started this command again after a failure: torchrun and whet launch say so."""
    return (_number(environment, ("TORCHELASTIC_RESTART_COUNT",)) or 0) > 0


def may_be_another_pod(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this command may take the place of another pod's, perhaps of an earlier job: WHET_RESUME=auto."""
    return environment.get(RESUME) == "auto"


def resumes_unasked(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this command may be one that was started again, which resumes unasked.

    A pod cannot know whether it takes the place of another one: there WHET_RESUME=auto says so.
    """
    return restarted(environment) or may_be_another_pod(environment)


def may_start_again(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this command may be started again after a failure, or is one that was."""
    return resumes_unasked(environment) or (_number(environment, (_MOST_RESTARTS,)) or 0) > 0


def launch_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the id of the job or launcher that starts this command, and starts it again; None if it has none.

    torchrun gives none, as --rdzv_id is often left out or copied: there it follows from its process, which outlives the
    ranks that it starts. On several machines each has one of its own, and a job has those of all of them.
    """
    run = environment.get(_ELASTIC_RUN)
    if environment.get(LAUNCH) or run is None:
        return environment.get(LAUNCH) or None
    agent = system.starter(rank_variables(environment) | {_ELASTIC_RUN: run})
    return hashlib.sha256(repr((run, socket.gethostname(), agent)).encode()).hexdigest()[:32]


def own_launches() -> frozenset[str]:
    """Return the id of the job or launcher of this process, if it has one."""
    return frozenset(filter(None, [launch_id()]))


def elastic_run(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return torchrun's --rdzv_id; None if torchrun has not started this process."""
    return environment.get(_ELASTIC_RUN)


def n_machines(environment: Mapping[str, str] = os.environ) -> int:
    """Return on how many machines torchrun has started ranks."""
    return _number(environment, ("GROUP_WORLD_SIZE",)) or 1


def require_output_for_restarts(*, overwrites: bool, n_restarts: int | None = None) -> None:
    """Raise ConfigError if a launcher may start this command again, and it would overwrite its output folder.

    `n_restarts` is how often; None: what torchrun's variables, or those of a pod, say.
    """
    most = _number(os.environ, (_MOST_RESTARTS,)) if n_restarts is None else n_restarts
    if overwrites and (most or (n_restarts is None and resumes_unasked())):
        raise ConfigError(
            what="overwrite_output_dir does not fit a command that is started again after a failure",
            got=f"--overwrite_output_dir with {f'up to {most} restarts' if most else f'{RESUME}=auto'}",
            why="a restart continues from the newest checkpoint in the folder, and that may be of the run that was to "
            "be overwritten",
            fix="leave --overwrite_output_dir out, and use a new --output_dir for a new run",
        )


def require_one_process(what: str) -> None:
    """Raise ConfigError if this process is one of several ranks; `what` does not run on several."""
    place = here()
    if place.n_ranks == 1:
        return
    raise ConfigError(
        what=f"{what} runs in one process",
        got=f"rank {place.rank} of {place.n_ranks}" + (f", started by {place.launcher}" if place.launcher else ""),
        why="each rank would do the complete work again",
        fix="start it once, without the launcher; if variables of a launcher are left over, put before the command: "
        + shlex.join(_unset(os.environ)),
    )


def _place(environment: Mapping[str, str], launcher: _Launcher) -> Place | None:
    """Return the place that a launcher's variables name; None if it started one process or none."""
    size, rank = _number(environment, launcher.size), _number(environment, launcher.rank)
    if size is None or size <= 1:
        return None
    if rank is None or not 0 <= rank < size:
        return None
    local_rank, n_local = _number(environment, launcher.local_rank), _number(environment, launcher.local_size)
    if launcher.name in _WITHIN_SLURM and _is_slurm_step(environment):
        slurm_rank, n_of_slurm = _number(environment, ("SLURM_LOCALID",)), _tasks_here(environment)
        local_rank = slurm_rank if local_rank is None else local_rank
        n_local = n_of_slurm if n_local is None or launcher.name == "Slurm" else n_local
    if n_local is None and launcher.name == "torchrun" and local_rank is None:
        local_rank, n_local = 0, 1  # scripts that set RANK and WORLD_SIZE by hand
    return Place(rank, size, local_rank or 0, n_local or 1, launcher.name)


def _tasks_here(environment: Mapping[str, str]) -> int | None:
    """Return Slurm's number of ranks on this node, from a list such as 4(x2),3; None if it does not say."""
    text = next((environment[name] for name in _LAUNCHERS[-1].local_size if environment.get(name)), "")
    found = [_TASKS.fullmatch(part.strip()) for part in text.split(",")]
    counts = [int(one[1]) for one in found if one for _ in range(int(one[2] or 1))]
    node = _number(environment, ("SLURM_NODEID",))
    if None in found or not counts:
        return None
    if node is None or not 0 <= node < len(counts):
        return counts[0] if len(set(counts)) == 1 else None
    return counts[node]


def _incomplete(environment: Mapping[str, str]) -> Problem | None:
    """Return the problem of variables that show several ranks, but not which one this is."""
    found = _signs(environment)
    if not found:
        return None
    launcher, names = next(iter(found.items()))
    every = dict.fromkeys(name for several in found.values() for name in several)
    return Problem(
        what=f"this process seems to be one of several ranks ({launcher}), and it is not known which",
        got=", ".join(f"{name}={environment[name]}" for name in every),
        why="ranks find each other by RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; "
        "without them each would train the complete run again",
        fix=f"start ranks with torchrun, whet launch, mpirun or srun; if {', '.join(names)} is left over, or each "
        "process is a run of its own with its own --output_dir, put before the command: "
        + shlex.join(_unset(environment)),
    )


def _signs(environment: Mapping[str, str]) -> dict[str, list[str]]:
    """Return launcher -> its variables that show more than one process."""
    found: dict[str, list[str]] = {}
    for launcher in _LAUNCHERS:
        if launcher.name == "Slurm" and not _is_slurm_step(environment):
            continue
        size = next((name for name in launcher.size if _number(environment, (name,)) is not None), launcher.size[0])
        sizes = (size,) if launcher.name == "Slurm" else (size, *launcher.local_size)
        names = [name for name in sizes if (_number(environment, (name,)) or 0) > 1]
        ranks = (*launcher.rank, *launcher.local_rank)
        names += [name for name in ranks if (_number(environment, (name,)) or 0) > 0]
        if names:
            found.setdefault(launcher.name, []).extend(names)
    for name, variables in _OTHERS.items():
        names = [one for one in variables if _shows_ranks(environment, one)]
        if names:
            found.setdefault(name, []).extend(names)
    return found


def _shows_ranks(environment: Mapping[str, str], name: str) -> bool:
    if name in _ALONE_UNLESS_SIZED and name in environment and not _any_size(environment):
        return True
    number = _number(environment, (name,)) or 0
    return number > 1 or (number > 0 and name.endswith("RANK"))


def _any_size(environment: Mapping[str, str]) -> bool:
    sizes = ("SLURM_STEP_NUM_TASKS", *(name for one in _LAUNCHERS if one.name != "Slurm" for name in one.size))
    sizes += ("FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "HOROVOD_SIZE")
    return any((_number(environment, (name,)) or 0) > 0 for name in sizes)


def _is_slurm_step(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process; the shell of sbatch or salloc is no step."""
    if (_number(environment, ("SLURM_STEP_NUM_TASKS",)) or 0) > 0:
        return True
    step = _number(environment, _SLURM_STEP)
    return step < _FIRST_SPECIAL_STEP if step is not None else (_number(environment, ("SLURM_PROCID",)) or 0) > 0


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Return the first of these variables that is an integer; None if none is."""
    for name in names:
        text = environment.get(name, "").strip()
        if text.lstrip("-").isdigit():
            return int(text)
    return None


def _unset(environment: Mapping[str, str]) -> list[str]:
    """Return the command `env` that takes out every variable of a launcher."""
    names = [
        name for one in _LAUNCHERS for group in (one.rank, one.size, one.local_rank, one.local_size) for name in group
    ]
    names += [name for several in _OTHERS.values() for name in several] + list(_SLURM_STEP)
    return ["env", *(word for name in dict.fromkeys(names) if name in environment for word in ("-u", name))]


def _in_group() -> Place | None:
    """Return the place in torch's process group; None if there is none, or one process in it."""
    group = sys.modules.get("torch.distributed")
    if group is None or not group.is_available() or not group.is_initialized():
        return None
    rank, size = group.get_rank(), group.get_world_size()
    try:
        local = place_in(os.environ)
    except ConfigError:
        local = ALONE
    if (local.rank, local.n_ranks) == (rank, size):
        return local
    return Place(rank, size, local_rank=rank, n_local=size)  # as torch.multiprocessing.spawn makes one


class LostRankError(WhetError):
    """Another rank ended or does not answer; the cause is in its own messages."""

    def __init__(self, place: Place, doing: str, error: BaseException, saved: str = "") -> None:
        super().__init__(
            what=f"rank {place.rank} of {place.n_ranks} lost another rank while it {doing}{saved}",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            why="a rank that fails or hangs stops all: no rank can finish the step alone",
            fix="read the messages of the other ranks for the cause, then start again with "
            "--resume_from_checkpoint auto, in Python trainer.train(resume_from_checkpoint=True)",
        )
        self.place, self.doing, self.error = place, doing, error
