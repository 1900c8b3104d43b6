"""A command that could only fail in the pods, or lose its results there, is refused on the terminal."""

from __future__ import annotations

from typing import Any

import pytest
from plans import QA, pod_of, refused, rendered

from whet.kubernetes.plan import TEMPORARY

QA_FILE = ("qa", "--model_name_or_path", "m", "--do_train", "--output_dir", "/output/run", "--train_file")
BAD_COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "an unknown flag": ((*QA, "--no_such_flag", "3"), "no_such_flag"),
    "an output outside of the claim": ((*QA[:-1], "/data/out"), "--output_dir /output/out"),
    "a file without its claim": ((*QA_FILE, "/data/a.json"), "add --data_claim CLAIM"),
    "a file of this machine": ((*QA_FILE, "a.json"), "--train_file /data/a.json with --data_claim"),
    "a program of this machine": (("bash", "-c", "whet qa"), "a script in the image"),
}


def test_a_command_that_would_fail_in_the_pod_is_refused_here(capfd: pytest.CaptureFixture[str]) -> None:
    for case, (command, fix) in BAD_COMMANDS.items():
        assert fix in " ".join(refused(capfd, *command).split()), case


LM = ("lm", "--model_name_or_path", "m", "--dataset_name", "d", "--do_train", "--do_eval", "--output_dir", "/output/x")
MERGE = ("merge", "/output/a", "--output_dir")
IN_PODS: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "two pods that merge": ((*MERGE, "/output/b"), {"nodes": 2}, "leave --nodes"),
    "seeds on two pods": ((*LM, "--seeds", "2"), {"nodes": 2}, "make one job for each --seed"),
    "a launcher": (("launch", "--", "qa"), {}, "put the command of the ranks itself after --"),
    "a merged model that is lost": ((*MERGE, f"{TEMPORARY}/b"), {}, "--output_dir /output/b"),
    "DeepSpeed's file of this machine": ((*QA, "--deepspeed", "ds.json"), {}, "--deepspeed /data/ds.json"),
}  # fmt: skip


def test_what_cannot_end_well_in_the_pods_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for case, (command, options, fix) in IN_PODS.items():
        assert fix in " ".join(refused(capfd, *command, **options).split()), case


WELL: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "a merge": ((*MERGE, "/output/b"), {}),
    "DeepSpeed's file": ((*QA, "--deepspeed", "/data/ds.json"), {"data_claim": "d"}),
    "settings of a claim": (("qa", "/data/x.yaml"), {"data_claim": "d", "nodes": 2}),
}  # fmt: skip


def test_what_ends_well_is_rendered(capfd: pytest.CaptureFixture[str]) -> None:
    """Every word of the command reaches the pod."""
    for command, options in WELL.values():
        said = pod_of(rendered(capfd, *command, **options))["containers"][0]["command"]
        start = said.index("whet") + 1
        assert tuple(said[start : start + len(command)]) == command
