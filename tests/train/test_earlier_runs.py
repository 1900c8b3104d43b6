"""An engine leaves nothing behind: many runs in a row need the memory of one."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

from tiny_decoders import tiny_decoder, token_rows, trainer_of


def trained(folder: Path) -> list[weakref.ref[Any]]:
    trainer = trainer_of(folder, tiny_decoder("llama"), token_rows(4), max_steps=1)
    trainer.train()
    return [weakref.ref(trainer), weakref.ref(trainer.optimizer)]


def test_engine_and_optimizer_are_freed_without_a_search_for_cycles(tmp_path: Path) -> None:
    gc.disable()  # Python might look for cycles at any time
    try:
        assert [one() for one in trained(tmp_path)] == [None, None]
    finally:
        gc.enable()
