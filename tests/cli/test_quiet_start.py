"""Starting whet prints what whet has to say: no warnings of libraries, with and without the optional ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import pytest
from tiny_qa import DOC_STRIDE, MAX_SEQ_LENGTH, command, questions_of, save_encoder, squad, write_json

pytestmark = pytest.mark.true_start

NOISY = ("torchao", "bitsandbytes")
SRC = Path(__file__).resolve().parents[2] / "src"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its data and a text."""
    made = tmp_path_factory.mktemp("quiet")
    save_encoder(made / "model")
    write_json(made / "train.json", squad())
    (made / "notes.txt").write_text(questions_of(squad())[0]["context"], "utf-8")
    return made


def _python(
    *words: str, path: Path | None = None, more: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    before = ["-S"] if path else []
    environment = ENVIRONMENT | dict(more) | ({"PYTHONPATH": f"{SRC}{os.pathsep}{path}"} if path else {})
    return subprocess.run(
        [sys.executable, *before, *words], capture_output=True, text=True, check=True, env=environment, timeout=120
    )


@pytest.fixture(scope="module")
def without_optional(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed packages, without the optional ones that talk."""
    made = tmp_path_factory.mktemp("packages")
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(NOISY) and entry.suffix != ".pth":
            (made / entry.name).symlink_to(entry)
    return made


@pytest.mark.slow
def test_importing_the_trainer_prints_nothing() -> None:
    if missing := [name for name in NOISY if find_spec(name) is None]:
        pytest.skip(f"not installed: {missing}, so that there is nothing to be quiet about")
    done = _python("-c", "import whet; whet.Trainer; whet.optimize; import torchao")
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.night
def test_importing_whet_before_transformers_prints_nothing() -> None:
    """The order of the README; what the packages warn about later is heard."""
    if missing := [name for name in NOISY if find_spec(name) is None]:
        pytest.skip(f"not installed: {missing}, so that there is nothing to be quiet about")
    code = (
        "import sys, whet; assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "from transformers import Trainer; import torchao, bitsandbytes, logging\n"
        "logging.getLogger('torchao').warning('a later %s', 'word')"
    )
    done = _python("-c", code)
    assert (done.stdout, done.stderr) == ("", "a later word\n")


def test_report_without_a_folder_for_settings_prints_its_path_alone(tmp_path: Path) -> None:
    """As for a user without a home; matplotlib then uses a temporary folder."""
    (tmp_path / "file").write_text("mine")
    history = [{"step": step, "loss": 1 / step} for step in (1, 2)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"max_steps": 2, "log_history": history}))
    own = {"MPLCONFIGDIR": str(tmp_path / "file" / "settings")}
    done = _python("-m", "whet", "report", str(tmp_path), more=own)
    assert (done.stdout, done.stderr) == (f"{tmp_path / 'report.html'}\n", "")
    assert "<svg" in (tmp_path / "report.html").read_text("utf-8")


@pytest.mark.night
def test_importing_the_trainer_prints_nothing_without_optional_packages(without_optional: Path) -> None:
    code = "import whet; whet.Trainer; import sys; assert not {'torchao', 'bitsandbytes'} & set(sys.modules)"
    done = _python("-c", code, path=without_optional)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.night
def test_levels_of_loggers_are_the_users_again() -> None:
    code = (
        "import logging; logging.getLogger('torchao').setLevel(logging.INFO); import whet; whet.Trainer\n"
        "print([logging.getLogger(n).level for n in ('torchao', 'bitsandbytes', 'torch.utils._pytree')])"
    )
    assert _python("-c", code).stdout == "[20, 0, 0]\n"


@pytest.mark.slow
@pytest.mark.gate  # the tests below see `whet qa` alone
def test_every_command_prints_only_its_own_lines(folder: Path) -> None:
    train = command(folder / "model", folder / "out", "--do_train", "--do_eval",
                    train_file=folder / "train.json", validation_file=folder / "train.json")  # fmt: skip
    stderr = _python("-m", "whet", *train).stderr
    assert [line for line in stderr.splitlines() if not line.startswith(("whet: ", "  "))] == []
    windows = ("--max_seq_length", str(MAX_SEQ_LENGTH), "--doc_stride", str(DOC_STRIDE))
    ask = ("ask", str(folder / "out"), "--context", str(folder / "notes.txt"), "--question", "Who?", *windows)
    stderr = _python("-m", "whet", *ask).stderr
    assert [line for line in stderr.splitlines() if not line.startswith("whet: ")] == []
    assert _python("-m", "whet", "--help").stderr == ""


@pytest.mark.slow
@pytest.mark.night
def test_log_level_error_leaves_standard_error_empty(folder: Path) -> None:
    words = command(folder / "model", folder / "silent", "--do_train", train_file=folder / "train.json",
                    log_level="error", log_format="json")  # fmt: skip
    done = _python("-m", "whet", *words)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1, "the JSON line of the finished training"


@pytest.mark.night
def test_log_level_error_prints_nothing_for_people(folder: Path) -> None:
    words = command(folder / "model", folder / "wordless", "--do_train", train_file=folder / "train.json",
                    log_level="error")  # fmt: skip
    done = _python("-m", "whet", *words)
    assert done.stdout + done.stderr == ""
