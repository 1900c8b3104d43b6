"""A run frees what earlier runs of the process hold, so that many runs in a row need the memory of one."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

from tiny_decoders import tiny_decoder, token_rows, trainer_of


def trained(folder: Path, n_words: int) -> tuple[Any, weakref.ref[Any]]:
    trainer = trainer_of(folder, tiny_decoder("llama", vocab_size=n_words), token_rows(4), max_steps=1)
    trainer.train()
    return trainer, weakref.ref(trainer.model)


def test_large_model_of_an_earlier_run_is_freed_unless_it_is_in_use(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()  # Python might look for cycles at any time
    try:
        kept, of_kept = trained(tmp_path / "a", 300_000)
        forgotten = trained(tmp_path / "b", 300_000)[1]
        trained(tmp_path / "c", 300)
        assert forgotten() is None
        assert of_kept() is kept.model
    finally:
        gc.enable()
