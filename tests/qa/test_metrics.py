"""The SQuAD metrics against a naive version written from the published definition, and by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.errors import DataError
from whet.tasks.qa.metrics import normalise, squad_metrics, word_f1
from whet.tasks.qa.types import Answers, Predictions, Questions

_V2_KEYS = ["exact", "f1", "total"]
_BEST_KEYS = ["best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh"]


def _questions(answers: list[list[str]]) -> Questions:
    n = len(answers)
    return Questions(
        ids=[f"q{i}" for i in range(n)],
        questions=["?"] * n,
        answers=[Answers(tuple(texts), (0,) * len(texts)) for texts in answers],
        context_of=np.zeros(n, dtype=np.int64),
        contexts=[""],
    )


def _predictions(texts: list[str], odds: list[float] | None = None) -> Predictions:
    ids = [f"q{i}" for i in range(len(texts))]
    return Predictions(
        best=dict(zip(ids, texts, strict=True)),
        nbest={},
        null_odds=None if odds is None else dict(zip(ids, odds, strict=True)),
    )


def _score(texts: list[str], answers: list[list[str]], odds: list[float] | None = None) -> dict[str, float]:
    return squad_metrics(_questions(answers), _predictions(texts, odds), version_2=odds is not None)


# --- the naive version: one rule of the definition at a time, character by character ----------------------------------


def _naive_words(text: str) -> list[str]:
    kept = [c for c in text.lower() if c not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"]
    # An article stands between two ends of a word; word characters are letters, digits and the underscore.
    done, word = "", ""
    for c in [*kept, " "]:
        if c.isalnum() or c == "_":
            word += c
        else:
            done += (" " if word in ("a", "an", "the") else word) + c
            word = ""
    return done.split()


def _naive_f1(predicted: list[str], wanted: list[str]) -> float:
    left, same = list(wanted), 0
    for word in predicted:
        if word in left:
            left.remove(word)
            same += 1
    # Harmonic mean of same / predicted and same / wanted, multiplied out.
    return 2 * same / (len(predicted) + len(wanted)) if same else 0.0


def _naive_pair(text: str, answers: list[str], v2: bool) -> tuple[float, float]:
    predicted, wanted = _naive_words(text), [_naive_words(answer) for answer in answers]
    if v2:
        wanted = [words for words in wanted if words] or [[]]
    exact = max(float(predicted == words) for words in wanted)
    if v2:
        return exact, max(
            _naive_f1(predicted, words) if predicted and words else float(predicted == words) for words in wanted
        )
    return exact, max(_naive_f1(predicted, words) for words in wanted)


def _naive_best(
    scores: list[float], texts: list[str], answers: list[list[str]], odds: list[float]
) -> tuple[float, float]:
    """Answer the n questions of lowest odds, for every n, and count anew."""
    order = sorted(range(len(odds)), key=lambda i: odds[i])
    best, threshold = -1.0, 0.0
    for n in range(len(odds) + 1):
        points = 0.0
        for i in range(len(odds)):
            if i in order[:n]:
                points += scores[i] if answers[i] else float(not texts[i])
            else:
                points += float(not answers[i])
        if points > best + 1e-12:  # the sums are made in another order than ours
            best, threshold = points, odds[order[n - 1]] if n else 0.0
    return 100 * best / len(odds), threshold


def _naive_v2(texts: list[str], answers: list[list[str]], odds: list[float]) -> dict[str, float]:
    pairs = [_naive_pair(text, refs, True) for text, refs in zip(texts, answers, strict=True)]
    out: dict[str, float] = {}
    for prefix, wanted in (("", (True, False)), ("HasAns_", (True,)), ("NoAns_", (False,))):
        group = [pair for pair, refs in zip(pairs, answers, strict=True) if bool(refs) in wanted]
        if group:
            means = [100 * sum(column) / len(group) for column in zip(*group, strict=True)]
            out |= {f"{prefix}exact": means[0], f"{prefix}f1": means[1], f"{prefix}total": len(group)}
    for i, name in enumerate(("exact", "f1")):
        out[f"best_{name}"], out[f"best_{name}_thresh"] = _naive_best([p[i] for p in pairs], texts, answers, odds)
    return out


# --- made cases ------------------------------------------------------------------------------------------------------

_WORD = st.sampled_from(
    [
        "",
        "a",
        "The",
        "an",
        "cat",
        "CAT",
        "cat's",
        "the-cat",
        "a_cat",
        "anthem",
        "ÉTÉ",
        "été",
        "中",
        "İ",
        "ß",
        "%",
        "«the»",
        "2",
    ]
)
_SPACE = st.sampled_from([" ", "  ", "\t", "\u00a0", "-", ", ", "/"])


@st.composite
def _answer(draw) -> str:
    words = draw(st.lists(_WORD, max_size=5))
    return "".join(word + draw(_SPACE) for word in words[:-1]) + (words[-1] if words else "")


@st.composite
def _scored(draw, fewest: int) -> tuple[str, list[str]]:
    """A prediction, often empty or right, and the references."""
    references = draw(st.lists(_answer(), min_size=fewest, max_size=3))
    return draw(st.one_of(st.sampled_from(["", *references]), _answer())), references


_ODDS = st.one_of(st.integers(-2, 2).map(float), st.floats(-30, 30, width=32))


@settings(max_examples=75, deadline=None)
@given(st.lists(_scored(fewest=1), min_size=1, max_size=6))
def test_v1_equals_the_naive_count(rows: list[tuple[str, list[str]]]) -> None:
    texts, answers = [list(column) for column in zip(*rows, strict=True)]
    pairs = [_naive_pair(text, refs, False) for text, refs in rows]
    wanted = {
        "exact_match": 100 * sum(p[0] for p in pairs) / len(rows),
        "f1": 100 * sum(p[1] for p in pairs) / len(rows),
    }
    # float64 sums of a few terms in another order
    assert _score(texts, answers) == pytest.approx(wanted, abs=1e-9)


@settings(max_examples=75, deadline=None)
@given(st.lists(st.tuples(_scored(fewest=0), _ODDS), min_size=1, max_size=6))
def test_v2_equals_the_naive_count(rows: list[tuple[tuple[str, list[str]], float]]) -> None:
    texts, answers, odds = [text for (text, _), _ in rows], [refs for (_, refs), _ in rows], [x for _, x in rows]
    got, wanted = _score(texts, answers, odds), _naive_v2(texts, answers, odds)
    assert list(got) == list(wanted)
    assert got == pytest.approx(wanted, abs=1e-9)  # as above


# --- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("The  Cat, sat.", "cat sat"),
        ("a.n apple", "apple"),  # punctuation goes first, which leaves the article "an"
        ("The-cat", "thecat"),  # so here no article is left
        ("anthem of a land", "anthem of land"),
        ("l'été\u00a0à Paris", "lété à paris"),
        ("«the» 中", "« » 中"),  # only ASCII punctuation goes, but these quotes do end a word
        ("$5,000", "5000"),
        ("the", ""),
    ],
)
def test_normalise_matches_the_official_script(text: str, wanted: str) -> None:
    assert normalise(text) == wanted


def test_word_f1_matches_values_by_hand() -> None:
    # Shared: "to" once and "be" once, of 3 and 2 words: precision 2/3, recall 1, F1 = (4/3) / (5/3) = 4/5.
    assert word_f1("to be to", "to be") == pytest.approx(0.8)
    assert word_f1("x", "y") == 0.0
    assert word_f1("", "") == 0.0  # v1.1 says so


def test_v1_matches_values_by_hand() -> None:
    # 1: equal once the article and the dot are gone: 1, 1. 2: the second reference is better: of 2 predicted words 1 is
    # shared, of 1 wanted word 1: F1 = 2 * (1/2 * 1) / (3/2) = 2/3, not exact. 3: nothing shared. 4: only articles on
    # both sides: equal, but F1 0 by v1.1.
    got = _score(["the cat.", "red car", "x", "a"], [["Cat"], ["blue", "car"], ["y"], ["the"]])
    assert got == pytest.approx({"exact_match": 50.0, "f1": 100 * (1 + 2 / 3) / 4})


def test_v2_matches_values_by_hand() -> None:
    texts = ["the cat", "red car", "", "dog", ""]
    answers = [["cat"], ["car"], ["bird"], [], []]
    odds = [-4.0, -2.0, 3.0, -3.0, 5.0]
    # exact 1 0 0 0 1; F1 1, 2/3, 0, 0, 1. Two of five have no answer: answering nothing scores 2.
    # In the order of odds, answering gains: q0 +1 (3), q3 -1 (2), q1 +0 (2) or +2/3 (8/3), q2 +0, q4 +0.
    # So both are best with q0 alone: 3 of 5, at the odds of q0.
    assert _score(texts, answers, odds) == pytest.approx(
        {
            "exact": 40.0,
            "f1": 100 * (2 + 2 / 3) / 5,
            "total": 5,
            "HasAns_exact": 100 / 3,
            "HasAns_f1": 100 * (1 + 2 / 3) / 3,
            "HasAns_total": 3,
            "NoAns_exact": 50.0,
            "NoAns_f1": 50.0,
            "NoAns_total": 2,
            "best_exact": 60.0,
            "best_exact_thresh": -4.0,
            "best_f1": 60.0,
            "best_f1_thresh": -4.0,
        }
    )


def test_v2_omits_groups_without_questions() -> None:
    assert list(_score(["x"], [["x"]], [0.0])) == [*_V2_KEYS, *(f"HasAns_{key}" for key in _V2_KEYS), *_BEST_KEYS]
    assert list(_score([""], [[]], [0.0])) == [*_V2_KEYS, *(f"NoAns_{key}" for key in _V2_KEYS), *_BEST_KEYS]


def test_v2_answer_of_only_articles_counts_as_has_answer() -> None:
    got = _score(["", "the", "x"], [["the"], ["a"], ["an"]], [0.0, 0.0, 0.0])
    assert got["HasAns_exact"] == got["HasAns_f1"] == pytest.approx(200 / 3)


def test_v2_unanswered_question_below_the_threshold_is_correct() -> None:
    # Both right: up to -4, the first is answered with "", which is right as well.
    got = _score(["", "x"], [[], ["x"]], [-5.0, -4.0])
    assert (got["best_exact"], got["best_exact_thresh"]) == (100.0, -4.0)


def test_v2_threshold_is_zero_if_no_answer_is_best() -> None:
    got = _score(["x", "y"], [[], []], [-9.0, -8.0])
    assert got["best_f1"] == 100.0
    assert got["best_f1_thresh"] == 0.0


def test_right_answers_score_100_on_real_data(xquad_dir: Path) -> None:
    data = json.loads((xquad_dir / "dev.json").read_text(encoding="utf-8"))["data"]
    asked = [qa for article in data for paragraph in article["paragraphs"] for qa in paragraph["qas"]]
    answers = [[answer["text"] for answer in qa["answers"]] for qa in asked]
    assert _score([texts[-1] for texts in answers], answers) == {"exact_match": 100.0, "f1": 100.0}


# --- what is refused -------------------------------------------------------------------------------------------------


def _refused(questions: Questions, predictions: Predictions, *, version_2: bool) -> list[str]:
    with pytest.raises(DataError) as caught:
        squad_metrics(questions, predictions, version_2=version_2)
    return [problem.what for problem in caught.value.problems]


def test_v1_refuses_questions_without_answers() -> None:
    found = _refused(_questions([["x"], []]), _predictions(["x", "y"]), version_2=False)
    assert found == ["1 of 2 questions have no reference answer"]
