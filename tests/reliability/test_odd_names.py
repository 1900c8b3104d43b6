"""Names that are no UTF-8, or that the locale cannot write: a run works, and what it prints can be pasted."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_qa import DOC_STRIDE, MAX_SEQ_LENGTH, command, questions_of, save_encoder, squad

from not_shown import not_shown

pytestmark = pytest.mark.reliability
_ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
_UTF8 = {"LC_ALL": "C.UTF-8"}
_LATIN_1 = {"LC_ALL": "de_DE.ISO-8859-1", "PYTHONUTF8": "0"}
PLACES: dict[str, tuple[bytes, dict[str, str]]] = {
    "Latin-1 bytes": (b"caf\xe9 au lait", _UTF8),
    "control characters": (b"a\x1b[31mb\nc", _UTF8),
    "Latin-1 bytes, C locale": (b"caf\xe9", _ASCII),
    "UTF-8 bytes, C locale": ("Zürich Ω".encode(), _ASCII),
    "Latin-1 bytes, Latin-1 locale": (b"caf\xe9", _LATIN_1),
}
"""A name, and the environment in which it is used."""


def _whet(words: list[str], folder: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    own = os.environ | env | {"XDG_CACHE_HOME": str(folder / "cache")}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "whet", *words], cwd=folder, env=own, **streams)  # pyright: ignore


def _with_locale(env: dict[str, str], folder: Path) -> dict[str, str]:
    """Return the environment with the path of its locale, which is made unless it is one of C."""
    name = env["LC_ALL"]
    language, _, encoding = name.partition(".")
    if language == "C":
        return env
    if shutil.which("localedef") is None or not Path("/usr/share/i18n/locales", language).exists():
        not_shown("names of folders", f"{name} cannot be made", "localedef and its sources (package locales)")
    made = ["localedef", "-f", encoding, "-i", language, str(folder / name)]
    subprocess.run(made, capture_output=True, check=True)
    return env | {"LOCPATH": str(folder)}


def _wait_for(folder: Path, n: int) -> None:
    deadline = time.monotonic() + 120
    while len(list(folder.glob("checkpoint-*"))) < n:
        assert time.monotonic() < deadline, "no checkpoint has come"
        time.sleep(0.05)


@pytest.mark.parametrize("kind", PLACES)
def test_a_run_with_odd_names_is_stopped_continued_and_asked(kind: str, tmp_path: Path) -> None:
    """Model folder, data file and output folder have the name; the printed command is pasted into a shell."""
    raw, env = PLACES[kind]
    name, env = os.fsdecode(raw), _with_locale(env, tmp_path)
    encoding = "latin-1" if "LOCPATH" in env else "utf-8"  # of the terminal
    save_encoder(tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / f"{name} model")

    (tmp_path / f"{name}.json").write_text(json.dumps(squad()), "utf-8")
    output = tmp_path / f"{name} out"
    words = command(Path(f"{name} model"), Path(f"{name} out"), "--do_train", "--do_eval", train_file=f"{name}.json",
                    validation_file=f"{name}.json", max_steps=300, save_strategy="steps", save_steps=20,
                    save_total_limit=3, per_device_train_batch_size=2)  # fmt: skip
    process = _whet(words, tmp_path, env)
    _wait_for(output, 2)
    process.send_signal(signal.SIGTERM)
    told = process.communicate(timeout=120)[1].decode(encoding)
    assert process.returncode == 75, told
    assert told.replace("\n", "").isprintable(), "a name of the disk reaches the terminal as it is"

    again = re.search(r"continue with:\s+(whet .*)", told)
    assert again, told
    shell = f"{sys.executable} -m {again[1]}".encode(encoding)
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, env=os.environ | env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert (output / "eval_results.json").exists()

    (tmp_path / f"{name}.txt").write_text(questions_of(squad())[0]["context"], "utf-8")
    ask = ["ask", f"{name} out", "--context", f"{name}.txt", "--question", "Who?"]
    asked = _whet([*ask, "--max_seq_length", str(MAX_SEQ_LENGTH), "--doc_stride", str(DOC_STRIDE)], tmp_path, env)
    shown, told_of = asked.communicate(timeout=120)
    assert asked.returncode == 0, told_of.decode()
    assert b"%" in shown
    print("\nodd names, a run stopped, continued and asked: 1/1")


def test_answers_are_printed_where_the_locale_cannot_write_them(tmp_path: Path) -> None:
    code = "from whet.cli.main import main; from whet.tasks.qa import ask; import sys\n"
    code += "import whet.cli.main as m; m._print_whatever_the_locale()\n"
    code += "ask.show('Wo?', [ask.Answer('Z\\u00fcrich', 0.5, (0, 6))])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | _ASCII, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "Wo?\n   50.0%  Z\\xfcrich  (characters 0 to 6)\n"
