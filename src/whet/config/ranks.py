"""The number of processes that a launcher started, from the variables that launchers set.

whet trains in one process so far. Started once per rank, it would train the same run several times, so it refuses.
Support for ranks will replace the calls of `require_one_process`.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping

from whet.errors import ConfigError, Problem

_SIZES = {
    "torchrun or accelerate launch": ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MVAPICH": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_SIZE"),
    "an MPI launcher (Intel MPI, MPICH, PALS)": (
        "PMI_SIZE", "PMI_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_SIZE", "PALS_LOCAL_SIZE",
    ),
    "Flux": ("FLUX_JOB_SIZE",),
    "jsrun": ("JSM_NAMESPACE_SIZE",),
    "Horovod": ("HOROVOD_SIZE",),
}  # fmt: skip
"""Launcher -> variables with the number of processes it started."""
_RANKS = {
    "torchrun or accelerate launch": ("RANK", "LOCAL_RANK", "GROUP_RANK"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK",),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"),
    "an MPI launcher (Intel MPI, MPICH, PALS)": (
        "PMI_RANK", "PMI_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_RANKID", "PALS_LOCAL_RANKID",
    ),
    "PMIx": ("PMIX_RANK",),
    "Slurm": ("SLURM_PROCID", "SLURM_LOCALID"),
    "Flux": ("FLUX_TASK_RANK",),
    "jsrun": ("JSM_NAMESPACE_RANK",),
    "Horovod": ("HOROVOD_RANK",),
}  # fmt: skip
"""Launcher -> variables with the number of this process; above 0 there are others."""
_SIZE_UNKNOWN = {
    "TORCHELASTIC_RUN_ID": "torchrun or accelerate launch",
    "PMIX_RANK": "PMIx",
    "PALS_RANKID": "an MPI launcher (Intel MPI, MPICH, PALS)",
    "FLUX_TASK_RANK": "Flux",
}
"""Variables of launchers that, without any size next to them, may have started any number of processes."""
_SLURM_STEP, _SLURM_TASKS = ("SLURM_STEP_ID", "SLURM_STEPID"), ("SLURM_NTASKS", "SLURM_NPROCS")
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm numbers the batch script, and the shell of salloc, from the end of the range: one process each."""


def require_one_process() -> None:
    """Raise ConfigError if this process is one of several that a launcher started for one run."""
    if problem := several_processes(os.environ) or _initialized_group():
        raise ConfigError.of([problem])


def several_processes(environment: Mapping[str, str]) -> Problem | None:
    """Return the problem if this process has siblings, None if it runs alone."""
    found = _siblings(environment)
    if not found:
        return None
    launcher, names = next(iter(found.items()))
    every = [name for several in found.values() for name in several]
    return Problem(
        what=f"whet was started once per rank, by {launcher}",
        got=", ".join(f"{name}={environment[name]}" for name in dict.fromkeys(every)),
        why="whet trains in one process: each rank would train the complete run again, over the same output folder",
        fix=f"start it once, without the launcher, or as its only task (torchrun --nproc_per_node 1, srun -n 1, "
        f"mpirun -n 1); if {', '.join(names)} is left over, or each process is a run of its own with its own "
        f"--output_dir, put before the command: {shlex.join(_unset(environment))}",
    )


def _siblings(environment: Mapping[str, str]) -> dict[str, list[str]]:
    """Return launcher -> its variables that indicate more than one process."""
    found: dict[str, list[str]] = {}
    for launcher, names in _SIZES.items():
        found.setdefault(launcher, []).extend(name for name in names if _number(environment, name) > 1)
    for launcher, names in _RANKS.items():
        found.setdefault(launcher, []).extend(name for name in names if _number(environment, name) > 0)
    found["Slurm"].extend(_slurm_tasks(environment))
    if not _any_size(environment):
        for name, launcher in _SIZE_UNKNOWN.items():
            if name in environment and name not in found[launcher]:
                found[launcher].append(name)
    return {launcher: names for launcher, names in found.items() if names}


def _slurm_tasks(environment: Mapping[str, str]) -> list[str]:
    """Return the variables of a Slurm step with several tasks; the shell of sbatch or salloc is not such a step."""
    if _number(environment, "SLURM_STEP_NUM_TASKS") > 1:
        return ["SLURM_STEP_NUM_TASKS"]
    step = next((_number(environment, name) for name in _SLURM_STEP if name in environment), None)
    if step is None or step >= _FIRST_SPECIAL_STEP or "SLURM_STEP_NUM_TASKS" in environment:
        return []
    return [name for name in _SLURM_TASKS if _number(environment, name) > 1]


def _any_size(environment: Mapping[str, str]) -> bool:
    sizes = ("SLURM_STEP_NUM_TASKS", *(name for names in _SIZES.values() for name in names))
    return any(_number(environment, name) > 0 for name in sizes)


def _number(environment: Mapping[str, str], name: str) -> int:
    """Return the variable as an integer; 0 if it is missing or not a number."""
    try:
        return int(environment.get(name, "0"))
    except ValueError:
        return 0


def _unset(environment: Mapping[str, str]) -> list[str]:
    names = [name for several in _siblings(environment).values() for name in several]
    related = [name for several in _RANKS.values() for name in several if name in environment]
    steps = [name for name in (*_SLURM_STEP, *_SIZE_UNKNOWN) if name in environment]
    return ["env", *(word for name in dict.fromkeys([*names, *related, *steps]) for word in ("-u", name))]


def _initialized_group() -> Problem | None:
    """Return the problem if this process is in a process group of torch, which needs no variables."""
    group = sys.modules.get("torch.distributed")
    if group is None or not group.is_available() or not group.is_initialized() or group.get_world_size() < 2:
        return None
    return Problem(
        what="this process is one rank of a torch process group",
        got=f"rank {group.get_rank()} of {group.get_world_size()}",
        why="whet.Trainer trains in one process: each rank would train the complete run again",
        fix="call whet.optimize(model) in your own distributed loop, or use whet.Trainer without init_process_group",
    )
