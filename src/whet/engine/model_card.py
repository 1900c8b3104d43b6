"""Model cards of trained models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import TrainerState
from transformers.trainer_utils import SchedulerType

from whet.delayed_imports import standing
from whet.engine.run import Prepared
from whet.watch import files as output_files


@standing()  # TrainingSummary imports datasets to ask whether the rows are one of its own
def write(prepared: Prepared, precision: str, state: TrainerState, facts: Mapping[str, Any]) -> None:
    """Write README.md to the output folder: a draft of a model card; `precision` is the name of the run's."""
    from transformers.modelcard import TrainingSummary

    path = Path(prepared.args.output_dir) / "README.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    summary = TrainingSummary.from_trainer(_as_transformers_has_it(prepared, precision, state), **facts)
    with output_files.stored(f"{path.name} cannot be written", path.parent, on_error=prepared.args.save_error_policy):
        card = summary.to_model_card()  # names of folders may hold bytes that are no UTF-8
        output_files.write_text(path, card.encode("utf-8", "backslashreplace").decode("utf-8"))


def _as_transformers_has_it(prepared: Prepared, precision: str, state: TrainerState) -> Any:
    """Return an object with the attributes of a Trainer that TrainingSummary reads."""
    args = prepared.args
    values = {name: getattr(args, name) for name in args.to_dict()}
    schedule = args.lr_scheduler_type
    facts = {
        "parallel_mode": args.parallel_mode,
        "world_size": args.world_size,
        "train_batch_size": args.per_device_train_batch_size,
        "eval_batch_size": args.per_device_eval_batch_size,
        "lr_scheduler_type": SchedulerType(getattr(schedule, "value", schedule)),
        "label_smoothing_factor": args.label_smoothing_factor,
        "fp16": precision == "fp16",
    }
    return SimpleNamespace(
        args=SimpleNamespace(**(values | facts)),
        model=prepared.model if hasattr(prepared.model, "config") else _with_config(prepared.model),
        state=state,
        train_dataset=prepared.train_dataset,
        eval_dataset=prepared.eval_dataset,
    )


def _with_config(model: Any) -> Any:
    """Return an object that looks like the model with an empty configuration."""
    return type(type(model).__name__, (), {"config": SimpleNamespace(_name_or_path="")})()
