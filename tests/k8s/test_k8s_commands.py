"""A command that could only fail in the pods, or lose its results there, is refused on the terminal."""

from __future__ import annotations

from typing import Any

import pytest
from plans import QA, pod_of, refused, rendered

from whet.kubernetes.command import TEMPORARY

QA_FILE = ("qa", "--model_name_or_path", "m", "--do_train", "--output_dir", "/output/run", "--train_file")
BAD_COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "an unknown flag": ((*QA, "--no_such_flag", "3"), "no_such_flag"),
    "a value of the wrong type": ((*QA, "--num_train_epochs", "many"), "num_train_epochs"),
    "an output outside of the claim": ((*QA[:-1], "/data/out"), "--output_dir /output/out"),
    "an output above the claim": ((*QA[:-1], "../out"), "--output_dir /output/out"),
    "an output that is replaced": ((*QA, "--overwrite_output_dir"), "leave --overwrite_output_dir out"),
    "a file without its claim": ((*QA_FILE, "/data/a.json"), "add --data_claim CLAIM"),
    "a file without the claim of the cache": ((*QA_FILE, "/cache/a.json"), "add --cache_claim CLAIM"),
    "a model without its claim": ((*QA, "--model_name_or_path", "/data/model"), "add --data_claim CLAIM"),
    "a file of this machine": ((*QA_FILE, "a.json"), "--train_file /data/a.json with --data_claim"),
    "a file below this folder": ((*QA_FILE, "sub/a.json"), "--train_file /output/a.json if it is on --output_claim"),
    "a model of this machine": ((*QA, "--tokenizer_name", "./model"), "--tokenizer_name /data/model"),
    "a model at home": ((*QA, "--tokenizer_name", "~/model"), "--tokenizer_name /data/model"),
    "a program of this machine": (("bash", "-c", "whet qa"), "a script in the image"),
}


@pytest.mark.parametrize("case", BAD_COMMANDS)
def test_a_command_that_would_fail_in_the_pod_is_refused_here(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    command, fix = BAD_COMMANDS[case]
    assert fix in " ".join(refused(capfd, *command).split())


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("/data/a.json", {"data_claim": "data"}),
        ("/cache/a.json", {"cache_claim": "models"}),
        ("/output/a.json", {}),
        ("/app/a.json", {}),
    ],
)
def test_a_file_that_the_pods_have_passes(
    file: str, options: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    rendered(capfd, *QA_FILE, file, "--cache_dir", "/cache/hub", **options)


LM = ("lm", "--model_name_or_path", "m", "--dataset_name", "d", "--do_train", "--do_eval", "--output_dir", "/output/x")
MERGE = ("merge", "/output/a", "--output_dir")
IN_PODS: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "two pods that demonstrate": (("demo",), {"nodes": 2}, "leave --nodes, --max_nodes and --nproc_per_node out"),
    "two pods that merge": ((*MERGE, "/output/b"), {"nodes": 2}, "leave --nodes"),
    "a pod that may become two": ((*MERGE, "/output/b"), {"max_nodes": 2, "kind": "pytorchjob"}, "leave --nodes"),
    "two ranks that generate": (("generate", "/output/a", "--prompt", "x"), {"nproc_per_node": 2}, "leave --nodes"),
    "the same by its module": (("-m", "whet", "demo"), {"nodes": 2}, "leave --nodes"),
    "seeds on two pods": ((*LM, "--seeds", "2"), {"nodes": 2}, "make one job for each --seed"),
    "a launcher": (("launch", "--", "qa"), {}, "put the command of the ranks itself after --"),
    "another cluster": (("k8s", "status", "x"), {}, "put the command of the ranks itself after --"),
    "a help text": (("qa", "--help"), {}, "run whet qa --help here"),
    "a config that is printed": ((*QA, "--print_config"), {}, "run whet qa --print_config here"),
    "a merged model that is lost": ((*MERGE, f"{TEMPORARY}/b"), {}, "--output_dir /output/b"),
    "a demonstration that is lost": (("demo", "--output_dir", f"{TEMPORARY}/b"), {}, "--output_dir /output/b"),
    "predictions that are lost": (("predict", "/output/a", "--file", "/data/f", "--output", f"{TEMPORARY}/p.jsonl"),
                                  {"data_claim": "d"}, "--output /output/p.jsonl"),
    "curves that are lost": ((*QA, "--report_to", "tensorboard", "--logging_dir", "/x/y"), {},
                             "--logging_dir /output/y"),
    "a cache that is read-only": ((*QA, "--cache_dir", "/app/c"), {}, "--cache_dir /cache/c"),
    "a temporary file": ((*QA_FILE, f"{TEMPORARY}/a.json"), {}, "--train_file /data/a.json with --data_claim"),
    "a file to predict of this machine": (("predict", "/output/a", "--file", "f.jsonl"), {}, "--file /data/f.jsonl"),
    "DeepSpeed's file of this machine": ((*QA, "--deepspeed", "ds.json"), {}, "--deepspeed /data/ds.json"),
    "DeepSpeed's file without its claim": ((*QA, "--deepspeed=/data/ds.json"), {}, "add --data_claim CLAIM"),
    "settings of this machine": (("qa", "--config", "x.yaml"), {}, "--config /data/x.yaml with --data_claim"),
    "the same without the flag": (("qa", "x.yaml"), {}, "--config /data/x.yaml with --data_claim"),
    "settings without their claim": (("qa", "/data/x.yaml"), {}, "add --data_claim CLAIM"),
    "an output that settings do not excuse": (("qa", "/app/x.yaml", "--output_dir", f"{TEMPORARY}/b"), {}, "/output/b"),
}  # fmt: skip


@pytest.mark.parametrize("case", IN_PODS)
def test_what_cannot_end_well_in_the_pods_is_refused(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    command, options, fix = IN_PODS[case]
    assert fix in " ".join(refused(capfd, *command, **options).split())


WELL: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "a merge": ((*MERGE, "/output/b"), {}),
    "a demonstration": (("demo",), {}),
    "a doctor": (("doctor",), {}),
    "seeds in one process": ((*LM, "--seeds", "2"), {}),
    "predictions": (("predict", "/output/a", "--file", "/data/f.jsonl", "--output", "/output/p.jsonl"),
                    {"data_claim": "d"}),
    "DeepSpeed's file": ((*QA, "--deepspeed", "/data/ds.json"), {"data_claim": "d"}),
    "settings of a claim": (("qa", "/data/x.yaml"), {"data_claim": "d", "nodes": 2}),
    "settings of the image": (("qa", "--config", "/app/x.yaml", "--output_dir", "/output/b"), {}),
    "curves": ((*QA, "--report_to", "tensorboard", "--logging_dir", "/output/y"), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", WELL)
def test_what_ends_well_is_rendered(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Every word of the command reaches the pod."""
    command, options = WELL[case]
    said = pod_of(rendered(capfd, *command, **options))["containers"][0]["command"]
    start = said.index("whet") + 1
    assert tuple(said[start : start + len(command)]) == command
