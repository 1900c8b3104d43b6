"""The program as a user meets it: what it prints where, and how it ends."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import whet
from whet.cli.main import run
from whet.errors import DataError
from whet.tasks.qa import task
from whet.tasks.qa.arguments import AskArguments, DemoArguments, QaArguments

_RUN_QA_DEFAULTS = {
    "config_name": None, "tokenizer_name": None, "cache_dir": None, "model_revision": "main", "token": None,
    "trust_remote_code": False, "dataset_name": None, "dataset_config_name": None, "train_file": None,
    "validation_file": None, "test_file": None, "overwrite_cache": False, "preprocessing_num_workers": None,
    "max_seq_length": 384, "pad_to_max_length": True, "max_train_samples": None, "max_eval_samples": None,
    "max_predict_samples": None, "version_2_with_negative": False, "null_score_diff_threshold": 0.0,
    "doc_stride": 128, "n_best_size": 20, "max_answer_length": 30,
}  # fmt: skip
"""As read in the guides' run_qa.py."""


_LORA = {
    "lora_r": None, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": None, "use_rslora": False,
    "use_dora": False, "load_in_8bit": False, "load_in_4bit": False,
}  # fmt: skip
_EXPERTS = {
    "moe_experts": None, "moe_top_k": None, "moe_every": None, "moe_capacity_factor": None, "moe_aux_loss_coef": None,
    "moe_z_loss_coef": None,
}  # fmt: skip
_TEACHER = {"teacher_model": None, "distillation_temperature": 2.0, "distillation_alpha": 0.5}
_SPLITS = {"train_split_name": "train", "validation_split_name": "validation", "test_split_name": "test"}
_OWN = {**_SPLITS, "skip_bad": False, "seeds": 1, "report_html": True, "dry_run": False,
        "auto": False, "auto_budget_s": 60.0, "auto_ranks": None, "auto_again": False,
        "resize_token_embeddings": None, **_LORA, **_EXPERTS, **_TEACHER}  # fmt: skip


def test_the_options_and_defaults_of_run_qa() -> None:
    qa = QaArguments(model_name_or_path="m", train_file="t.json")
    assert qa.to_dict() == {**_RUN_QA_DEFAULTS, **_OWN, "model_name_or_path": "m", "train_file": "t.json"}


def test_python_m_whet_ends_with_the_exit_code_and_the_errors_on_stderr() -> None:
    words = ["qa", "--model_name_or_path", "m", "--train_file", __file__, "--do_train", "--bf61"]
    done = subprocess.run([sys.executable, "-m", "whet", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.splitlines() == [
        "error: --bf61 is unknown",
        "  got: bf61",
        "  why: no option has this name, and a setting without effect would mislead",
        "  fix: did you mean --bf16?",
    ]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"whet {whet.__version__}\n"


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dmo"]) == 78
    assert "did you mean whet demo?" in capsys.readouterr().err


def test_no_command_shows_the_help_as_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 78
    shown = capsys.readouterr()
    assert not shown.out
    assert "Commands:" in shown.err


def test_the_config_goes_to_stdout_and_the_notes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["qa", "--no_cuda", "--print_config"]) == 0
    shown = capsys.readouterr()
    assert "use_cpu: true\n" in shown.out
    assert shown.err == "note: --no_cuda is an older name of --use_cpu, and was taken as true\n"


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (DataError(what="bad row", got="x", why="it is empty", fix="mend --train_file"), 65, "error: bad row"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_the_work_raises_becomes_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: BaseException, code: int, said: str
) -> None:
    def work(_: DemoArguments) -> int:
        raise raised

    monkeypatch.setattr(task, "COMMANDS", (replace(task.DEMO, run=work),))
    assert run(["demo"]) == code
    assert said in capsys.readouterr().err


def test_what_nobody_foresaw_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(_: DemoArguments) -> int:
        return 1 // 0

    monkeypatch.setattr(task, "COMMANDS", (replace(task.DEMO, run=work),))
    with pytest.raises(ZeroDivisionError):
        run(["demo"])


def test_the_work_gets_the_settings_and_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    got = []

    def work(settings: DemoArguments) -> int:
        got.append(settings)
        return 75

    monkeypatch.setattr(task, "COMMANDS", (replace(task.DEMO, run=work),))
    assert run(["demo", "--seed", "7"]) == 75
    assert got == [DemoArguments(seed=7)]


def test_errors_are_coloured_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert run(["dmo"]) == 78
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1;31merror: " in shown
    assert "fix: did you mean whet demo?" in shown
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert run(["dmo"]) == 78
    assert "\x1b" not in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_a_reader_that_stops_early_sees_no_traceback() -> None:
    """As in `whet qa --help | head -1`."""
    shown = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(0.3); from whet.cli.main import main; main(['qa', '--help'])"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert shown.stdout and shown.stderr  # noqa: PT018 - for the type checker
    shown.stdout.close()
    assert shown.stderr.read() == b""
    shown.stderr.close()
    assert shown.wait() == 141


def test_the_context_is_read_from_a_file_or_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Zoë wrote it.\r\nIn 1999."
    (tmp_path / "c.txt").write_bytes(text.encode())
    asked = AskArguments(model="m", context=str(tmp_path / "c.txt"), question="Who?")
    assert asked.question == ("Who?",)
    assert asked.read_context() == text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="latin-1"))
    assert replace(asked, context="-").read_context() == text


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe"])
def test_a_context_that_cannot_be_read_is_a_data_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "c.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match="the context cannot be read") as caught:
        AskArguments(model="m", context=str(path), question="Who?").read_context()
    assert caught.value.exit_code == 65


def test_settings_are_json_ready(tmp_path: Path) -> None:
    qa = QaArguments(model_name_or_path="m", train_file="t.json", token="hf_secret")
    assert json.loads(json.dumps(qa.to_dict()))["token"] == "***"
