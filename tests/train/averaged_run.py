"""A short run that averages its weights: run as a script, it is killed within the averaging."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

import engine
from tiny import arguments, tiny_model, tiny_rows

N_STEPS, BEGINS, KILLED_AFTER = 10, 6, 8
"""Steps 6 to 10 are averaged."""


class KillAfter(TrainerCallback):
    """Ends the process at once, after a step whose checkpoint is written."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)


def averaged(
    folder: Path, *, seed: int = 0, callbacks: list[Any] | None = None, kind: Any = engine.Trainer, wrap: Any = None,
    **changes: Any,
) -> engine.Trainer:  # fmt: skip
    """Return the trainer of the run, of class `kind`; `seed` is that of the first weights, `wrap` wraps the model."""
    usual: dict[str, Any] = {
        "max_steps": N_STEPS, "weight_averaging_start": 0.5, "save_strategy": "steps", "save_steps": 1,
        "lr_scheduler_type": "constant_with_warmup",
    }  # fmt: skip
    rows, model = tiny_rows(30), tiny_model("bert", dropout=0.1, seed=seed)
    return kind(
        model if wrap is None else wrap(model), arguments(folder, **(usual | changes)), train_dataset=rows,
        eval_dataset=rows, callbacks=callbacks,
    )  # fmt: skip


if __name__ == "__main__":
    averaged(Path(sys.argv[1]), callbacks=[KillAfter()]).train()
