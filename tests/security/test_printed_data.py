"""What whet prints of data cannot steer the terminal, forge a line of whet's, reorder text, or fill the screen."""

from __future__ import annotations

import json
import logging
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_qa import command, questions_of, squad, write_json

from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, EXIT_BAD_DATA, ConfigError, WhetError, escape_controls
from whet.tasks.qa.ask import Answer, show

pytestmark = pytest.mark.reliability
HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\nwhet: saved everything\n\u202etxt.exe\u2066\x9b31m\u2028end"
"""A window title, a cleared screen, a forged line, reversed text, a C1 control, a line separator."""
LONG = "x" * 2_000_000
_MOST_PRINTED = 30_000


def _steering(text: str) -> set[str]:
    return {char for char in text.replace("\n", "") if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


def _questions(**changes: Any) -> list[dict[str, Any]]:
    return [questions_of(squad())[0] | changes]


def _rows(folder: Path, **changes: Any) -> list[str]:
    path = write_json(folder / "train.json", {"data": _questions(**changes)})
    return command(folder, folder / "out", "--do_train", train_file=path)


def _skipped(folder: Path) -> list[str]:
    bad = questions_of(squad())[1] | {"id": HOSTILE, "answers": 3}
    path = write_json(folder / "train.json", {"data": [*_questions(), bad]})
    return command(folder, folder / "out", "--do_train", "--skip_bad", train_file=path)


def _columns(folder: Path) -> list[str]:
    header = HOSTILE.replace("\n", " ").replace("\r", " ").replace("\u2028", " ")
    (folder / "train.csv").write_text(f"id,question,{header}\n1,2,3\n", "utf-8")
    return command(folder, folder / "out", "--do_train", train_file=folder / "train.csv")


def _file_name(folder: Path) -> list[str]:
    path = folder / HOSTILE.replace("/", "")
    path.write_text("{}", "utf-8")
    return command(folder, folder / "out", "--do_train", train_file=path)


def _config_file(folder: Path) -> list[str]:
    path = write_json(folder / "run.json", {HOSTILE: 1, "learning_rate": HOSTILE, "optim": LONG})
    return ["qa", "--config", str(path)]


def _model_settings(folder: Path) -> list[str]:
    (folder / "config.json").write_text(json.dumps({"model_type": HOSTILE, HOSTILE: 1}), "utf-8")
    (folder / "tokenizer.json").write_text("{}", "utf-8")
    return _rows(folder)


WAYS: dict[str, Callable[[Path], list[str]]] = {
    "id": lambda folder: _rows(folder, id=HOSTILE, answers=3),
    "answer": lambda folder: _rows(folder, answers=[{"text": HOSTILE, "answer_start": 0}]),
    "answers of another kind": lambda folder: _rows(folder, answers={HOSTILE: LONG}),
    "field names": lambda folder: _rows(folder, question=None, **{HOSTILE: 1}),
    "long id": lambda folder: _rows(folder, id=LONG, answers=3),
    "long answer": lambda folder: _rows(folder, answers=[{"text": LONG, "answer_start": 0}]),
    "left out": _skipped,
    "column": _columns,
    "file name": _file_name,
    "model": lambda folder: command(Path(HOSTILE), folder / "out", "--do_train", train_file=folder / "none"),
    "long model": lambda folder: command(Path(LONG), folder / "out", "--do_train", train_file=folder / "none"),
    "output": lambda folder: command(folder, Path("/proc") / HOSTILE, "--do_train", train_file=folder / "none"),
    "option": lambda _: ["qa", f"--{HOSTILE}", "1"],
    "long option": lambda _: ["qa", f"--{LONG}", "1"],
    "value": lambda _: ["qa", "--learning_rate", HOSTILE],
    "choice": lambda _: ["qa", "--optim", HOSTILE],
    "config file": _config_file,
    "model's settings": _model_settings,
    "command": lambda _: [HOSTILE],
    "context": lambda folder: ["ask", str(folder), "--context", HOSTILE, "--question", "Who?"],
    "checkpoint": lambda folder: [*_rows(folder), "--resume_from_checkpoint", HOSTILE],
}
"""Where the data comes from that ends up in a message."""


@pytest.mark.parametrize("way", WAYS)
def test_messages_show_data_escaped_and_cut(way: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = run(WAYS[way](tmp_path))
    shown = "".join(capfd.readouterr())
    assert code in (EXIT_BAD_DATA, EXIT_BAD_CONFIG, 73, 74), shown[:2000]
    assert shown.count("  fix: ") > 0
    assert _steering(shown) == set()
    assert "\nwhet: saved everything" not in shown
    assert len(shown) < _MOST_PRINTED


def test_answers_are_shown_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    show(HOSTILE, [Answer(HOSTILE, 0.5, (0, 3)), Answer("", 0.1, (0, 0))])
    shown = capsys.readouterr().out
    assert _steering(shown) == set()
    assert len(shown.splitlines()) == 3


def test_log_lines_show_values_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    from whet import log

    log.set_up()
    log.logger.warning("read from %s and %s: %s", HOSTILE, Path(HOSTILE.replace("/", "")), OSError(HOSTILE))
    error = ConfigError(what=HOSTILE, got=HOSTILE, why="a", fix="b")
    log.logger.log(logging.ERROR, "%s", error)
    shown = capsys.readouterr().err
    assert _steering(shown) == set()
    assert len(shown.splitlines()) == 1 + len(str(error).splitlines()) == 5


def test_plain_text_of_any_language_stays_as_it_is() -> None:
    for text in ("Zürich", "東京の川\u3000流れる", "\u0645\u06cc\u200c\u062e", "👩\u200d🚀", "a\u00a0b", "שלום"):
        assert escape_controls(text) == text
    assert escape_controls("caf\udce9") == "caf\\xe9"
    assert str(WhetError(what="a", got="b\nc", why="d", fix="e")) == "a\n  got: b\\nc\n  why: d\n  fix: e"
