"""What a run of `whet qa` says of each question: its answer, and what it should have been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_qa import command, files, load, squad, without_answers, write_json

from text_tasks import load_lines
from whet.cli.main import run
from whet.tasks.qa.judge import around
from whet.tasks.qa.metrics import normalise

_LONG = {"num_train_epochs": 50, "learning_rate": 3e-3, "lr_scheduler_type": "cosine", "warmup_steps": 10}


@pytest.fixture(scope="module")
def trained(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that learns 25 questions by heart, five of them without an answer."""
    folder = tmp_path_factory.mktemp("runs") / "out"
    file = write_json(folder.parent / "v2.json", squad(version_2=True))
    assert run(command(encoder, folder, "--do_train", "--version_2_with_negative", train_file=file, **_LONG)) == 0
    return folder


def _question(document: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """The question of this id, and its context."""
    return next(
        (one, paragraph["context"])
        for paragraph in document["data"][0]["paragraphs"]
        for one in paragraph["qas"]
        if one["id"] == name
    )


def _with_other_answers() -> dict[str, Any]:
    """The questions, of which some have other answers than those that the model has learnt."""
    document = squad(version_2=True)
    for name, text in (("Mira-3", "sheep"), ("Tovan-0", "an old mill in Oldwick"), ("none-1", "water")):
        question, context = _question(document, name)
        question |= {"answers": [{"text": text, "answer_start": context.index(text)}], "is_impossible": False}
    question, context = _question(document, "Elsi-2")
    question |= {"answers": [], "is_impossible": True}
    question, context = _question(document, "Borin-1")
    question["answers"].append({"text": "the hills", "answer_start": context.index("the hills")})
    return document


@pytest.mark.slow
def test_errors_say_what_was_expected_and_where(trained: Path, tmp_path: Path, capsys: Any) -> None:
    document = _with_other_answers()
    file = write_json(tmp_path / "other.json", document)
    asked = command(trained, tmp_path / "out", "--do_eval", "--version_2_with_negative", validation_file=file)
    assert run(asked) == 0
    best = load(tmp_path / "out", "eval_predictions.json")
    nbest = load(tmp_path / "out", "eval_nbest_predictions.json")
    every = load_lines(tmp_path / "out" / "eval_predictions.jsonl")
    results = load(tmp_path / "out", "eval_results.json")
    assert [(line["row"], line["predicted"]) for line in every] == [*best.items()]
    assert np.mean([line["f1"] for line in every]) == pytest.approx(results["eval_f1"])
    assert 100 * np.mean([line["exact"] for line in every]) == pytest.approx(results["eval_exact"])
    for line in every:
        question, context = _question(document, line["row"])
        texts = [one["text"] for one in question["answers"]]
        assert line["question"] == question["question"]
        assert line["expected"] in (texts or [""])
        assert {line["expected"], *line.get("other_answers", [])} == set(texts or [""])
        for text in (line["expected"], line["predicted"]):
            assert text in line["context"]
        for piece in line["context"].split("…"):
            assert piece.strip() in context
        share = [one["probability"] for one in nbest[line["row"]] if one["text"] == line["predicted"]]
        assert sum(share) - 1e-6 <= line["score"] <= 1  # texts that differ in an article or a comma are one answer
    errors = load_lines(tmp_path / "out" / "errors.jsonl")
    wrong = [line for line in errors if not line["exact"]]
    assert errors[: len(wrong)] == wrong
    assert len(wrong) == results["eval_questions_wrong"] == sum(not line["exact"] for line in every)
    assert len(errors) == len(every) == results["eval_questions_judged"] == results["eval_questions_listed"] == 25
    assert {"Mira-3", "none-1", "Elsi-2", "Tovan-0"} <= {line["row"] for line in wrong}
    f1 = [line["f1"] for line in wrong]
    assert f1 == sorted(f1)
    assert next(line for line in wrong if line["row"] == "Elsi-2")["expected"] == ""
    said = capsys.readouterr().out
    assert f"wrong: {len(wrong)} of 25 questions, the worst first in errors.jsonl" in said
    shown = said.splitlines()[-4:-1]  # the report comes last
    assert all(line["question"] in one for line, one in zip(wrong, shown, strict=False))


@pytest.mark.slow
def test_probability_is_that_of_the_expected_answer(trained: Path, tmp_path: Path) -> None:
    file = write_json(tmp_path / "v2.json", squad(version_2=True))
    asked = command(trained, tmp_path / "out", "--do_eval", "--version_2_with_negative", validation_file=file)
    assert run(asked) == 0
    nbest = load(tmp_path / "out", "eval_nbest_predictions.json")
    for line in load_lines(tmp_path / "out" / "eval_predictions.jsonl"):
        wanted = normalise(line["expected"])
        shares = [one["probability"] for one in nbest[line["row"]] if normalise(str(one["text"])) == wanted]
        assert line["probability"] == (pytest.approx(sum(shares)) if shares else None)
        assert line["exact"] == (normalise(line["predicted"]) == wanted)
        if line["exact"]:
            assert line["score"] == line["probability"]


def test_questions_that_are_left_out_do_not_shift_the_others(trained: Path, tmp_path: Path) -> None:
    document = squad()
    question, _ = _question(document, "Mira-1")
    question["answers"][0]["answer_start"] += 1
    question, _ = _question(document, "Tovan-2")
    question["question"] = ""
    file = write_json(tmp_path / "bad.json", document)
    options = {"validation_file": file, "max_eval_samples": 9, "per_device_eval_batch_size": 2}
    assert run(command(trained, tmp_path / "out", "--do_eval", "--skip_bad", **options)) == 0
    every = load_lines(tmp_path / "out" / "eval_predictions.jsonl")
    assert not {"Mira-1", "Tovan-2"} & {line["row"] for line in every}
    assert len(every) >= 7
    errors = load_lines(tmp_path / "out" / "errors.jsonl")
    assert {line["row"] for line in errors} == {line["row"] for line in every}
    for line in [*every, *errors]:
        question, _ = _question(document, line["row"])
        assert (line["question"], line["expected"]) == (question["question"], question["answers"][0]["text"])


def test_test_split_of_which_some_answers_are_known_is_judged_by_these(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Version 1 has no metrics for questions without an answer, and a run ends well that meets them in a test split."""
    document = squad()
    for name in ("Mira-0", "Mira-2"):
        question, _ = _question(document, name)
        question["answers"] = []
    file = write_json(tmp_path / "test.json", document)
    assert run(command(trained, tmp_path / "out", "--do_predict", test_file=file)) == 0
    assert "2 questions without an answer, so it gets no metrics" in capsys.readouterr().err
    results = load(tmp_path / "out", "predict_results.json")
    assert "predict_f1" not in results
    assert results["predict_questions_judged"] == 18
    every = load_lines(tmp_path / "out" / "predict_predictions.jsonl")
    assert [line["row"] for line in every if line["expected"] is None] == ["Mira-0", "Mira-2"]
    errors = load_lines(tmp_path / "out" / "predict_errors.jsonl")
    assert len(errors) == 18
    assert not {"Mira-0", "Mira-2"} & {line["row"] for line in errors}
    write_json(file, without_answers(squad()))
    assert run(command(trained, tmp_path / "out", "--do_predict", test_file=file)) == 0
    assert "predict_errors.jsonl" not in files(tmp_path / "out")


def test_context_around_answers_is_cut_between_words() -> None:
    context = " ".join(f"word{n}" for n in range(500))
    begin, far = context.index("word100"), context.index("word400")
    found = around(context, [(far, far + 7), (begin, begin + 7)])
    first, second = found.removeprefix("… ").removesuffix(" …").split(" … ")
    for piece, word in ((first, "word100"), (second, "word400")):
        assert piece in context
        assert word in piece.split()
        assert set(piece.split()) <= set(context.split())
        assert 200 < len(piece) < 340
    assert around(context, [(begin, begin + 7), (begin + 50, begin + 57)]).count(" … ") == 0
    assert around("a short one", [(2, 7)]) == "a short one"
    assert around(context, []).startswith("word0 ")
    assert around("", [(-1, -1)]) == ""
