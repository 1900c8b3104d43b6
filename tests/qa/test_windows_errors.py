"""What cannot work is refused with the number that would."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_tokenizers
from transformers import CanineTokenizer

from whet.data.store import RowStore
from whet.errors import ConfigError, DataError
from whet.jobs.tokenising.encode import check_max_length, encode_texts, require_memory, rust_tokenizer
from whet.tasks.qa.types import Answers, Questions, Windows
from whet.tasks.qa.windows import WindowOptions, make_windows, span_labels


def _questions(*texts: str, context: str = "bats sleep in caves " * 20) -> Questions:
    n = len(texts)
    return Questions([f"q{i}" for i in range(n)], list(texts), [Answers()] * n, np.zeros(n, np.int64), [context])


@pytest.fixture(scope="module")
def bert():
    return tiny_tokenizers.bert()


def test_slow_tokenizer_is_refused():
    with pytest.raises(ConfigError, match=r"slow one\n  got: CanineTokenizer"):
        make_windows(_questions("Who?"), CanineTokenizer(), WindowOptions())


def test_rows_longer_than_tokenizer_or_model_allow_are_refused(bert):
    with pytest.raises(ConfigError, match=r"longer than the tokenizer takes(.*\n)*.*--max_seq_length 512 or less"):
        make_windows(_questions("Who?"), bert, WindowOptions(max_seq_length=513))
    with pytest.raises(ConfigError, match=r"the model has positions for(.*\n)*.*--max_seq_length 128 or less"):
        check_max_length(129, bert, 128)
    check_max_length(128, bert, 128)
    check_max_length(512, bert)


def test_overlap_without_a_step_is_refused_and_names_the_question(bert):
    questions = _questions("Who?", "the " * 3, "the " * 14)
    make_windows(questions, bert, WindowOptions(max_seq_length=32, doc_stride=14))
    # the third question has 14 tokens, special ones are 3: 15 are left for the context
    with pytest.raises(ConfigError, match="question 'q2' leaves too little room") as caught:
        make_windows(questions, bert, WindowOptions(max_seq_length=32, doc_stride=15))
    assert "takes 17 tokens of max_seq_length 32; that leaves 15 for the context" in str(caught.value)
    assert "--doc_stride 14 or less, or --max_seq_length 33 or more" in str(caught.value)
    make_windows(questions, bert, WindowOptions(max_seq_length=33, doc_stride=15))


def test_unused_overlap_does_no_harm(bert):
    questions = _questions("the " * 14, context="bats sleep")
    assert len(make_windows(questions, bert, WindowOptions(max_seq_length=32, doc_stride=31))) == 1


def test_questions_that_fill_the_row_are_refused_and_counted(bert):
    questions = _questions("the " * 40, "Who?", "the " * 29)
    with pytest.raises(ConfigError, match="question 'q0'") as caught:
        make_windows(questions, bert, WindowOptions(max_seq_length=32, doc_stride=0))
    assert "that leaves -11 for the context" in str(caught.value)
    assert "2 questions are too long" in str(caught.value)
    assert "fix: --max_seq_length 44 or more" in str(caught.value)
    make_windows(questions, bert, WindowOptions(max_seq_length=44, doc_stride=0))


@pytest.mark.parametrize("context", ["The caves.", "Who?"], ids=["other text", "same text"])
@pytest.mark.parametrize("make", [tiny_tokenizers.reversing, tiny_tokenizers.repeating, tiny_tokenizers.adding])
def test_tokenizer_with_another_pair_template_is_refused(make, context):
    with pytest.raises(ConfigError, match="joins question and context in a way that is not known"):
        make_windows(_questions("Who?", context=context), make(), WindowOptions())


def test_questions_without_any_token_are_a_data_error(bert):
    with pytest.raises(DataError, match="no question with tokens"):
        make_windows(_questions("\u200d"), bert, WindowOptions())


def test_tokens_out_of_order_are_refused():
    """No tokenizer at hand does it; the search for the answer would go wrong in silence."""
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    windows = Windows(
        rows=RowStore(np.array([0, 4]), {"input_ids": np.arange(4)}),
        question_of=zero,
        context_of=zero,
        context_first=one,
        context_from=zero,
        n_context=one * 3,
        spans=np.array([[0, 2], [3, 5], [1, 6]]),
        context_starts=np.array([0, 3]),
    )
    with pytest.raises(ConfigError, match="out of the order"):
        span_labels([Answers(("bc",), (3,))], windows, zero)


def test_text_too_large_for_memory_is_refused_before_tokenising() -> None:
    """A context of 1 GB takes 320 GB; the limit is that of the machine, given here."""
    with pytest.raises(DataError, match="too long to be tokenised") as caught:
        require_memory(["short", "long " * 1000], available_bytes=1_000_000)
    assert caught.value.problems[0].got == f"5,000 characters, which begin with {('long ' * 12)!r}"
    require_memory(["short", "long " * 1000], available_bytes=2_000_000)


def test_long_texts_tokenised_in_parts_give_the_same_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{encode_texts.__module__}._BATCH_CHARS", 50_000)
    rust = rust_tokenizer(tiny_tokenizers.bert())
    texts = ["river bats " * 1_000, "river", "bats " * 9_000, ""]
    together, alone = encode_texts(rust, texts), [encode_texts(rust, [text]) for text in texts]
    assert together.lengths.tolist() == [int(one.lengths[0]) for one in alone]
    assert together.ids.tolist() == [token for one in alone for token in one.ids.tolist()]
