"""`whet export` of embedding models and rerankers: the vectors and scores of sentence-transformers, without it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_server import free_port, posted, serving
from safetensors.torch import load_file, save_file
from tiny_encoders import save_encoder, sentences

from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG

pytestmark = pytest.mark.filterwarnings("default")  # those of these libraries are not whet's
library = pytest.importorskip(
    "sentence_transformers", reason="needs sentence-transformers: make test-libraries installs it"
)
pytest.importorskip("onnxruntime", reason="needs onnxruntime: make test-libraries installs it")
pytest.importorskip("onnxscript", reason="needs onnxscript: make test-libraries installs it")
onnx = pytest.importorskip("onnx", reason="needs onnx: make test-libraries installs it")

ROOT = Path(__file__).resolve().parents[2]
CLOSE = 1e-5
"""Of a number of a vector of these tiny models: float32 rounding in another order; measured: below 2e-6."""
N_ROWS = 40
HIDDEN = ("whet", "torch", "transformers", "onnx", "sentence_transformers", "scipy", "sklearn")
"""What a process that serves an export does not have."""


def write_pairs(path: Path) -> Path:
    """Write pairs of texts that share their number."""
    rows = [
        f"{n} {one},{n} {two}"
        for n, (one, two) in enumerate(zip(sentences(N_ROWS, 1), sentences(N_ROWS, 2), strict=True))
    ]
    path.write_text("\n".join(["question,answer", *rows]) + "\n", "utf-8")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders that `whet embed` and `whet rerank` leave, with a prompt and a part of the pairs set aside."""
    folder = tmp_path_factory.mktemp("trained")
    save_encoder(folder / "encoder", dropout=0.0)
    data = write_pairs(folder / "pairs.csv")
    for command, more in (("embed", ["--query_prompt", "who ", "--matryoshka_dims", "32,8"]), ("rerank", [])):
        words = [command, "--model_name_or_path", folder / "encoder", "--train_file", data, "--do_train", "--do_eval",
                 "--validation_split_percentage", 25, "--max_steps", 20, "--learning_rate", 1e-3, "--save_strategy",
                 "no", "--precision", "fp32", "--output_dir", folder / command, *more]  # fmt: skip
        assert run([*map(str, words)]) == 0
    return {command: folder / command for command in ("embed", "rerank")}


@pytest.fixture(scope="module")
def exports(trained: dict[str, Path]) -> dict[str, Path]:
    """The export of each of these folders to ONNX, next to it."""
    for folder in trained.values():
        assert run(["export", str(folder), "--to", "onnx"]) == 0
    return {command: folder.with_name(f"{folder.name}-onnx") for command, folder in trained.items()}


def made_by_library(folder: Path, encoder: Path) -> Any:
    """Return a model that whet has not trained: the first token, a dense layer, unit length, half of the numbers."""
    encoding = library.SentenceTransformer(str(encoder), device="cpu")[0]
    torch.manual_seed(0)
    of = library.sentence_transformer.modules
    dense = of.Dense(32, 16, activation_function=torch.nn.Tanh())
    modules = [encoding, of.Pooling(32, "cls"), dense, of.Normalize()]
    model = library.SentenceTransformer(
        modules=modules, device="cpu", prompts={"passage": "the ", "other": "on "}, default_prompt_name="other",
        truncate_dim=8,
    )  # fmt: skip
    model.save(str(folder))
    return model


def served(folder: Path, lines: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return what the script of the folder answers, in a process without the libraries that made it."""
    hidden = f"import sys, runpy; sys.modules.update(dict.fromkeys({HIDDEN!r}));"
    program = f"{hidden} runpy.run_path({str(folder / 'serve.py')!r}, run_name='__main__')"
    asked = "".join(f"{json.dumps(one)}\n" for one in lines)
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, input=asked, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def about(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "export.json").read_text("utf-8"))["whet"]


def vectors_of(model: Path, file: Path, output: Path) -> np.ndarray:
    words = ["predict", model, "--file", file, "--text_column_names", "answer", "--output", output]
    assert run([*map(str, words)]) == 0
    return np.load(output)


def test_an_embedding_model_gives_its_vectors_everywhere(
    trained: dict[str, Path], exports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = exports["embed"], trained["embed"].parent / "pairs.csv"
    found = about(folder)["check"]
    assert found["notes"] == []
    assert found["outputs_fp32"]["largest_difference"] < CLOSE
    assert found["outputs_fp32"]["cosine"][0] > 1 - CLOSE
    assert found["metric"]["name"] == "NDCG@10"
    assert found["metric"]["examples"] == N_ROWS / 4
    assert found["metric"]["exported"] == pytest.approx(found["metric"]["torch"], abs=CLOSE)
    assert not [*folder.glob("model*.safetensors")], "the weights are in the graph"

    model = library.SentenceTransformer(str(trained["embed"]), device="cpu")
    questions, answers = ([line.split(",")[n] for line in file.read_text("utf-8").splitlines()[1:]] for n in (0, 1))
    wanted = model.encode_document(answers)
    np.testing.assert_allclose(vectors_of(folder, file, tmp_path / "found.npy"), wanted, atol=CLOSE)
    lines = [{"text": answers}, {"text": questions[0], "prompt": "query"}, {"text": answers[0], "prompt": "nobody"}]
    several, one, odd, alone, named = served(folder, [*lines, {"text": answers[0]}, {"text": {"who": "built it"}}])
    assert alone["vector"] == several["vectors"][0], "a vector does not depend on the texts next to it"
    np.testing.assert_allclose(several["vectors"], wanted, atol=CLOSE)
    np.testing.assert_allclose(one["vector"], model.encode_query(questions[0]), atol=CLOSE)
    assert "nobody" in odd["error"]
    assert "text is a text or a list of texts" in named["error"], "and no vector of its key"

    said = []
    for one in (trained["embed"], folder):
        capsys.readouterr()
        words = ["search", one, "--corpus", file, "--text_column_names", "answer", "--query", questions[3]]
        assert run([*map(str, words)]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_a_reranker_gives_its_scores_everywhere(
    trained: dict[str, Path], exports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = exports["rerank"], trained["rerank"].parent / "pairs.csv"
    found = about(folder)["check"]
    assert found["metric"]["name"] == "NDCG@10"
    assert found["metric"]["exported"] == pytest.approx(found["metric"]["torch"], abs=CLOSE)
    rows = [line.split(",") for line in file.read_text("utf-8").splitlines()[1:]]
    wanted = library.CrossEncoder(str(trained["rerank"]), device="cpu").predict(rows)
    assert run(["predict", str(folder), "--file", str(file), "--output", str(tmp_path / "found.jsonl")]) == 0
    assert "fp32 by ONNX Runtime" in capsys.readouterr().out
    scores = [json.loads(line)["score"] for line in (tmp_path / "found.jsonl").read_text("utf-8").splitlines()]
    np.testing.assert_allclose(scores, wanted, atol=CLOSE)
    answer, odd = served(folder, [{"query": rows[0][0], "texts": one} for one in ([rows[0][1]], rows[0][1])])
    np.testing.assert_allclose(answer["scores"], wanted[:1], atol=CLOSE)
    assert "texts is a list of texts" in odd["error"], "and no scores of its letters"
    words = ["search", str(exports["embed"]), "--corpus", str(file), "--text_column_names", "answer", "--query",
             rows[0][0], "--reranker", str(folder), "--top_k", "2"]  # fmt: skip
    assert run(words) == 0
    assert capsys.readouterr().out.count("line ") == 2


def test_a_model_of_the_library_keeps_modules_prompts_and_length(encoder_folder: Path, tmp_path: Path) -> None:
    model = made_by_library(tmp_path / "model", encoder_folder)
    texts = sentences(6, 3)
    wanted = model.encode(texts), model.encode(texts, prompt_name="passage")
    assert wanted[0].shape == (6, 8)
    assert run(["export", str(tmp_path / "model")]) == 0
    folder = tmp_path / "model-onnx"
    assert "made-up texts were compared, as none of the training are at hand" in about(folder)["check"]["notes"]
    found = served(folder, [{"text": texts}, {"text": texts, "prompt": "document"}, {"text": texts, "prompt": "other"}])
    for one, vectors in zip(found, (wanted[0], wanted[1], wanted[0]), strict=True):
        np.testing.assert_allclose(one["vectors"], vectors, atol=CLOSE)
    one = tmp_path / "one.csv"
    one.write_text("question,answer\n" + "".join(f"{text},the sea\n" for text in texts), "utf-8")
    words = ["--truncate_dim", "4", "--output_dir", str(tmp_path / "short"), "--validation_file", str(one)]
    assert run(["export", str(tmp_path / "model"), *words]) == 0
    notes = about(tmp_path / "short")["check"]["notes"]
    assert f"no metric was compared: {one}: the evaluation has nothing to tell apart" in notes
    np.testing.assert_allclose(
        served(tmp_path / "short", [{"text": texts}])[0]["vectors"], wanted[0][:, :4], atol=CLOSE
    )


def test_an_adapter_in_the_folder_is_part_of_the_graph(encoder_folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", "0.22", reason="transformers adds adapters with peft 0.22 or newer")
    torch.manual_seed(0)
    model = library.SentenceTransformer(str(encoder_folder), device="cpu")
    plain = model.encode(["who built the bridge"])
    model.add_adapter(peft.LoraConfig(target_modules=["query", "value"], init_lora_weights=False))
    model.save(str(tmp_path / "model"))
    assert (tmp_path / "model" / "adapter_config.json").is_file()
    file = write_pairs(tmp_path / "pairs.csv")
    wanted = model.encode([line.split(",")[1] for line in file.read_text("utf-8").splitlines()[1:]])
    assert run(["export", str(tmp_path / "model")]) == 0
    folder = tmp_path / "model-onnx"
    assert not [*folder.glob("adapter_*")]
    np.testing.assert_allclose(vectors_of(folder, file, tmp_path / "found.npy"), wanted, atol=CLOSE)
    (answer,) = served(folder, [{"text": "who built the bridge"}])
    assert np.abs(answer["vector"] - plain[0]).max() > 100 * CLOSE


def test_layers_that_cost_the_metric_in_int8_stay_in_fp32(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One value of an inner layer is so large that 8 bits leave nothing of the others, which the vector depends on."""
    weights = load_file(encoder_folder / "model.safetensors")
    weights["encoder.layer.0.intermediate.dense.weight"][0] *= 1e4
    weights["encoder.layer.0.intermediate.dense.bias"][0] = 1e4
    weights["encoder.layer.0.output.dense.weight"] *= 30
    weights["encoder.layer.0.output.dense.weight"][:, 0] = 1e-6
    save_file(weights, encoder_folder / "model.safetensors", {"format": "pt"})
    model = library.SentenceTransformer(str(encoder_folder), device="cpu")
    model.save(str(tmp_path / "model"))
    one, two = sentences(N_ROWS, 1), sentences(N_ROWS, 2)
    cosines = model.similarity_pairwise(model.encode(one), model.encode(two))  # so that torch's correlation is 1
    scores = ((cosines - cosines.min()) / (cosines.max() - cosines.min())).tolist()
    lines = ["sentence1,sentence2,score", *(f"{a},{b},{score}" for a, b, score in zip(one, two, scores, strict=True))]
    (tmp_path / "scored.csv").write_text("\n".join(lines) + "\n", "utf-8")

    folder = tmp_path / "served"
    line = [
        "export",
        tmp_path / "model",
        "--int8",
        "--output_dir",
        folder,
        "--validation_file",
        tmp_path / "scored.csv",
    ]
    assert run([*map(str, line), "--max_metric_drop", "3"]) == 0
    found = about(folder)["check"]
    assert found["metric"]["torch"] == pytest.approx(1, abs=CLOSE)
    assert found["int8"]["without_fp32"]["drop_points"] > 3 >= found["metric"]["drop_points"]
    (layer,) = found["int8"]["fp32"]
    assert layer.endswith("encoder.layer.0.output.dense")
    assert "layers (with all in int8 Spearman's correlation loses" in capsys.readouterr().out
    program = onnx.load(folder / "model.onnx", load_external_data=False)
    held = {one.name for one in program.graph.initializer}
    plain = [node for node in program.graph.node if node.op_type == "MatMul" and node.input[1] in held]
    assert len(plain) == 1


def test_an_int8_model_answers_over_http(exports: dict[str, Path], trained: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "served"
    assert (
        run(["export", str(trained["embed"]), "--int8", "--output_dir", str(folder), "--max_metric_drop", "100"]) == 0
    )
    assert about(folder)["precision"] == "int8"
    least, mean = about(folder)["check"]["outputs_int8"]["cosine"]
    assert 0.9 < least <= mean < 1, "rounded, and not another model's"
    with serving(folder) as port:
        answer = posted(port, {"text": "who built the bridge"})
        (line,) = served(folder, [{"text": "who built the bridge"}])
        assert answer == line
        several = posted(port, {"text": ["a bridge of stone over the river", "who built the bridge", "no"]})
        assert several["vectors"][1] == line["vector"], "int8 ranges are of one text"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as asked:
            assert json.load(asked)["status"] == "ok"
        with pytest.raises(urllib.error.HTTPError, match="400"):
            posted(port, {"tekst": "who"})
        second = [sys.executable, str(folder / "serve.py"), "--port", str(port)]
        taken = subprocess.run(second, capture_output=True, text=True, check=False)
        assert taken.returncode == 1
        assert f"127.0.0.1:{port}: " in taken.stderr
        assert "Traceback" not in taken.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_page_leads_from_pairs_to_a_server(encoder_folder: Path, tmp_path: Path) -> None:
    """The commands of docs/embed.md, as they stand there but for the model, the port and the installation."""
    page = (ROOT / "docs" / "embed.md").read_text("utf-8")
    (block,) = (one for one in page.split("```bash no-run\n")[1:] if "serve.py --port" in one.partition("```")[0])
    lines = block.partition("```")[0].replace("MODEL", str(encoder_folder)).replace("8000", str(free_port()))
    script = lines.partition("\n")[2]  # after pip install
    write_pairs(tmp_path / "pairs.csv")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with (tmp_path / "said").open("w") as said:
        walk = subprocess.Popen(
            ["bash", "-euxo", "pipefail", "-c", script], cwd=tmp_path, env=os.environ | {"PATH": path}, stdout=said,
            stderr=said, start_new_session=True,
        )  # fmt: skip
        try:
            status = walk.wait(timeout=300)
        finally:
            os.killpg(walk.pid, signal.SIGTERM)  # the server is in the background
    said = (tmp_path / "said").read_text()
    assert status == 0, said[-4000:]
    vector = json.loads(said[said.rindex('{"vector"') :].splitlines()[0])["vector"]
    assert len(vector) == library.SentenceTransformer(str(tmp_path / "out")).get_embedding_dimension()


def test_what_no_graph_computes_is_refused(
    encoder_folder: Path, exports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library.CrossEncoder(str(encoder_folder), num_labels=3, device="cpu").save(str(tmp_path / "labels"))
    parts = [*library.SentenceTransformer(str(encoder_folder), device="cpu")]
    parts[1] = library.sentence_transformer.modules.Pooling(32, "mean", include_prompt=False)
    library.SentenceTransformer(modules=parts, prompts={"query": "who "}, device="cpu").save(str(tmp_path / "apart"))
    pairs = write_pairs(tmp_path / "pairs.csv")
    training = ["--train_file", str(pairs), "--do_train", "--output_dir", str(tmp_path / "out")]
    for words, said in (
        (["export", tmp_path / "labels"], "it gives 3 labels"),
        (["export", tmp_path / "apart"], "its pooling leaves the prompt out"),
        (["export", encoder_folder], "the model has no head that whet exports"),
        (["export", exports["embed"]], "the model is an export already"),
        (["embed", "--model_name_or_path", exports["embed"], *training], "a graph has no weights that can be trained"),
        (["search", exports["rerank"], "--corpus", pairs, "--query", "who"], "names a reranker"),
        (["predict", exports["embed"], "--file", pairs, "--text_column_names", "question", "--precision", "bf16"],
         "computes in its own number format"),
    ):  # fmt: skip
        capsys.readouterr()
        assert run([*map(str, words)]) == EXIT_BAD_CONFIG, words
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["embed", pytest.param("rerank", marks=pytest.mark.night)])
def test_openvino_gives_the_same(
    command: str, trained: dict[str, Path], exports: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("openvino", reason="needs openvino: make test-libraries installs it")
    folder = tmp_path / "served"
    assert run(["export", str(trained[command]), "--to", "openvino", "--output_dir", str(folder)]) == 0
    assert about(folder)["check"]["outputs_fp32"]["largest_difference"] < CLOSE
    asked = (
        {"text": ["who built it", "the sea"]} if command == "embed" else {"query": "who", "texts": ["the sea", "on"]}
    )
    (one,), (other,) = served(folder, [asked]), served(exports[command], [asked])
    (name,) = one
    np.testing.assert_allclose(one[name], other[name], atol=CLOSE)
    copy = tmp_path / "moved"
    shutil.move(folder, copy)  # nothing in the folder names its place
    assert served(copy, [asked]) == [one]
