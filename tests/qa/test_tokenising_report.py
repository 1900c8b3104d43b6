"""Tokenising one huge text is one long call: the log shows that it moves, and how far it is."""

from __future__ import annotations

import re
import threading

import pytest
from tiny_qa import trained_tokenizer

from whet.jobs.tokenising import encode, progress


@pytest.mark.parametrize("n_threads", [None, 2])
def test_long_text_reports_its_progress(
    n_threads: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a fiftieth of a second between the lines, a text of a million characters has several."""
    caplog.set_level("INFO", logger="whet")
    monkeypatch.setattr(progress, "FIRST_S", 0.02)
    monkeypatch.setattr(progress, "INTERVAL_S", 0.02)
    text = "The rain fell on the hills and the sheep slept. " * 20_000
    made = encode.encode_texts(encode.rust_tokenizer(trained_tokenizer()), ["short", text], n_threads=n_threads)
    assert len(made.lengths) == 2
    told = [record.getMessage() for record in caplog.records if "tokenising" in record.getMessage()]
    assert len(told) >= 2
    assert all(re.fullmatch(r"tokenising: [\d,]+ of 960,005 characters are done after \d+ s", line) for line in told)
    assert not [thread for thread in threading.enumerate() if thread.name == "whet-tokenising"]


def test_as_many_threads_encode_as_are_asked_for() -> None:
    together = threading.Barrier(3, timeout=20)

    def encoded(n: int) -> int:
        together.wait()
        return n

    assert encode.each(range(3), encoded, 3) == [0, 1, 2]


def test_short_text_reports_no_progress(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="whet")
    encode.encode_texts(encode.rust_tokenizer(trained_tokenizer()), ["The rain fell."])
    assert "tokenising" not in caplog.text
