"""`whet export`: exports compute what their models compute, are served without whet, and replace nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from export_server import posted, serving
from torch import Tensor

from hub_cache import cached
from saved_decoder import save_decoder
from text_tasks import (
    SAILING,
    TOPICS,
    examples,
    load,
    load_lines,
    save_encoder,
    topic_rows,
    words,
    write_csv,
    write_lines,
)
from tiny import FAMILIES, VOCABULARY, has_segments, tiny_config
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, ConfigError

pytestmark = pytest.mark.filterwarnings("default")  # those of these libraries are not whet's
pytest.importorskip("onnxruntime", reason="needs onnxruntime: make test-libraries installs it")
onnx = pytest.importorskip("onnx", reason="needs onnx: make test-libraries installs it")
pytest.importorskip("onnxscript", reason="needs onnxscript: make test-libraries installs it")
from whet.export import check, graph  # noqa: E402 - after the packages that it needs
from whet.models.loading import exported  # noqa: E402

CLOSE = 1e-5
"""Of a score or a logit of these tiny models: float32 rounding in another order; measured: below 1e-6."""
HEADS = ("AutoModelForQuestionAnswering", "AutoModelForSequenceClassification", "AutoModelForTokenClassification")
COMMANDS = ("qa", "classify", "tag")
SAYS = {"qa": "answer", "classify": "label", "tag": "tags"}
"""What the script of a folder calls its answer."""
TEN = ("albert", "bert", "camembert", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "roberta",
       "xlm-roberta")  # fmt: skip
BY_DAY = {("deberta-v2", HEADS[0]), ("modernbert", HEADS[1]), ("mpnet", HEADS[2])}
"""Relative positions, windows of attention, a table of biases: what a trace of one size gets wrong most easily."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a run for each task, that of classify with an adapter; long texts are read in windows."""
    folder = tmp_path_factory.mktemp("trained")
    save_encoder(folder / "encoder")
    found = {}
    for command in COMMANDS:
        (folder / command).mkdir()
        file = examples(command, folder / command)
        options: dict[str, Any] = {"train_file": file, "validation_file": file, "max_steps": 20, "learning_rate": 2e-2}
        options |= {"max_seq_length": 16, "doc_stride": 4} | ({"lora_r": 4} if command == "classify" else {})
        line = words(command, folder / "encoder", folder / command / "out", "--do_train", "--do_eval", **options)
        assert run(line) == 0
        found[command] = folder / command / "out"
    return found


@pytest.fixture(scope="module")
def exports(trained: dict[str, Path]) -> dict[str, Path]:
    """The export of each of these folders to ONNX, next to it."""
    for command in COMMANDS:
        assert run(["export", str(trained[command]), "--to", "onnx"]) == 0
    return {command: trained[command].with_name("out-onnx") for command in COMMANDS}


def plain_copy(trained: Path, folder: Path) -> Path:
    """Return a folder as whet.Trainer and transformers leave one: weights and a tokenizer."""
    folder.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(trained / name, folder / name)
    return folder


def close(found: Any, wanted: Any) -> bool:
    """Return whether two answers agree: numbers nearly, everything else exactly."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(close(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(close, found, wanted))
    return abs(found - wanted) < CLOSE if isinstance(wanted, float) else found == wanted


def predicted(model: Path, file: Path, output: Path) -> list[Any]:
    assert run(["predict", str(model), "--file", str(file), "--output", str(output)]) == 0
    return load_lines(output)


def served(folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return what the script of the folder answers, in a process in which whet, torch and transformers are missing."""
    hidden = "import sys, runpy; sys.modules.update(dict.fromkeys(('whet', 'torch', 'transformers', 'onnx')));"
    program = f"{hidden} runpy.run_path({str(folder / 'serve.py')!r}, run_name='__main__')"
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=lines, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def about(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "export.json").read_text("utf-8"))["whet"]


def asked_of(command: str, file: Path, answers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return what the script is asked, and what `whet predict` has answered, in the script's words."""
    if command == "classify":
        return [{"text": row["text"]} for row in topic_rows()], [one["label"] for one in answers]
    rows = load_lines(file)
    if command == "tag":
        return [{"tokens": one["tokens"]} for one in answers], [one["tags"] for one in answers]
    asked = [{"question": row["question"], "context": row["context"]} for row in rows]
    return asked, [one["answer"] for one in answers]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_export_answers_as_its_model_with_and_without_whet(
    command: str, trained: dict[str, Path], exports: dict[str, Path], tmp_path: Path
) -> None:
    folder = exports[command]
    found = about(folder)["check"]
    assert found["outputs_fp32"]["largest_difference"] < CLOSE
    assert found["metric"]["exported"] == pytest.approx(found["metric"]["torch"], abs=CLOSE)
    assert found["notes"] == []
    names = {path.name for path in folder.iterdir()}
    assert {"README.md", "config.json", "model.onnx", "serve.py", "tokenizer.json", "whet_task.json"} <= names
    assert "rows/s" in (folder / "README.md").read_text("utf-8")
    assert [path.name for path in folder.parent.glob(".*")] == []
    file = examples(command, trained[command].parent)
    wanted = predicted(trained[command], file, tmp_path / "wanted.jsonl")
    answers = predicted(folder, file, tmp_path / "found.jsonl")
    assert close(answers, wanted)
    asked, said = asked_of(command, file, answers)
    assert [one[SAYS[command]] for one in served(folder, asked)] == said


# ---- what its script is asked ----


def test_a_question_that_is_too_long_is_an_error_and_not_the_end(
    trained: dict[str, Path], exports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = ". ".join(SAILING)
    asked = [{"question": " ".join(["boat"] * n), "context": context} for n in (9, 13, 1)]
    *refused, answer = served(exports["qa"], asked)
    assert all("the question is too long" in one["error"] for one in refused)
    assert answer["answer"]
    with serving(exports["qa"]) as port:
        for question in asked[:2]:
            with pytest.raises(urllib.error.HTTPError, match="400") as caught:
                posted(port, question)
            assert "the question is too long" in json.load(caught.value)["error"]
        assert posted(port, asked[2]) == answer
    for question in asked[:2]:
        file = write_lines(tmp_path / "rows.jsonl", [{"id": "0", **question}])
        assert run(["predict", str(trained["qa"]), "--file", str(file), "--output", str(tmp_path / "o")]) != 0
        assert "leaves too little room for its context" in capsys.readouterr().err


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_stopped_finishes_its_answers(end: signal.Signals, exports: dict[str, Path]) -> None:
    """Without a handler, SIGTERM has no effect on the first process of a container."""
    question = {"question": "what?", "context": ". ".join(SAILING)}
    body = json.dumps(question).encode()

    def rest() -> bytes:
        time.sleep(1)
        asking.sendall(body[9:])
        return asking.makefile("rb").read()

    with ThreadPoolExecutor() as threads:
        with serving(exports["qa"], end) as port:
            wanted = posted(port, question)
            asking = socket.create_connection(("127.0.0.1", port))
            asking.sendall(b"POST / HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:9])
            time.sleep(0.3)
            answer = threads.submit(rest)
        assert json.loads(answer.result().partition(b"\r\n\r\n")[2]) == wanted
        asking.close()


def test_the_script_answers_from_the_cache_of_the_hub(exports: dict[str, Path], tmp_path: Path) -> None:
    """There each file is a link to one in another folder, also that of the weights next to the graph."""
    assert (exports["qa"] / "model.onnx.data").is_file()
    asked = [{"question": "what?", "context": ". ".join(SAILING)}]
    assert served(cached(exports["qa"], tmp_path, "me/reader"), asked) == served(exports["qa"], asked)


def test_the_script_finds_its_files_through_a_link(exports: dict[str, Path], tmp_path: Path) -> None:
    asked = [{"question": "what?", "context": ". ".join(SAILING)}]
    (tmp_path / "serve.py").symlink_to(exports["qa"] / "serve.py")
    assert served(tmp_path, asked) == served(exports["qa"], asked)


def test_the_script_reads_utf_8_and_nothing_ends_it(exports: dict[str, Path]) -> None:
    question = {"question": "what?", "context": "the caf\u00e9 of the harbour"}
    lines = json.dumps(question, ensure_ascii=False).encode() + b'\n{"question": "what?", "context": "the caf\xe9"}\n'
    done = subprocess.run(
        [sys.executable, str(exports["qa"] / "serve.py")], input=lines, capture_output=True, check=False,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.decode("utf-8").splitlines()]
    assert found[0] == served(exports["qa"], [question])[0]
    assert "answer" in found[1]
    (odd,) = served(exports["tag"], [{"tokens": "the boat"}])
    assert "tokens is a list of words" in odd["error"]


def test_pairs_in_windows_are_labelled_as_by_predict(trained: dict[str, Path], tmp_path: Path) -> None:
    rows = [
        {"first": text, "second": ". ".join(texts[::-1]), "label": topic} for topic, texts in TOPICS.items()
        for text in texts
    ]  # fmt: skip
    file = write_csv(tmp_path / "rows.csv", rows)
    line = words("classify", trained["qa"].parents[1] / "encoder", tmp_path / "out", "--do_train", train_file=file,
                 text_column_names="first", text_pair_column_names="second", label_column_name="label", max_steps=20,
                 learning_rate=1e-2, max_seq_length=16, doc_stride=4)  # fmt: skip
    assert run(line) == 0
    assert run(["export", str(tmp_path / "out")]) == 0
    wanted = predicted(tmp_path / "out", file, tmp_path / "wanted.jsonl")
    asked = [{"text": row["first"], "text_pair": row["second"]} for row in rows]
    *found, alone, odd = served(
        tmp_path / "out-onnx", [*asked, {"text": rows[0]["second"]}, {"text": rows[0]["second"], "text_pair": "a boat"}]
    )
    assert [one["label"] for one in found] == [one["label"] for one in wanted]
    scores = [one["scores"][one["label"]] for one in found]
    np.testing.assert_allclose(scores, [one["score"] for one in wanted], atol=CLOSE)
    assert alone["scores"], "a text alone is cut in another way than a pair"
    assert "the text is too long" in odd["error"]


def test_windows_of_words_are_those_of_predict_if_the_tokenizer_cuts_on_the_left(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(trained["tag"], tmp_path / "model")
    _set(tmp_path / "model" / "tokenizer_config.json", truncation_side="left")
    assert run(["export", str(tmp_path / "model")]) == 0
    tokens = [" ".join(texts[n:] + texts[:n]).split() for texts in TOPICS.values() for n in range(4)]
    file = write_lines(tmp_path / "rows.jsonl", [{"tokens": one} for one in tokens])
    wanted = predicted(tmp_path / "model", file, tmp_path / "wanted.jsonl")
    found = served(tmp_path / "model-onnx", [{"tokens": one} for one in tokens])
    assert [one["tags"] for one in found] == [one["tags"] for one in wanted]


def test_a_tokenizer_that_its_file_does_not_describe_is_refused(
    trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script would read "[SEP]" in a text as the special token, and `whet predict` reads its letters."""
    for command in COMMANDS[::2]:
        model = plain_copy(trained[command], tmp_path / command)
        _set(model / "tokenizer_config.json", split_special_tokens=True)
        assert run(["export", str(model), "--max_seq_length", "64", "--doc_stride", "8"]) == EXIT_BAD_CONFIG
        assert "the script of the export would read texts otherwise than the model" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(COMMANDS[::2])


def _set(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | values), "utf-8")


# ---- what the training has left ----


def test_an_export_chooses_answers_as_its_training_did(trained: dict[str, Path], tmp_path: Path) -> None:
    file = examples("qa", tmp_path)
    line = words("qa", trained["qa"].parents[1] / "encoder", tmp_path / "out", "--do_train", "--do_eval",
                 "--version_2_with_negative", train_file=file, validation_file=file, max_steps=1, max_seq_length=16,
                 doc_stride=4, max_answer_length=1, n_best_size=6, null_score_diff_threshold=1e6)  # fmt: skip
    assert run(line) == 0
    assert run(["export", str(tmp_path / "out")]) == 0
    folder = tmp_path / "out-onnx"
    assert about(folder)["check"]["metric"]["torch"] == load(tmp_path / "out", "all_results.json")["eval_f1"]
    wanted = predicted(tmp_path / "out", file, tmp_path / "wanted.jsonl")
    answers = predicted(folder, file, tmp_path / "found.jsonl")
    assert close(answers, wanted)
    asked, said = asked_of("qa", file, answers)
    assert all(said)
    assert not [one for one in said if " " in one]
    assert {*said} - {"empty"}, "which is the word of run_qa.py for no answer among the best"
    assert [one["answer"] or "empty" for one in served(folder, asked)] == said


def test_files_of_the_training_are_those_of_the_folder_in_which_it_was_started(
    trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, n_rows in (("mine", 12), ("other", 6)):
        (tmp_path / name).mkdir()
        write_csv(tmp_path / name / "rows.csv", topic_rows()[:n_rows])
    monkeypatch.chdir(tmp_path / "mine")
    line = words("classify", trained["qa"].parents[1] / "encoder", Path("out"), "--do_train", train_file="rows.csv",
                 validation_file="rows.csv", max_steps=1)  # fmt: skip
    assert run(line) == 0
    monkeypatch.chdir(tmp_path / "other")
    assert run(["export", "../mine/out"]) == 0
    assert f"takes examples from {tmp_path / 'mine' / 'rows.csv'}\n" in capsys.readouterr().err
    assert about(tmp_path / "mine" / "out-onnx")["check"]["metric"]["examples"] == 12


def test_whet_ask_and_transformers_take_an_export(
    trained: dict[str, Path], exports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text(". ".join(SAILING), "utf-8")
    line = ["--context", str(tmp_path / "notes.txt"), "--question", "where lay the boat?"]
    line += ["--max_seq_length", "32", "--doc_stride", "8"]
    said = []
    for model in (trained["qa"], exports["qa"]):
        capsys.readouterr()
        assert run(["ask", str(model), *line]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    ids = torch.ones(2, 7, dtype=torch.int64)
    model = transformers.exporters.ExportedModel.from_pretrained(exports["qa"])
    found = model(input_ids=ids, attention_mask=ids, token_type_ids=ids * 0)
    assert found.start_logits.shape == (2, 7)


def test_what_an_export_cannot_do_is_refused(
    trained: dict[str, Path], exports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("a text", "utf-8")
    ask = ["--context", str(tmp_path / "notes.txt"), "--question", "what?"]
    predict = ["predict", str(exports["tag"]), "--file", str(examples("tag", tmp_path))]
    for line, what in (
        (["ask", str(exports["qa"]), "--base_model_name_or_path", "x", *ask], "would change nothing"),
        (["ask", str(exports["tag"]), *ask], "the exported model has not learnt to answer questions"),
        ([*predict, "--precision", "bf16"], "the exported model computes in its own number format"),
        (["export", str(exports["qa"])], "the model is an export already"),
    ):
        capsys.readouterr()
        assert run(line) == EXIT_BAD_CONFIG
        assert what in capsys.readouterr().err
    (exports["tag"] / "model.onnx").rename(exports["tag"] / "kept")
    (exports["tag"] / "model.onnx").write_bytes(b"damaged")
    assert run(predict) == EXIT_BAD_CONFIG
    assert "the exported model cannot be opened" in capsys.readouterr().err
    (exports["tag"] / "kept").replace(exports["tag"] / "model.onnx")


def test_a_difference_above_the_limit_keeps_nothing_and_leaves_an_earlier_export(
    trained: dict[str, Path], exports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "served"
    shutil.copytree(exports["tag"], folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    line = ["export", str(trained["tag"]), "--output_dir", str(folder), "--max_difference", "1e-30"]
    assert run(line) == EXIT_BAD_CONFIG
    assert "the export does not compute what the model computes" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["served"]


def test_a_folder_without_data_is_exported_and_says_what_is_not_measured(
    trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = plain_copy(trained["tag"], tmp_path / "model")
    assert run(["export", str(model)]) == 0
    shown = capsys.readouterr().out
    assert "no metric was compared" in shown
    assert "made-up texts were compared" in shown
    assert "metric" not in about(tmp_path / "model-onnx")["check"]
    assert run(["export", str(model), "--text_pair_column_names", "b"]) == EXIT_BAD_CONFIG
    assert "text_pair_column_names would change nothing here" in capsys.readouterr().err
    assert run(["export", str(model), "--int8", "--int8_activations", "static"]) == EXIT_BAD_CONFIG
    assert "name a file in --train_file" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model-onnx"]


def test_what_cannot_be_exported_is_refused_before_any_work(
    trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(trained["qa"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    save_decoder(tmp_path / "decoder")

    def refused(*line: str) -> str:
        capsys.readouterr()
        assert run(["export", *line]) == EXIT_BAD_CONFIG
        return capsys.readouterr().err

    assert "the folder of the export holds something else" in refused(model, "--output_dir", str(tmp_path / "full"))
    assert "output_dir is the folder of the model" in refused(model, "--output_dir", model)
    assert "gguf holds language models" in refused(model, "--to", "gguf")
    assert "convert_hf_to_gguf.py" in refused(str(tmp_path / "decoder"), "--to", "gguf")
    assert "language models are not exported to this format" in refused(str(tmp_path / "decoder"))
    assert "--int8_activations" in refused(model, "--int8_activations", "static")
    assert "truncate_dim would change nothing here" in refused(model, "--truncate_dim", "8")
    assert "calibration_samples would change nothing" in refused(model, "--int8", "--calibration_samples", "8")
    assert "base_model_name_or_path would change nothing" in refused(model, "--base_model_name_or_path", "x")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "run: pip install 'whet-train[onnx]'" in refused(model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decoder", "full"]


# ---- int8, and another runtime ----


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_int8_multiplies_bytes_and_says_what_it_costs(
    activations: str, trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "served", examples("tag", tmp_path)
    model = plain_copy(trained["tag"], tmp_path / "model")
    line = ["export", str(model), "--int8", "--int8_activations", activations, "--output_dir", str(folder)]
    line += ["--validation_file", str(file), "--max_eval_samples", "6", "--max_metric_drop", "100"]
    assert run([*line, *(["--train_file", str(file)] if activations == "static" else [])]) == 0
    assert "of the largest logits are the same" in capsys.readouterr().out
    found = about(folder)
    assert found["precision"] == "int8"
    assert found["check"]["int8"]["activations"] == activations
    assert found["check"]["outputs_fp32"]["largest_difference"] < CLOSE
    assert found["check"]["outputs_int8"]["largest_difference"] > 100 * CLOSE
    assert found["check"]["metric"]["examples"] == 6
    program = onnx.load(folder / "model.onnx", load_external_data=False)
    weights = {one.name for one in program.graph.initializer if one.data_type == onnx.TensorProto.INT8}
    products = {name for node in program.graph.node for name in node.input} & weights
    assert len(products) >= 2 * 6, "of two blocks: queries, keys, values, output, and the two of the inner layer"
    assert len(predicted(folder, file, tmp_path / "found.jsonl")) == len(load_lines(file))
    assert "int8 by ONNX Runtime" in capsys.readouterr().out


def test_int8_that_costs_too_much_fails() -> None:
    def metric(points: float) -> check.Metric:
        return check.Metric("f1", 100, "dev.json", torch=80.0, exported=80.0 - points, drop_points=points)

    metric(0.5).require_kept(0.5, "")
    metric(-3.0).require_kept(0.0, "")
    for points in (0.51, float("nan")):
        with pytest.raises(ConfigError, match="the int8 export loses"):
            metric(points).require_kept(0.5, "try another way")


@pytest.mark.parametrize("command", ["qa", pytest.param("classify", marks=pytest.mark.night),
                                     pytest.param("tag", marks=pytest.mark.night)])  # fmt: skip
def test_openvino_answers_as_the_model(command: str, trained: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="needs openvino: make test-libraries installs it")
    folder = tmp_path / "served"
    line = ["export", str(trained[command]), "--to", "openvino", "--output_dir", str(folder)]
    assert run(line) == 0
    assert about(folder)["check"]["outputs_fp32"]["largest_difference"] < CLOSE
    file = examples(command, tmp_path)
    answers = predicted(folder, file, tmp_path / "found.jsonl")
    assert close(answers, predicted(trained[command], file, tmp_path / "wanted.jsonl"))
    asked, said = asked_of(command, file, answers)
    assert [one[SAYS[command]] for one in served(folder, asked)] == said
    with serving(folder) as port, ThreadPoolExecutor(8) as pool:
        assert [one[SAYS[command]] for one in pool.map(partial(posted, port), 10 * asked)] == 10 * said
    compute, names = exported.runtime(folder, "openvino"), about(folder)["inputs"]
    feeds = [{name: np.full((1, n), n if name == "input_ids" else 1) for name in names} for n in range(2, 14)]
    alone = [compute(feed) for feed in feeds]
    with ThreadPoolExecutor(8) as pool:
        for one, other in zip(pool.map(compute, 10 * feeds), 10 * alone, strict=True):
            assert all(np.array_equal(one[name], other[name]) for name in other)
    pytest.importorskip("nncf", reason="needs nncf: make test-libraries installs it")
    assert run([*line, "--int8", "--max_metric_drop", "100"]) == 0
    assert about(folder)["precision"] == "int8"
    assert sys.modules.get("openvino_telemetry") is None, "nothing is reported to the makers of the packages"


# ---- families ----


def columns(family: str, n_rows: int, length: int, full: int | None = None) -> dict[str, Tensor]:
    """Return a padded batch of random tokens."""
    numbers = np.random.default_rng(n_rows * 100 + length)
    config = tiny_config(family)
    width = full or length
    n_tokens = np.maximum(1, length - np.arange(n_rows) * 2)
    mask = (np.arange(width) < n_tokens[:, None]).astype(np.int64)
    ids = np.where(mask, numbers.integers(10, VOCABULARY - 2, (n_rows, width)), config.pad_token_id or 0)
    found = {"input_ids": ids, "attention_mask": mask}
    if has_segments(family):
        found["token_type_ids"] = (np.arange(width) > width // 2).astype(np.int64) * mask
    return {name: torch.from_numpy(value) for name, value in found.items()}


@pytest.mark.parametrize(
    ("family", "head"),
    [
        pytest.param(family, head, marks=() if (family, head) in BY_DAY else pytest.mark.night)
        for family in TEN
        for head in HEADS
    ],
)
def test_each_family_and_head_computes_the_same_for_any_batch(family: str, head: str, tmp_path: Path) -> None:
    assert family in FAMILIES
    torch.manual_seed(0)
    model = getattr(transformers, head).from_config(tiny_config(family)).eval()
    made = graph.traced(model, columns(family, 3, 9), "onnx")
    graph.save(made, tmp_path)
    about = {"format": "onnx", "precision": "fp32", "head": head, "inputs": [*columns(family, 3, 9)]}
    other = exported.ExportedModel(model.config, about, exported.runtime(tmp_path, "onnx"))

    def pad(rows: Sequence[int], full: int | None = None) -> dict[str, Tensor]:
        return columns(family, len(rows), max(rows), full)

    def logits(of: Any) -> check.Forward:
        def forward(given: check.Columns) -> Mapping[str, Any]:
            with torch.inference_mode():
                return {name: value for name, value in of(**given).items() if name.endswith("logits")}

        return forward

    lengths = [1 + place % 60 for place in range(0, 150, 3)]
    kind: check.Kind = "rows" if head == HEADS[1] else "tokens"
    found = check.compared(lengths, pad, 70, logits(model), logits(other), kind)
    print(f"{family} {head}: {found.largest_difference:.1e}")
    assert found.largest_difference < CLOSE
    assert found.longest_tokens == 70
