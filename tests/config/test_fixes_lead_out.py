"""Who follows the fix of a refusal is not refused again: each way that it names is tried."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from following import followed, problems, ways
from whet.cli.k8s import COMMAND as K8S
from whet.cli.launch import COMMAND as LAUNCH
from whet.config.command_line import Command
from whet.config.ranks import require_output_for_restarts
from whet.config.rules.training import check_output_dir
from whet.errors import ConfigError
from whet.models.experts.settings import ExpertSettings, with_factors
from whet.optional import is_installed
from whet.tasks.classify.task import CLASSIFY
from whet.tasks.lm.task import LM
from whet.tasks.qa.task import QA
from whet.tasks.tag.task import TAG

_RUN = "--model_name_or_path m --train_file t --validation_file v --do_train --do_eval --output_dir out "
_JOB = "render squad --image example.org/whet:1 --cpus 16 --memory 64Gi --output_claim runs "
_BEST = "--save_strategy best --eval_strategy epoch"
_REFUSED: dict[str, tuple[Command, str]] = {
    "FSDP and an optimizer": (QA, f"{_RUN} --fsdp full_shard --optim adafactor"),
    "FSDP and precision": (QA, f"{_RUN} --fsdp full_shard --fp16"),
    "FSDP and its buckets": (QA, f"{_RUN} --fsdp shard_grad_op --ddp_bucket_cap_mb 5"),
    "ZeRO and an optimizer": (QA, f"{_RUN} --zero_stage 3 --optim adafactor"),
    "DeepSpeed's file and buckets": (QA, f"{_RUN} --precision fp32 --ddp_bucket_cap_mb 5 --deepspeed DS"),
    "the best model of nothing": (QA, f"{_RUN} --load_best_model_at_end"),
    "the best of nothing is saved": (LM, f"{_RUN} --save_strategy best --metric_for_best_model loss"),
    "lm by no metric": (LM, f"{_RUN} {_BEST}"),
    "classify by no metric": (CLASSIFY, f"{_RUN} {_BEST}"),
    "tag by no metric": (TAG, f"{_RUN} {_BEST}"),
    "a metric of classes": (CLASSIFY, f"{_RUN} --do_regression true --metric_name accuracy"),
    "a metric of one class": (
        CLASSIFY,
        f"{_RUN} --problem_type multi_label_classification --metric_for_best_model matthews_correlation",
    ),
    "a metric of numbers": (CLASSIFY, f"{_RUN} --problem_type regression --metric_for_best_model accuracy"),
    "a configuration of files": (QA, f"{_RUN} --dataset_config_name plain"),
    "variables of nodes by hand": (LAUNCH, "--nnodes 2 --master_addr h --env X=1 -- qa"),
    "a Python of nodes by hand": (LAUNCH, "--nnodes 2 --master_addr h --python python3 -- qa"),
    "a time to join over ssh": (LAUNCH, "--hosts a,b --join_timeout_s 60 -- qa"),
    "a range the wrong way round": (K8S, f"{_JOB} --kind pytorchjob --nodes 3 --min_nodes 4 --max_nodes 2 -- qa"),
    "storage in bytes": (K8S, f"{_JOB} --ephemeral_storage 20 -- qa"),
    "a toleration of no effect": (K8S, f"{_JOB} --toleration a=b:Never -- qa"),
    "the same below the job": (K8S, f"{_JOB} --kind pytorchjob --nodes 9 --min_nodes 4 --max_nodes 2 -- qa"),
    "the same above the job": (K8S, f"{_JOB} --kind pytorchjob --nodes 1 --min_nodes 4 --max_nodes 2 -- qa"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_the_fix_of_a_refusal_is_not_refused(case: str, tmp_path: Path) -> None:
    command, line = _REFUSED[case]
    if "--deepspeed" in line and is_installed("deepspeed"):
        pytest.skip("its engine has no buckets of ranks that whet could refuse")
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}}), "utf-8")
    words = [str(file) if word == "DS" else word for word in shlex.split(line)]
    (problem,) = problems(command, words)
    assert ways(problem.fix)
    for way in ways(problem.fix):
        assert [str(one) for one in problems(command, followed(words, way))] == [], way


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("1.5GB", "1.5Gi"), ("512MB", "512Mi"), ("65536MiB", "65536Mi"), ("064", "64Gi"), ("128 Gi", "128Gi"),
        ("100Mi", "64Gi"), ("64k", "64Gi"), ("100000000", "64Gi"), ("lots", "64Gi"), ("0", "64Gi"),
        ("8000", "8000Mi"), ("8000m", "8000Mi"),
    ],
)  # fmt: skip
def test_the_memory_that_is_proposed_is_the_one_that_was_meant(given: str, meant: str) -> None:
    words = [given if word == "64Gi" else word for word in shlex.split(_JOB)]
    words += ["--shared_memory", "16Mi", "--", "qa"]
    (problem,) = problems(K8S, words)
    assert problem.fix == f"use --memory {meant}"
    assert problems(K8S, followed(words, problem.fix)) == []


@pytest.mark.parametrize("meant", ["512Gi", "512Mi"])
def test_either_meaning_of_an_amount_in_bytes_leads_on(meant: str) -> None:
    words = shlex.split(f"{_JOB.replace('64Gi', '512')} --shared_memory 16Mi -- qa")
    (problem,) = problems(K8S, words)
    assert f"--memory {meant}" in problem.fix
    assert problems(K8S, followed(words, f"use --memory {meant}")) == []


def test_the_factors_that_are_proposed_are_those_of_the_command() -> None:
    settings = ExpertSettings(experts=4, top_k=2, every=3, capacity_factor=1.25)
    words = followed(shlex.split(_RUN), with_factors(settings, aux_loss_coef=0.0, z_loss_coef=0.0))
    assert {*words} >= {"--moe_experts", "--moe_every", "--moe_capacity_factor", "--moe_aux_loss_coef", "1.25"}
    assert problems(LM, words) == []


def test_a_full_folder_is_overwritten_where_nothing_starts_again(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    problem = check_output_dir(tmp_path, overwrite=False)
    assert problem is not None
    assert "--overwrite_output_dir (not with --max_restarts)" in problem.fix
    require_output_for_restarts(overwrites=True, n_restarts=0)
    with pytest.raises(ConfigError, match="started again"):
        require_output_for_restarts(overwrites=True, n_restarts=1)
