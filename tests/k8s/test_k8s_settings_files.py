"""What the files of --config and --deepspeed say is checked before a job exists, if this machine has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from plans import QA, pod_of, refused, rendered, words

from whet.cli.main import run

GOOD = {
    "model_name_or_path": "m", "dataset_name": "squad", "do_train": True, "output_dir": "/output/run", "max_steps": 5,
}  # fmt: skip
TOKEN = "hf_" + "aB3dE5gH7jK9" * 3
BAD: dict[str, tuple[dict[str, object], str]] = {
    "an unknown key": ({"learning_rat": 3e-5}, "did you mean learning_rate?"),
    "a file of this machine": (
        {"train_file": "a.json", "dataset_name": None},
        "--train_file /data/a.json with --data_claim",
    ),
    "a secret by its form": ({"run_name": TOKEN}, "--env_from_secret HF_TOKEN=hub/HF_TOKEN"),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that the pods have too, as part of the image; /tmp is the pod's own, where tests' folders are."""
    monkeypatch.setattr("whet.kubernetes.plan.TEMPORARY", "/no/such/folder")
    return tmp_path


def written(place: Path, name: str, values: object) -> str:
    file = place / name
    file.write_text(yaml.safe_dump(values) if name.endswith("yaml") else json.dumps(values), "utf-8")
    return str(file)


def noted(capfd: pytest.CaptureFixture[str], *command: str, **options: Any) -> str:
    """Return what the program says about a plan that it renders."""
    assert run(words(*command, **options)) == 0
    printed = capfd.readouterr()
    assert list(yaml.safe_load_all(printed.out))
    return " ".join(printed.err.split())


@pytest.mark.parametrize("case", BAD)
def test_a_settings_file_is_checked_as_in_the_pod(case: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong, fix = BAD[case]
    said = refused(capfd, "qa", "--config", written(place, "run.yaml", {**GOOD, **wrong}))
    assert fix in " ".join(said.split())
    assert TOKEN not in said


def test_a_flag_that_contradicts_the_file_is_refused(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = written(place, "run.yaml", {**GOOD, "load_best_model_at_end": True, "eval_strategy": "steps"})
    assert "load_best_model_at_end" in refused(capfd, "qa", file, "--do_eval", "--save_strategy", "epoch")


def test_a_good_file_passes_and_reaches_the_pod(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = written(place, "run.yaml", GOOD)
    said = pod_of(rendered(capfd, "qa", file))["containers"][0]["command"]
    assert said[-2:] == ["qa", file]


def test_files_that_are_not_here_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    said = noted(capfd, *QA, "--deepspeed", "/app/no/ds.json")
    assert "note: /app/no/ds.json is not on this machine" in said
    said = noted(capfd, "qa", "/app/no/run.yaml")
    assert "note: /app/no/run.yaml is not on this machine" in said
    assert "neither its settings nor the flags next to it were checked" in said


def test_a_file_named_by_a_file_is_checked(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    absent = written(place, "run.yaml", {**GOOD, "deepspeed": "/app/no/ds.json"})
    assert "note: /app/no/ds.json is not on this machine" in noted(capfd, "qa", absent)
    bad = written(place, "ds.json", {"zero_optimization": {"stage": 7}})
    named = written(place, "run.yaml", {**GOOD, "deepspeed": bad})
    assert "zero_optimization.stage is 7" in refused(capfd, "qa", named)


WRONG_DEEPSPEED: dict[str, tuple[object, str]] = {
    "another batch than that of the pods": (
        {"zero_optimization": {"stage": 2}, "train_batch_size": 16, "train_micro_batch_size_per_gpu": 8,
         "gradient_accumulation_steps": 1}, "train_batch_size is 16",
    ),
    "a secret": ({"zero_optimization": {"stage": 2}, "wandb": {"api_key": TOKEN}}, "--env_from_secret"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_DEEPSPEED)
def test_a_configuration_of_deepspeed_is_checked(case: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    values, seen = WRONG_DEEPSPEED[case]
    file = written(place, "ds.json", values)
    said = refused(capfd, *QA, "--deepspeed", file, "--max_grad_norm", "1.0", nodes=4)
    assert seen in " ".join(said.split())
    assert TOKEN not in said


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_batch_counts_the_ranks_of_the_pods(nodes: int, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither this process, which is alone, nor a variable left over here is what the file has to agree with."""
    file = written(place, "ds.json", {"zero_optimization": {"stage": 2}, "train_batch_size": 16 * nodes})
    rendered(capfd, *QA, "--deepspeed", file, "--per_device_train_batch_size", "8", nodes=nodes, nproc_per_node=2)


def test_a_batch_has_to_fit_every_number_of_pods(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "train_batch_size": 32}
    file = written(place, "ds.json", {"zero_optimization": {"stage": 2}, **sizes})
    elastic = {"kind": "pytorchjob", "nodes": 4, "min_nodes": 2, "max_nodes": 4}
    assert "train_batch_size is 32" in refused(capfd, *QA, "--deepspeed", file, **elastic)


def test_what_only_deepspeed_honours_is_said(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = written(place, "ds.json", {"zero_optimization": {"stage": 2}, "communication_data_type": "bfp16"})
    assert "need DeepSpeed in the image" in noted(capfd, *QA, "--deepspeed", file)
    hook = ("--ddp_comm_hook", "bf16", "--deepspeed", written(place, "b.json", {"zero_optimization": {"stage": 1}}))
    assert "need an image without DeepSpeed" in noted(capfd, *QA, *hook)


GENERATE = ("generate", "/output/run", "--chat")
WAITING: dict[str, tuple[tuple[str, ...], str]] = {
    "a chat": (GENERATE, "add --prompt TEXT"),
    "a notebook": (("-m", "notebook"), "make a Deployment"),
    "a launcher": (("-m", "torch.distributed.run", "--nproc_per_node=2", "train.py"), "put train.py itself after --"),
}  # fmt: skip


@pytest.mark.parametrize("case", WAITING)
def test_a_command_that_cannot_be_a_job_is_refused(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    command, fix = WAITING[case]
    assert fix in " ".join(refused(capfd, *command).split())


def test_a_chat_with_its_turns_is_a_job(capfd: pytest.CaptureFixture[str]) -> None:
    rendered(capfd, *GENERATE, "--prompt", "hello")
    rendered(capfd, "-m", "pytest_of_mine", "--chat")
