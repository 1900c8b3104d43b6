"""`whet tune`: what it tries, keeps, drops and prints; a search that was killed or stopped; what it refuses."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import hub_server
from text_tasks import load, load_lines, save_encoder, topic_rows, words, write_csv
from whet.cli.main import run
from whet.config.command_line import without
from whet.errors import EXIT_BAD_CONFIG, EXIT_BAD_DATA, EXIT_STOPPED_AND_SAVED
from whet.jobs import tune
from whet.models.loading import hub as hub_names


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny encoder without a head."""
    folder = tmp_path_factory.mktemp("encoder")
    save_encoder(folder)
    return folder


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSV file of sentences with topics."""
    return write_csv(tmp_path_factory.mktemp("data") / "topics.csv", topic_rows())


def command(encoder: Path, topics: Path, out: Path, *search: str, **more: Any) -> list[str]:
    """The words of a search over `search`, in trainings of few epochs."""
    given = {"train_file": topics, "validation_file": topics, "num_train_epochs": 2, **more}
    training = words("classify", encoder, out, **given)
    at = training.index("--save_strategy") if "--save_strategy" in training else len(training)
    return ["tune", *training[:at], *training[at + 2 :], *(["--search", *search] if search else [])]


def process(argv: list[str]) -> subprocess.Popen[str]:
    """Start the command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "whet", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def trials(folder: Path) -> list[dict[str, Any]]:
    """What the summary says of each trial."""
    return json.loads((folder / "tune.json").read_text())["trials"]


def three_trials(encoder: Path, topics: Path, out: Path) -> list[str]:
    """The words of a search of three trials."""
    return command(encoder, topics, out, "learning_rate=1e-6:3e-2:log", "max_seq_length=8:16:4", "adam_beta2=0.9,0.99",
                   trials=3, learning_rate=1e-3, max_seq_length=12, adam_beta2=0.99, num_train_epochs=6)  # fmt: skip


@pytest.fixture(scope="module")
def searched(encoder: Path, topics: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output folder of a search of three trials, and what it printed."""
    out = tmp_path_factory.mktemp("searched") / "out"
    done = process(three_trials(encoder, topics, out))
    said, errors = done.communicate(timeout=300)
    assert done.returncode == 0, errors
    return out, said


@pytest.mark.slow
def test_first_trial_has_the_settings_as_given_and_all_are_within(searched: tuple[Path, str]) -> None:
    found = [one["values"] for one in trials(searched[0])]
    assert found[0] == {"learning_rate": 1e-3, "max_seq_length": 12, "adam_beta2": 0.99}
    assert len(found) == 3
    assert all(1e-6 <= one["learning_rate"] <= 3e-2 for one in found)
    assert {one["max_seq_length"] for one in found} <= {8, 12, 16}
    assert {one["adam_beta2"] for one in found} <= {0.9, 0.99}
    assert len({json.dumps(one) for one in found}) == 3


@pytest.mark.slow
def test_best_model_is_the_output_and_the_only_one_that_is_kept(
    searched: tuple[Path, str], topics: Path, tmp_path: Path
) -> None:
    out, _ = searched
    summary = json.loads((out / "tune.json").read_text())
    scores = {one["number"]: one["score"] for one in summary["trials"] if one["state"] == "complete"}
    assert summary["metric"] == "eval_accuracy"
    assert summary["score"] == max(scores.values()) == scores[summary["best"]]
    models = {path.parent.name for path in out.glob("trial-*/model.safetensors")}
    assert models == {f"trial-{summary['best']}"}
    assert all((out / f"trial-{number}" / "report.html").exists() for number in scores)
    assert (out / "model.safetensors").read_bytes() == (out / models.pop() / "model.safetensors").read_bytes()
    assert run(words("classify", out, tmp_path / "again", "--do_eval", validation_file=topics,
                     max_seq_length=summary["values"]["max_seq_length"])) == 0  # fmt: skip
    assert load(tmp_path / "again", "eval_results.json")["eval_accuracy"] == summary["score"]
    assert "# out" in (out / "README.md").read_text()
    assert "<svg" in (out / "tune.svg").read_text()


def test_printed_command_trains_the_best_model_again(searched: tuple[Path, str], tmp_path: Path) -> None:
    out, said = searched
    printed = shlex.split(said.splitlines()[-1])
    assert printed[0] == "whet"
    assert run([*printed[1:], "--output_dir", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_each_trial_is_a_run_of_its_own_in_tensorboard(encoder: Path, topics: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    events, more = tmp_path / "events", {"trials": 2, "num_train_epochs": 1, "report_to": "tensorboard"}
    argv = command(encoder, topics, tmp_path / "out", "learning_rate=1e-4,1e-3", logging_dir=events, **more)
    assert run(argv) == 0
    assert sorted(path.parent.name for path in events.rglob("*tfevents*")) == ["trial-0", "trial-1"]


def _waits_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 400
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def _has_trained(folder: Path) -> bool:
    return (folder / "run.jsonl").exists() and '"step"' in (folder / "run.jsonl").read_text()


@pytest.mark.reliability
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_search_that_was_ended_continues(number: signal.Signals, encoder: Path, topics: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = command(encoder, topics, out, "learning_rate=1e-5,1e-4,1e-3", learning_rate=1e-4, num_train_epochs=300)
    search = process(argv)
    _waits_for(lambda: any(_has_trained(one) for one in out.glob("trial-*") if one.name != "trial-0"))
    first = (out / "trial-0" / "all_results.json").read_bytes()
    search.send_signal(number)
    _, errors = search.communicate(timeout=60)
    if number == signal.SIGINT:
        assert search.returncode == EXIT_STOPPED_AND_SAVED, errors
        argv = shlex.split(next(line for line in errors.splitlines() if line.startswith("whet tune")))[1:]
    else:
        argv += ["--resume_from_checkpoint", "auto"]
    _waits_for(lambda: not _is_trained_in(out))
    again = process(argv)
    said, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    assert "1 trial known" in said
    assert (out / "trial-0" / "all_results.json").read_bytes() == first
    found = [one["values"]["learning_rate"] for one in trials(out)]
    assert sorted(found) == [1e-5, 1e-4, 1e-3]
    assert found[0] == 1e-4


def _is_trained_in(folder: Path) -> bool:
    """Whether a process of this machine trains into the folder."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"{folder}/trial-".encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False


def test_search_with_other_settings_is_not_continued(
    searched: tuple[Path, str], encoder: Path, topics: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = command(encoder, topics, searched[0], "learning_rate=1e-6:3e-2:log", resume_from_checkpoint="auto")
    assert run(argv) == EXIT_BAD_CONFIG
    said = " ".join(capsys.readouterr().err.split())
    assert "has other settings: search" in said
    assert "num_train_epochs" in said


def test_search_over_other_data_is_not_continued(
    searched: tuple[Path, str], encoder: Path, topics: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = topics.read_text()
    topics.write_text(rows.replace("dawn", "noon"))
    try:
        argv = three_trials(encoder, topics, searched[0])
        assert run([*argv, "--resume_from_checkpoint", "auto"]) == EXIT_BAD_CONFIG
    finally:
        topics.write_text(rows)
    assert "has other settings: train_file, validation_file" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_best_model_stays_when_a_search_continues_without_the_trial_s_own(
    encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = command(encoder, topics, out, "learning_rate=1e-4,1e-3", trials=1, keep_trials=0)
    assert run(argv) == 0
    model = (out / "model.safetensors").read_bytes()
    assert not (out / "trial-0" / "model.safetensors").exists()
    again = [*argv, "--resume_from_checkpoint", "auto"]
    assert run(again) == 0
    shutil.rmtree(out / "trial-0")
    assert run(again) == 0
    assert (out / "model.safetensors").read_bytes() == model
    assert json.loads((out / "tune.json").read_text())["metric"] == "eval_accuracy"
    (out / "model.safetensors").write_bytes(model[:-4] + b"else")  # of another run
    assert run(again) == EXIT_BAD_DATA
    said = " ".join(capsys.readouterr().err.split())
    assert "the model of the best trial, trial-0, is gone" in said
    assert "train it again, and then continue: whet classify" in said
    assert (out / "model.safetensors").exists()


def test_folders_that_are_no_trials_stay(encoder: Path, tmp_path: Path) -> None:
    out, data = tmp_path / "out", tmp_path / "bad.csv"
    data.write_text("text,label\n,\n")
    own = [out / name for name in ("trial-7-good/model.safetensors", "trial-data/rows.csv", "trial-notes")]
    for path in own:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("the user's")
    argv = command(encoder, data, out, "learning_rate=1e-4,1e-3", trials=1, overwrite_output_dir="true")
    assert run(argv) == EXIT_BAD_DATA
    assert all(path.read_text() == "the user's" for path in own)


def bad_models(encoder: Path, topics: Path, out: Path, **more: Any) -> list[str]:
    """The words of a search over a model and four that are not there."""
    models = ",".join(map(str, [encoder, *(out.parent / f"none-{n}" for n in range(4))]))
    return command(encoder, topics, out, f"model_name_or_path={models}", **more)


@pytest.mark.slow
def test_training_that_fails_counts_as_a_trial(
    encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(bad_models(encoder, topics, tmp_path / "out", trials=3)) == 0
    assert [one["state"] for one in trials(tmp_path / "out")] == ["complete", "fail", "fail"]
    assert "best of 1 complete trial, 2 failed" in capsys.readouterr().out


@pytest.mark.slow
def test_search_ends_when_one_training_after_the_other_fails(
    encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "_FAILURES_IN_A_ROW", 2)
    assert run(bad_models(encoder, topics, tmp_path / "out")) == EXIT_BAD_DATA
    said = " ".join(capsys.readouterr().err.split())
    assert "2 trials in a row failed" in said
    assert "none-" in said
    assert (tmp_path / "out" / "model.safetensors").exists(), "the best of the complete ones is kept"


@pytest.mark.night
def test_time_limit_ends_the_search_with_a_complete_trial(encoder: Path, topics: Path, tmp_path: Path) -> None:
    argv = command(encoder, topics, tmp_path / "out", "learning_rate=1e-6:3e-2:log", time_limit="40s",
                   num_train_epochs=20)  # fmt: skip
    began_s = time.monotonic()
    search = process(argv)
    said, errors = search.communicate(timeout=120)
    took_s = time.monotonic() - began_s
    assert search.returncode == 0, errors
    assert "fit in 40s" in said
    assert took_s < 100  # the plan and the end come on top of the limit
    assert sum(one["state"] == "complete" for one in trials(tmp_path / "out")) >= 1


@pytest.mark.night
def test_trials_behind_the_median_are_dropped(encoder: Path, topics: Path, tmp_path: Path) -> None:
    argv = command(encoder, topics, tmp_path / "out", "learning_rate=1e-9,1e-8,1e-7,1e-6,1e-2,1.1e-2,1.2e-2,1.3e-2",
                   learning_rate=1e-2, num_train_epochs=30)  # fmt: skip
    search = process(argv)
    said, errors = search.communicate(timeout=300)
    assert search.returncode == 0, errors
    dropped = [one for one in trials(tmp_path / "out") if one["state"] == "pruned"]
    assert dropped
    assert any(len(one["evaluations"]) < 30 for one in dropped)
    complete = [one for one in trials(tmp_path / "out") if one["state"] == "complete"]
    assert {len(one["evaluations"]) for one in complete} == {30}, "one an epoch: the last model is judged once more"
    assert "dropped: behind the median" in said


def test_training_that_is_refused_is_shown(
    encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("text,label\n,\n")
    argv = command(encoder, bad, tmp_path / "out", "learning_rate=1e-5,1e-4,1e-3,1e-2")
    assert run(argv) == EXIT_BAD_DATA
    said = " ".join(capsys.readouterr().err.split())
    assert "the first 3 trials failed" in said
    assert "bad.csv" in said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of httpx, about the hub's client
def test_config_file_has_the_search_and_the_upload_and_trials_have_neither(
    encoder: Path, topics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, file = tmp_path / "out", tmp_path / "all.json"
    search = {"search": ["learning_rate=1e-4,1e-3"], "trials": 1, "keep_trials": 2}
    training = {"learning_rate": 1e-3, "num_train_epochs": 3, "lr_scheduler_kwargs": {"num_cycles": 0.4},
                "lr_scheduler_type": "cosine"}  # fmt: skip
    upload = {"push_to_hub": True, "hub_model_id": "us/best", "token": hub_server.TOKEN}
    file.write_text(json.dumps(search | training | upload))
    argv = words("classify", encoder, out, train_file=topics, validation_file=topics, config=file)
    given = without(argv[1:], {"learning_rate", "save_strategy"}, {})
    with hub_server.running() as hub:
        for name, value in {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_HUB_OFFLINE")
        hub_names.unreachable.cache_clear()
        assert run(["tune", "classify", *given]) == 0
        hub_names.unreachable.cache_clear()
        assert hub.repositories["us/best"]["model.safetensors"] == (out / "model.safetensors").read_bytes()
        assert hub.messages == ["End of training"]
    begin = load_lines(out / "trial-0" / "run.jsonl")[0]["settings"]
    assert begin["learning_rate"]["value"] == 1e-3
    assert begin["num_train_epochs"]["value"] == 3
    assert begin["lr_scheduler_kwargs"]["value"] == {"num_cycles": 0.4}
    assert begin["token"]["value"], "the trial has the secret"
    assert not [path for path in out.rglob("*") if path.is_file() and hub_server.TOKEN.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("search", "why"),
    [
        ("learning_rat=1:2", "did you mean learning_rate?"),
        ("seed=1,2", "a lucky seed is no better setting"),
        ("output_dir=a,b", "each trial has its own"),
        ("learning_rate=1e-3:1e-5", "with LOW below HIGH"),
        ("learning_rate=0:1:log", "begins above 0"),
        ("learning_rate=1e-3", "has one value"),
        ("learning_rate=a:b", "'a' is no number"),
        ("learning_rate", "no NAME=VALUES"),
        ("lora_r=1.5:4", "takes whole numbers"),
        ("optim=adamw_torch,adamw_nobody", "adamw_nobody"),
        ("learning_rate=-1:1", "learning_rate"),
        ("label_smoothing_factor=0,2", "label_smoothing_factor"),
    ],
)
def test_search_that_cannot_be_is_refused_before_any_work(
    search: str, why: str, encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(encoder, topics, tmp_path / "out", search)) == EXIT_BAD_CONFIG
    assert why in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"auto": "true"}, "auto is for one"),
        ({"seeds": 3}, "trains one seed a trial"),
        ({"eval_strategy": "no"}, "trials are not evaluated"),
        ({"time_limit": "soon"}, "time_limit is not a time"),
        ({"trials": 0}, "trials"),
    ],
)
def test_settings_that_fit_no_search_are_refused(
    more: dict[str, Any], why: str, encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(encoder, topics, tmp_path / "out", "learning_rate=1e-5:1e-3", **more)) == EXIT_BAD_CONFIG
    assert why in " ".join(capsys.readouterr().err.split())


def test_nothing_to_search_and_unknown_task_are_refused(
    encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(encoder, topics, tmp_path / "out")) == EXIT_BAD_CONFIG
    assert "nothing is searched" in capsys.readouterr().err
    assert run(["tune", "sort", "--search", "learning_rate=1:2"]) == EXIT_BAD_CONFIG
    assert "the task to tune is unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
    "search",
    [
        ("learning_rate=1e-5,1e-4,1e-3,1e-2", "max_seq_length=8:16:4", "adam_beta2=0.9,0.99"),
        ("weight_decay=0:0.3:0.1", 'lr_scheduler_kwargs={},{"power": 2, "lr_end": 1e-8},null', "max_seq_length=14,16"),
    ],
)
def test_search_ends_once_all_combinations_were_tried(
    search: tuple[str, ...], encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """24 combinations, of which one is much better: trainings of no time, by the study and the sampler of a search."""
    tried: list[str] = []

    def train(search: tune._Search, trial: Any, values: dict[str, Any]) -> tune._Outcome:
        tried.append(json.dumps(values))
        score = 0.9 if "16" in tried[-1] and "0.99" in tried[-1] else 0.1
        return tune._Outcome("complete", score, 0.0)

    monkeypatch.setattr(tune._Search, "_train", train)
    monkeypatch.setattr(tune._Search, "finish", lambda _: None)
    more = {"max_seq_length": 16, "learning_rate": 1e-4, "lr_scheduler_type": "polynomial"}
    argv = command(encoder, topics, tmp_path / "out", *search, trials=30, **more)
    assert run(argv) == 0
    assert len(tried) == len(set(tried)) == 24
    assert "all combinations were tried" in capsys.readouterr().out
    journal = [json.loads(line) for line in (tmp_path / "out" / "tune.journal").read_text().splitlines()]
    optuna = pytest.importorskip("optuna")
    failed = [one for one in journal if one.get("state") == optuna.trial.TrialState.FAIL.value]
    assert len(failed) < len(tried)


def test_search_ends_if_only_known_values_come(
    encoder: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range of two neighbouring numbers, which are not counted: trainings of no time, as above."""
    tried: list[float] = []

    def train(search: tune._Search, trial: Any, values: dict[str, Any]) -> tune._Outcome:
        tried.append(values["weight_decay"])
        return tune._Outcome("complete", 0.5, 0.0)

    monkeypatch.setattr(tune._Search, "_train", train)
    monkeypatch.setattr(tune._Search, "finish", lambda _: None)
    more = math.nextafter(0.1, 1.0)
    assert run(command(encoder, topics, tmp_path / "out", f"weight_decay=0.1:{more!r}", trials=30)) == 0
    assert 1 <= len(tried) == len(set(tried)) <= 2
    said = capsys.readouterr().out
    assert "the search ends, as 50 suggestions in a row were tried before" in said
    assert "all combinations" not in said


@pytest.mark.slow
def test_json_objects_are_searched(encoder: Path, topics: Path, tmp_path: Path) -> None:
    ends = [json.dumps({"lr_end": end, "power": 2.0}) for end in (1e-6, 1e-5)]
    more = {"lr_scheduler_type": "polynomial", "num_train_epochs": 1, "trials": 2}
    argv = command(encoder, topics, tmp_path / "out", f"lr_scheduler_kwargs={','.join(ends)}", **more)
    assert run(argv) == 0
    assert {one["values"]["lr_scheduler_kwargs"] for one in trials(tmp_path / "out")} == {*ends}
    begun = [load_lines(tmp_path / "out" / f"trial-{n}" / "run.jsonl")[0]["settings"] for n in range(2)]
    assert sorted(one["lr_scheduler_kwargs"]["value"]["lr_end"] for one in begun) == [1e-6, 1e-5]


@pytest.mark.slow
def test_search_in_a_new_pod_continues(
    encoder: Path, topics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its trials begin: each has a folder of its own."""
    argv = command(encoder, topics, tmp_path / "out", "learning_rate=1e-4,1e-3", trials=1)
    monkeypatch.setenv("WHET_RESUME", "auto")
    assert run(argv) == 0
    capsys.readouterr()
    first = (tmp_path / "out" / "trial-0" / "all_results.json").read_bytes()
    assert run(argv) == 0
    assert "1 trial known" in capsys.readouterr().out
    assert (tmp_path / "out" / "trial-0" / "all_results.json").read_bytes() == first
