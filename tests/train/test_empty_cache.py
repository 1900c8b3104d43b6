"""torch_empty_cache_steps: freed memory really goes back to the system, and the log says what it cost."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import pytest
import torch
from tiny_runs import toy_trainer
from transformers import TrainerState

import whet
from whet.hardware import memory, trim
from whet.log import logger
from whet.watch.empty_cache import EmptyCache

here = pytest.mark.skipif(trim.why_not() is not None, reason=f"this system does not: {trim.why_not()}")
_PIECE, _N_PIECES = 60_000, 2_000  # below the size that the C library asks the system for, and returns, on its own


def _fragments() -> int:
    """Take and free many small pieces, the last of which stays, as a training does; return what is held then."""
    pieces = [ctypes.create_string_buffer(b"x" * _PIECE) for _ in range(_N_PIECES)]
    globals()["_last"] = pieces.pop()
    del pieces
    return memory.resident_bytes() or 0


@here
def test_freed_memory_goes_back_to_the_system() -> None:
    callback, state = EmptyCache(2, torch.device("cpu")), TrainerState()
    held = _fragments()
    for state.global_step in (1, 2, 3):
        callback.on_step_end(None, state, None)
    assert callback.n_calls == 1
    assert callback.returned_bytes > _PIECE * _N_PIECES / 2
    assert (memory.resident_bytes() or 0) < held - _PIECE * _N_PIECES / 2


@here
def test_the_log_ends_with_the_cost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger.name):
        toy_trainer(tmp_path, torch_empty_cache_steps=2, max_steps=5).train()
    assert "unused memory was returned 2 times: " in caplog.text
    assert " ms and " in caplog.text


def test_where_it_could_do_nothing_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 0 08:01 1 /usr/lib/libjemalloc.so.2\n")
    monkeypatch.setattr(trim, "_MAPS", maps)
    with pytest.raises(whet.ConfigError, match="torch_empty_cache_steps can do nothing here"):
        toy_trainer(tmp_path, torch_empty_cache_steps=1)
    monkeypatch.setattr("sys.platform", "darwin")
    assert "darwin" in (trim.why_not() or "")
