"""What a run prints: a few aligned lines, one live line or a line an interval, a table; the rest is in run.log."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from tiny_qa import command, squad, write_json

from no_room import run_without_room
from terminal import on_terminal
from whet.cli.main import run
from whet.log import logger
from whet.watch import run_log

_LABELS = ["model", "data", "precision", "batch", "memory", "machine", "saves"]
_STEP = r"step \d+/4  epoch \d\.\d\d  loss [\d.]+  lr [\d.e-]+  [\d,]+ tokens/s  eta \d+s"


def _words(encoder: Path, folder: Path, *flags: str, **options: object) -> list[str]:
    data = write_json(folder.parent / "data.json", squad())
    usual = {"train_file": data, "validation_file": data, "max_steps": 4, "logging_steps": 2, "save_strategy": "steps",
             "save_steps": 2}  # fmt: skip
    return command(encoder, folder, "--do_train", "--do_eval", *flags, **(usual | options))


def _block(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if re.match(r"[a-z]+  +\S", line)]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 80])
def test_no_line_on_a_terminal_is_wider_than_it(columns: int, encoder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a folder with a long name" / "and another one in it that makes no line longer"
    folder.parent.mkdir()
    lines = on_terminal(_words(encoder, folder), columns)
    assert max(map(len, lines)) <= columns, [line for line in lines if len(line) > columns]
    assert _block(lines) == _LABELS
    live = [line for line in lines if line.startswith("step ") and "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in line]
    assert live
    assert "eta 0s" in live[-1]
    assert any(line.startswith("  files in ") for line in lines)
    assert any("errors.jsonl" in line for line in lines)
    assert re.fullmatch(r"  report +\S.*report\.html", lines[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [{"JPY_PARENT_PID": "1"}, {"TERM": "xterm-color", "GIT_PAGER": "cat"}])
def test_a_cell_of_a_notebook_gets_lines(kernel: dict[str, str], encoder: Path, tmp_path: Path) -> None:
    """Its commands have a terminal of 80 columns as well, but the cell keeps what is written there."""
    lines = on_terminal(_words(encoder, tmp_path / "out"), 80, **kernel)
    assert max(map(len, lines)) <= 80
    assert not any("\N{BOX DRAWINGS HEAVY HORIZONTAL}" in line for line in lines)
    assert [line[:8] for line in lines if re.fullmatch(_STEP, line)] == ["step 2/4", "step 4/4"]


def test_a_file_gets_lines_for_people(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(_words(encoder, tmp_path / "out", eval_strategy="steps", eval_steps=2)) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert shown.err == ""
    assert max(map(len, lines)) <= 80
    assert _block(lines) == _LABELS
    assert [line[:8] for line in lines if re.fullmatch(_STEP, line)] == ["step 2/4", "step 4/4"]
    assert sum("eval_f1" in line for line in lines) == 2, "the last evaluation is in the table"
    assert any(re.fullmatch(r"precision +fp32 \(auto: .+\)", line) for line in lines[:6])
    at = next(n for n, line in enumerate(lines) if line.startswith("  files in "))
    assert lines[at] == f"  files in{'':16}{tmp_path / 'out'}" or "..." in lines[at]
    assert re.fullmatch(r"  peak memory \(process\) +[\d.,]+ [MG]B", lines[at - 1])
    assert lines[at + 1].endswith("questions, the worst first in errors.jsonl")
    assert len(lines[at + 2 :]) <= 5  # the names of the columns, three questions, and the report


def test_the_log_of_a_run_holds_the_rest_and_grows_when_it_resumes(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = _words(encoder, tmp_path / "out")
    assert run(words) == 0
    first = (tmp_path / "out" / "run.log").read_text("utf-8")
    assert "batches run without padding" in first
    assert re.search(r"INFO +step 2  loss ", first)
    assert "  files in " in first
    assert first.count("whet 0.1.0: process") == first.count("batches run without padding") == 1
    assert run([*words, "--resume_from_checkpoint", "auto", "--max_steps", "6"]) == 0
    shown = capsys.readouterr()
    assert "resumes    after step 4 of 6" in shown.out
    assert "resuming after step" not in shown.err
    both = (tmp_path / "out" / "run.log").read_text("utf-8")
    assert both.startswith(first)
    assert "resuming after step 4" in both[len(first) :]


def test_programs_get_json_lines_and_people_the_rest(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(_words(encoder, tmp_path / "out", "--log_format", "json")) == 0
    shown = capsys.readouterr()
    assert [json.loads(line)["step"] for line in shown.out.splitlines()][:2] == [2, 4]
    assert _block(shown.err.splitlines()) == _LABELS


def test_a_higher_log_level_leaves_the_words_for_people_out(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(_words(encoder, tmp_path / "out", "--log_level", "error")) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert all(re.match(r"step \d", line) for line in shown.out.splitlines())
    assert "files in" in (tmp_path / "out" / "run.log").read_text("utf-8")


def test_a_run_that_fails_early_leaves_its_log_and_may_start_again(encoder: Path, tmp_path: Path) -> None:
    assert run(_words(encoder, tmp_path / "out", learning_rate=1e30, max_grad_norm=0, save_strategy="no")) == 70
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.html", "run.jsonl", "run.log"]
    assert "NonFiniteError" in (tmp_path / "out" / "run.log").read_text("utf-8")
    assert run(_words(encoder, tmp_path / "out")) == 0


def test_a_large_log_makes_room_and_keeps_one_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "LARGEST_BYTES", 2000)
    with run_log.written_to(tmp_path):
        for number in range(100):
            logger.info("line %d", number)
    assert {path.name for path in tmp_path.iterdir()} == {"run.log", "run.log.1"}
    assert all(path.stat().st_size < 2200 for path in tmp_path.iterdir())
    assert "line 99" in (tmp_path / "run.log").read_text("utf-8")


def test_a_full_disk_costs_lines_of_the_log_and_nothing_else(tmp_path: Path) -> None:
    """No file may grow: each line is refused, one warning says so, and the work ends well."""
    code = (
        "import sys\n"
        "from whet.log import logger\nfrom whet.watch import run_log\n"
        "with run_log.written_to(sys.argv[1]):\n"
        "    for number in range(3): logger.info('line %d', number)\n"
        "print('done')"
    )
    done = run_without_room(code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr.count("run.log cannot be written") == 1


def test_messages_that_a_program_does_not_show_stay_out_of_its_output(tmp_path: Path) -> None:
    """A file that gets more is no reason to show more; the program's own settings come back after it."""
    code = (
        "import logging, sys\n"
        "logging.basicConfig(level=logging.WARNING)\n"
        "from whet.log import logger\nfrom whet.watch import run_log\n"
        "with run_log.written_to(sys.argv[1]):\n"
        "    logger.info('quiet'); logger.warning('loud')\n"
        "logger.info('after'); logger.warning('again')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["WARNING:whet:loud", "WARNING:whet:again"]
    assert "quiet" in (tmp_path / "run.log").read_text("utf-8")


def test_a_long_warning_is_folded_on_a_terminal_alone(tmp_path: Path) -> None:
    code = "from whet import log; log.set_up(30); log.logger.warning('word ' * 40)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stderr.splitlines()) == 1
    process, screen = pty.fork()
    if process == 0:
        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        os.environ.pop("COLUMNS", None)
        os.execv(sys.executable, [sys.executable, "-c", code])
    shown = b""
    while True:
        try:
            shown += os.read(screen, 4096)
        except OSError:
            break
    os.waitpid(process, 0)
    lines = shown.decode().split("\r\n")
    assert max(map(len, lines)) <= 60
    assert lines[1].startswith("      word")


def test_ctrl_c_while_the_results_are_printed_changes_nothing() -> None:
    code = (
        "import os, signal, time\n"
        "from whet.watch import stop\n"
        "stop.install(); stop.defer_signals(); stop.mark_step_done(); stop.mark_work_done()\n"
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(0.3); print('the table')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the table\n", "")


def test_evaluation_alone_says_which_precision_it_runs_in(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measuring takes longer than so few batches."""
    data = write_json(tmp_path / "data.json", squad())
    assert run(command(encoder, tmp_path / "trained", "--do_train", train_file=data, max_steps=1)) == 0
    capsys.readouterr()
    assert run(command(tmp_path / "trained", tmp_path / "out", "--do_eval", validation_file=data)) == 0
    assert "precision  fp32 (auto: too few batches to measure)" in capsys.readouterr().out
