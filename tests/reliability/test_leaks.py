"""R15: what a run holds does not grow with its steps: memory, open files, threads, stray files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forked_runs
import numpy as np
import pytest
from forked_runs import LIMIT_S, fork
from transformers import TrainerCallback

import engine
from whet.hardware import memory

pytestmark = pytest.mark.reliability
WARM_UP = 500
N_STEPS = 50_000 if forked_runs.SOAK else 3_000
EVERY = 50
MOST_BYTES_A_STEP = 2**20 / 1000
"""1 MiB in 1,000 steps: a run of 100,000 steps would take 100 MiB more at its end, which no limit should notice."""
MOST_S_A_STEP = 0.1
"""Ten times what a step takes on a quiet machine: the night run takes many of them."""
N_SAVES, MOST_BYTES_OF_SAVES = 20, 2 * 2**20
_LENGTHS = (5, 8, 12, 16, 20, 26, 32, 40)


class Watch(TrainerCallback):
    """Notes memory, open files and threads every so many steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.seen: list[tuple[int, int, int, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every == 0:
            held = memory.resident_bytes() or 0
            self.seen.append((state.global_step, held, _n_in("/proc/self/fd"), _n_in("/proc/self/task")))


def _n_in(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def _rows() -> Any:
    """Rows of eight lengths, so that every batch has another shape."""
    from tiny_runs import span_rows

    rows = span_rows(64)
    for number, row in enumerate(rows):
        length = _LENGTHS[number % len(_LENGTHS)]
        row["input_ids"] = (row["input_ids"] * 8)[:length]
        row["start_positions"], row["end_positions"] = number % length, length - 1
    return rows


def _train(folder: Path, every: int = EVERY, **changes: Any) -> list[tuple[int, int, int, int]]:
    """Train a tiny BERT in a child; return what was seen there."""

    def work() -> None:
        from tiny_runs import arguments, tiny_bert

        watch = Watch(every)
        usual = {"train_sampling_strategy": "random", "logging_strategy": "no", "gradient_accumulation_steps": 1}
        args = arguments(folder / "out", **(usual | changes))
        engine.Trainer(model=tiny_bert(), args=args, train_dataset=_rows(), callbacks=[watch]).train()
        (folder / "seen.json").write_text(json.dumps(watch.seen), "utf-8")

    child = fork(work, folder / "log")
    assert child.wait(pause_s=0.2, limit_s=LIMIT_S + MOST_S_A_STEP * changes["max_steps"]) == 0, child.text()
    return json.loads((folder / "seen.json").read_text("utf-8"))


def test_nothing_grows_with_the_steps(tmp_path: Path) -> None:
    seen = np.array([entry for entry in _train(tmp_path, max_steps=WARM_UP + N_STEPS) if entry[0] > WARM_UP])
    slope = np.polyfit(seen[:, 0], seen[:, 1], 1)[0]
    print(f"resident memory: {slope * 1000 / 2**20:+.3f} MiB in 1,000 steps, over {len(seen) * EVERY} steps")
    assert slope <= MOST_BYTES_A_STEP
    assert len(set(seen[:, 2])) == 1, "open files"
    assert len(set(seen[:, 3])) == 1, "threads"


def test_saves_leave_nothing_behind(tmp_path: Path) -> None:
    """20 saves after the warm-up, which saved, too: memory as before, and of files only the two kept checkpoints."""
    every = 15
    n_before = WARM_UP // every
    last = every * (n_before + N_SAVES + 1)
    seen = _train(tmp_path, every, max_steps=last, save_strategy="steps", save_steps=every, save_total_limit=2)
    before, after = seen[n_before], seen[n_before + N_SAVES]
    print(f"{N_SAVES} saves: {(after[1] - before[1]) / 2**20:+.2f} MiB")
    assert after[1] - before[1] <= MOST_BYTES_OF_SAVES
    assert after[2:] == before[2:], "open files, threads"
    wanted = {f"checkpoint-{step}" for step in (last - every, last)}
    assert {path.name for path in (tmp_path / "out").iterdir()} == wanted | {"run.log"}
