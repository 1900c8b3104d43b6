"""`--json`: every command prints one object, whatever happens to it, and nothing else to standard output."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from text_tasks import examples, save_encoder, topic_rows, words, write_csv
from whet.cli import main
from whet.cli.commands import COMMANDS
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, EXIT_STOPPED_AND_SAVED

_GENERAL = {"command", "status", "exit_code", "version", "seconds", "metrics", "outputs", "warnings"}
_LONGEST_S = 60.0
_EPOCHS = 100_000
"""More than a run takes that is stopped after its first steps."""


def one_object(text: str) -> dict[str, Any]:
    """Return the object that is all of this text."""
    (line,) = text.splitlines()
    found = json.loads(line)
    assert found.keys() >= _GENERAL
    return found


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command in this process, and return its object, which has its exit code."""

    def ask(*given: Any) -> dict[str, Any]:
        code = run([str(word) for word in given])
        found = one_object(capsys.readouterr().out)
        assert found["exit_code"] == code
        return found

    return ask


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_describes_itself_and_its_refusals(name: str, asked: Any, capsys: Any) -> None:
    help_ = asked(name, "--help", "--json")
    assert (help_["command"], help_["status"]) == (name, "ok")
    assert all(one["help"] and one["values"] for one in help_["options"])
    refused = [name, "--no_such_option", "3"]
    assert run(refused) == EXIT_BAD_CONFIG
    said = capsys.readouterr().err
    found = asked(name, "--json", *refused[1:])
    assert (found["command"], found["status"], found["exit_code"]) == (name, "error", EXIT_BAD_CONFIG)
    assert found["error"].keys() == {"what", "got", "why", "fix"}
    assert f"error: {found['error']['what']}\n" in said, "the object has the error that people read"


def test_a_model_is_trained_judged_and_used_by_its_objects(tmp_path: Path, asked: Any, capsys: Any) -> None:
    """What a program that drives whet does: each object leads to the next command."""
    save_encoder(tmp_path / "model")
    rows = examples("classify", tmp_path)
    given = words("classify", tmp_path / "model", tmp_path / "out", "--do_train", "--do_eval", "--no_cuda", "--json",
                  train_file=rows, validation_file=rows, num_train_epochs=2)  # fmt: skip
    trained = asked(*given)
    assert trained["status"] == "ok"
    assert trained["metrics"] == json.loads((tmp_path / "out" / "all_results.json").read_text())
    outputs = trained["outputs"]
    assert outputs["folder"] == str(tmp_path / "out")
    assert all(Path(path).is_absolute() and Path(path).exists() for path in outputs.values())
    assert outputs.keys() == {"folder", "results", "errors", "report", "record"}
    assert any("no_cuda" in one for one in trained["warnings"])
    assert "--json" not in (tmp_path / "out" / "README.md").read_text("utf-8")

    predictions = tmp_path / "predictions.jsonl"
    predicted = asked("predict", outputs["folder"], "--file", rows, "--output", predictions, "--json")
    assert predicted["predictions"] == len(predictions.read_text("utf-8").splitlines()) == len(topic_rows())
    assert predicted["outputs"] == {"predictions": str(predictions)}
    (watched,) = asked("watch", outputs["folder"], "--json")["runs"]
    assert watched["status"] == "finished"
    assert asked("report", outputs["folder"], "--json")["outputs"] == {"report": str(tmp_path / "out" / "report.html")}

    again = asked(*given)
    assert (again["status"], again["error"]["what"]) == ("error", "output_dir is not empty")
    planned = asked("plan", *words("classify", tmp_path / "model", tmp_path / "new", "--no_time", "--json",
                                   train_file=rows))  # fmt: skip
    assert planned["memory"]["peak_bytes"] > 0
    assert "memory of one rank" not in capsys.readouterr().err


def test_answers_and_texts_are_in_the_object(tmp_path: Path, encoder: Path, decoder: Path, asked: Any) -> None:
    rows = examples("qa", tmp_path)
    trained = asked(*words("qa", encoder, tmp_path / "out", "--do_train", "--json", train_file=rows, doc_stride=8,
                           num_train_epochs=1))  # fmt: skip
    (tmp_path / "notes.txt").write_text("The boat lay in the harbour.")
    found = asked("ask", trained["outputs"]["folder"], "--context", tmp_path / "notes.txt", "--question", "what?",
                  "--n_best", "2", "--max_seq_length", "24", "--doc_stride", "8", "--json")  # fmt: skip
    (answered,) = found["answers"]
    assert answered["question"] == "what?"
    assert len(answered["answers"]) == 2
    assert all({"text", "probability", "span"} == one.keys() for one in answered["answers"])
    generated = asked("generate", decoder, "--prompt", "the boat", "--max_new_tokens", "3", "--json")
    assert [one["prompt"] for one in generated["texts"]] == ["the boat"]


def test_manifests_and_migrated_commands_are_in_the_object(asked: Any) -> None:
    rendered = asked("k8s", "render", "squad", "--json", "--image", "registry.example.org/whet:1", "--output_claim",
                     "runs", "--cpus", "4", "--memory", "8Gi", "--", "demo", "--json")  # fmt: skip
    assert [one["kind"] for one in rendered["manifests"]]
    moved = asked("migrate", "--json", "python run_qa.py --model_name_or_path m --dataset_name squad --do_train"
                  " --output_dir out")  # fmt: skip
    assert moved["command"].startswith("whet qa "), "of migrate, what it translated to"
    missing = asked("migrate", "python run_qa.py --do_train --output_dir out", "--json")
    assert (missing["status"], missing["exit_code"]) == ("error", EXIT_BAD_CONFIG)


def test_whet_alone_has_objects_too(asked: Any) -> None:
    assert asked("--version", "--json")["text"] == f"whet {asked('--version', '--json')['version']}"
    assert asked("no-such", "--json")["error"]["what"] == "unknown command"


def test_the_flag_takes_no_word_for_its_value_but_true_and_false(tmp_path: Path, asked: Any, capsys: Any) -> None:
    assert asked("watch", "--json", tmp_path)["error"]["got"].startswith(f"{tmp_path}: ")
    assert asked("watch", tmp_path, "--json", "true")["status"] == "error"
    assert run(["watch", str(tmp_path), "--json", "false"]) == EXIT_BAD_CONFIG
    assert run(["watch", str(tmp_path), "--json=maybe"]) == EXIT_BAD_CONFIG
    assert capsys.readouterr().out == ""


def test_numbers_that_json_has_not_are_text_and_secrets_are_hidden(
    asked: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from whet import json_output

    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    with json_output.begun("qa", lambda: True, own_process=False):
        json_output.add(metrics={"loss": float("nan"), "all": [float("inf")]})
        json_output.warn("sent 0123456789abcdef to https://me:secret@example.org")
        json_output.finish(0)
    found = one_object(capsys.readouterr().out)
    assert found["metrics"] == {"loss": "NaN", "all": ["Infinity"]}
    assert found["warnings"] == ["sent *** to https://***@example.org"]


def test_a_fault_of_ours_is_an_object_and_a_traceback(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> int:
        raise ValueError("a fault")

    monkeypatch.setattr(main, "_dispatch", fails)
    with pytest.raises(ValueError, match="a fault"):
        run(["doctor", "--json"])
    found = one_object(capsys.readouterr().out)
    assert (found["status"], found["exit_code"], found["error"]["got"]) == ("error", 1, "a fault")


def test_only_the_first_rank_prints(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, n_lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert run(["classify", "--json", "--no_such_option", "3"]) == EXIT_BAD_CONFIG
        assert len(capsys.readouterr().out.splitlines()) == n_lines


@pytest.mark.slow
def test_predictions_do_not_share_standard_output_with_the_object(tmp_path: Path, asked: Any) -> None:
    rows = write_csv(tmp_path / "rows.csv", topic_rows())
    found = _whet("predict", tmp_path, "--file", rows, "--output", "/dev/stdout", "--json")
    assert found.returncode == EXIT_BAD_CONFIG
    assert one_object(found.stdout)["error"]["got"] == "--output /dev/stdout"


def _whet(*given: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "whet", *map(str, given)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST_S)


def test_what_a_script_prints_goes_to_standard_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nos.write(1, b'by the system\\n')\nprint(sys.argv[1])\nsys.exit(3)\n")
    done = _whet("run", "--json", script, "--json")
    found = one_object(done.stdout)
    assert (done.returncode, found["exit_code"], found["status"]) == (3, 3, "failed")
    assert found["started"][-1] == "--json", "what follows the script is its own"
    assert "by the system\n" in done.stderr
    assert "\n--json\n" in done.stderr


def test_a_program_that_takes_the_place_of_a_command_prints_its_own_object() -> None:
    """As --auto does, once it knows the threads and ranks of a run."""
    code = (
        "import os, sys\n"
        "from whet import json_output\n"
        "with json_output.begun('classify', lambda: True, own_process=True):\n"
        "    os.write(1, b'before\\n')\n"
        "    json_output.hand_over()\n"
        "    os.execv(sys.executable, [sys.executable, '-m', 'whet', '--version', '--json'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert one_object(done.stdout)["status"] == "ok"
    assert done.stderr == "before\n"


@pytest.mark.night
def test_ranks_print_one_object_together(tmp_path: Path) -> None:
    save_encoder(tmp_path / "model")
    given = words("classify", tmp_path / "model", tmp_path / "out", "--do_train", "--json", max_steps=2,
                  train_file=examples("classify", tmp_path))  # fmt: skip
    done = _whet("launch", "--nproc_per_node", 2, "--log_dir", tmp_path / "logs", "--", *given)
    assert one_object(done.stdout)["metrics"]["train_loss"] > 0
    started = _whet("launch", "--json", "--nproc_per_node", 2, "--log_dir", tmp_path / "logs", "--", *given)
    found = one_object(started.stdout)
    assert (found["command"], found["status"], found["exit_code"]) == ("launch", "failed", EXIT_BAD_CONFIG)
    assert found["failed_rank"]["code"] == EXIT_BAD_CONFIG, "the output folder is not empty any more"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_says_how_to_resume(tmp_path: Path, number: signal.Signals) -> None:
    save_encoder(tmp_path / "model")
    given = words("classify", tmp_path / "model", tmp_path / "out", "--do_train", "--json", num_train_epochs=_EPOCHS,
                  train_file=examples("classify", tmp_path), logging_steps=1)  # fmt: skip
    command = [sys.executable, "-m", "whet", *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        record, until_s = tmp_path / "out" / "run.jsonl", time.monotonic() + _LONGEST_S
        while not (record.is_file() and '"step"' in record.read_text()) and time.monotonic() < until_s:
            time.sleep(0.05)
        process.send_signal(number)
        printed, said = process.communicate(timeout=_LONGEST_S)
    found = one_object(printed)
    assert (process.returncode, found["exit_code"]) == (EXIT_STOPPED_AND_SAVED, EXIT_STOPPED_AND_SAVED)
    assert found["status"] == "stopped"
    assert f"stopped by {number.name}" in found["stopped"]
    assert found["resume"] in said, "it is the command that people read"
    assert shlex.split(found["resume"]) == ["whet", *given, "--resume_from_checkpoint", "auto"]
    assert list(Path(found["outputs"]["folder"]).glob("checkpoint-*"))


def _catches(process: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for the signal, by the kernel's account."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


def test_a_run_that_is_stopped_before_its_first_step_says_so(tmp_path: Path) -> None:
    """It ends at once, from another thread than the one that works."""
    save_encoder(tmp_path / "model")
    rows = write_csv(tmp_path / "rows.csv", topic_rows() * 3000)  # tokenising them takes a second
    given = words("classify", tmp_path / "model", tmp_path / "out", "--do_train", "--json", train_file=rows)
    command = [sys.executable, "-m", "whet", *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not _catches(process.pid, signal.SIGTERM):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=_LONGEST_S)
    found = one_object(printed)
    assert (found["status"], found["exit_code"]) == ("stopped", EXIT_STOPPED_AND_SAVED)
    assert "nothing to save" in found["stopped"]


@pytest.mark.slow
def test_a_command_that_saves_nothing_says_which_signal_ended_it(decoder: Path) -> None:
    command = [sys.executable, "-m", "whet", "generate", str(decoder), "--chat", "--json"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write("the boat\n")
        process.stdin.flush()
        assert any("the answer is cut" in line for line in process.stderr), "it has answered, and waits for more"
        process.terminate()
        printed, _ = process.communicate(timeout=_LONGEST_S)
    found = one_object(printed)
    assert process.returncode == -signal.SIGTERM, "whoever waits for it sees the signal, as without --json"
    assert (found["status"], found["stopped"]) == ("stopped", "ended by SIGTERM")
