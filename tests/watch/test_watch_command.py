"""`whet watch`: real runs in the background, on terminals of several widths, by a pipe, and from other machines."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import words_of, write_run

from whet.cli.main import run
from whet.watch import lock

_FRAME = re.compile(r"\x1b\[(?:H|\?1049l)")
"""What each picture begins with: the cursor goes home, or to the terminal's first screen."""


class Screen:
    """`whet watch` on a terminal of its own."""

    def __init__(self, words: list[str], columns: int, **variables: str) -> None:
        self._screen, self._side = pty.openpty()
        self.resize(columns)
        plain = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "whet", "watch", *words], env=plain | {"TERM": "xterm"} | variables,
            stdin=self._side, stdout=self._side, stderr=self._side, start_new_session=True,
        )  # fmt: skip
        self._shown = b""
        os.set_blocking(self._screen, False)

    def resize(self, columns: int) -> None:
        """Give the terminal this width."""
        fcntl.ioctl(self._side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def shown(self) -> str:
        """Everything that was shown so far."""
        try:
            while found := os.read(self._screen, 1 << 16):
                self._shown += found
        except OSError:
            pass
        return self._shown.decode(errors="ignore")  # the last character may not be complete yet

    def wait_for(self, what: Callable[[str], Any], within_s: float = 60) -> str:
        """Wait until what was shown fulfils this."""
        until = time.monotonic() + within_s
        while not what(self.shown()):
            assert time.monotonic() < until, self.shown()[-3000:]
            time.sleep(0.05)
        return self.shown()

    def pictures(self) -> list[list[str]]:
        """Each picture, in lines without colours."""
        texts = _FRAME.split(self.shown())
        return [[line.rstrip() for line in plain(text).splitlines() if line.strip()] for text in texts]


def plain(text: str) -> str:
    """The text without what controls a terminal."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 60])
def test_a_training_is_watched_from_its_start_to_its_end(columns: int, encoder: Path, tmp_path: Path) -> None:
    words = words_of(encoder, tmp_path / "out", max_steps=400, logging_steps=1, eval_steps=200, save_steps=200)
    with subprocess.Popen([sys.executable, "-m", "whet", *words], stdout=subprocess.DEVNULL) as training:
        until = time.monotonic() + 60
        while not (tmp_path / "out" / ".whet.lock").exists() and time.monotonic() < until:
            time.sleep(0.01)
        screen = Screen([str(tmp_path / "out")], columns)
        screen.wait_for(lambda _: screen.process.poll() is not None, 120)
        assert training.wait() == 0
    assert screen.process.returncode == 0, screen.shown()
    pictures = screen.pictures()
    assert max(len(line) for picture in pictures for line in picture) <= columns
    assert any("  running " in line for picture in pictures for line in picture)
    last = "\n".join(pictures[-1])
    assert "  finished " in last
    assert "400 of 400, 100%" in last
    assert re.search(r"│ loss +[\d.]+ [▁▂▃▄▅▆▇█]{9}", last)
    assert re.search(r"│ scores +exact match [\d.]+, f1 ", last)
    assert "checkpoint-400" in last
    assert "\x1b[?1049l" in screen.shown(), "the terminal's first screen is back"


def test_pictures_fit_narrow_windows_and_say_what_there_is(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    write_run(tmp_path / "out", 40)
    for columns in (120, 80, 60, 32):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert run(["watch", str(tmp_path / "out"), "--once"]) == 0
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= columns
        flat = " ".join(re.sub(r"[│╭╰─╮╯\n]", " ", shown).split())
        for part in ("running", "40 of 100, 40%, epoch 0.80", "forecast 1h00m (50m00s to 1h06m)", "loss 0.075 ",
                     "learning rate 3e-05, gradient norm 1.5", "812 tokens/s", "forward and backward 70%",
                     "1.8 GB of 16.4 GB, forecast 2.0 GB"):  # fmt: skip
            assert part in flat, (part, columns, shown)


@pytest.mark.slow
def test_a_new_size_of_the_window_changes_the_next_picture(tmp_path: Path) -> None:
    screen = Screen([str(write_run(tmp_path / "out", 30))], 90)
    screen.wait_for(lambda text: len(_FRAME.split(text)) > 2)
    screen.resize(50)
    screen.wait_for(lambda _: any(max(map(len, one)) == 50 for one in screen.pictures() if one))
    with (tmp_path / "out" / "run.jsonl").open("a", encoding="utf-8") as file:
        file.write(f'{{"event": "end", "time": {time.time()}, "status": "finished", "metrics": {{}}}}\n')
    screen.wait_for(lambda _: screen.process.poll() is not None)
    assert screen.process.returncode == 0
    assert max(map(len, screen.pictures()[-1])) == 50


def test_ctrl_c_ends_quietly(tmp_path: Path) -> None:
    screen = Screen([str(write_run(tmp_path / "out", 30))], 80)
    screen.wait_for(lambda text: "running" in text)
    os.kill(screen.process.pid, signal.SIGINT)
    assert screen.process.wait(20) == 0
    after = plain(screen.shown().rpartition("\x1b[?1049l")[2])
    assert after.strip() == ""


def test_more_runs_than_the_window_has_room_for_take_a_line_each(tmp_path: Path) -> None:
    folders = [str(write_run(tmp_path / f"run-{number:02}", 20)) for number in range(45)]
    screen = Screen(folders, 70)
    screen.wait_for(lambda text: "more runs" in text)
    os.kill(screen.process.pid, signal.SIGINT)
    assert screen.process.wait(20) == 0
    (picture,) = [one for one in screen.pictures() if any("more runs" in line for line in one)][:1]
    assert len(picture) == 40
    assert max(map(len, picture)) <= 70
    assert "running" in "\n".join(picture)
    assert picture[-1].startswith("and 6 more runs")


def test_panels_of_several_runs_are_short_where_long_ones_have_no_room(tmp_path: Path) -> None:
    screen = Screen([str(write_run(tmp_path / f"run-{number}", 20)) for number in range(5)], 80)
    screen.wait_for(lambda text: len(_FRAME.split(text)) > 2)
    os.kill(screen.process.pid, signal.SIGINT)
    assert screen.process.wait(20) == 0
    picture = "\n".join(next(one for one in screen.pictures() if any("run-4" in line for line in one)))
    assert [picture.count(label) for label in ("│ step ", "│ loss ", "│ memory ")] == [5, 5, 0]


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_terminals_without_colours_get_none(variables: dict[str, str], tmp_path: Path) -> None:
    screen = Screen([str(write_run(tmp_path / "out", 30, end="finished"))], 80, **variables)
    screen.wait_for(lambda _: screen.process.poll() is not None)
    assert screen.process.returncode == 0
    assert re.findall(r"\x1b\[[0-9;]*(?:3[0-7]|9[0-7])[0-9;]*m", screen.shown()) == []
    assert "finished" in screen.shown()
    if "TERM" in variables:
        assert "\x1b" not in screen.shown()


def test_a_pipe_gets_a_line_for_each_change(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out", 30)
    watching = subprocess.Popen(
        [sys.executable, "-m", "whet", "watch", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert watching.stdout is not None
    now = watching.stdout.readline()
    assert now == f"{folder}  running  step 30/100  loss 0.1  lr 3e-05  812 tokens/s, 6.2 rows/s  eta 3m10s\n"
    with (folder / "run.jsonl").open("a", encoding="utf-8") as file:
        for line in (
            {"event": "step", "time": time.time(), "step": 31, "of": 100, "loss": 0.09},
            {"event": "evaluation", "time": time.time(), "step": 31, "metrics": {"eval_f1": 50.0, "eval_runtime": 1.0}},
            {"event": "save", "time": time.time(), "step": 31, "folder": "checkpoint-31"},
            {"event": "end", "time": time.time(), "status": "stopped", "error": "stopped by SIGTERM", "metrics": {}},
        ):
            file.write(json.dumps(line) + "\n")
    rest, _ = watching.communicate(timeout=30)
    assert watching.returncode == 0
    assert rest.splitlines() == [
        f"{folder}  step 31/100  loss 0.09",
        f"{folder}  evaluated at step 31  f1 50",
        f"{folder}  saved checkpoint-31",
        f"{folder}  stopped  stopped by SIGTERM",
    ]


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out", 30, end="finished")
    line = f"{sys.executable} -m whet watch {folder} | head -c 1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def _status(folder: Path, capsys: Any) -> dict[str, Any]:
    assert run(["watch", str(folder), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    return found


def test_programs_get_one_object(tmp_path: Path, capsys: Any) -> None:
    found = _status(write_run(tmp_path / "out", 30, end="failed"), capsys)
    assert (found["status"], found["step"], found["of"], found["loss"]) == ("failed", 30, 100, 0.1)
    assert found["error"] == "no room\n  fix: buy a disk"
    assert found["metrics"] == {"eval_f1": 43.21}
    assert found["memory_limit_bytes"] == 16_400_000_000
    assert found["forecast"]["train_s"] == 3600


def test_a_run_that_has_written_nothing_yet_is_starting(tmp_path: Path, capsys: Any) -> None:
    with lock.locked(tmp_path):
        assert _status(tmp_path, capsys)["status"] == "starting"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_run(tmp_path, 30, ago_s=60, end="failed", pid=ended.pid)
    assert _status(tmp_path, capsys)["status"] == "failed"
    with lock.locked(tmp_path):
        assert _status(tmp_path, capsys)["status"] == "starting", "the next run in the folder"


def _shown(folder: Path, capsys: Any, monkeypatch: Any) -> str:
    """The picture of a run in a wide window, as one line."""
    monkeypatch.setenv("COLUMNS", "160")
    assert run(["watch", str(folder), "--once"]) == 0
    return " ".join(re.sub(r"[│╭╰─╮╯\n]", " ", capsys.readouterr().out).split())


def _add(folder: Path, *lines: dict[str, Any]) -> None:
    with (folder / "run.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_what_a_process_judges_later_has_its_own_clock(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    folder = write_run(tmp_path / "out", 30, ago_s=86_400, end="finished")
    begin = json.loads((folder / "run.jsonl").read_text("utf-8").splitlines()[0])
    _add(folder, begin | {"time": time.time() - 75, "steps": None, "machine": {}},
         {"event": "evaluating", "time": time.time(), "step": 0, "done": 5, "of": 9})  # fmt: skip
    shown = _shown(folder, capsys, monkeypatch)
    assert "time for 1m1" in shown
    assert "evaluating: 5 of 9" in shown
    assert "30 of 100" in shown
    assert not [one for one in ("forecast", "left", "tokens/s", "GB", "spent") if one in shown]
    found = _status(folder, capsys)
    assert (found["status"], found["loss"]) == ("running", 0.1)
    assert [found[name] for name in ("tokens_per_s", "resident_bytes", "eta_s", "forecast")] == [None] * 4
    end = {"event": "end", "time": time.time(), "status": "finished", "train_s": 0.0, "peak_bytes": 3e9, "metrics": {}}
    _add(folder, {"event": "evaluation", "time": time.time(), "step": 0, "metrics": {"eval_f1": 50.0}}, end)
    shown = _shown(folder, capsys, monkeypatch)
    assert "scores f1 50 " in shown + " "
    assert "at step" not in shown
    assert "3.0 GB at most" in shown


def test_a_run_that_starts_shows_nothing_of_the_one_before(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder = write_run(tmp_path / "out", 30, ago_s=60, end="failed", pid=ended.pid)
    with lock.locked(folder):
        assert _shown(folder, capsys, monkeypatch) == f"{folder} starting"
        found = _status(folder, capsys)
    assert (found["status"], found["step"], found["error"], found["metrics"]) == ("starting", None, None, {})


def test_the_time_left_passes_while_a_run_evaluates(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    folder = write_run(tmp_path / "out", 30, ago_s=100)
    _add(folder, {"event": "evaluating", "time": time.time(), "step": 30, "done": 5, "of": 9})
    assert re.search(r"1m(30|2\d)s left", _shown(folder, capsys, monkeypatch))
    done = write_run(tmp_path / "done", 100, ago_s=5)
    assert re.search(r"3m0\ds left", _shown(done, capsys, monkeypatch)), "an evaluation and a save to come"
    _add(done, {"event": "evaluating", "time": time.time(), "step": 100, "done": 5, "of": 9})
    assert "s left" not in _shown(done, capsys, monkeypatch)


def test_what_a_resumed_run_takes_again_is_gone(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    folder, now = write_run(tmp_path / "out", 30, ago_s=60, end="stopped"), time.time()
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text("utf-8").splitlines()]
    judged = [
        line
        for step in (10, 30)
        for line in (
            {"event": "evaluation", "time": now - 60, "step": step, "metrics": {"eval_f1": float(step)}},
            {"event": "save", "time": now - 60, "step": step, "folder": f"checkpoint-{step}"},
        )
    ]
    begin = lines[0] | {"time": now - 40, "resumed_from": 20}
    lines = [*lines[:-1], *judged, lines[-1], begin, lines[1]]
    (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    shown = _shown(folder, capsys, monkeypatch)
    assert "20 of 100" in shown
    assert "f1 10, at step 10" in shown
    assert "checkpoint-10" in shown
    assert "checkpoint-30" not in shown
    assert re.search(r"for 1m4\ds, forecast 1h00m \(50m00s to 1h06m\) since the resume", shown), "61 s, and 40"
    assert "tokens/s" not in shown


def test_memory_of_several_ranks_is_that_of_the_first(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    running = write_run(tmp_path / "running", 30, ranks=2)
    assert "1.8 GB of 16.4 GB, of rank 0" in _shown(running, capsys, monkeypatch)
    ended = write_run(tmp_path / "ended", 30, end="finished", ranks=2)
    assert "2.0 GB of 16.4 GB at most, of rank 0" in _shown(ended, capsys, monkeypatch)
    assert run(["report", str(ended)]) == 0
    assert "<dt>peak memory of rank 0</dt>" in (ended / "report.html").read_text("utf-8")


def test_an_entity_may_be_called_total(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """As in receipts; SQuAD's detail of this name is a number of questions."""
    folder = write_run(tmp_path / "out", 30)
    metrics = {"eval_total_f1": 0.625, "eval_total": 12, "eval_HasAns_f1": 0.5, "eval_best_f1_thresh": 0.25}
    _add(folder, {"event": "evaluation", "time": time.time(), "step": 30, "metrics": metrics})
    assert "scores total f1 0.625, at step 30 " in _shown(folder, capsys, monkeypatch)
    _add(folder, {"event": "end", "time": time.time(), "status": "finished", "metrics": metrics})
    assert run(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text("utf-8")
    metrics_at_end = page[page.index("Metrics at the end") :]
    plain, details = metrics_at_end.split("<details", 1)
    assert "total_" in plain.replace("<wbr>", "")
    assert "HasAns" not in plain
    assert "HasAns" in details


def test_a_silent_run_is_told_from_a_killed_one_and_from_one_of_another_machine(tmp_path: Path, capsys: Any) -> None:
    here = _status(write_run(tmp_path / "here", 30, ago_s=300), capsys)
    assert (here["status"], here["alive"]) == ("silent", True)
    far = _status(write_run(tmp_path / "far", 30, ago_s=300, host="another", pid=1), capsys)
    assert (far["status"], far["alive"]) == ("silent", None)
    assert 300 <= far["quiet_s"] < 330
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone = _status(write_run(tmp_path / "gone", 30, ago_s=300, pid=ended.pid), capsys)
    assert (gone["status"], gone["alive"]) == ("killed", False)
    slow = write_run(tmp_path / "slow", 2, ago_s=100, host="another")
    lines = [json.loads(line) for line in (slow / "run.jsonl").read_text("utf-8").splitlines()]
    lines[2]["time"] -= 60  # its steps take a minute
    (slow / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    assert _status(slow, capsys)["status"] == "running"
    assert run(["watch", str(tmp_path / "gone"), str(tmp_path / "far"), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "killed: its process is gone" in shown
    assert "no sign of life for 5m" in shown


def test_a_killed_run_is_seen_though_another_process_has_its_number(tmp_path: Path, capsys: Any) -> None:
    """The kernel has released its lock, and its file is still there."""
    folder = write_run(tmp_path / "out", 30, ago_s=60)
    assert _status(folder, capsys)["alive"], "this process has its number"
    own = {"pid": os.getpid(), "host": socket.gethostname()}
    (folder / ".whet.lock").write_text(json.dumps(own | {"pid": 1}), "utf-8")
    assert _status(folder, capsys)["alive"], "the file is of an earlier run, and this one takes no lock"
    (folder / ".whet.lock").write_text(json.dumps(own), "utf-8")
    assert (_status(folder, capsys)["status"], _status(folder, capsys)["alive"]) == ("killed", False)
    assert run(["watch", str(folder)]) == 0
    assert "killed: its process is gone" in capsys.readouterr().out
    with lock.locked(folder):
        assert _status(folder, capsys)["alive"]


@pytest.mark.slow
def test_a_killed_training_is_seen_and_ends_the_watching(encoder: Path, tmp_path: Path) -> None:
    words = words_of(encoder, tmp_path / "out", max_steps=4000, logging_steps=1, eval_strategy="no", save_strategy="no")
    training = subprocess.Popen([sys.executable, "-m", "whet", *words], stdout=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not (tmp_path / "out" / "run.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.05)
    watching = subprocess.Popen(
        [sys.executable, "-m", "whet", "watch", str(tmp_path / "out")], stdout=subprocess.PIPE, text=True
    )
    assert watching.stdout is not None
    assert "  running" in watching.stdout.readline()
    os.kill(training.pid, signal.SIGKILL)
    training.wait()
    rest, _ = watching.communicate(timeout=60)
    assert watching.returncode == 0
    assert "killed: its process is gone" in rest.splitlines()[-1]


def test_seeds_are_watched_by_the_folder_around_them(tmp_path: Path, capsys: Any) -> None:
    for seed in (42, 43):
        write_run(tmp_path / "several" / f"seed-{seed}", 30, end="finished")
    assert run(["watch", str(tmp_path / "several")]) == 0
    assert [line.split("  ")[0][-7:] for line in capsys.readouterr().out.splitlines()] == ["seed-42", "seed-43"]


@pytest.mark.parametrize("seeds_are_older", [False, True])
def test_of_a_run_and_seeds_in_one_folder_the_later_is_watched(
    tmp_path: Path, capsys: Any, seeds_are_older: bool
) -> None:
    folders = [write_run(tmp_path / "out", 9, end="finished"), write_run(tmp_path / "out/seed-42", 9, end="finished")]
    earlier = folders[int(seeds_are_older)] / "run.jsonl"
    os.utime(earlier, (time.time() - 3600,) * 2)
    assert run(["watch", str(tmp_path / "out")]) == 0
    assert ("seed-42" in capsys.readouterr().out) is not seeds_are_older


def test_wrong_folders_are_refused_together(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    for name in ("empty", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged" / "run.jsonl").write_text("begin\n", "utf-8")
    assert run(["watch", *(str(tmp_path / name) for name in ("nowhere", "file", "empty", "damaged"))]) == 78
    said = capsys.readouterr().err
    assert said.count("error: no run is recorded in this folder") == said.count("  fix: ") == 4
    assert f"name its folder: {tmp_path}" in said
    assert run(["watch"]) == 78
    assert "whet watch out" in capsys.readouterr().err


def test_what_a_file_says_cannot_move_the_cursor_or_break_the_picture(tmp_path: Path, capsys: Any) -> None:
    bad = "\x1b[2J[bold]\u202e"
    folder = write_run(tmp_path / "out", 3, task=bad, model={"name": bad, "parameters": "many"}, data=[], machine=7,
                       settings="none", forecast={"train_s": float("nan"), "peak_bytes": "all"}, steps="9",
                       resumed_from={})  # fmt: skip
    with (folder / "run.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": "step", "time": 1, "step": 4, "loss": "NaN", "eta_s": "Infinity"}) + "\n")
        file.write(json.dumps({"event": "save", "step": 4, "folder": bad}) + "\n")
        file.write(json.dumps({"event": "evaluation", "step": 4, "metrics": {f"eval_{bad}": 1}}) + "\n")
        file.write(json.dumps({"event": "evaluating", "done": "x", "of": {}}) + "\n")
        file.write(json.dumps({"event": "end", "status": bad, "error": bad, "metrics": [], "peak_bytes": "x"}) + "\n")
    for form in ("--once", "--json"):
        assert run(["watch", str(folder), form]) == 0
        shown = capsys.readouterr().out
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "[bold]" in shown
    assert run(["watch", str(folder), "--once"]) == 0
    assert "loss   nan" in capsys.readouterr().out


@pytest.mark.true_start
def test_watching_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out", 30, end="finished")
    code = (
        f"import sys; from whet.cli.main import run; assert run(['watch', {str(folder)!r}, '--once']) == 0; "
        "print(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
