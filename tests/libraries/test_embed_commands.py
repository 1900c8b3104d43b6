"""`whet embed`, `rerank`, `predict` and `search` against sentence-transformers' trainers, evaluators and folders."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny_encoders import sentences
from transformers import AutoModelForSequenceClassification

from whet.cli.main import run
from whet.precision import compare
from whet.store import manifest
from whet.tasks.embed import job

pytest.importorskip("sentence_transformers", reason="needs sentence-transformers: make test-libraries installs it")
import sentence_transformers as library
from safetensors.torch import load_file
from sentence_transformers.cross_encoder import losses as cross_encoder_losses
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

CURVE_TOLERANCE = 1e-4
"""Relative, of the losses of the steps: float32 sums in another order, as in `test_sentence_transformers.py`."""
METRIC_TOLERANCE = 1e-6
N_ROWS, N_STEPS = 80, 12


def write(path: Path, columns: dict[str, list[Any]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows(zip(*columns.values(), strict=True))
    return str(path)


def texts(seed: int) -> list[str]:
    return [f"{n} {text}" for n, text in enumerate(sentences(N_ROWS, seed))]


def scores() -> list[float]:
    return [round(float(value), 3) for value in np.random.default_rng(4).random(N_ROWS)]


def whet(*words: object, code: int = 0) -> None:
    assert run([*map(str, words)]) == code


def losses_of(folder: Path) -> list[float]:
    state = json.loads((folder / "trainer_state.json").read_text("utf-8"))
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


TRAINING = ("--max_steps", N_STEPS, "--logging_steps", 1, "--per_device_train_batch_size", 8, "--learning_rate", 1e-3,
            "--seed", 3, "--save_strategy", "no", "--precision", "fp32", "--use_cpu")  # fmt: skip


def of_library(task: str, folder: Path, **more: Any) -> Any:
    """Return the library's own training arguments for the same run."""
    kind = "SentenceTransformer" if task == "embed" else "CrossEncoder"
    return getattr(library, f"{kind}TrainingArguments")(
        str(folder), max_steps=N_STEPS, logging_steps=1, per_device_train_batch_size=8, learning_rate=1e-3, seed=3,
        warmup_steps=0.1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, **more,
    )  # fmt: skip


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def require_worst_first(out: Path) -> None:
    """The errors are those of the predictions whose first text is a wrong one, from the last place up; they are counted
    and the report shows them."""
    listed, counted = lines_of(out / "errors.jsonl"), json.loads((out / "eval_results.json").read_text("utf-8"))
    ranks = [line["rank"] or np.inf for line in listed]
    n_wrong = sum(rank != 1 for rank in ranks)
    assert ranks == sorted(ranks, reverse=True)
    assert n_wrong == sum(line["rank"] != 1 for line in lines_of(out / "eval_predictions.jsonl"))
    assert (counted["eval_queries_wrong"], counted["eval_queries_judged"]) == (n_wrong, N_ROWS)
    page = (out / "report.html").read_text("utf-8")
    assert listed[0]["text"] in page
    assert 'data-label="rank"' in page


EMBED: dict[str, tuple[dict[str, list[Any]], list[object], Any]] = {
    "pairs": ({"frage": texts(1), "antwort": texts(2)}, [], losses.MultipleNegativesRankingLoss),
    "cached, matryoshka": (
        {"query": texts(1), "answer": texts(2)},
        ["--loss", "CachedMultipleNegativesRankingLoss", "--mini_batch_size", 3, "--matryoshka_dims", "8,32"],
        lambda model: losses.MatryoshkaLoss(
            model, losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3), [32, 8]
        ),
    ),
    "scores": ({"one": texts(1), "two": texts(2), "fits": scores()}, [], losses.CoSENTLoss),
    "triplets": (
        {"anchor": texts(1), "positive": texts(2), "negative": texts(3)},
        ["--loss", "TripletLoss"],
        losses.TripletLoss,
    ),
}
NAMES = {"frage": "anchor", "antwort": "positive", "query": "anchor", "answer": "positive",
         "one": "sentence_A", "two": "sentence_B", "fits": "score"}  # fmt: skip


@pytest.mark.parametrize("case", EMBED)
def test_embed_has_the_curve_and_metrics_of_the_library(case: str, encoder_folder: Path, tmp_path: Path) -> None:
    columns, words, loss = EMBED[case]
    data, out = write(tmp_path / "data.csv", columns), tmp_path / "out"
    whet("embed", "--model_name_or_path", encoder_folder, "--train_file", data, "--validation_file", data, "--do_train",
         "--do_eval", "--output_dir", out, *TRAINING, *words)  # fmt: skip

    model = library.SentenceTransformer(str(encoder_folder), device="cpu")
    sampler = "no_duplicates" if case in ("pairs", "cached, matryoshka") else "batch_sampler"
    trainer = library.SentenceTransformerTrainer(
        model=model, args=of_library("embed", tmp_path / "plain", batch_sampler=sampler), loss=loss(model),
        train_dataset=Dataset.from_dict({NAMES.get(name, name): values for name, values in columns.items()}),
    )  # fmt: skip
    trainer.train()
    wanted = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(wanted) == N_STEPS
    assert wanted[0] != wanted[-1]
    np.testing.assert_allclose(losses_of(out), wanted, rtol=CURVE_TOLERANCE)

    trained = library.SentenceTransformer(str(out), device="cpu")
    found = json.loads((out / "eval_results.json").read_text("utf-8"))
    if "fits" in columns:
        assert {"eval_spearman_cosine", "start_spearman_cosine"} <= found.keys()
        one, two = (trained.encode(columns[name]) for name in ("one", "two"))
        predicted = trained.similarity_pairwise(one, two).numpy()
        told = lines_of(out / "eval_predictions.jsonl")
        np.testing.assert_allclose([line["predicted"] for line in told], predicted, atol=1e-5)
        apart = np.abs(np.argsort(np.argsort(predicted)) - np.argsort(np.argsort(columns["fits"])))
        listed = lines_of(out / "errors.jsonl")
        n = told.index(next(line for line in told if line["row"] == listed[0]["row"]))
        assert abs(apart[n] - apart.max()) <= 1  # equal scores of the data share their places
        return
    first, second, *others = columns.values()
    corpus = {f"d{n}": text for n, text in enumerate([*second, *(text for column in others for text in column)])}
    evaluator = InformationRetrievalEvaluator(
        {f"q{n}": text for n, text in enumerate(first)}, corpus, {f"q{n}": {f"d{n}"} for n in range(N_ROWS)}
    )
    own = evaluator(trained)
    for name in ("cosine_ndcg@10", "cosine_mrr@10", "cosine_recall@5"):
        assert found[f"eval_{name}"] == pytest.approx(own[name], abs=METRIC_TOLERANCE)
    require_worst_first(out)
    table = trained.similarity(trained.encode_query(first), trained.encode_document([*corpus.values()])).numpy()
    for n, line in enumerate(lines_of(out / "eval_predictions.jsonl")):
        assert line["text"] == first[n]
        assert line["predicted"] == [*corpus.values()][table[n].argmax()]
        if line["rank"] is not None:
            assert line["expected"] == second[n]
            least, most = (1 + (np.delete(table[n], n) > table[n][n] + near).sum() for near in (1e-6, -1e-6))
            assert least <= line["rank"] <= most
    card = (out / "README.md").read_text("utf-8")
    assert "sentence-transformers" in card
    assert str(tmp_path) not in card


def test_embed_resumes_bitwise_and_refuses_changes(
    dropout_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write(tmp_path / "data.csv", {"query": texts(1), "answer": texts(2)}), tmp_path / "out"
    words = ["embed", "--model_name_or_path", dropout_folder, "--train_file", data, "--do_train", *TRAINING,
             "--save_strategy", "steps", "--save_steps", 5, "--output_dir"]  # fmt: skip
    whet(*words, out)
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    shutil.copytree(out / "checkpoint-5", resumed / "checkpoint-5")
    whet(*words, resumed, "--resume_from_checkpoint", "auto")
    one, other = (load_file(folder / "model.safetensors") for folder in (out, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert losses_of(out) == losses_of(resumed)
    stopped = tmp_path / "stopped"
    line = [sys.executable, "-m", "whet", *map(str, words), str(stopped)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for printed in process.stdout:  # the first steps were taken
        if "step 2/" in printed:
            process.send_signal(signal.SIGINT)
            break
    _, told = process.communicate(timeout=120)
    assert process.returncode == 75, told
    assert "--resume_from_checkpoint" in told
    whet(*words, stopped, "--resume_from_checkpoint", "auto")
    other = load_file(stopped / "model.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in one)
    capsys.readouterr()
    for changed, said in (("--max_seq_length 9", "max_seq_length: None -> 9"), ("--seed 4", "seed: 3 in")):
        whet(*words, resumed, "--resume_from_checkpoint", "auto", *changed.split(), code=78)
        assert said in capsys.readouterr().err


def test_allowed_changes_of_settings_take_effect(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out, resumed = (
        write(tmp_path / "data.csv", {"a": texts(1), "b": texts(2)}),
        tmp_path / "out",
        tmp_path / "new",
    )
    words = ["embed", "--model_name_or_path", encoder_folder, "--train_file", data, "--do_train", *TRAINING,
             "--save_strategy", "steps", "--save_steps", 5, "--output_dir"]  # fmt: skip
    whet(*words, out)
    resumed.mkdir()
    shutil.copytree(out / "checkpoint-5", resumed / "checkpoint-5")
    words += [resumed, "--resume_from_checkpoint", "auto", "--learning_rate", 1e-2]
    capsys.readouterr()
    whet(*words, code=78)
    assert "--resume_allow_changes learning_rate" in capsys.readouterr().err
    whet(*words, "--resume_allow_changes", "learning_rate")
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("with a change that was allowed: learning_rate: 0.001 in the checkpoint -> 0.01 now") == 1
    assert "the checkpoint's stays" not in told

    def logged(folder: Path, name: str) -> list[float]:
        state = json.loads((folder / "trainer_state.json").read_text("utf-8"))
        return [entry[name] for entry in state["log_history"] if "loss" in entry]

    old, new = logged(out, "learning_rate"), logged(resumed, "learning_rate")
    assert new[:5] == old[:5]
    np.testing.assert_allclose(new[5:], [10 * one for one in old[5:]], rtol=1e-6)
    old, new = logged(out, "loss"), logged(resumed, "loss")
    assert new[:6] == old[:6]
    assert abs(new[6] - old[6]) > 1e-4  # the update of step 6 was another one


@pytest.mark.parametrize("allowed", ["", "--learning_rate 1e-2 --resume_allow_changes learning_rate"])
def test_optimizer_of_another_model_is_refused_in_a_sentence(
    allowed: str, encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write(tmp_path / "data.csv", {"a": texts(1), "b": texts(2)}), tmp_path / "out"
    words = ["embed", "--model_name_or_path", encoder_folder, "--train_file", data, "--do_train", *TRAINING,
             "--max_steps", 2, "--save_strategy", "steps", "--save_steps", 1, "--output_dir", out]  # fmt: skip
    whet(*words)
    shutil.rmtree(out / "checkpoint-2")
    path = out / "checkpoint-1" / "optimizer.json"
    state = json.loads(path.read_text("utf-8"))
    state["param_groups"] = state["param_groups"][:1]
    path.write_text(json.dumps(state), "utf-8")
    manifest.relist(path.parent, path.name)
    capsys.readouterr()
    whet(*words, "--resume_from_checkpoint", "auto", *allowed.split(), code=74)
    assert "does not fit this training" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("task", ["embed", "rerank"])
def test_changes_that_the_trainer_would_not_carry_out_are_refused(
    task: str, encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "data.csv", {"one": texts(1), "two": texts(2), "fits": scores()})
    words = [task, "--model_name_or_path", encoder_folder, "--train_file", data, "--do_train", *TRAINING,
             "--max_steps", 1, "--save_strategy", "steps", "--output_dir", tmp_path / "out"]  # fmt: skip
    whet(*words)
    words += ["--resume_from_checkpoint", "auto"]
    for change in ("--optim sgd", "--per_device_train_batch_size 4 --learning_rate 1e-2"):
        capsys.readouterr()
        whet(*words, *change.split(), code=78)
        told = capsys.readouterr().err
        assert "use the settings of the checkpoint" in told
        assert "--resume_allow_changes" not in told
    for name in ("optim", "rows_per_step"):
        whet(*words, "--resume_allow_changes", f"learning_rate,{name}", code=78)
        assert f"cannot resume with another {name}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("task", ["embed", "rerank"])
def test_formats_are_compared_on_rows_that_fit_into_memory(
    task: str, encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32 has memory for no row, and bf16 for all."""
    monkeypatch.setattr(compare, "LEAST_FLOP", 0.0)
    pass_in, tried = job._TrainerOfCommand._pass_in, list[str]()

    def scarce(trainer: Any, products: str, batch: Any) -> None:
        tried.append(products)
        if products == "fp32":
            raise torch.OutOfMemoryError("CUDA out of memory")
        pass_in(trainer, products, batch)

    monkeypatch.setattr(job._TrainerOfCommand, "_pass_in", scarce)
    data = write(tmp_path / "data.csv", {"one": texts(1), "two": texts(2), "fits": scores()})
    whet(task, "--model_name_or_path", encoder_folder, "--train_file", data, "--do_train", *TRAINING,
         "--max_steps", 1, "--precision", "auto", "--output_dir", tmp_path / "out")  # fmt: skip
    assert tried == [*["fp32"] * 4, "bf16"], "8 rows, 4, 2, and one"
    said = " ".join(capsys.readouterr().out.split())
    assert "precision: bf16 (auto: there is no memory for one row in fp32)" in said


@pytest.mark.parametrize("task", ["embed", "rerank"])
def test_overwriting_removes_the_checkpoints_of_the_earlier_run(
    task: str, encoder_folder: Path, tmp_path: Path
) -> None:
    data, out = write(tmp_path / "data.csv", {"one": texts(1), "two": texts(2), "fits": scores()}), tmp_path / "out"
    words = [task, "--model_name_or_path", encoder_folder, "--train_file", data, "--do_train", *TRAINING,
             "--output_dir", out, "--overwrite_output_dir"]  # fmt: skip
    saving = ["--save_strategy", "steps", "--save_steps", 5]
    missing = {"embed": "cosine_ndcg@10", "rerank": "ndcg@10"}[task]  # which pairs with scores have not

    def steps() -> set[int]:
        return {int(path.name.removeprefix("checkpoint-")) for path in out.rglob("checkpoint-*")}

    whet(*words, *saving)
    assert steps() == {5, 10, 12}
    whet(*words, *saving, "--do_eval", "--validation_file", data, "--metric_for_best_model", missing,
         "--load_best_model_at_end", "--eval_strategy", "steps", "--eval_steps", 5, code=78)  # fmt: skip
    assert steps() == {5, 10, 12}, "a run that was refused has changed nothing"
    whet(*words, *saving, "--resume_from_checkpoint", "auto", "--max_steps", 13)
    assert steps() == {5, 10, 12, 13}, "a run that resumes keeps its own"
    whet(*words, "--max_steps", 2)
    assert steps() == set(), "no later run resumes what was overwritten"


def test_record_ends_when_the_run_does(encoder_folder: Path, tmp_path: Path) -> None:
    data, out = write(tmp_path / "data.csv", {"query": texts(1), "answer": texts(2)}), tmp_path / "out"
    words = ["embed", "--model_name_or_path", encoder_folder, "--train_file", data, "--do_train", *TRAINING,
             "--max_steps", 2, "--output_dir", out, "--overwrite_output_dir"]  # fmt: skip

    def recorded() -> list[dict[str, Any]]:
        lines = lines_of(out / "run.jsonl")
        return lines[max(n for n, line in enumerate(lines) if line["event"] == "begin") :]

    whet(*words, "--do_eval", "--validation_file", data)
    begin, *_, judged, end = recorded()
    assert begin["data"]["rows"] == N_ROWS
    assert begin["machine"]["cores"]
    assert judged["event"] == "evaluation"
    assert [line["status"] for line in recorded() if line["event"] == "end"] == ["finished"]
    assert end["metrics"].keys() >= {"train_loss", "eval_cosine_ndcg@10", "start_cosine_ndcg@10"}
    (out / "README.md").unlink()
    (out / "README.md" / "in the way").mkdir(parents=True)
    whet(*words, code=74)
    *_, end = recorded()
    assert (end["event"], end["status"]) == ("end", "failed")
    assert "README.md" in end["error"]


def test_folder_used_again_has_the_results_of_one_model(encoder_folder: Path, tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs.csv", {"query": texts(1), "answer": texts(2)})
    scored = write(tmp_path / "scored.csv", {"one": texts(1), "two": texts(2), "fits": scores()})
    out, other = tmp_path / "out", tmp_path / "other"

    def results() -> dict[str, Any]:
        return json.loads((out / "all_results.json").read_text("utf-8"))

    def train(folder: Path, *more: object) -> None:
        whet("embed", "--model_name_or_path", encoder_folder, "--output_dir", folder, "--train_file", pairs,
             "--do_train", "--overwrite_output_dir", *TRAINING, *more)  # fmt: skip

    def evaluate(model: Path, file: str) -> None:
        whet("embed", "--model_name_or_path", model, "--output_dir", out, "--validation_file", file, "--do_eval",
             "--use_cpu")  # fmt: skip

    train(out, "--do_eval", "--validation_file", pairs)
    assert {"eval_cosine_ndcg@10", "start_cosine_ndcg@10", "train_loss"} <= results().keys()
    evaluate(out, scored)
    assert {"eval_spearman_cosine", "train_loss"} <= results().keys()
    assert not [name for name in results() if "ndcg" in name], "those of other data, before the training too"
    assert "Curves" in (out / "report.html").read_text("utf-8")
    train(other, "--seed", 5)
    evaluate(other, scored)
    assert "train_loss" not in results()
    assert "Curves" not in (out / "report.html").read_text("utf-8")
    train(out)
    assert not [name for name in results() if name.startswith(("eval_", "start_"))]
    assert not (out / "errors.jsonl").exists()
    page = (out / "report.html").read_text("utf-8")
    assert "Curves" in page
    assert "spearman" not in page


def test_embedding_model_predicts_and_searches(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A SentenceTransformer that was not trained here: with a Normalize, a prompt, and no whet_task.json."""
    folder = tmp_path / "model"
    parts = library.SentenceTransformer(str(encoder_folder), device="cpu")
    normalize = library.sentence_transformer.modules.Normalize()
    model = library.SentenceTransformer(modules=[*parts, normalize], prompts={"query": "who "}, device="cpu")
    model.save(str(folder))
    corpus, queries = texts(2), texts(1)[:5]
    file, asked = write(tmp_path / "corpus.csv", {"id": [*range(N_ROWS)], "body": corpus}), tmp_path / "queries.txt"
    asked.write_text("\n".join(queries) + "\n", "utf-8")

    whet("predict", folder, "--file", file, "--output", tmp_path / "v.npy")
    whet("predict", folder, "--file", file, "--output", tmp_path / "v.jsonl")
    wanted = model.encode_document(corpus)
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), wanted, atol=1e-5)  # float32 rounding over a few layers
    rows = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text("utf-8").splitlines()]
    np.testing.assert_allclose([row["vector"] for row in rows], wanted, atol=1e-5)

    whet("predict", folder, "--file", asked, "--corpus_file", file, "--top_k", 3, "--output", tmp_path / "m.jsonl")
    found = [json.loads(line)["matches"] for line in (tmp_path / "m.jsonl").read_text("utf-8").splitlines()]
    scores = model.similarity(model.encode_query(queries), wanted)
    np.testing.assert_allclose(
        [[one["score"] for one in row] for row in found], scores.topk(3).values.numpy(), atol=1e-5
    )
    capsys.readouterr()
    whet("search", folder, "--corpus", file, "--query", queries[0], "--top_k", 1)
    assert found[0][0]["row"] in capsys.readouterr().out

    repeated = write(tmp_path / "repeated.csv", {"body": [text for text in corpus for _ in range(3)]})
    whet("search", folder, "--corpus", repeated, "--query", queries[0], "--top_k", 5, "--json")
    said = json.loads(capsys.readouterr().out)
    hits = said["results"][0]["hits"]
    assert len({hit["text"] for hit in hits}) == 5
    assert hits[0]["score"] == pytest.approx(found[0][0]["score"], abs=1e-5)
    assert any("equal ones are found once" in one for one in said["warnings"])


def test_a_classifier_is_not_taken_for_an_embedding_model(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(encoder_folder, tmp_path / "classifier")
    AutoModelForSequenceClassification.from_pretrained(encoder_folder).save_pretrained(model)
    data = write(tmp_path / "data.csv", {"body": texts(1)})
    whet("search", model, "--corpus", data, "--query", "who?", code=78)
    assert "the model has not learnt to embed" in capsys.readouterr().err


RERANK: dict[str, tuple[dict[str, list[Any]], list[object], Any]] = {
    "scores": (
        {"query": texts(1), "text": texts(2), "label": scores()},
        [],
        cross_encoder_losses.BinaryCrossEntropyLoss,
    ),
    "pairs": (  # with all of a batch: which are drawn follows from the step here, and from every earlier draw there
        {"query": texts(1), "text": texts(2)},
        ["--num_negatives", "null"],
        lambda model: cross_encoder_losses.MultipleNegativesRankingLoss(model, num_negatives=None),
    ),
}


@pytest.mark.parametrize("case", RERANK)
def test_rerank_has_the_curve_and_scores_of_the_library(case: str, encoder_folder: Path, tmp_path: Path) -> None:
    columns, words, loss = RERANK[case]
    data, out = write(tmp_path / "data.csv", columns), tmp_path / "out"
    whet("rerank", "--model_name_or_path", encoder_folder, "--train_file", data, "--validation_file", data,
         "--do_train", "--do_eval", "--output_dir", out, *TRAINING, *words)  # fmt: skip
    args = of_library("rerank", tmp_path / "plain", **({} if case == "scores" else {"batch_sampler": "no_duplicates"}))
    torch.manual_seed(3)  # the new head is drawn from the seed of the run
    model = library.CrossEncoder(str(encoder_folder), num_labels=1, device="cpu")
    trainer = library.CrossEncoderTrainer(
        model=model, args=args, loss=loss(model), train_dataset=Dataset.from_dict(columns)
    )
    trainer.train()
    wanted = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    np.testing.assert_allclose(losses_of(out), wanted, rtol=CURVE_TOLERANCE)
    name = "eval_spearman" if case == "scores" else "eval_ndcg@10"
    assert name in json.loads((out / "eval_results.json").read_text("utf-8"))

    whet("predict", out, "--file", data, "--output", tmp_path / "s.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text("utf-8").splitlines()]
    trained = library.CrossEncoder(str(out), device="cpu")
    pairs = [*zip(columns["query"], columns["text"], strict=True)]
    np.testing.assert_allclose([row["score"] for row in rows], trained.predict(pairs), atol=1e-5)
    told = lines_of(out / "eval_predictions.jsonl")
    if case == "scores":
        np.testing.assert_allclose([line["predicted"] for line in told], trained.predict(pairs), atol=1e-5)
        return
    require_worst_first(out)
    for key in ("expected", "predicted"):
        wanted = trained.predict([(line["text"], line[key]) for line in told])
        np.testing.assert_allclose([line[f"score_of_{key}"] for line in told], wanted, atol=1e-5)
    assert all(line["score_of_predicted"] >= line["score_of_expected"] for line in told)


def test_a_reranker_scores_the_columns_that_it_was_trained_on(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    title, body, question, answer = (texts(seed) for seed in (1, 2, 3, 4))
    columns = {"title": title, "body": body, "question": question, "answer": answer, "score": scores()}
    data, out = write(tmp_path / "data.csv", columns), tmp_path / "out"
    whet("rerank", "--model_name_or_path", encoder_folder, "--train_file", data, "--do_train", "--output_dir", out,
         "--anchor_column_name", "title", "--positive_column_name", "body", *TRAINING)  # fmt: skip
    trained = library.CrossEncoder(str(out), device="cpu")
    other = write(tmp_path / "other.csv", {"title": title, "question": question, "answer": answer})
    for file, pair, said in (
        (data, (title, body), "text: title; second text: body"),
        (other, (question, answer), "it has no body, which the training read"),
    ):
        capsys.readouterr()
        whet("predict", out, "--file", file, "--output", tmp_path / "s.jsonl")
        found = [line["score"] for line in lines_of(tmp_path / "s.jsonl")]
        np.testing.assert_allclose(found, trained.predict([*zip(*pair, strict=True)]), atol=1e-5)
        assert said in " ".join(capsys.readouterr().out.split())
    whet("predict", out, "--file", other, "--text_column_names", "title", code=65)
    assert "no column is named body" in capsys.readouterr().err


def test_mined_negatives_train_a_reranker_that_orders_a_search(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write(tmp_path / "data.csv", {"query": texts(1), "answer": texts(2)}), tmp_path / "out"
    whet("rerank", "--model_name_or_path", encoder_folder, "--train_file", data, "--do_train", "--output_dir", out,
         "--num_hard_negatives", 2, "--hard_negatives_model", encoder_folder, "--hard_negatives_margin", 0,
         *TRAINING)  # fmt: skip
    said = capsys.readouterr().out
    assert "hard negatives: 2 for each of" in said
    whet("search", encoder_folder, "--corpus", data, "--text_column_names", "answer", "--query", texts(1)[0],
         "--reranker", out, "--top_k", 2)  # fmt: skip
    assert capsys.readouterr().out.count("line ") == 2
