"""Reads checkpoints of form 1, which number the optimizer's parameters and have one file for each kind of counter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from whet.paths import utf8_name
from whet.train.resume import schema
from whet.train.state import State

_RUN, _SCHEDULE, _OPTIMIZER, _MOMENTS = "meter.json", "scheduler.json", "optimizer.json", "optimizer.safetensors"
_KINDS = {
    "loss_total": schema.number, "n_losses": schema.count, "window": schema.list_of(schema.loss),
    "n_bad_in_a_row": schema.count, "n_left_out": schema.count, "n_skipped": schema.count,
    "losses": schema.list_of(schema.number), "pending": schema.optional(schema.json_object),
    "checkpoints": schema.list_of(schema.text), "precision": schema.json_object,
    "stream": schema.optional(schema.json_object),
}  # fmt: skip


def read(folder: Path, names: Sequence[str], rows_per_step: int) -> dict[str, State]:
    """Return the states of the run's parts as form 2 has them; `names` are those of the optimizer's parameters now.

    Form 1 does not count rows: each step counts as `rows_per_step`. Raises ValueError for values that no run writes.
    """
    run = _json(folder, _RUN)
    schema.require_types(run, _KINDS, _RUN)
    return {
        "meter": {
            "loss_total": run["loss_total"],
            "n_losses": run["n_losses"],
            "n_skipped": run.get("n_skipped", 0),
            "n_rows": (run["n_losses"] + run.get("n_skipped", 0)) * rows_per_step,
            "window": run["window"],
        },
        "spikes": {"losses": run.get("losses", []), "n_bad_in_a_row": run["n_bad_in_a_row"]},
        "precision": run.get("precision", {}),
        "edges": {"pending": run.get("pending")},
        "loader": {**(run.get("stream") or {}), "n_left_out": run["n_left_out"]},
        "checkpoints": {"names": run["checkpoints"]},
        "optimizer": _optimizer(folder, names),
        "schedule": _json(folder, _SCHEDULE),
    }


def _optimizer(folder: Path, names: Sequence[str]) -> State:
    saved = _json(folder, _OPTIMIZER)
    state: dict[str, Any] = {_name(number, names): dict(values) for number, values in saved["state"].items()}
    with utf8_name(folder) as named:
        tensors = load_file(named / _MOMENTS)
    for place, tensor in tensors.items():
        number, *within, key = place.split(".")
        values = state.setdefault(_name(number, names), {})
        for part in within:
            values = values.setdefault(part, {})
        values[key] = tensor
    groups = [
        {**group, "params": [_name(number, names) for number in group["params"]]} for group in saved["param_groups"]
    ]
    return {"param_groups": groups, "state": state}


def _name(number: Any, names: Sequence[str]) -> str:
    """Return the parameter's name; a number without a parameter gets a name that the optimizer refuses."""
    index = int(number)
    return names[index] if 0 <= index < len(names) else f"parameter {index}"


def _json(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text("utf-8"))
