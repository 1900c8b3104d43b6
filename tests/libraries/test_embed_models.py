"""Which models `whet embed`, `rerank`, `predict` and `search` use as what, and which prompts their texts begin with."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tiny_encoders import sentences
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hub_cache import cached
from whet.cli.main import run

pytest.importorskip("sentence_transformers", reason="needs sentence-transformers: make test-libraries installs it")
import sentence_transformers as library
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer import losses

pytestmark = pytest.mark.filterwarnings("default")  # those of these libraries are not whet's
CLOSE = 1e-5
"""Of a number of a vector or score: float32 rounding over a few layers, without padding and with it."""
CURVE_TOLERANCE = 1e-4
"""Relative, as in `test_embed_commands.py`."""
N_ROWS = 16
STEPS = ("--max_steps", 2, "--logging_steps", 1, "--per_device_train_batch_size", 8, "--learning_rate", 1e-3, "--seed",
         3, "--save_strategy", "no", "--precision", "fp32", "--use_cpu")  # fmt: skip
OF_LIBRARY: dict[str, Any] = {
    "max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "seed": 3,
    "warmup_steps": 0.1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
}  # fmt: skip
"""The same in the library's own training arguments."""
QUERY, PASSAGE = "who ", "the river "


def texts(seed: int) -> list[str]:
    return [f"{n} {text}" for n, text in enumerate(sentences(N_ROWS, seed))]


def write(path: Path, **columns: list[Any]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows(zip(*columns.values(), strict=True))
    return path


def whet(*words: object, code: int = 0) -> None:
    assert run([*map(str, words)]) == code, words


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def logged(history: list[dict[str, Any]]) -> list[float]:
    return [entry["loss"] for entry in history if "loss" in entry]


def losses_of(folder: Path) -> list[float]:
    return logged(json.loads((folder / "trainer_state.json").read_text("utf-8"))["log_history"])


def embedder(encoder: Path, folder: Path, **options: Any) -> Path:
    parts = [*library.SentenceTransformer(str(encoder), device="cpu")]
    library.SentenceTransformer(modules=parts, device="cpu", **options).save(str(folder))
    return folder


def classifier(encoder: Path, folder: Path, n_labels: int) -> Path:
    """Write a model of transformers with a head of so many labels, as another program saves it."""
    torch.manual_seed(n_labels)
    model = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=n_labels)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder).save_pretrained(folder)
    return folder


# ---- which model is used as what ----


def test_a_search_is_ordered_by_what_has_learnt_to_score(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write(tmp_path / "corpus.csv", body=texts(2))
    search = ["search", encoder_folder, "--corpus", corpus, "--query", texts(1)[0]]
    reranker, three = classifier(encoder_folder, tmp_path / "one", 1), tmp_path / "three"
    library.CrossEncoder(str(encoder_folder), num_labels=3, device="cpu").save(str(three))
    capsys.readouterr()
    whet(*search, "--reranker", reranker, "--top_k", 3, "--json")
    hits = json.loads(capsys.readouterr().out)["results"][0]["hits"]
    wanted = library.CrossEncoder(str(reranker), device="cpu").predict([(texts(1)[0], hit["text"]) for hit in hits])
    np.testing.assert_allclose([hit["score"] for hit in hits], wanted, atol=CLOSE)

    headless = shutil.copytree(reranker, tmp_path / "headless")
    kept = {name: one for name, one in load_file(reranker / "model.safetensors").items() if "classifier" not in name}
    save_file(kept, headless / "model.safetensors", {"format": "pt"})
    sparse = embedder(encoder_folder, tmp_path / "sparse")
    settings = sparse / "config_sentence_transformers.json"
    settings.write_text(settings.read_text("utf-8").replace('"SentenceTransformer"', '"SparseEncoder"'), "utf-8")
    pairs = write(tmp_path / "pairs.csv", query=texts(1), answer=texts(2))
    scored = write(tmp_path / "scored.csv", query=texts(1), text=texts(2), score=[n % 2 for n in range(N_ROWS)])
    of_rerank = ["rerank", "--output_dir", tmp_path / "out", "--model_name_or_path"]
    mine = ["--train_file", pairs, "--do_train", "--num_hard_negatives", 1, "--hard_negatives_model"]
    for words, said in (
        ([*search, "--reranker", embedder(encoder_folder, tmp_path / "embedder")], "--reranker names no reranker"),
        ([*search, "--reranker", encoder_folder], "--reranker names no reranker"),
        ([*search, "--reranker", headless], "no weights for classifier"),
        ([*search, "--reranker", three], "the reranker gives several labels"),
        (["predict", three, "--file", pairs, "--text_column_names", "query", "--corpus_file", corpus],
         "the reranker gives several labels"),
        (["search", sparse, *search[2:]], "--model names another kind of model"),
        ([*of_rerank, encoder_folder, "--validation_file", scored, "--do_eval"], "or train this one: --do_train"),
        ([*of_rerank, classifier(encoder_folder, tmp_path / "third", 3), "--train_file", scored, "--do_train"],
         "the reranker gives several labels"),
        ([*of_rerank, encoder_folder, *mine, reranker], "the model has not learnt to embed"),
        ([*of_rerank, encoder_folder, *mine, three], "--hard_negatives_model names a reranker"),
    ):  # fmt: skip
        capsys.readouterr()
        whet(*words, code=78)
        assert said in capsys.readouterr().err, words


def test_a_download_of_the_other_kind_is_refused(
    encoder_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SENTENCE_TRANSFORMERS_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    made = {
        "embedder": embedder(encoder_folder, tmp_path / "embedder"),
        "reranker": classifier(encoder_folder, tmp_path / "reranker", 1),
        "encoder": encoder_folder,
    }
    library.CrossEncoder(str(made["reranker"]), device="cpu").save(str(tmp_path / "saved"))
    made["saved"] = tmp_path / "saved"
    for name, folder in made.items():  # as the hub's client keeps a download
        there = tmp_path / "cache" / f"models--some--{name}"
        (there / "snapshots").mkdir(parents=True)
        (snapshot := there / "snapshots" / ("a" * 40)).mkdir()
        shutil.copytree(folder, there / "blobs")
        for file in (there / "blobs").rglob("*.*"):
            link = snapshot / file.relative_to(there / "blobs")
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(file)
        (there / "refs").mkdir()
        (there / "refs" / "main").write_text("a" * 40)
    search = ["--corpus", write(tmp_path / "corpus.csv", body=texts(2)), "--query", "who"]
    for words, said in (
        (["some/embedder", *search, "--reranker", "some/embedder"], "--reranker names no reranker"),
        (["some/embedder", *search, "--reranker", "some/encoder"], "--reranker names no reranker"),
        (["some/saved", *search], "--model names a reranker"),
        (["some/reranker", *search], "the model has not learnt to embed"),
    ):
        whet("search", *words, code=78)
        assert said in capsys.readouterr().err, words
    for reranker in ("some/reranker", "some/saved"):
        whet("search", "some/encoder", *search, "--reranker", reranker)


def test_the_kind_of_a_model_of_the_hub_is_told_as_that_of_a_folder(
    encoder_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class of transformers in either is one that other tasks have, too."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    library.CrossEncoder(str(classifier(encoder_folder, tmp_path / "one", 1)), device="cpu").save(
        str(tmp_path / "reranker")
    )
    embedder(encoder_folder, tmp_path / "embedder")
    file, output = write(tmp_path / "rows.csv", query=texts(1), text=texts(2)), tmp_path / "found.jsonl"
    for name, asked in (("reranker", []), ("embedder", ["--text_column_names", "query"])):
        cached(tmp_path / name, tmp_path / "cache", f"some/{name}")
        found = []
        for model in (tmp_path / name, f"some/{name}"):
            whet("predict", model, "--file", file, "--output", output, *asked)
            found.append(lines_of(output))
        assert found[0] == found[1]
        assert {"reranker": "score", "embedder": "vector"}[name] in found[0][0]


# ---- prompts ----


@pytest.mark.parametrize("named", ["its own", "none for documents"])
def test_documents_have_one_prompt_in_training_and_in_service(
    named: str, encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = embedder(encoder_folder, tmp_path / "base", prompts={"query": QUERY, "passage": PASSAGE})
    data, out = write(tmp_path / "data.csv", query=texts(1), answer=texts(2)), tmp_path / "out"
    more, prompt = ([], PASSAGE) if named == "its own" else (["--document_prompt", ""], "")
    whet("embed", "--model_name_or_path", base, "--train_file", data, "--validation_file", data, "--do_train",
         "--do_eval", "--output_dir", out, *STEPS, *more)  # fmt: skip
    model = library.SentenceTransformer(str(base), device="cpu")
    args = library.SentenceTransformerTrainingArguments(
        str(tmp_path / "plain"),
        batch_sampler="no_duplicates",
        prompts={"anchor": QUERY, "positive": prompt},
        **OF_LIBRARY,
    )
    rows = Dataset.from_dict({"anchor": texts(1), "positive": texts(2)})
    loss = losses.MultipleNegativesRankingLoss(model)
    trainer = library.SentenceTransformerTrainer(model=model, args=args, train_dataset=rows, loss=loss)
    trainer.train()
    np.testing.assert_allclose(losses_of(out), logged(trainer.state.log_history), rtol=CURVE_TOLERANCE)

    trained = library.SentenceTransformer(str(out), device="cpu")
    queries, documents = (trained.encode([f"{before}{text}" for text in some], prompt="")
                          for before, some in ((QUERY, texts(1)), (prompt, texts(2))))  # fmt: skip
    np.testing.assert_allclose(trained.encode_document(texts(2)), documents, atol=CLOSE)
    whet("predict", out, "--file", data, "--text_column_names", "answer", "--output", tmp_path / "v.npy")
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), documents, atol=CLOSE)
    capsys.readouterr()
    whet("predict", out, "--file", write(tmp_path / "asked.csv", query=texts(1)), "--output", tmp_path / "q.npy")
    np.testing.assert_allclose(np.load(tmp_path / "q.npy"), queries, atol=CLOSE)
    assert f"encoded as queries, the first texts of the training: {QUERY!r}" in " ".join(
        capsys.readouterr().out.split()
    )
    scores = trained.similarity(queries, documents).numpy()
    told = lines_of(out / "eval_predictions.jsonl")
    np.testing.assert_allclose([line["score_of_predicted"] for line in told], scores.max(1), atol=CLOSE)
    capsys.readouterr()
    whet("search", out, "--corpus", data, "--text_column_names", "answer", "--query", texts(1)[0], "--json")
    hits = json.loads(capsys.readouterr().out)["results"][0]["hits"]
    np.testing.assert_allclose([hit["score"] for hit in hits], np.sort(scores[0])[::-1][:5], atol=CLOSE)


def test_pairs_with_scores_are_encoded_alike(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = embedder(encoder_folder, tmp_path / "base", default_prompt_name="any",
                    prompts={"query": QUERY, "passage": PASSAGE, "any": "on "})  # fmt: skip
    scores = [round(float(value), 3) for value in np.random.default_rng(4).random(N_ROWS)]
    data, out = write(tmp_path / "data.csv", one=texts(1), two=texts(2), score=scores), tmp_path / "out"
    words = ["embed", "--model_name_or_path", base, "--train_file", data, "--validation_file", data, "--do_train",
             "--do_eval", "--output_dir", out, *STEPS]  # fmt: skip
    whet(*words, "--query_prompt", "query: ", code=78)
    assert "query_prompt would change nothing for pairs with scores" in capsys.readouterr().err
    whet(*words)
    model = library.SentenceTransformer(str(base), device="cpu")
    one, two = (model.encode([f"on {text}" for text in texts(seed)], prompt="") for seed in (1, 2))
    first = json.loads((out / "eval_results.json").read_text())["start_spearman_cosine"]
    np.testing.assert_allclose(first, rank_correlation(model.similarity_pairwise(one, two).numpy(), scores), atol=1e-6)
    args = library.SentenceTransformerTrainingArguments(str(tmp_path / "plain"), prompts="on ", **OF_LIBRARY)
    rows = Dataset.from_dict({"sentence_A": texts(1), "sentence_B": texts(2), "score": scores})
    trainer = library.SentenceTransformerTrainer(
        model=model, args=args, train_dataset=rows, loss=losses.CoSENTLoss(model)
    )
    trainer.train()
    np.testing.assert_allclose(losses_of(out), logged(trainer.state.log_history), rtol=CURVE_TOLERANCE)

    trained = library.SentenceTransformer(str(out), device="cpu")
    one, two = (trained.encode([f"on {text}" for text in texts(seed)], prompt="") for seed in (1, 2))
    alike = trained.similarity_pairwise(one, two).numpy()
    whet("predict", out, "--file", data, "--text_column_names", "one", "--text_pair_column_names", "two", "--output",
         tmp_path / "s.jsonl")  # fmt: skip
    for told, name in ((tmp_path / "s.jsonl", "score"), (out / "eval_predictions.jsonl", "predicted")):
        np.testing.assert_allclose([line[name] for line in lines_of(told)], alike, atol=CLOSE)
    for encode in (trained.encode, trained.encode_query, trained.encode_document):
        np.testing.assert_allclose(encode(texts(1)), one, atol=CLOSE)


def rank_correlation(one: Any, other: Any) -> float:
    places = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(np.stack(places))[0, 1])


def test_a_reranker_is_trained_with_the_prompt_of_its_predictions(encoder_folder: Path, tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    torch.manual_seed(0)
    library.CrossEncoder(
        str(encoder_folder), num_labels=1, device="cpu", prompts={"any": "who built "}, default_prompt_name="any"
    ).save(str(base))
    columns = {"query": texts(1), "text": texts(2), "label": [float(n % 2) for n in range(N_ROWS)]}
    data = write(tmp_path / "data.csv", **columns)
    whet("rerank", "--model_name_or_path", base, "--train_file", data, "--do_train", "--output_dir", out, *STEPS)
    model = library.CrossEncoder(str(base), device="cpu")
    trainer = library.CrossEncoderTrainer(
        model=model,
        args=library.CrossEncoderTrainingArguments(str(tmp_path / "plain"), prompts="who built ", **OF_LIBRARY),
        train_dataset=Dataset.from_dict(columns),
        loss=BinaryCrossEntropyLoss(model),
    )
    trainer.train()
    np.testing.assert_allclose(losses_of(out), logged(trainer.state.log_history), rtol=CURVE_TOLERANCE)


# ---- rows ----


def test_an_array_has_a_vector_of_each_row_or_is_refused(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = embedder(encoder_folder, tmp_path / "model")
    file, plain = write(tmp_path / "rows.csv", body=["a", "", "c"]), tmp_path / "rows.txt"
    plain.write_text("the sea\n\nthe bridge\n", "utf-8")
    array, lines = tmp_path / "v.NPY", tmp_path / "v.jsonl"
    for source, said in ((file, "1 bad row left out"), (plain, "1 blank line between the texts")):
        capsys.readouterr()
        whet("predict", model, "--file", source, "--skip_bad", "--output", array, code=65)
        assert said in capsys.readouterr().err
        assert not array.exists()
    whet("predict", model, "--file", file, "--skip_bad", "--output", lines, "--json")
    assert any("1 text is bad and was left out" in one for one in json.loads(capsys.readouterr().out)["warnings"])
    assert [line["row"] for line in lines_of(lines)] == ["line 2", "line 4"]
    whet("predict", model, "--file", plain, "--max_predict_samples", 1, "--output", array)
    assert np.load(array).shape == (1, 32)
    reranker = tmp_path / "reranker"
    library.CrossEncoder(str(encoder_folder), num_labels=1, device="cpu").save(str(reranker))
    pairs = write(tmp_path / "pairs.csv", query=texts(1), answer=texts(2))
    for other in (reranker, classifier(encoder_folder, tmp_path / "classifier", 2)):
        capsys.readouterr()
        whet("predict", other, "--file", pairs, "--output", tmp_path / "s.npy", code=78)
        assert "an array" in capsys.readouterr().err
