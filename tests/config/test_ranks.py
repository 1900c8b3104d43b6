"""Point A3: a launcher that starts a process per rank is refused; one process alone runs, however it was started."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import toy_trainer

import whet
from whet.config.ranks import several_processes
from whet.errors import EXIT_BAD_CONFIG, ConfigError

SEVERAL: dict[str, dict[str, str]] = {
    "torchrun": {
        "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none",
    },
    "torchrun on two nodes": {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "RANK": "1", "LOCAL_RANK": "0"},
    "torchrun, size lost": {"TORCHELASTIC_RUN_ID": "job"},
    "rank alone": {"RANK": "1"},
    "hydra": {"PMI_SIZE": "4", "PMI_RANK": "0"},
    "Intel MPI": {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"},
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
    "MVAPICH": {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"},
    "prun": {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-1"},
    "PALS": {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1"},
    "PALS, first rank": {"PALS_RANKID": "0", "PALS_LOCAL_RANKID": "0"},
    "Flux": {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"},
    "jsrun": {"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "0"},
    "srun": {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"},
    "srun of an old Slurm": {"SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_STEPID": "0"},
    "srun, second task": {"SLURM_NTASKS": "4", "SLURM_PROCID": "1"},
}  # fmt: skip
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


@pytest.mark.parametrize("launched", SEVERAL.values(), ids=SEVERAL, indirect=True)
def test_trainer_refuses_to_be_one_of_several_ranks(launched: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="started once per rank") as refused:
        toy_trainer(tmp_path / "out")
    assert refused.value.exit_code == EXIT_BAD_CONFIG
    assert any(f"{name}={value}" in str(refused.value) for name, value in launched.items())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("environment", SEVERAL.values(), ids=SEVERAL)
def test_ranks_fix_names_an_environment_that_runs(environment: dict[str, str]) -> None:
    """Whoever takes out the variables that the message names is not refused again."""
    problem = several_processes(environment)
    assert problem is not None
    words = shlex.split(problem.fix.partition("before the command: ")[2])
    assert words[0] == "env"
    left = {name: value for name, value in environment.items() if name not in words}
    assert several_processes(left) is None


@pytest.mark.parametrize("launched", ONE.values(), ids=ONE, indirect=True)
def test_trainer_runs_as_the_only_process(launched: dict[str, str], tmp_path: Path) -> None:
    assert toy_trainer(tmp_path / "out", max_steps=1).train().global_step == 1


def test_train_refuses_ranks_that_appear_after_construction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = toy_trainer(tmp_path / "out")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2"):
        trainer.train()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["qa", "demo", "bench-methods"])
def test_commands_refuse_ranks_before_any_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoder: Path
) -> None:
    """Before torch is loaded, the data is read or a file is written; the help text still works."""
    data = tmp_path / "missing.json"
    model = ["--model_name_or_path", str(encoder), "--train_file", str(data)]
    more = {"qa": ["--do_train", *model], "bench-methods": model}.get(command, [])
    words = [sys.executable, "-X", "importtime", "-m", "whet", command, "--output_dir", str(tmp_path / "out"), *more]
    data.write_text("[]", "utf-8")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    assert done.returncode == EXIT_BAD_CONFIG, done.stderr
    assert "WORLD_SIZE=2" in done.stderr
    assert "| torch\n" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["missing.json"]


_GROUP = """
import sys, torch, whet
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
try:
    whet.Trainer(torch.nn.Linear(1, 1), whet.TrainingArguments(output_dir=sys.argv[1] + "out"))
except whet.ConfigError as error:
    print(error)
"""


def test_trainer_refuses_a_process_group_without_variables(tmp_path: Path) -> None:
    """As torch.multiprocessing.spawn makes one."""
    words = [sys.executable, "-c", _GROUP, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    assert all("whet.optimize" in rank.communicate(timeout=120)[0] for rank in ranks)


def test_optimize_works_in_a_distributed_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny import tiny_model

    monkeypatch.setenv("WORLD_SIZE", "2")
    whet.optimize(tiny_model("bert", dropout=0.1))
