"""What a run holds does not grow with the steps: batches of ever other lengths leave no products of theirs behind."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import engine
from tiny import arguments, tiny_model, tiny_rows

SETTLED, LAST = 60, 120
"""Steps by whose end most sizes of batches have occurred, and the last one."""
MOST_GROWTH = 48 << 20
"""Half a megabyte for each product of a size that is still new after SETTLED steps: 18 MiB here. With as many sizes as
steps it was 126 MiB."""
_MALLINFO2 = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
    *("uordblks", "fordblks", "keepcost"),
)
"""The numbers of glibc's mallinfo2(3)."""


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2]


def _in_use() -> int:
    """Return the bytes of this process that are allocated and not freed, of glibc's heap."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    return libc.mallinfo2().uordblks


class _Watch(TrainerCallback):
    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.held[state.global_step] = _in_use()


@pytest.mark.gate
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this C library does not say what is in use")
def test_steps_of_other_lengths_leave_nothing_behind(tmp_path: Path) -> None:
    watch = _Watch()
    model = tiny_model("bert", hidden_size=256, intermediate_size=512, max_position_embeddings=512)
    trainer = engine.Trainer(
        model=model,
        args=arguments(tmp_path, precision="fp32", max_steps=LAST, per_device_train_batch_size=6, logging_steps=LAST),
        train_dataset=tiny_rows(400, lengths=(30, 220)),
        callbacks=[watch],
    )
    trainer.train()
    assert watch.held[LAST] - watch.held[SETTLED] < MOST_GROWTH
