"""Bad input to `whet qa` ends it before any training, with an exit code of its kind and a message that helps."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny_qa import command, questions_of, squad, without_answers, write_json

from whet.cli.main import run

BAD_DATA, CANNOT_CREATE, BAD_CONFIG = 65, 73, 78
_PLACE = r"data\[0\]\.paragraphs\[2\]\.qas\[1\], article 'People', question 'Elsi-1'"


@dataclass
class Attempt:
    """A command that must fail: its files are in `folder`, its output would be in `folder`/out."""

    folder: Path
    model: Path
    words: list[str] = field(default_factory=lambda: ["--do_train"])
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> int:
        """Run it; return the exit code."""
        if "train_file" not in self.options and "dataset_name" not in self.options:
            self.options["train_file"] = write_json(self.folder / "good.json", squad())
        usual = {"output_dir": self.folder / "out", "max_steps": 1}
        return run(command(self.model, self.folder / "out", *self.words, **(usual | self.options)))

    def data(self, document: Any) -> None:
        """Train on this document; a text is written as it is."""
        path = self.folder / "data.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document), "utf-8")
        self.options["train_file"] = path

    def copy_model(self) -> Path:
        """Take a copy of the model instead, which may be spoilt; return its folder."""
        copy = self.folder / "model"
        copy.mkdir()
        for path in self.model.iterdir():
            (copy / path.name).write_bytes(path.read_bytes())
        self.model = copy
        return copy


@pytest.fixture
def attempt(tmp_path: Path, encoder: Path) -> Attempt:
    """A command that would work."""
    return Attempt(tmp_path, encoder)


def assert_refused(attempt: Attempt, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The command ends with this code, has told the four parts, has trained nothing and has saved nothing."""
    assert attempt() == code
    shown = capsys.readouterr()
    of_data = r"(?:train|validation|test): .* questions.*; read: .*(?:\n  .*)*\n"  # the columns; nothing of a training
    assert re.sub(of_data, "", shown.out) == ""
    told = shown.err[shown.err.index("error: ") :]
    assert re.search(message, told, re.DOTALL), told
    for part in ("  why: ", "  fix: "):
        assert told.count(part) == told.count("error: "), told
    assert "Traceback" not in shown.err
    out = attempt.folder / "out"
    assert not out.is_dir() or not list(out.iterdir())
    return told


def _changed(**changes: Any) -> dict[str, Any]:
    """The corpus with other fields in one question; a field that is None is taken out."""
    document = squad()
    question = document["data"][0]["paragraphs"][2]["qas"][1]
    question.update(changes)
    for name in [name for name, value in question.items() if value is None]:
        del question[name]
    return document


def _lines(*without: str) -> str:
    """The corpus as JSON lines, one column or more left out."""
    rows = [
        q
        | {
            "answers": {
                "text": [a["text"] for a in q["answers"]],
                "answer_start": [a["answer_start"] for a in q["answers"]],
            }
        }
        for q in questions_of(squad())
    ]
    return "\n".join(json.dumps({name: value for name, value in row.items() if name not in without}) for row in rows)


_BAD_DATA: dict[str, tuple[Callable[[Attempt], Any], str]] = {
    "no such file": (
        lambda a: a.options.update(train_file=a.folder / "none.json"), r"none\.json: no such file.*fix: correct",
    ),
    "a folder": (lambda a: a.options.update(train_file=a.folder), r"this is a folder, not a file"),
    "no JSON": (lambda a: a.data('{"data": [}'), r"data\.json.*line 1"),
    "not SQuAD": (lambda a: a.data({"rows": []}), r"not SQuAD: the document has no `data`.*got: fields found: rows"),
    "no articles": (lambda a: a.data({"data": []}), r"there is no question in it"),
    "no paragraphs": (lambda a: a.data({"data": [{"title": "T", "paragraphs": []}]}), r"there is no question in it"),
    "an answer elsewhere": (
        lambda a: a.data(_changed(answers=[{"text": "Carra", "answer_start": 3}])), rf"{_PLACE}.*got: .*why: .*fix: ",
    ),
    "no answers": (lambda a: a.data(_changed(answers=None)), rf"{_PLACE}: .*answers"),
    "no id": (lambda a: a.data(_changed(id=None)), r"data\[0\]\.paragraphs\[2\]\.qas\[1\], article 'People': .*id"),
    "a test set to train on": (lambda a: a.data(without_answers(squad())), r"answers.*20 problems in all"),
    **{
        f"no {name} column": (
            lambda a, name=name: a.data(_lines(name)), rf"data\.json: the column {name} is missing.*columns found: ",
        )
        for name in ("answers", "context", "question")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(_BAD_DATA))
def test_bad_data_files_are_refused(attempt: Attempt, capsys: pytest.CaptureFixture[str], name: str) -> None:
    spoil, message = _BAD_DATA[name]
    spoil(attempt)
    assert_refused(attempt, BAD_DATA, message, capsys)


def test_data_problems_are_reported_at_once(attempt: Attempt, capsys: pytest.CaptureFixture[str]) -> None:
    document = _changed(answers=[{"text": "Carra", "answer_start": 3}])
    document["data"][0]["paragraphs"][4]["qas"][0]["question"] = " "
    attempt.data(document)
    told = assert_refused(attempt, BAD_DATA, _PLACE, capsys)
    assert told.count("error: ") == 2
    assert "question 'Cadda-0'" in told


def test_bad_data_of_a_later_part_is_found_before_training(
    attempt: Attempt, capsys: pytest.CaptureFixture[str]
) -> None:
    """The validation file is read before the model is trained, not after."""
    attempt.words += ["--do_eval"]
    attempt.options["validation_file"] = attempt.folder / "none.json"
    assert_refused(attempt, BAD_DATA, r"none\.json: no such file", capsys)


def test_questions_without_answers_need_version_2(attempt: Attempt, capsys: pytest.CaptureFixture[str]) -> None:
    """Found before the training, though it is the evaluation that cannot score them."""
    attempt.words += ["--do_eval"]
    attempt.options["validation_file"] = write_json(attempt.folder / "v2.json", squad(version_2=True))
    assert_refused(attempt, BAD_DATA, "--version_2_with_negative", capsys)


def _file_in_the_way(attempt: Attempt) -> None:
    (attempt.folder / "out").write_text("mine", "utf-8")


def _file_on_the_way(attempt: Attempt) -> None:
    (attempt.folder / "file").write_text("mine", "utf-8")
    attempt.options["output_dir"] = attempt.folder / "file" / "out"


@pytest.mark.parametrize("spoil", [_file_in_the_way, _file_on_the_way])
def test_unusable_output_folder_is_refused(
    attempt: Attempt, capsys: pytest.CaptureFixture[str], spoil: Callable[[Attempt], None]
) -> None:
    spoil(attempt)
    assert_refused(attempt, CANNOT_CREATE, r"output_dir cannot be written.*is not a folder.*--output_dir", capsys)


def test_the_output_of_another_run_is_not_mixed_with(attempt: Attempt, capsys: pytest.CaptureFixture[str]) -> None:
    attempt.options["output_dir"] = attempt.folder
    (attempt.folder / "old.txt").write_text("mine", "utf-8")
    assert_refused(attempt, BAD_CONFIG, r"output_dir is not empty.*--overwrite_output_dir", capsys)


def _slow_tokenizer(attempt: Attempt) -> None:
    folder = attempt.folder / "slow"
    folder.mkdir()
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "ByT5Tokenizer"})
    attempt.options["tokenizer_name"] = folder


def _no_vocabulary(attempt: Attempt) -> None:
    folder = attempt.copy_model()
    for path in folder.iterdir():
        if path.name not in ("config.json", "model.safetensors", "tokenizer_config.json"):
            path.unlink()


def _no_tokenizer(attempt: Attempt) -> None:
    """transformers makes up an empty one."""
    _no_vocabulary(attempt)
    (attempt.model / "tokenizer_config.json").unlink()


def _no_weights(attempt: Attempt) -> None:
    (attempt.copy_model() / "model.safetensors").unlink()


def _broken_weights(attempt: Attempt) -> None:
    path = attempt.copy_model() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def _no_config(attempt: Attempt) -> None:
    (attempt.copy_model() / "config.json").unlink()


def _other_kind(attempt: Attempt) -> None:
    """A model that has no question answering head."""
    write_json(attempt.copy_model() / "config.json", {"model_type": "vit"})


_BAD_CONFIG: dict[str, tuple[Callable[[Attempt], Any], str]] = {
    "rows longer than the model": (
        lambda a: a.options.update(max_seq_length=65), r"rows of 65 tokens.*limit 64.*--max_seq_length 64 or less",
    ),
    "overlap as long as the rows": (
        lambda a: a.options.update(doc_stride=40), r"doc_stride is not below max_seq_length.*smaller --doc_stride",
    ),
    "overlap that leaves no room": (
        lambda a: a.options.update(doc_stride=30), r"question '\w+-\d' leaves too little room.*--doc_stride \d+ or",
    ),
    "a slow tokenizer": (_slow_tokenizer, r"the tokenizer is a slow one.*got: ByT5Tokenizer.*--tokenizer_name"),
    "no model there": (
        lambda a: setattr(a, "model", a.folder / "none"), r"--model_name_or_path: no such folder.*got: .*none.*fix: ",
    ),
    "no configuration there": (
        lambda a: a.options.update(config_name=a.folder / "none"), r"--config_name: no such folder.*got: .*none",
    ),
    "no tokenizer there": (
        lambda a: a.options.update(tokenizer_name=a.folder / "none"), r"--tokenizer_name: no such folder.*got: .*none",
    ),
    "a model that is a file": (
        lambda a: setattr(a, "model", a.model / "config.json"), r"--model_name_or_path names a file, not a folder",
    ),
    "no tokenizer beside the weights": (
        _no_tokenizer, r"the tokenizer knows no words.*5 tokens, all.*special.*tokenizer\.json.*--tokenizer_name",
    ),
    "a tokenizer without its vocabulary": (_no_vocabulary, r"the tokenizer knows no words"),
    "no weights": (_no_weights, r"the model cannot be loaded.*got: .*model.*model\.safetensors"),
    "broken weights": (_broken_weights, r"the model cannot be loaded.*got: "),
    "no configuration": (_no_config, r"cannot be loaded.*config"),
    "a model for something else": (_other_kind, r"cannot be loaded"),
    "foreign code": (lambda a: a.words.append("--trust_remote_code"), r"trust_remote_code is true.*never runs code"),
    "an unknown option": (
        lambda a: a.words.append("--doc_strid"), r"--doc_strid is unknown.*did you mean --doc_stride\?",
    ),
    "a word for a number": (
        lambda a: a.options.update(learning_rate="fast"), r"--learning_rate does not fit.*got: fast.*such as 5e-05",
    ),
    "a setting that is not honoured": (
        lambda a: a.words.append("--fp16_full_eval"), r"does not honour --fp16_full_eval.*use --fp16",
    ),
    "nothing to do": (lambda a: a.words.clear(), r"there is nothing to do.*--do_train"),
    "data twice": (lambda a: a.options.update(train_file="t.json", dataset_name="squad"), r"data is named twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(_BAD_CONFIG))
def test_bad_configuration_is_refused(attempt: Attempt, capsys: pytest.CaptureFixture[str], name: str) -> None:
    spoil, message = _BAD_CONFIG[name]
    spoil(attempt)
    assert_refused(attempt, BAD_CONFIG, message, capsys)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda a: setattr(a, "model", a.folder / "none"), "--model: no such folder"),
        (_no_tokenizer, "the tokenizer knows no words"),
    ],
)
def test_ask_refuses_a_bad_model(
    attempt: Attempt, capsys: pytest.CaptureFixture[str], spoil: Callable[[Attempt], Any], message: str
) -> None:
    spoil(attempt)
    (attempt.folder / "text").write_text("Mira lives here.", "utf-8")
    assert run(["ask", str(attempt.model), "--context", str(attempt.folder / "text"), "--question", "Who?"]) == 78
    assert message in capsys.readouterr().err


def test_unknown_metric_is_refused(attempt: Attempt, capsys: pytest.CaptureFixture[str]) -> None:
    """What `whet qa` measures is known before it trains, and an epoch may take hours."""
    attempt.words += ["--load_best_model_at_end"]
    attempt.options |= {
        "validation_file": write_json(attempt.folder / "v.json", squad()), "eval_strategy": "epoch",
        "save_strategy": "epoch", "metric_for_best_model": "f2",
    }  # fmt: skip
    message = r"metric_for_best_model names no metric.*got: f2.*exact_match.*f1"
    assert_refused(attempt, BAD_CONFIG, message, capsys)


def test_option_problems_are_reported_at_once(attempt: Attempt, capsys: pytest.CaptureFixture[str]) -> None:
    """Misspelled, of the wrong type and against a rule, in one go."""
    attempt.words += ["--trust_remote_code", "--bf61"]
    attempt.options |= {"learning_rate": "fast", "doc_stride": 50, "max_steps": 0}
    told = assert_refused(attempt, BAD_CONFIG, "error: ", capsys)
    for name in ("--bf61", "--learning_rate", "trust_remote_code", "doc_stride", "max_steps"):
        assert name in told


def test_broken_rules_are_reported_together(attempt: Attempt, capsys: pytest.CaptureFixture[str]) -> None:
    attempt.words += ["--trust_remote_code"]
    attempt.options |= {"learning_rate": -1, "doc_stride": 50, "max_steps": 0, "n_best_size": 0}
    told = assert_refused(attempt, BAD_CONFIG, "error: ", capsys)
    assert told.count("error: ") == 5


class _Trap:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickle_is_not_read(attempt: Attempt, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with pytorch_model.bin alone, of the kind that runs code when it is read."""
    folder, trap = attempt.copy_model(), attempt.folder / "sprung"
    (folder / "model.safetensors").unlink()
    inside = io.BytesIO()
    with zipfile.ZipFile(inside, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_Trap(trap)))
        archive.writestr("archive/version", "3")
    (folder / "pytorch_model.bin").write_bytes(inside.getvalue())
    assert_refused(attempt, BAD_CONFIG, r"the model cannot be loaded.*got: .*why: .*model\.safetensors.*fix: ", capsys)
    assert not trap.exists()


@pytest.mark.parametrize("part", ["config.json", "tokenizer_config.json"])
def test_code_in_a_model_folder_is_not_run(attempt: Attempt, part: str) -> None:
    """A model or a tokenizer that brings its own classes, as those of the hub may."""
    folder, trap = attempt.copy_model(), attempt.folder / "sprung"
    (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(trap)!r}).touch()\n", "utf-8")
    settings = json.loads((folder / part).read_text("utf-8"))
    classes = dict.fromkeys(("AutoConfig", "AutoModelForQuestionAnswering"), "own.Own")
    settings["auto_map"] = classes if part == "config.json" else {"AutoTokenizer": [None, "own.Own"]}
    settings |= {"model_type": "own"} if part == "config.json" else {"tokenizer_class": "Own"}
    write_json(folder / part, settings)
    assert attempt() == BAD_CONFIG
    assert not trap.exists()


@pytest.mark.parametrize(
    ("code", "options"),
    [
        (BAD_DATA, ["--train_file", "none.json"]),
        (BAD_CONFIG, ["--train_file", "none.json", "--doc_stride", "9999"]),
        (CANNOT_CREATE, ["--train_file", "none.json", "--output_dir", __file__]),
    ],
)
def test_process_exits_with_the_documented_code(tmp_path: Path, code: int, options: list[str]) -> None:
    """As the shell sees it, and before torch is loaded: bad files and folders are told at once."""
    words = ["--model_name_or_path", "m", "--do_train", "--output_dir", str(tmp_path / "out"), *options]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "whet", "qa", *words],
        capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ | {"PYTHONUTF8": "1"},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "error: " in done.stderr
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert not {"torch", "transformers"} & loaded
