"""Output folders as a run leaves them, written line by line: no training is needed to read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGAN_S = 1_790_000_000.0
SETTINGS = {
    "learning_rate": {"value": 3e-4, "from": "command line"},
    "optim": {"value": "lion", "from": "recipe"},
    "seed": {"value": 42},
    "weight_decay": {"value": 0.0},
}
FORECAST = {"peak_bytes": 1_000_000_000, "train_s": 100.0, "low": 80.0, "high": 130.0}
WRONG = [
    {"row": "test.csv:7", "text": "I lost my card", "expected": "lost_card", "predicted": "card_arrival",
     "probability": 0.01, "loss": 4.6},
    {"row": "test.csv:3", "text": "Where is my card?", "expected": "card_arrival", "predicted": "lost_card",
     "probability": 0.2, "loss": 1.6},
    {"row": "test.csv:9", "text": "My phone was stolen", "expected": "lost_phone", "predicted": "lost_card",
     "probability": 0.3, "loss": 1.2},
]  # fmt: skip
UNSURE = {"row": "test.csv:4", "text": "New card", "expected": "card_arrival", "predicted": "card_arrival",
          "probability": 0.51, "loss": 0.67}  # fmt: skip


def record_run(
    folder: Path,
    *,
    task: str = "classify",
    settings: Mapping[str, Any] = SETTINGS,
    steps: int = 12,
    factor: float = 1.0,
    ends: bool = True,
    forecast: Mapping[str, Any] = FORECAST,
    **begin: Any,
) -> Path:
    """Write run.jsonl and all_results.json of a run whose losses are `factor` / step, and return the folder."""
    lines: list[dict[str, Any]] = [
        {"event": "begin", "time": BEGAN_S, "task": task, "settings": settings, "steps": steps, "resumed_from": None,
         "command": "whet classify --learning_rate 3e-4 --do_train", "host": "h",
         "machine": {"processor": "Zen", "cores": 2, "memory_bytes": 24_000_000_000},
         "model": {"name": "tiny", "parameters": 22_600_000, "trainable": 22_600_000},
         "data": {"rows": 490, "tokens": 67_678}} | begin,
        {"event": "forecast", "time": BEGAN_S + 1, "forecast": forecast},
        *(_step(step, steps, factor) for step in range(1, steps + 1)),
        {"event": "evaluation", "time": BEGAN_S + 60, "step": steps // 2,
         "metrics": {"eval_accuracy": 0.5, "eval_loss": 2.0}},
        {"event": "evaluation", "time": BEGAN_S + 120, "step": steps,
         "metrics": {"eval_accuracy": 0.75, "eval_loss": 1.0}},
    ]  # fmt: skip
    if ends:
        lines.append({"event": "end", "time": BEGAN_S + 125, "status": "finished", "error": None,
                      "peak_bytes": 1_100_000_000, "train_s": 120.0, "metrics": {}})  # fmt: skip
    write_lines(folder / "run.jsonl", lines)
    results = {"eval_accuracy": 0.75, "eval_loss": 1.0, "eval_samples": 16, "eval_examples_wrong": 3,
               "eval_runtime": 2.0, "train_loss": 0.5, "train_runtime": 120.0, "epoch": 2.0}  # fmt: skip
    (folder / "all_results.json").write_text(json.dumps(results), "utf-8")
    return folder


def _step(step: int, of: int, factor: float) -> dict[str, Any]:
    return {
        "event": "step", "time": BEGAN_S + 10 * step, "step": step, "of": of, "epoch": 2 * step / of,
        "loss": factor / step, "learning_rate": 3e-4 * (1 - step / of), "grad_norm": 1.5, "tokens_per_s": 900.0,
        "rows_per_s": 4.0, "resident_bytes": 1_000_000_000, "eta_s": 1.0,
        "seconds": {"forward_backward": 6.0, "update": 3.0, "data": 1.0},
    }  # fmt: skip


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    """Write a JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def write_errors(folder: Path, rows: Sequence[Mapping[str, Any]] = (*WRONG, UNSURE)) -> Path:
    """Write the errors of a validation split."""
    return write_lines(folder / "errors.jsonl", rows)


def write_confusion(folder: Path, labels: Sequence[str], counts: Sequence[Sequence[int]]) -> None:
    """Write a confusion matrix as whet classify does."""
    rows = [",".join(["expected", *labels]), *(f"{name},{','.join(map(str, row))}" for name, row in
                                               zip(labels, counts, strict=True))]  # fmt: skip
    (folder / "eval_confusion.csv").write_text("\n".join(rows) + "\n", "utf-8")


def write_trainer_state(folder: Path) -> None:
    """Write what transformers' Trainer keeps of a training, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    history = [
        *({"epoch": step / 10, "loss": 2 / step, "learning_rate": 1e-4, "grad_norm": 1.0, "step": step}
          for step in (1, 2, 3)),
        {"epoch": 0.3, "eval_loss": 0.9, "eval_accuracy": 0.625, "step": 3},
        {"epoch": 0.3, "train_runtime": 12.0, "train_loss": 1.2, "step": 3},
    ]  # fmt: skip
    state = {"global_step": 3, "max_steps": 3, "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(state), "utf-8")
