"""Windows are those that the tokenizer itself makes when it cuts and joins."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from whet.jobs.tokenising.encode import rust_tokenizer
from whet.tasks.qa import windows as windows_module
from whet.tasks.qa.read import read_questions
from whet.tasks.qa.types import Answers, Questions, Windows
from whet.tasks.qa.windows import WindowOptions, make_windows

_MAKERS = {
    "bert": tiny_tokenizers.bert,
    "roberta": tiny_tokenizers.roberta,
    "xlnet": tiny_tokenizers.xlnet_like,
    "gpt": tiny_tokenizers.gpt_like,
}
_TOKENIZERS: dict[str, Any] = {}


@pytest.fixture(scope="module", params=_MAKERS)
def tokenizer(request) -> Any:
    return _tokenizer(request.param)


def _tokenizer(name: str) -> Any:
    if name not in _TOKENIZERS:
        _TOKENIZERS[name] = _MAKERS[name]()
    return _TOKENIZERS[name]


def _questions(*rows: tuple[str, str, str | None]) -> Questions:
    """Questions from (question, context, answer or None); contexts are kept once."""
    contexts = list(dict.fromkeys(context for _, context, _ in rows))
    return Questions(
        ids=[f"q{n}" for n in range(len(rows))],
        questions=[question for question, _, _ in rows],
        answers=[
            Answers() if answer is None else Answers((answer,), (context.index(answer),)) for _, context, answer in rows
        ],
        context_of=np.array([contexts.index(context) for _, context, _ in rows]),
        contexts=contexts,
    )


_RIVER = "The Senna flows through the old town of Brüssel, under eleven bridges, and on to the sea. " * 6
_CAVE = "  Bats sleep\tin caves 😀 during the day;  at night they hunt moths.  東京の川 is far"
_SOME = _questions(
    ("  Which town?", _RIVER, "Brüssel"),
    ("Who built the bridges over the old river?", _RIVER, None),
    ("What is far away?", _CAVE, "東京の川"),
    ("Who sleeps?", _CAVE, "Bats"),
    ("Is it?", "Yes", "Yes"),
)


def _by_the_tokenizer(tokenizer, questions: Questions, options: WindowOptions) -> Any:
    """The rows as run_qa.py gets them."""
    asked = [question.lstrip() for question in questions.questions]
    contexts = [questions.context(i) for i in range(len(questions))]
    question_first = tokenizer.padding_side == "right"
    return tokenizer(
        *((asked, contexts) if question_first else (contexts, asked)),
        truncation="only_second" if question_first else "only_first",
        max_length=options.max_seq_length,
        stride=options.doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=True,
    )


def _naive_labels(offsets, context_tokens: list[int], answers: Answers, no_answer: int) -> tuple[int, int]:
    """The definition by characters, word for word."""
    if not answers.texts or not context_tokens:
        return no_answer, no_answer
    begin, end = answers.starts[0], answers.starts[0] + len(answers.texts[0])
    if offsets[context_tokens[0]][0] > begin or offsets[context_tokens[-1]][1] < end:
        return no_answer, no_answer
    first = max(i for i in context_tokens if offsets[i][0] <= begin)
    last = min(i for i in context_tokens if offsets[i][1] >= end)
    return min(first, last), max(first, last)


def _assert_as_the_tokenizer(tokenizer, questions: Questions, options: WindowOptions) -> Windows:
    windows = make_windows(questions, tokenizer, options)
    expected = _by_the_tokenizer(tokenizer, questions, options)
    has_types = "token_type_ids" in tokenizer.model_input_names
    assert ("token_type_ids" in windows.rows.tokens) == has_types
    assert windows.question_of.tolist() == expected["overflow_to_sample_mapping"]
    assert windows.context_of.tolist() == questions.context_of[windows.question_of].tolist()
    context_number = 1 if tokenizer.padding_side == "right" else 0
    for row in range(len(windows)):
        found: dict[str, Any] = windows.rows[row]
        assert found["input_ids"] == expected["input_ids"][row]
        if has_types:
            assert found["token_type_ids"] == expected["token_type_ids"][row]
        tokens = [i for i, text in enumerate(expected.sequence_ids(row)) if text == context_number]
        first, n_tokens = int(windows.context_first[row]), int(windows.n_context[row])
        assert tokens == list(range(first, first + n_tokens))
        offsets = expected["offset_mapping"][row]
        at = windows.context_starts[windows.context_of[row]] + windows.context_from[row]
        assert windows.spans[at : at + n_tokens].tolist() == [list(offsets[i]) for i in tokens]
        if options.with_labels:
            answers = questions.answers[windows.question_of[row]]
            labels = _naive_labels(offsets, tokens, answers, _no_answer(tokenizer, len(found["input_ids"])))
            assert (found["start_positions"], found["end_positions"]) == labels
    return windows


def _no_answer(tokenizer, n_tokens: int) -> int:
    """Where the CLS token stands in these tokenizers' rows."""
    return n_tokens - 1 if tokenizer is _TOKENIZERS.get("xlnet") else 0


@pytest.mark.parametrize(("max_seq_length", "doc_stride"), [(384, 128), (64, 16), (50, 0), (49, 1)])
def test_rows_equal_those_of_the_tokenizer(tokenizer, max_seq_length, doc_stride):
    options = WindowOptions(max_seq_length=max_seq_length, doc_stride=doc_stride)
    windows = _assert_as_the_tokenizer(tokenizer, _SOME, options)
    assert windows.rows.lengths.max() <= max_seq_length
    assert {"start_positions", "end_positions"} == set(windows.rows.labels)


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("truncation_side", ["left", "right"])
def test_both_sides_of_padding_and_truncation_work(padding_side, truncation_side):
    tokenizer = tiny_tokenizers.bert(padding_side=padding_side, truncation_side=truncation_side)
    _assert_as_the_tokenizer(tokenizer, _SOME, WindowOptions(max_seq_length=48, doc_stride=11))


def test_windows_of_the_real_encoder_on_xquad_are_correct(minilm_dir, xquad_dir):
    """Its tokenizer.json cuts at 128 and pads: neither may show."""
    tokenizer = AutoTokenizer.from_pretrained(minilm_dir)
    questions = read_questions(xquad_dir / "train.json")
    windows = _assert_as_the_tokenizer(tokenizer, questions, WindowOptions(max_seq_length=160, doc_stride=48))
    assert len(windows) > len(questions)
    assert windows.rows.lengths.min() < 128 < windows.rows.lengths.max() <= 160


def test_windows_of_byte_level_bpe_on_xquad_are_correct(xquad_dir):
    questions = read_questions(xquad_dir / "dev.json")
    _assert_as_the_tokenizer(_tokenizer("roberta"), questions, WindowOptions(max_seq_length=384, doc_stride=128))


def test_space_before_a_window_is_omitted():
    """RoBERTa with add_prefix_space: the tokenizer counts that space to the first token of every later window."""
    tokenizer = tiny_tokenizers.roberta(add_prefix_space=True)
    options = WindowOptions(max_seq_length=64, doc_stride=16)
    windows, expected = make_windows(_SOME, tokenizer, options), _by_the_tokenizer(tokenizer, _SOME, options)
    assert [windows.rows[row]["input_ids"] for row in range(len(windows))] == expected["input_ids"]
    n_different = 0
    for row in range(len(windows)):
        context, first = _SOME.context(windows.question_of[row]), windows.context_first[row]
        at = windows.context_starts[windows.context_of[row]] + windows.context_from[row]
        spans = windows.spans[at : at + windows.n_context[row]].tolist()
        offsets = [list(pair) for pair in expected["offset_mapping"][row][first : first + len(spans)]]
        assert spans[1:] == offsets[1:]
        if spans[0] != offsets[0]:
            n_different += 1
            assert context[slice(*offsets[0])].lstrip(" ") == context[slice(*spans[0])]
    assert n_different > 0


_LETTERS = st.sampled_from([*"abc .,\t\n\u00a0éßİ東川😀\u200dﬁ", "e\u0301", "👩\u200d👧", "the", " river"])


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(_MAKERS)),
    question=st.lists(_LETTERS, min_size=1, max_size=6).map("".join),
    context=st.lists(_LETTERS, min_size=1, max_size=60).map("".join),
    cut=st.tuples(st.integers(0, 300), st.integers(1, 20)),
    lengths=st.tuples(st.integers(24, 60), st.integers(0, 9)),
)
def test_rows_and_labels_of_generated_texts_are_correct(name, question, context, cut, lengths):
    tokenizer = _tokenizer(name)
    begin = cut[0] % len(context)
    answer = Answers((context[begin : begin + cut[1]],), (begin,))
    questions = Questions(["q"], [question], [answer], np.zeros(1, np.int64), [context])
    rust = rust_tokenizer(tokenizer)
    n_asked = len(rust.encode(question.lstrip(), add_special_tokens=False).ids)
    # else there is nothing to join, or no room: errors that have tests of their own
    assume(n_asked > 0 and rust.encode(context, add_special_tokens=False).ids)
    assume(lengths[0] - n_asked - 4 > lengths[1])
    _assert_as_the_tokenizer(tokenizer, questions, WindowOptions(max_seq_length=lengths[0], doc_stride=lengths[1]))


def test_an_answer_in_the_last_token_of_a_context_is_found(tokenizer):
    """run_qa.py runs on into the special token behind it."""
    windows = make_windows(_questions(("Is it?", "We think yes", "yes")), tokenizer, WindowOptions())
    last = int(windows.context_first[0] + windows.n_context[0]) - 1
    assert windows.rows.labels["end_positions"][0] == last
    assert windows.context_first[0] < windows.rows.labels["start_positions"][0] <= last


def test_tokens_that_share_the_character_of_the_answer_are_labelled_in_order():
    windows = make_windows(_questions(("Is it?", "so 😀 it is", "😀")), _tokenizer("roberta"), WindowOptions())
    first, last = (windows.rows.labels[name][0] for name in ("start_positions", "end_positions"))
    assert first < last
    for position in (first, last):
        assert windows.spans[position - windows.context_first[0]].tolist() == [3, 4]


def test_rows_after_the_first_block_are_joined_equally(monkeypatch):
    monkeypatch.setattr(windows_module, "_ROWS_AT_ONCE", 3)
    windows = _assert_as_the_tokenizer(_tokenizer("bert"), _SOME, WindowOptions(max_seq_length=50, doc_stride=5))
    assert len(windows) > 9


def test_windows_without_labels_have_none(tokenizer):
    windows = make_windows(_SOME, tokenizer, WindowOptions(with_labels=False))
    assert not windows.rows.labels


def test_context_without_tokens_gives_an_empty_window():
    questions = _questions(("Is it?", "Yes", "Yes"), ("Is it?", "\u200d", "\u200d"))
    windows = _assert_as_the_tokenizer(_tokenizer("bert"), questions, WindowOptions())
    assert windows.n_context[0] > 0 == windows.n_context[1]


class _Counting:
    """Hands on to the tokenizer, and remembers the texts of the batches."""

    def __init__(self, rust: Any, texts: list[str]) -> None:
        self._rust = rust
        self._texts = texts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rust, name)

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self._texts += texts
        return self._rust.encode_batch(texts, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self._texts += texts
        return self._rust.encode_batch_fast(texts, **options)


def test_every_context_and_every_question_is_tokenised_once(monkeypatch):
    texts: list[str] = []
    real = windows_module.rust_tokenizer
    monkeypatch.setattr(windows_module, "rust_tokenizer", lambda tokenizer: _Counting(real(tokenizer), texts))
    questions = _questions(*((f"Question {n}?", (_RIVER, _CAVE)[n % 2], None) for n in range(700)))
    make_windows(questions, _tokenizer("bert"), WindowOptions(max_seq_length=64, doc_stride=16))
    assert sorted(texts) == sorted([_RIVER, _CAVE, *questions.questions])


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("variable", [None, "true"])
def test_windows_do_not_depend_on_threads(n_threads, variable, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if variable is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", variable)
    questions = _questions(*((f"Question {n}?", f"The context {n % 900} has bats.", "bats") for n in range(2000)))
    options = WindowOptions(max_seq_length=32, doc_stride=2)
    expected, found = (make_windows(questions, _tokenizer("bert"), options, n_threads=n) for n in (None, n_threads))
    for name, array in expected.rows.arrays().items():
        assert np.array_equal(found.rows.arrays()[name], array)
    assert np.array_equal(found.spans, expected.spans)
    assert os.environ.get("TOKENIZERS_PARALLELISM") == variable
