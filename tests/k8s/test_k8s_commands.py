"""A command that could only fail in the pods, or lose its results there, is refused on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plans import QA, pod_of, refused, rendered, words

from whet.cli.main import run
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


def test_a_folder_of_this_machine_is_no_name_of_the_hub(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for option in ("model_name_or_path", "teacher_model", "dataset_name", "tokenizer_name"):
        said = " ".join(refused(capfd, *QA, f"--{option}", "models/mine").split())
        assert f"{option} is a folder of this machine" in said
        assert f"use --{option} /data/mine with --data_claim, or --{option} /output/mine" in said
    rendered(capfd, *QA, "--teacher_model", "models/other")
    assert run(words(*QA, "--teacher_model", "/usr/lib", "--tokenizer_name", "/opt/not/here")) == 0
    said = " ".join(capfd.readouterr().err.split())
    assert "note: --teacher_model /usr/lib is on this machine; the pods have it only if the image does" in said
    assert "not/here" not in said


def by_kubelet(text: str, values: dict[str, str]) -> str:
    """What a kubelet makes of a word: k8s.io/kubernetes/third_party/forked/golang/expansion, in a few lines."""
    found, place = "", 0
    while place < len(text):
        follows = text[place + 1 : place + 2]
        end = text.find(")", place)
        if text[place] != "$" or follows not in ("$", "(") or (follows == "(" and end < 0):
            found, place = found + text[place], place + 1
        elif follows == "$":
            found, place = found + "$", place + 2
        else:
            name = text[place + 2 : end]
            found, place = found + values.get(name, f"$({name})"), end + 1
    return found


@pytest.mark.parametrize("kind", ["job", "trainjob", "pytorchjob"])
def test_pods_get_dollars_as_they_are_and_the_values_of_named_variables(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ("cost $$5", "$(HOME)", "$$(HOME)", "$$$(HOME)", "$(", "$x", "$()", "$(HF_TOKEN)", "a$(TEAM)$$")
    options = {"env": ("TEAM=we", "COST=$$9 $(HOME) $(OTHER)"), "env_from_secret": ("HF_TOKEN=hub",)}
    manifests = rendered(capfd, "/app/train.py", *given, kind=kind, **options)
    container = pod_of(manifests)["containers"][0]
    values = {one["name"]: one.get("value", "secret") for one in container["env"]}
    got = [by_kubelet(word, values) for word in container["command"]]
    assert got[-len(given) :] == [*given[:-2], "secret", "awe$$"]
    assert by_kubelet(values["COST"], values) == "$$9 $(HOME) $(OTHER)"


def test_variables_that_decide_over_threads_are_the_plans(capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_DOMAIN_NUM_THREADS", "OMP_THREAD_LIMIT", "WHET_LAUNCH_ID"):
        assert f"{name} is set by the plan" in refused(capfd, env=(f"{name}=1",))
