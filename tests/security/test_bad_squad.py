"""Bad questions end `whet qa` with 65, the place named, fast and small; or are left out and counted, where asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bad_squad import CONTEXT, KINDS, START, document, question, write
from tiny_qa import command, squad, write_json

from whet.cli.main import run
from whet.errors import EXIT_BAD_DATA, DataError
from whet.tasks.qa.read import read_questions

pytestmark = pytest.mark.true_start

N_KINDS = 62
_MOST_S, _MOST_KIB = 2.0, 300 * 1024


_RUN = """
import re, sys
from pathlib import Path
from whet.cli.main import run
code = run(sys.argv[1:])
Path("peak").write_text(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
sys.exit(code)
"""


def _as_process(words: list[str], folder: Path) -> tuple[int, str, float, int]:
    """Run `whet` with these words; return exit code, standard error, processor seconds, largest memory in KiB.

    The process reads its own largest memory: what wait4 tells begins with that of the process it was forked from.
    """
    before = os.times()
    done = subprocess.run([sys.executable, "-c", _RUN, *words], capture_output=True, text=True, check=False, cwd=folder)
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return done.returncode, done.stderr, seconds, int((folder / "peak").read_text())


@pytest.mark.reliability
def test_every_kind_ends_the_run_with_its_place(tmp_path: Path) -> None:
    """One process a kind. Its time is the processor's, so that a busy machine does no harm."""
    assert len(KINDS) == N_KINDS
    good, slowest, largest = [], 0.0, 0
    for kind, (_, message) in KINDS.items():
        folder = tmp_path / kind
        folder.mkdir()
        path = write(kind, folder)
        (folder / "m").mkdir()  # a name that is no folder is refused before any data is read
        words = ["--model_name_or_path", "m", "--do_train", "--train_file", str(path), "--output_dir", "out"]
        code, told, seconds, kib = _as_process(["qa", *words], folder)
        assert re.search(message, told), (kind, told[:1000])
        assert str(path) in told, kind
        assert told.count("  why: ") == told.count("  fix: ") == told.count("error: ") > 0, kind
        assert "Traceback" not in told
        slowest, largest = max(slowest, seconds), max(largest, kib)
        good += [kind] if (code, seconds <= _MOST_S, kib <= _MOST_KIB) == (EXIT_BAD_DATA, True, True) else []
    print(f"\nkinds of bad data refused: {len(good)}/{N_KINDS}; {slowest:.2f} s and {largest / 1024:.0f} MiB at most")
    assert KINDS.keys() - set(good) == set()


def test_the_document_that_is_spoilt_is_good(tmp_path: Path) -> None:
    assert len(read_questions(write_json(tmp_path / "good.json", document()))) == 4


def test_marks_that_text_may_hold_are_no_fault(tmp_path: Path) -> None:
    """Bidi controls and combining marks stand in real texts of many languages; the answer stands at its offset."""
    context = "\u202b\u05e9\u05dc\u05d5\u05dd\u202c Cafe\u0301 sung"
    answers = [{"text": "Cafe\u0301", "answer_start": context.index("Cafe")}]
    data = document(context=context, qas=[question(4, answers=answers)])
    assert read_questions(write_json(tmp_path / "good.json", data)).answers[-1].texts == ("Cafe\u0301",)


def _spoilt() -> dict[str, Any]:
    """The corpus with six bad questions: three of their own, and a paragraph of three."""
    data = squad()
    paragraphs = data["data"][0]["paragraphs"]
    paragraphs[0]["qas"][1]["answers"][0]["answer_start"] += 1
    paragraphs[1]["qas"][0]["question"] = ""
    paragraphs[2]["qas"][3]["id"] = paragraphs[2]["qas"][2]["id"]
    paragraphs.append({"context": None, "qas": [question(n) for n in (101, 102, 103)]})
    return data


def test_bad_questions_are_left_out_counted_and_named(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_json(tmp_path / "spoilt.json", _spoilt())
    words = command(encoder, tmp_path / "out", "--do_train", "--do_eval", train_file=data, validation_file=data,
                    max_steps=1, log_level="info")  # fmt: skip
    assert run(words) == EXIT_BAD_DATA
    capsys.readouterr()
    assert run([*words, "--skip_bad"]) == 0
    told = capsys.readouterr().err
    for split in ("train", "validation"):
        assert f"{split}: 6 questions are bad and were left out" in told
        assert f"{split}: 17 questions" in told
    places = ["paragraphs[0].qas[1]", "paragraphs[1].qas[0]", "paragraphs[2].qas[3]", "paragraphs[5]"]
    assert all(told.count(place) >= 2 for place in places)
    results = json.loads((tmp_path / "out" / "all_results.json").read_text("utf-8"))
    assert (results["train_questions_left_out"], results["eval_questions_left_out"]) == (6, 6)
    for prefix in ("train", "eval"):
        named = json.loads((tmp_path / "out" / f"{prefix}_left_out.json").read_text("utf-8"))
        assert [place in one["what"] for place, one in zip(places, named, strict=True)] == [True] * 4
        assert all(one["why"] and one["fix"] for one in named)


def test_the_good_ones_are_as_without_the_bad(tmp_path: Path) -> None:
    kept = read_questions(write_json(tmp_path / "spoilt.json", _spoilt()), skip_bad=True)
    whole = read_questions(write_json(tmp_path / "good.json", squad()))
    wanted = [n for n, name in enumerate(whole.ids) if name not in ("Mira-1", "Tovan-0", "Elsi-3")]
    assert list(kept.ids) == [whole.ids[n] for n in wanted]
    for n, old in enumerate(wanted):
        assert (kept.questions[n], kept.context(n), kept.answers[n]) == (
            whole.questions[old], whole.context(old), whole.answers[old],
        )  # fmt: skip
    assert (kept.left_out.n_rows, whole.left_out.n_rows, list(whole.left_out.problems)) == (6, 0, [])


def test_rows_are_left_out_too(tmp_path: Path) -> None:
    rows = [{"id": f"r{n}", "context": CONTEXT, "question": "?" if n % 3 else "",
             "answers": {"text": ["sung"], "answer_start": [START]}} for n in range(30)]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    kept = read_questions(path, skip_bad=True)
    assert (len(kept), kept.left_out.n_rows, len(kept.left_out.problems)) == (20, 10, 10)


def test_where_nothing_is_left_the_run_ends(tmp_path: Path) -> None:
    data = document(qas=[question(4, question="")])
    data["data"][0]["paragraphs"] = data["data"][0]["paragraphs"][1:]
    with pytest.raises(DataError, match="not one question can be used"):
        read_questions(write_json(tmp_path / "bad.json", data), skip_bad=True)


def test_a_file_that_cannot_be_read_is_not_skipped(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(json.dumps(document())[:-40], "utf-8")
    with pytest.raises(DataError, match="not JSON"):
        read_questions(tmp_path / "bad.json", skip_bad=True)
