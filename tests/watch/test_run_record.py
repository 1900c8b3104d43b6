"""run.jsonl: what real runs write while they run, and what is left of those that are killed, stopped or fail."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import words_of
from tiny_qa import write_json

from no_room import run_without_room
from whet.cli.main import run
from whet.errors import ConfigError
from whet.watch import record


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Every line of the folder's file; each has to be strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "run.jsonl").read_text("ascii").splitlines()]


def test_a_run_records_what_it_is_how_it_goes_and_how_it_ends(encoder: Path, tmp_path: Path) -> None:
    settings = write_json(tmp_path / "run.json", {"seed": 7, "learning_rate": 1e-3, "recipe": "few_samples"})
    words = words_of(encoder, tmp_path / "out", "--do_predict", config=settings, test_file=tmp_path / "data.json")
    assert run([*words, "--max_train_samples", "12", "--token", "hf_abcdefghijklmnop"]) == 0
    lines = lines_of(tmp_path / "out")
    begin, *_, end = lines
    assert [line["event"] for line in lines] == [
        "begin", "step", "evaluation", "save", "step", "evaluation", "save", "evaluation", "evaluation", "end",
    ]  # fmt: skip
    assert begin["command"].startswith("whet qa --do_train --do_predict --model_name_or_path ")
    assert "abcdef" not in (tmp_path / "out" / "run.jsonl").read_text("ascii")
    given = begin["settings"]
    assert given["token"] == {"value": "***", "from": "command line"}
    assert given["seed"] == {"value": 7, "from": "settings file"}
    assert given["learning_rate"]["from"] == "command line", "the command line wins"
    assert given["reinit_layers"] == {"value": 1, "from": "recipe"}
    assert given["weight_decay"] == {"value": 0.0}, "a default names no source"
    assert (begin["task"], begin["steps"], begin["resumed_from"], begin["pid"]) == ("qa", 4, None, os.getpid())
    assert begin["working_dir"] == str(Path.cwd()), "where relative paths of the settings begin"
    assert begin["data"]["rows"] > 0
    assert begin["data"]["tokens"] > begin["data"]["rows"]
    assert begin["model"]["parameters"] == begin["model"]["trainable"] > 1000
    assert {"processor", "cores", "threads", "memory_bytes", "torch", "transformers"} <= begin["machine"].keys()
    results = json.loads((tmp_path / "out" / "all_results.json").read_text("utf-8"))
    assert end["status"] == "finished"
    assert end["metrics"] == results
    assert end["peak_bytes"] > 1e6
    assert end["train_s"] == pytest.approx(results["train_runtime"], rel=0.5)


def test_steps_have_the_losses_of_the_log_and_the_time_of_each_part(encoder: Path, tmp_path: Path) -> None:
    assert run(words_of(encoder, tmp_path / "out")) == 0
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text("utf-8"))
    logged = [entry for entry in state["log_history"] if "loss" in entry]
    found = record.read(tmp_path / "out")
    assert [(one.step, one.loss, one.learning_rate, one.grad_norm) for one in found.steps] == [
        (entry["step"], entry["loss"], entry["learning_rate"], entry["grad_norm"]) for entry in logged
    ]
    first, second = found.steps
    assert first.of == 4
    assert min(first.eta_s, second.eta_s) > 0, "after the last step there is an evaluation and a save to come"
    assert all(one.tokens_per_s > one.rows_per_s > 0 and one.resident_bytes > 1e6 for one in found.steps)
    assert {"data", "forward_backward", "update"} == first.seconds.keys()
    assert second.seconds.keys() == first.seconds.keys() | {"evaluation", "saving"}
    assert 0 < sum(second.seconds.values()) <= second.time - first.time + 0.01
    # as many rows in each: the speed counts neither the evaluation nor the checkpoint between them
    of_steps = [sum(one.seconds[part] for part in ("data", "forward_backward", "update")) for one in (first, second)]
    assert second.rows_per_s * of_steps[1] == pytest.approx(first.rows_per_s * of_steps[0], rel=0.01)
    assert [one.step for one in found.evaluations] == [2, 4, 4], "the last one is of the trained model"
    assert "eval_f1" in found.evaluations[0].metrics
    assert [one.folder for one in found.saves] == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.slow
def test_a_resumed_run_appends_and_a_new_one_in_the_folder_is_told_apart(encoder: Path, tmp_path: Path) -> None:
    words = words_of(encoder, tmp_path / "out")
    assert run(words) == 0
    before = (tmp_path / "out" / "run.jsonl").read_bytes()
    assert run([*words, "--resume_from_checkpoint", "checkpoint-2", "--max_steps", "6"]) != 0, "no such folder"
    again = ["--resume_from_checkpoint", str(tmp_path / "out" / "checkpoint-2"), "--max_steps", "6"]
    assert run([*words, *again]) == 0
    assert (tmp_path / "out" / "run.jsonl").read_bytes().startswith(before)
    found = record.read(tmp_path / "out")
    assert [one.begin["resumed_from"] for one in found.attempts] == [None, 2]
    assert [one.step for one in found.steps] == [2, 4, 6], "step 4 was taken twice, and counts once"
    assert run([*words, "--overwrite_output_dir", "--max_steps", "2"]) == 0
    found = record.read(tmp_path / "out")
    assert len(found.attempts) == 3
    assert [one.step for one in found.steps] == [2]
    assert run(words_of(tmp_path / "out", tmp_path / "out", "--do_eval", "--no_do_train", eval_strategy="no")) == 0
    found = record.read(tmp_path / "out")
    assert [one.begin["steps"] for one in found.run] == [2, None], "an evaluation belongs to the run before it"
    assert [one.step for one in found.steps] == [2]
    assert found.last.end["metrics"].keys() >= {"eval_f1"}


def test_totals_of_a_resumed_run_are_those_of_all_its_processes(encoder: Path, tmp_path: Path, capsys: Any) -> None:
    words, out = words_of(encoder, tmp_path / "out"), tmp_path / "out"

    def totals() -> tuple[dict[str, Any], float]:
        found = json.loads((out / "train_results.json").read_text("utf-8"))
        return found, found["train_samples_per_second"] * found["train_runtime"]

    assert run(words) == 0
    first, n_rows = totals()
    assert run([*words, "--resume_from_checkpoint", "auto"]) == 0
    assert totals()[0] == first, "nothing was left to train"
    assert json.loads((out / "all_results.json").read_text("utf-8"))["train_tokens_per_second"] > 0
    assert run([*words, "--resume_from_checkpoint", str(out / "checkpoint-2"), "--max_steps", "8"]) == 0
    later, n_later = totals()
    assert n_later > 1.5 * n_rows, "the last step of an epoch has fewer"
    of_processes = [one.end["train_s"] for one in record.read(out).attempts if one.end is not None]
    assert later["train_runtime"] < sum(of_processes) + 0.1
    (out / "train_results.json").unlink()
    assert run([*words, "--resume_from_checkpoint", "auto", "--max_steps", "8"]) == 0
    assert totals()[1] == pytest.approx(n_later, rel=0.01), "the checkpoint knows them"
    capsys.readouterr()
    assert run(["watch", str(out), "--once"]) == 0
    assert "trained for" in capsys.readouterr().out


@pytest.mark.slow
def test_a_killed_run_leaves_a_readable_file_and_the_next_one_continues_it(encoder: Path, tmp_path: Path) -> None:
    words = words_of(encoder, tmp_path / "out", max_steps=4000, logging_steps=1, eval_strategy="no", save_steps=2)
    process = subprocess.Popen([sys.executable, "-m", "whet", *words], stdout=subprocess.DEVNULL)
    follower, until = record.Follower(tmp_path / "out"), time.monotonic() + 120
    try:
        while len(follower.record.steps) < 5 and time.monotonic() < until:
            time.sleep(0.02)
            follower.update()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    path = tmp_path / "out" / "run.jsonl"
    killed = record.read(tmp_path / "out")
    assert killed.last.end is None
    assert len(killed.steps) >= 5
    with path.open("ab") as file:
        file.write(b'{"event": "step", "st')  # a disk that was full cuts a line off as well
    assert len(record.read(tmp_path / "out").steps) == len(killed.steps)
    last = killed.steps[-1].step + 2
    assert run([*words, "--resume_from_checkpoint", "auto", "--max_steps", str(last)]) == 0
    found = record.read(tmp_path / "out")
    assert found.last.begin["resumed_from"] == killed.saves[-1].step
    assert [one.step for one in found.steps] == list(range(1, last + 1))
    assert found.last.end["status"] == "finished"


def test_a_run_that_fails_says_why_and_its_losses_are_read_as_they_were(encoder: Path, tmp_path: Path) -> None:
    words = words_of(encoder, tmp_path / "out", learning_rate=1e30, max_grad_norm=0, logging_steps=1,
                     eval_strategy="no", save_strategy="no", max_steps=9)  # fmt: skip
    assert run(words) == 70
    found = record.read(tmp_path / "out")
    assert found.last.end["status"] == "failed"
    assert found.last.end["error"].splitlines()[0].endswith("steps in a row were not finite")
    assert any(math.isnan(one.loss) for one in found.steps)
    assert lines_of(tmp_path / "out")[-2]["loss"] == "NaN"


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom types import SimpleNamespace\nfrom whet.watch.record import Progress, Recorder\n"
        "state = SimpleNamespace(max_steps=9, global_step=0, epoch=0.0)\n"
        "recorder = Recorder(sys.argv[1], {})\n"
        "with recorder.ends({}):\n"
        "    recorder.begin(state)\n"
        "    for n in range(1, 4): recorder.step(state, Progress(n, n, n, 1.0 * n, 0.0), loss=1.0)\n"
        "print('done')"
    )
    done = run_without_room(code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr.count("run.jsonl cannot be written") == 1


def test_a_seed_has_its_record_and_the_folder_around_them_none(encoder: Path, tmp_path: Path) -> None:
    words = words_of(encoder, tmp_path / "out", "--do_eval", max_steps=2, eval_strategy="no", save_strategy="no")
    assert run([*words, "--seeds", "2"]) == 0
    assert not (tmp_path / "out" / "run.jsonl").exists()
    found = [record.read(tmp_path / "out" / f"seed-{seed}") for seed in (42, 43)]
    assert [one.last.begin["settings"]["seed"]["value"] for one in found] == [42, 43]
    assert run([*words, "--seeds", "3", "--resume_from_checkpoint", "auto"]) == 0, (
        "finished seeds are not compared by it"
    )
    assert len(record.read(tmp_path / "out" / "seed-42").attempts) == 1


def test_a_file_is_followed_while_it_grows_and_read_again_when_it_is_replaced(tmp_path: Path) -> None:
    path, follower = tmp_path / "run.jsonl", record.Follower(tmp_path)
    assert follower.update() == []
    first = b'{"event": "begin", "time": 1, "steps": 9, "resumed_from": null}\n{"event": "step", "time": 2, "step": 1'
    path.write_bytes(first)
    assert (len(follower.update()), follower.record.steps) == (1, [])
    with path.open("ab") as file:
        file.write(b', "loss": 2.5}\nnot JSON\n[1]\n')
    assert [one.loss for one in follower.update() if isinstance(one, record.Step)] == [2.5]
    (tmp_path / "new").write_bytes(b'{"event": "step", "time": "soon", "step": "two", "loss": {"a": 1}}\n')
    (tmp_path / "new").rename(path)
    follower.update()
    assert [(one.step, one.loss) for one in follower.record.steps] == [(0, None)], "what has no sense is not known"


def test_a_folder_without_a_record_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "run.jsonl").write_text('{"event": "begin", "time": 1}\n', "utf-8")
    with pytest.raises(ConfigError, match="name the output folder around it") as refused:
        record.read(tmp_path / "checkpoint-2")
    assert str(tmp_path) in refused.value.problems[0].fix
    with pytest.raises(ConfigError, match="there is no such folder"):
        record.read(tmp_path / "nowhere")


@pytest.mark.true_start
def test_peak_memory_that_the_process_held_before_the_run_is_called_so(tmp_path: Path, capsys: Any) -> None:
    code = (
        "import sys\nfrom types import SimpleNamespace\nfrom whet.watch.record import Recorder\n"
        "state = SimpleNamespace(max_steps=9, global_step=0, epoch=0.0)\n"
        "for name, size in (('first', 300 << 20), ('second', 1 << 20)):\n"
        "    recorder = Recorder(sys.argv[1] + '/' + name, {})\n"
        "    recorder.begin(state)\n"
        "    held = bytearray(size)\n"
        "    del held\n"
        "    recorder.end('finished')\n"
    )
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    shown = []
    for name in ("first", "second"):
        assert run(["watch", str(tmp_path / name), "--once"]) == 0
        shown.append(" ".join(capsys.readouterr().out.split()))
    assert "at most, of the process" not in shown[0]
    assert "at most, of the process" in shown[1]
    for name, label in (("first", "peak memory"), ("second", "peak memory of the process")):
        assert run(["report", str(tmp_path / name)]) == 0
        assert f"<dt>{label}</dt>" in (tmp_path / name / "report.html").read_text("utf-8")
