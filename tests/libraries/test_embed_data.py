"""`whet embed` and `rerank` on pairs whose texts repeat, that are few, or that say little: all of it is counted."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny_encoders import save_encoder, sentences
from transformers import AutoModel

from whet.cli.main import run
from whet.tasks.embed.batches import DistinctTexts
from whet.watch import record

pytest.importorskip("sentence_transformers", reason="needs sentence-transformers: make test-libraries installs it")
import sentence_transformers as library
from sentence_transformers.base.sampler import NoDuplicatesBatchSampler

pytestmark = pytest.mark.filterwarnings("default")  # those of these libraries are not whet's
CLOSE = 1e-5
"""Of a score: float32 rounding over a few layers, without padding and with it."""
N_ROWS, SIZE = 60, 16
USUAL = ("--logging_steps", 1, "--per_device_train_batch_size", SIZE, "--learning_rate", 1e-3, "--seed", 3,
         "--save_strategy", "no", "--precision", "fp32", "--use_cpu")  # fmt: skip


def texts(seed: int, n_rows: int = N_ROWS) -> list[str]:
    return [f"{n} {text}" for n, text in enumerate(sentences(n_rows, seed))]


def write(path: Path, **columns: list[Any]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows(zip(*columns.values(), strict=True))
    return path


def whet(*words: object, code: int = 0) -> None:
    assert run([*map(str, words)]) == code, words


def of(task: str, model: Path, data: Path, out: Path, *more: object) -> list[object]:
    """Return the words of a training with an evaluation on the same pairs."""
    return [task, "--model_name_or_path", model, "--train_file", data, "--validation_file", data, "--do_train",
            "--do_eval", "--output_dir", out, *USUAL, *more]  # fmt: skip


def said(captured: pytest.CaptureFixture[str]) -> str:
    """Return what was printed, in one line."""
    found = captured.readouterr()
    return " ".join((found.out + found.err).split())


def results(out: Path, name: str = "eval") -> dict[str, Any]:
    return json.loads((out / f"{name}_results.json").read_text("utf-8"))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


# ---- batches ----


@pytest.mark.parametrize("answers", ["different", "some again"])
def test_batches_are_those_of_the_librarys_sampler(answers: str) -> None:
    again = 10**6 if answers == "different" else 40
    columns = {"anchor": texts(1), "positive": [f"answer {n * n % again}" for n in range(N_ROWS)]}
    theirs = NoDuplicatesBatchSampler(
        Dataset.from_dict(columns), SIZE, drop_last=False, generator=torch.Generator(), seed=3
    )
    ours = DistinctTexts([*columns.values()], SIZE, drop_last=False, seed=3)
    assert (len(ours) == len(theirs)) == (answers == "different")
    for epoch in range(3):
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        if answers == "different" or epoch == 0:
            assert [*ours] == [*theirs]


def test_every_pair_is_trained_though_many_have_one_answer(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write(tmp_path / "faq.csv", question=texts(1), answer=[texts(2)[n % 6] for n in range(N_ROWS)]), "out"
    words = of("embed", encoder_folder, data, tmp_path / out, "--num_train_epochs", 2)
    whet(*words)
    assert "batches hold 6.0 rows on average, of 16" in said(capsys)
    state = json.loads((tmp_path / out / "trainer_state.json").read_text("utf-8"))
    assert (state["global_step"], state["epoch"]) == (20, 2.0)
    found = results(tmp_path / out, "train")
    assert found["train_samples"] == N_ROWS
    assert found["train_samples_per_second"] * found["train_runtime"] == pytest.approx(2 * N_ROWS, rel=1e-2)
    parts = ("data", "forward_backward", "update")
    recorded = [
        one.rows_per_s * sum(one.seconds[part] for part in parts)
        for one in record.read(tmp_path / out).steps
        if one.rows_per_s is not None
    ]
    assert sum(recorded) == pytest.approx(2 * N_ROWS, rel=5e-2), "rows of small batches, not of full ones"

    whet(*words, "--max_steps", 3, "--overwrite_output_dir")
    found = results(tmp_path / out, "train")
    assert found["train_samples_per_second"] * found["train_runtime"] == pytest.approx(18, rel=1e-2)
    for task in ("embed", "rerank"):
        whet(*of(task, encoder_folder, data, tmp_path / "other", "--dataloader_drop_last"), code=78)
        assert "no batch is full, so that nothing would be trained" in said(capsys)


def test_resume_compares_the_negatives_that_were_mined(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, miner = write(tmp_path / "data.csv", query=texts(1), answer=texts(2)), tmp_path / "miner"
    shutil.copytree(encoder_folder, miner)
    words = of("rerank", encoder_folder, data, tmp_path / "out", "--num_hard_negatives", 2, "--hard_negatives_margin",
               0, "--hard_negatives_model", miner, "--save_strategy", "steps", "--save_steps", 2)  # fmt: skip
    whet(*words, "--max_steps", 2)
    whet(*words, "--max_steps", 4, "--resume_from_checkpoint", "auto")
    encoder = AutoModel.from_pretrained(miner)
    torch.manual_seed(9)
    for weight in encoder.parameters():
        weight.data = torch.randn_like(weight) * 0.1
    encoder.save_pretrained(miner)
    capsys.readouterr()
    whet(*words, "--max_steps", 6, "--resume_from_checkpoint", "auto", code=78)
    assert "the pairs of the training are others" in said(capsys)


# ---- what is judged ----


def test_reranker_is_judged_on_all_pairs_where_few_queries_have_both_kinds(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of Quora's questions, most of which come once."""
    questions = [f"question {max(n, 1)}" for n in range(N_ROWS)]
    columns = {"question1": questions, "question2": texts(2), "is_duplicate": [n % 2 for n in range(N_ROWS)]}
    data, out = write(tmp_path / "data.csv", **columns), tmp_path / "out"
    whet(*of("rerank", encoder_folder, data, out, "--max_steps", 2))
    told = said(capsys)
    assert "validation: 1 of 59 queries have a text that fits and one that does not" in told
    assert f"validation: {N_ROWS} pairs with scores" in told
    assert {"eval_spearman", "eval_pairs_judged"} <= results(out).keys()
    assert "eval_ndcg@10" not in results(out)
    assert len(lines_of(out / "eval_predictions.jsonl")) == N_ROWS


def test_queries_that_cannot_be_judged_are_counted(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queries = [f"query {n // 2}" for n in range(N_ROWS)]
    fits = [n % 2 if n < 50 else 1 for n in range(N_ROWS)]  # of the last five queries both texts fit
    data, out = write(tmp_path / "data.csv", query=queries, text=texts(2), label=fits), tmp_path / "out"
    whet(*of("rerank", encoder_folder, data, out, "--max_steps", 2))
    told = said(capsys)
    assert told.count("validation: 25 of 30 queries") == 2, "before the training and above the metrics"
    found = results(out)
    assert (found["eval_queries_judged"], found["eval_queries_left_out"]) == (25, 5)
    assert len(lines_of(out / "eval_predictions.jsonl")) == 25


@pytest.mark.parametrize("task", ["embed", "rerank"])
def test_an_evaluation_that_tells_nothing_apart_is_refused(
    task: str, encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = write(tmp_path / "train.csv", query=texts(1), answer=texts(2))
    one = write(tmp_path / "one.csv", query=texts(1), answer=["the sea"] * N_ROWS)
    whet(*of(task, encoder_folder, train, tmp_path / "out", "--validation_file", one), code=65)
    told = said(capsys)
    assert "the evaluation has nothing to tell apart" in told
    assert "--validation_split_percentage" in told
    scored = write(tmp_path / "scored.csv", one=texts(1, 4), two=texts(2, 4), score=[0.1, 0.4, 0.6, 0.9])
    whet(task, "--model_name_or_path", encoder_folder, "--train_file", scored, "--validation_split_percentage", 25,
         "--do_train", "--do_eval", "--output_dir", tmp_path / "out", *USUAL, code=65)  # fmt: skip
    assert "1 pair with scores, no two of which differ" in said(capsys)


def test_scores_of_a_reranker_are_those_that_its_metrics_are_of(tmp_path: Path) -> None:
    """Training rounds products to bf16, and evaluations do not."""
    encoder = save_encoder(tmp_path / "encoder", dropout=0.0)
    scores = [round(float(value), 3) for value in np.random.default_rng(4).random(N_ROWS)]
    data, out = write(tmp_path / "data.csv", one=texts(1), two=texts(2), score=scores), tmp_path / "out"
    whet(*of("rerank", encoder, data, out, "--max_steps", 3, "--precision", "bf16"))
    trained = library.CrossEncoder(str(out), device="cpu")
    wanted = trained.predict([*zip(texts(1), texts(2), strict=True)])
    found = [line["predicted"] for line in lines_of(out / "eval_predictions.jsonl")]
    np.testing.assert_allclose(found, wanted, atol=CLOSE)


# ---- what the training follows ----


def test_metric_that_the_evaluation_lacks_is_refused_before_the_training(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write(tmp_path / "data.csv", query=texts(1), answer=texts(2)), tmp_path / "out"
    words = of("embed", encoder_folder, data, out, "--eval_strategy", "steps", "--eval_steps", 2, "--max_steps", 4)
    best = ("--load_best_model_at_end", "--save_strategy", "steps", "--save_steps", 2)
    for follows in (best, ("--lr_scheduler_type", "reduce_lr_on_plateau")):
        whet(*words, *follows, "--overwrite_output_dir", "--metric_for_best_model", "cosine_accuracy", code=78)
        told = said(capsys)
        assert "metric_for_best_model names no metric of this evaluation" in told
        assert "cosine_ndcg@10" in told
        assert "step 1/4" not in told


def test_schedule_that_follows_the_metric_wants_it_to_rise(encoder_folder: Path, tmp_path: Path) -> None:
    data, out = write(tmp_path / "data.csv", query=texts(1), answer=texts(2)), tmp_path / "out"
    whet(*of("embed", encoder_folder, data, out, "--eval_strategy", "steps", "--eval_steps", 2, "--max_steps", 9,
             "--lr_scheduler_type", "reduce_lr_on_plateau", "--lr_scheduler_kwargs", '{"patience": 0}'))  # fmt: skip
    history = json.loads((out / "trainer_state.json").read_text("utf-8"))["log_history"]
    metrics = [entry["eval_cosine_ndcg@10"] for entry in history if "eval_runtime" in entry and entry["step"] < 9]
    rates = [entry["learning_rate"] for entry in history if "learning_rate" in entry]

    def last(mode: Any) -> float:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode, patience=0)
        for metric in metrics:
            schedule.step(metric)
        return optimizer.param_groups[0]["lr"]

    assert len(metrics) == 4
    assert last("min") != last("max")
    assert (rates[0], rates[-1]) == (1e-3, pytest.approx(last("max")))


def test_the_folder_of_tensorboard_can_be_named(
    encoder_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", os.devnull)  # it is put back after the test
    data, events = write(tmp_path / "data.csv", query=texts(1), answer=texts(2)), tmp_path / "events"
    whet(*of("embed", encoder_folder, data, tmp_path / "out", "--max_steps", 1, "--report_to", "tensorboard",
             "--logging_dir", events))  # fmt: skip
    assert [*events.rglob("events.out.tfevents.*")]
