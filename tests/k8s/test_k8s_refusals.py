"""Plans that a cluster would refuse, or run badly, are refused here, each with the way that works."""

from __future__ import annotations

from typing import Any

import pytest
from plans import refused, words

from whet.cli.main import run

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a part of a CPU": ({"cpus": "7500m"}, "--cpus 7"),
    "more ranks than CPUs": ({"cpus": "2", "nproc_per_node": 4}, "--cpus 4"),
    "memory without a unit": ({"memory": "64"}, "--memory 64Gi"),
    "an upper-case name": ({"name": "Squad"}, "--name squad-1"),
    "a name too long for its pods": ({"name": "a" * 49}, "at most 48 characters"),
    "an elastic TrainJob": ({"min_nodes": 1, "max_nodes": 4}, "--kind pytorchjob"),
    "root": ({"run_as_user": 0}, "--run_as_user 1000"),
    "no claim for the output": ({"output_claim": None}, "--output_claim CLAIM"),
    "an image with a scheme": ({"image": "https://example.org/whet"}, "--image REGISTRY/NAME:TAG"),
    "threads by hand": ({"env": "OMP_NUM_THREADS=64"}, "leave OMP_NUM_THREADS out"),
    "a secret without a Secret": ({"env_from_secret": "HF_TOKEN"}, "--env_from_secret HF_TOKEN=hub/HF_TOKEN"),
    "pods beyond the limit": ({"nodes": 100_001, "kind": "job"}, "--nodes 100000"),
}


def test_a_plan_is_refused_with_a_way_that_works(capfd: pytest.CaptureFixture[str]) -> None:
    for case, (options, fix) in CASES.items():
        assert fix in " ".join(refused(capfd, **options).split()), case


def test_render_refuses_options_of_submit(capfd: pytest.CaptureFixture[str]) -> None:
    said = " ".join(refused(capfd, kubeconfig="k", context="c").split())
    assert "whet k8s render does not read kubeconfig, context" in said


def test_a_command_is_needed(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["k8s", "render", "--name", "a", "--image", "i", "--cpus", "2", "--memory", "4Gi", "--output_claim", "c"])
        == 78
    )
    assert "-- qa --do_train" in " ".join(capfd.readouterr().err.split())


def test_the_job_may_be_named_without_its_flag(capfd: pytest.CaptureFixture[str]) -> None:
    with_flag = words()
    at = with_flag.index("--name")
    assert run([*with_flag[:at], *with_flag[at + 1 :]]) == 0
    assert capfd.readouterr().out.count("name: squad") == 3
    assert run(["k8s", "render", "squad", "more"]) == 78
