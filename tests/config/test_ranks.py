"""Which rank a process is, from the variables of launchers; what cannot be known is refused."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import toy_trainer

import whet
from whet.config.ranks import ALONE, Place, place_in
from whet.errors import EXIT_BAD_CONFIG, ConfigError

KNOWN: dict[str, tuple[dict[str, str], Place]] = {
    "torchrun": (
        {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
        Place(3, 4, 1, 2, "torchrun"),
    ),
    "variables set by hand": ({"WORLD_SIZE": "2", "RANK": "1"}, Place(1, 2, 0, 1, "torchrun")),
    "Intel MPI": (
        {"PMI_SIZE": "8", "PMI_RANK": "5", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
        Place(5, 8, 1, 2, "Intel MPI or MPICH"),
    ),
    "Open MPI": (
        {
            "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "1",
        },
        Place(1, 2, 1, 2, "Open MPI"),
    ),
    "MVAPICH": (
        {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_LOCAL_SIZE": "2"},
        Place(0, 2, 0, 2, "MVAPICH"),
    ),
    "PALS": (
        {"PALS_RANKID": "3", "PALS_SIZE": "4", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"},
        Place(3, 4, 1, 2, "PALS"),
    ),
    "srun": (
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4",
         "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "2"},
        Place(2, 4, 0, 2, "Slurm"),
    ),
    "srun on unequal nodes": (
        {"SLURM_PROCID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1",
         "SLURM_TASKS_PER_NODE": "4,3", "SLURM_NODEID": "1"},
        Place(5, 7, 1, 3, "Slurm"),
    ),
    "srun on part of an allocation": (
        {"SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1",
         "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_TASKS_PER_NODE": "8", "SLURM_NODEID": "1"},
        Place(3, 4, 1, 2, "Slurm"),
    ),
    "srun --mpi=pmi2": (
        {"PMI_SIZE": "8", "PMI_RANK": "3", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8",
         "SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "2(x4)", "SLURM_NODEID": "1"},
        Place(3, 8, 1, 2, "Intel MPI or MPICH"),
    ),
    "srun of an old Slurm": (
        {"SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_STEPID": "0"}, Place(0, 4, 0, 1, "Slurm"),
    ),
    "torchrun started by srun": (
        {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "SLURM_PROCID": "0",
         "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
        Place(1, 4, 1, 2, "torchrun"),
    ),
}  # fmt: skip
UNKNOWN: dict[str, dict[str, str]] = {
    "torchrun, size lost": {"TORCHELASTIC_RUN_ID": "job"},
    "size alone": {"WORLD_SIZE": "2"},
    "rank alone": {"RANK": "1"},
    "rank out of range": {"RANK": "2", "WORLD_SIZE": "2"},
    "Intel MPI, local size alone": {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"},
    "prun": {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-1"},
    "PALS": {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1"},
    "Flux": {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"},
    "jsrun": {"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "0"},
}
ONE: dict[str, dict[str, str]] = {
    "no launcher": {},
    "torchrun with one process": {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"},
    "mpirun -n 1": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", "PMI_SIZE": "1"},
    "shell of sbatch": {"SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "shell of sbatch, step numbered": {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0"},
    "srun -n 1 in a larger allocation": {
        "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0",
    },
    "one of an array": {"SLURM_ARRAY_TASK_ID": "3", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
    "no numbers": {"WORLD_SIZE": "", "RANK": "first", "LOCAL_RANK": "-1"},
}  # fmt: skip


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of a process that a launcher started, set for this test."""
    variables: dict[str, str] = request.param
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


@pytest.mark.parametrize(("environment", "place"), KNOWN.values(), ids=KNOWN)
def test_place_is_what_the_launcher_says(environment: dict[str, str], place: Place) -> None:
    assert place_in(environment) == place


@pytest.mark.parametrize("environment", ONE.values(), ids=ONE)
def test_place_of_a_process_alone(environment: dict[str, str]) -> None:
    assert place_in(environment) == ALONE


@pytest.mark.parametrize("environment", UNKNOWN.values(), ids=UNKNOWN)
def test_ranks_fix_names_an_environment_that_runs(environment: dict[str, str]) -> None:
    """Whoever takes out the variables that the message names is not refused again."""
    with pytest.raises(ConfigError, match="one of several ranks") as refused:
        place_in(environment)
    fix = refused.value.problems[0].fix
    words = shlex.split(fix.partition("before the command: ")[2])
    assert words[0] == "env"
    left = {name: value for name, value in environment.items() if name not in words}
    assert place_in(left) == ALONE


@pytest.mark.parametrize("launched", UNKNOWN.values(), ids=UNKNOWN, indirect=True)
def test_trainer_refuses_a_place_that_is_not_known(launched: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one of several ranks") as refused:
        toy_trainer(tmp_path / "out")
    assert refused.value.exit_code == EXIT_BAD_CONFIG
    assert any(f"{name}={value}" in str(refused.value) for name, value in launched.items())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("launched", ONE.values(), ids=ONE, indirect=True)
def test_trainer_runs_as_the_only_process(launched: dict[str, str], tmp_path: Path) -> None:
    assert toy_trainer(tmp_path / "out", max_steps=1).train().global_step == 1


def test_train_refuses_ranks_that_appear_after_construction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = toy_trainer(tmp_path / "out")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="2 ranks now, 1 then"):
        trainer.train()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("command", "size_alone"), [("qa", True), ("demo", False), ("bench-methods", False)])
def test_commands_refuse_ranks_before_any_work(
    command: str, size_alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoder: Path
) -> None:
    """Before torch is loaded, the data is read or a file is written; the help text still works."""
    data = tmp_path / "missing.json"
    model = ["--model_name_or_path", str(encoder), "--train_file", str(data)]
    more = {"qa": ["--do_train", *model], "bench-methods": model}.get(command, [])
    words = [sys.executable, "-X", "importtime", "-m", "whet", command, "--output_dir", str(tmp_path / "out"), *more]
    data.write_text("[]", "utf-8")
    monkeypatch.setenv("WORLD_SIZE", "2")
    if not size_alone:
        monkeypatch.setenv("RANK", "1")
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    assert done.returncode == EXIT_BAD_CONFIG, done.stderr
    assert "WORLD_SIZE=2" in done.stderr or "rank 1 of 2" in done.stderr
    assert "| torch\n" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["missing.json"]


def test_optimize_works_in_a_distributed_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny import tiny_model

    monkeypatch.setenv("WORLD_SIZE", "2")
    whet.optimize(tiny_model("bert", dropout=0.1))
