"""Trainings that are recorded, and records without a training."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from tiny_qa import command, squad, write_json


def words_of(encoder: Path, folder: Path, *flags: str, **options: object) -> list[str]:
    """The words of a training of 4 steps that logs, evaluates and saves every second."""
    data = write_json(folder.parent / "data.json", squad())
    usual = {"train_file": data, "validation_file": data, "max_steps": 4, "logging_steps": 2, "eval_strategy": "steps",
             "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "precision": "fp32"}  # fmt: skip
    return command(encoder, folder, "--do_train", *flags, **(usual | options))


def write_run(folder: Path, n_lines: int, *, ago_s: float = 0.0, end: str | None = None, **begin: Any) -> Path:
    """Write the record of a run of this process whose last line is `ago_s` old."""
    now = time.time() - ago_s
    first = {
        "event": "begin", "time": now - n_lines, "pid": os.getpid(), "host": socket.gethostname(), "task": "qa",
        "model": {"name": "bert-base-uncased", "parameters": 109_000_000}, "data": {"rows": 88_524, "tokens": 9},
        "machine": {"memory_bytes": 16_400_000_000}, "steps": 100, "resumed_from": None,
    }  # fmt: skip
    forecast = {"train_s": 3600, "low": 3000, "high": 4000, "peak_bytes": 2_000_000_000}
    forecast = {"event": "forecast", "time": now - n_lines, "forecast": begin.pop("forecast", forecast)}
    steps = [
        {
            "event": "step", "time": now - n_lines + number, "step": number, "of": 100, "epoch": number / 50,
            "loss": 3.0 / number, "learning_rate": 3e-5, "grad_norm": 1.5, "tokens_per_s": 812.0, "rows_per_s": 6.2,
            "resident_bytes": 1_800_000_000, "eta_s": 190.0,
            "seconds": {"data": 0.1, "forward_backward": 0.7, "update": 0.2},
        }
        for number in range(1, n_lines + 1)
    ]  # fmt: skip
    last = {
        "event": "end", "time": now, "status": end, "error": "no room\n  fix: buy a disk", "peak_bytes": 2e9,
        "train_s": 61.0, "metrics": {"eval_f1": 43.21},
    }  # fmt: skip
    lines = [first | begin, forecast, *steps, *([] if end is None else [last])]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return folder
