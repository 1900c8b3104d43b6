"""From logits to answers, against a naive version that keeps all logits and tries every pair of a window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.data.store import RowStore
from whet.errors import NonFiniteError
from whet.tasks.qa.decode import DecodeOptions, concat, decode, top_spans
from whet.tasks.qa.types import Answers, Predictions, Questions, SpanScores, Windows


@dataclass
class Window:
    """One row as a person would write it down; the arrays of `Windows` are made from a list of these."""

    question: int
    first: int  # index in the row of the first context token
    skipped: int  # tokens of the context before that one
    starts: list[float]  # start logit of each token of the row
    ends: list[float]
    offsets: list[tuple[int, int]]  # characters of the context tokens in the row


@dataclass
class Case:
    contexts: list[str]
    tokens: list[list[tuple[int, int]]]  # characters of every token of every context
    context_of: list[int]
    rows: list[Window]

    def questions(self) -> Questions:
        n = len(self.context_of)
        return Questions(
            ids=[f"q{i}" for i in range(n)],
            questions=["?"] * n,
            answers=[Answers()] * n,
            context_of=np.array(self.context_of, dtype=np.int64),
            contexts=self.contexts,
        )

    def windows(self) -> Windows:
        lengths = [len(row.starts) for row in self.rows]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return Windows(
            rows=RowStore(starts, {"input_ids": np.zeros(starts[-1], dtype=np.int64)}),
            question_of=_int64(row.question for row in self.rows),
            context_of=_int64(self.context_of[row.question] for row in self.rows),
            context_first=_int64(row.first for row in self.rows),
            context_from=_int64(row.skipped for row in self.rows),
            n_context=_int64(len(row.offsets) for row in self.rows),
            spans=np.array([span for context in self.tokens for span in context], dtype=np.int64).reshape(-1, 2),
            context_starts=np.concatenate([[0], np.cumsum([len(context) for context in self.tokens])]).astype(np.int64),
        )

    def scores(self, k: int, rows_a_batch: int = 2) -> SpanScores:
        batches = [self.rows[i : i + rows_a_batch] for i in range(0, len(self.rows), rows_a_batch)]
        return concat([_top_spans(batch, k) for batch in batches])

    def decode(self, options: DecodeOptions) -> Predictions:
        return decode(self.questions(), self.windows(), self.scores(options.n_best_size), options)


def _int64(values) -> np.ndarray:
    return np.array(list(values), dtype=np.int64)


def _top_spans(rows: Sequence[Window], k: int) -> SpanScores:
    starts = torch.tensor([logit for row in rows for logit in row.starts], dtype=torch.float32)
    ends = torch.tensor([logit for row in rows for logit in row.ends], dtype=torch.float32)
    return top_spans(starts, ends, np.cumsum([0, *(len(row.starts) for row in rows)]), k)


# --- the naive version -----------------------------------------------------------------------------------------------


@dataclass
class Naive:
    text: str
    start: np.float32
    end: np.float32
    at: tuple[int, int] | None = None

    @property
    def score(self) -> np.float32:
        return self.start + self.end


def _largest(logits: Sequence[np.float32], n: int) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: -logits[i])[:n]  # sorted is stable: of equals the lowest index


_KEYS = ["start_logit", "end_logit", "text", "probability"]
_FALLBACK_KEYS = ["text", "start_logit", "end_logit", "probability"]  # in the files of the script it is another order


def _naive_candidates(row: Window, context: str, options: DecodeOptions) -> list[Naive]:
    starts, ends = [np.float32(x) for x in row.starts], [np.float32(x) for x in row.ends]
    inside = {row.first + i: span for i, span in enumerate(row.offsets)}
    found = []
    for start in _largest(starts, options.n_best_size):
        for end in _largest(ends, options.n_best_size):
            if start not in inside or end not in inside or end < start or end - start + 1 > options.max_answer_length:
                continue
            at = (inside[start][0], inside[end][1])
            found.append(Naive(context[at[0] : at[1]], starts[start], ends[end], at))
    return found


def _naive_question(case: Case, question: int, options: DecodeOptions) -> tuple[str, list[Naive], float | None]:
    v2 = options.version_2_with_negative
    context = case.contexts[case.context_of[question]]
    rows = [row for row in case.rows if row.question == question]
    found = [candidate for row in rows for candidate in _naive_candidates(row, context, options)]
    null = min((Naive("", np.float32(r.starts[0]), np.float32(r.ends[0]), (0, 0)) for r in rows), key=lambda x: x.score)
    found = sorted(found + [null] * v2, key=lambda x: -x.score)[: options.n_best_size]
    if v2 and all(x.at != (0, 0) for x in found):
        found.append(null)
    if all(x.text == "" for x in found) and (v2 or len(found) <= 1):
        found.insert(0, Naive("empty", np.float32(0), np.float32(0)))
    if not v2:
        return found[0].text, found, None
    best = next(x for x in found if x.text)
    odds = null.score - best.start - best.end
    return "" if odds > options.null_score_diff_threshold else best.text, found, float(odds)


def _assert_as_naive(case: Case, options: DecodeOptions) -> None:
    got = case.decode(options)
    ids = [f"q{i}" for i in range(len(case.context_of))]
    assert list(got.best) == list(got.nbest) == ids
    assert (got.null_odds is not None) == options.version_2_with_negative
    for question, name in enumerate(ids):
        best, found, odds = _naive_question(case, question, options)
        assert got.best[name] == best
        entries = got.nbest[name]
        assert [list(e) for e in entries] == [_FALLBACK_KEYS if x.at is None else _KEYS for x in found]
        assert [(e["text"], e["start_logit"], e["end_logit"]) for e in entries] == [
            (x.text, float(x.start), float(x.end)) for x in found
        ]
        powers = [math.exp(float(x.score) - float(max(y.score for y in found))) for x in found]
        # Both are float64; only the order of a sum of at most n_best + 1 terms may differ.
        assert [e["probability"] for e in entries] == pytest.approx([p / sum(powers) for p in powers], rel=1e-12)
        if got.null_odds is not None:
            assert got.null_odds[name] == odds


# --- made cases ------------------------------------------------------------------------------------------------------

_TEXT = st.text(st.sampled_from("ab é中\u0301🙂\u200d\n"), max_size=10)
_TIED = st.integers(-3, 3).map(lambda quarter: quarter / 4)  # few values, all sums exact: many ties
_SPREAD = st.floats(-20, 20, width=32)


@st.composite
def _token_spans(draw, text: str) -> list[tuple[int, int]]:
    """Tokens in order, some without characters, as tokenizers make them, some with a gap between."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    step = draw(st.sampled_from([1, 2]))
    return [(cuts[i], cuts[i + 1]) for i in range(0, len(cuts) - 1, step)]


@st.composite
def _window(draw, question: int, tokens: list[tuple[int, int]], logits) -> Window:
    skipped = draw(st.integers(0, len(tokens)))
    n_context = draw(st.integers(0, len(tokens) - skipped))
    first = draw(st.integers(1, 3))
    length = first + n_context + draw(st.integers(0, 2))
    column = st.lists(logits, min_size=length, max_size=length)
    return Window(question, first, skipped, draw(column), draw(column), tokens[skipped : skipped + n_context])


@st.composite
def _cases(draw) -> Case:
    logits = draw(st.sampled_from([_TIED, _SPREAD]))
    contexts = draw(st.lists(_TEXT, min_size=1, max_size=3))
    tokens = [draw(_token_spans(text)) for text in contexts]
    context_of = draw(st.lists(st.integers(0, len(contexts) - 1), min_size=1, max_size=4))
    per_question = [draw(st.integers(1, 3)) for _ in context_of]
    owners = draw(st.permutations([q for q, n in enumerate(per_question) for _ in range(n)]))
    return Case(contexts, tokens, context_of, [draw(_window(q, tokens[context_of[q]], logits)) for q in owners])


_OPTIONS = st.builds(
    DecodeOptions,
    n_best_size=st.integers(1, 9),
    max_answer_length=st.integers(1, 8),
    null_score_diff_threshold=st.sampled_from([0.0, 0.5, -0.5]),
    version_2_with_negative=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(_cases(), _OPTIONS)
def test_decode_equals_the_naive_search(case: Case, options: DecodeOptions) -> None:
    _assert_as_naive(case, options)


def _long_case() -> Case:
    rng = np.random.default_rng(0)
    text = "".join(rng.choice(list("abc 中"), size=200))
    tokens = [(i, min(i + 3, 200)) for i in range(0, 200, 3)]
    rows = []
    for question in range(20):
        for skipped in (0, 25):
            offsets = tokens[skipped : skipped + 42]
            starts, ends = rng.normal(size=(2, 5 + len(offsets) + 1)).astype(np.float32).tolist()
            rows.append(Window(question, 5, skipped, starts, ends, offsets))
    return Case([text], [tokens], [0] * 20, rows)


@pytest.mark.parametrize("version_2", [False, True])
def test_decode_equals_the_naive_search_with_default_sizes(version_2: bool) -> None:
    _assert_as_naive(_long_case(), DecodeOptions(version_2_with_negative=version_2))


def test_decode_handles_many_windows() -> None:
    case, copies = _long_case(), 100
    rows = [replace(row, question=row.question + 20 * copy) for copy in range(copies) for row in case.rows]
    many = Case(case.contexts, case.tokens, case.context_of * copies, rows).decode(DecodeOptions())
    assert list(many.nbest.values()) == list(case.decode(DecodeOptions()).nbest.values()) * copies


# --- cases worked out by hand ----------------------------------------------------------------------------------------

# Tokens "Ada", "wrote", "code"; the row is [CLS] ? [SEP] Ada wrote code [SEP], so the context stands at 3, 4, 5.
_TEXT_ADA = "Ada wrote code"
_TOKENS_ADA = [(0, 3), (4, 9), (10, 14)]
_STARTS_ADA = [1.0, -9.0, -9.0, 5.0, 2.0, 0.0, -9.0]
_ENDS_ADA = [1.0, -9.0, -9.0, 3.0, 0.0, 4.0, -9.0]


def _ada(*rows: tuple[list[float], list[float]]) -> Case:
    windows = [Window(0, 3, 0, starts, ends, _TOKENS_ADA) for starts, ends in rows]
    return Case([_TEXT_ADA], [_TOKENS_ADA], [0], windows)


def _texts(predictions: Predictions) -> list[str]:
    return [str(entry["text"]) for entry in predictions.nbest["q0"]]


def test_decode_matches_v1_by_hand() -> None:
    got = _ada((_STARTS_ADA, _ENDS_ADA)).decode(DecodeOptions(n_best_size=3))
    # Best 3 starts: Ada 5, wrote 2, [CLS] 1; best 3 ends: code 4, Ada 3, [CLS] 1. Inside and in order:
    # Ada..code 5 + 4 = 9, Ada..Ada 5 + 3 = 8, wrote..code 2 + 4 = 6.
    assert _texts(got) == ["Ada wrote code", "Ada", "wrote code"]
    assert got.best == {"q0": "Ada wrote code"}
    total = 1 + math.exp(-1) + math.exp(-3)
    assert [e["probability"] for e in got.nbest["q0"]] == pytest.approx(
        [1 / total, math.exp(-1) / total, math.exp(-3) / total]
    )
    assert got.null_odds is None


def test_by_hand_answers_longer_than_allowed_are_dropped() -> None:
    got = _ada((_STARTS_ADA, _ENDS_ADA)).decode(DecodeOptions(n_best_size=3, max_answer_length=2))
    assert _texts(got) == ["Ada", "wrote code"]


def test_by_hand_the_lowest_null_score_of_the_windows_decides() -> None:
    sure_of_none = ([8.0, *_STARTS_ADA[1:]], [7.0, *_ENDS_ADA[1:]])  # null scores 15 here, 1 + 1 = 2 in the other
    options = DecodeOptions(n_best_size=3, version_2_with_negative=True)
    got = _ada(sure_of_none, (_STARTS_ADA, _ENDS_ADA)).decode(options)
    assert got.best == {"q0": "Ada wrote code"}
    assert got.null_odds == {"q0": 2.0 - 9.0}


def test_by_hand_null_wins_only_beyond_the_threshold() -> None:
    # Null 8 + 3 = 11, best answer 9: ahead by 2.
    case = _ada(([8.0, *_STARTS_ADA[1:]], [3.0, *_ENDS_ADA[1:]]))
    options = DecodeOptions(n_best_size=3, version_2_with_negative=True)
    got = case.decode(options)
    assert got.null_odds == {"q0": 2.0}
    assert got.best == {"q0": ""}
    # Behind it Ada..code 9 and Ada..Ada 8; wrote..code 6 is the fourth and cut.
    assert _texts(got) == ["", "Ada wrote code", "Ada"]
    assert case.decode(replace(options, null_score_diff_threshold=2.0)).best == {"q0": "Ada wrote code"}
    assert case.decode(replace(options, null_score_diff_threshold=1.75)).best == {"q0": ""}


def test_by_hand_null_is_appended_to_the_n_best() -> None:
    # Null 2 is behind 9, 8 and 6: cut by n_best_size=3, then appended as a fourth.
    got = _ada((_STARTS_ADA, _ENDS_ADA)).decode(DecodeOptions(n_best_size=3, version_2_with_negative=True))
    assert _texts(got) == ["Ada wrote code", "Ada", "wrote code", ""]
    assert got.nbest["q0"][-1]["start_logit"] == got.nbest["q0"][-1]["end_logit"] == 1.0


def test_by_hand_no_candidate_gives_the_fallback() -> None:
    case = _ada(([1.0, 9.0, 9.0, 0.0, 0.0, 0.0, 9.0], [1.0, 9.0, 9.0, 0.0, 0.0, 0.0, 9.0]))
    assert case.decode(DecodeOptions(n_best_size=3)).best == {"q0": "empty"}
    got = case.decode(DecodeOptions(n_best_size=3, version_2_with_negative=True))
    assert _texts(got) == ["empty", ""]
    assert got.null_odds == {"q0": 2.0}  # 1 + 1 - 0 - 0
    assert got.best == {"q0": ""}


def test_all_candidates_empty_does_not_fail() -> None:
    # Two tokens without characters: three empty texts. The guides' script runs off the end of its list here in v2.
    tokens = [(2, 2), (2, 2)]
    case = Case(["abcd"], [tokens], [0], [Window(0, 1, 0, [0.0, 1.0, 1.0], [-3.0, 1.0, 1.0], tokens)])
    assert case.decode(DecodeOptions()).best == {"q0": ""}
    got = case.decode(DecodeOptions(version_2_with_negative=True))
    assert _texts(got)[0] == "empty"
    assert got.null_odds == {"q0": -3.0}
    assert got.best == {"q0": "empty"}


def test_equal_scores_choose_the_first_window() -> None:
    logits = [0.0, 1.0]
    rows = [Window(0, 1, 1, logits, logits, [(1, 2)]), Window(0, 1, 0, logits, logits, [(0, 1)])]
    assert Case(["ab"], [[(0, 1), (1, 2)]], [0], rows).decode(DecodeOptions()).best == {"q0": "b"}


def test_no_questions_give_no_answers() -> None:
    nothing = np.zeros((0, 20))
    scores = SpanScores(
        nothing.astype(np.int64), nothing, nothing.astype(np.int64), nothing, nothing[:, 0], nothing[:, 0]
    )
    for version_2 in (False, True):
        case = Case([], [], [], [])
        got = decode(case.questions(), case.windows(), scores, DecodeOptions(version_2_with_negative=version_2))
        assert got.best == got.nbest == {}


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 4])
def test_logits_that_are_not_finite_are_refused(wrong: float, at: int) -> None:
    starts = [*_STARTS_ADA[:at], wrong, *_STARTS_ADA[at + 1 :]]
    with pytest.raises(NonFiniteError, match="infinite or not numbers"):
        _ada((starts, _ENDS_ADA)).decode(DecodeOptions())
