"""What a run writes down so that it can go on, and how it goes on: bit for bit as if it had not stopped."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError
from whet.log import logger
from whet.precision.policy import in_checkpoint
from whet.train import checkpoint, weights

if TYPE_CHECKING:
    from whet.train.fit import Fit

_STATE, _SCHEDULER, _RUN, _ARGUMENTS = "trainer_state.json", "scheduler.json", "meter.json", "training_args.json"
_COUNTERS = (
    "global_step", "epoch", "log_history", "total_flos", "best_metric", "best_global_step", "best_model_checkpoint",
)  # fmt: skip
_SAME = (
    "seed", "train_sampling_strategy", "dataloader_drop_last", "learning_rate", "lr_scheduler_type",
    "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim", "adam_beta1", "adam_beta2", "adam_epsilon",
    "weight_decay", "max_grad_norm", "tf32", "attn_implementation", "optim_args",
)  # fmt: skip
"""Settings that change the curve; how far it goes may change."""


def folder_to_resume(asked: str | bool | None, output_dir: Path) -> Path | None:
    """Return the checkpoint that is meant: None for none, or where "auto" finds no whole one."""
    if not asked or asked == "no":
        return None
    if asked is True or asked == "auto":
        return checkpoint.newest(output_dir)
    return checkpoint.require_good(Path(str(asked)))


def save(fit: Fit, folder: Path) -> None:
    """Write everything that the rest of the run depends on; data order and masks follow from the step's number."""
    fit.trainer.write_model(folder)
    weights.save_optimizer(fit.optimizer, folder)
    _write(folder / _SCHEDULER, fit.scheduler.state_dict())
    meter = fit.meter
    run = {
        "loss_total": meter.loss_total,
        "n_losses": meter.n_losses,
        "window": [loss if math.isfinite(loss) else str(loss) for loss in meter.window],  # JSON has no NaN
        "n_bad_in_a_row": fit.n_bad_in_a_row,
        "n_left_out": fit.n_left_out,
        "n_skipped": meter.n_skipped,
        "losses": list(fit.spikes.losses),
        "pending": fit.pending,
        "checkpoints": [path.name for path in fit.folders],
        "precision": fit.trainer.precision.state(),
    }
    _write(folder / _RUN, run)
    fit.state.save_to_json(str(folder / _STATE))


def precision_of(folder: Path) -> str:
    """Return the precision that the checkpoint's run computes in: what `auto` came to."""
    return in_checkpoint(_read(folder / _ARGUMENTS))


def restore(fit: Fit, folder: Path) -> None:
    """Put back what `save` wrote; raises ConfigError where the settings would bend the curve."""
    _require_same(fit.args, folder)
    weights.load_weights(fit.trainer.model, folder)
    weights.load_optimizer(fit.optimizer, folder)
    # The rates are in the optimizer's groups: a step of the schedule here would be one too many.
    fit.scheduler.load_state_dict(_alike(_read(folder / _SCHEDULER), fit.scheduler.state_dict()))
    if isinstance(fit.scheduler, LambdaLR):  # a function of the step: a longer run has another rate here
        rates = zip(fit.optimizer.param_groups, fit.scheduler.base_lrs, fit.scheduler.lr_lambdas, strict=True)
        for group, base, share in rates:
            group["lr"] = base * share(fit.scheduler.last_epoch)
    kept = TrainerState.load_from_json(str(folder / _STATE))
    for name in _COUNTERS:
        setattr(fit.state, name, getattr(kept, name))
    run, meter = _read(folder / _RUN), fit.meter
    meter.loss_total, meter.n_losses = run["loss_total"], run["n_losses"]
    meter.window = [float(loss) for loss in run["window"]]
    fit.n_bad_in_a_row, fit.n_left_out = run["n_bad_in_a_row"], run["n_left_out"]
    fit.trainer.precision.load_state(run.get("precision", {}))  # older checkpoints are never of fp16
    meter.n_skipped, fit.pending = run.get("n_skipped", 0), run.get("pending")
    fit.spikes.losses.extend(run.get("losses", []))
    fit.folders = _own(folder, run["checkpoints"], Path(fit.args.output_dir))
    logger.info("resuming after step %d from %s", fit.state.global_step, folder)


def _own(folder: Path, names: list[str], output_dir: Path) -> list[Path]:
    """Return the run's checkpoints that are still there; none where it goes on in another folder."""
    if folder.resolve().parent != output_dir.resolve():
        return []
    wanted = {folder.name, *names}
    return [path for path in checkpoint.every(output_dir) if path.name in wanted]


def _require_same(args: TrainingArguments, folder: Path) -> None:
    before, now = _curve(_read(folder / _ARGUMENTS)), _curve(args.to_dict())
    if args.precision == "auto":  # takes what the checkpoint has
        del now["precision"]
    changed = [name for name in now if before.get(name) != now[name]]
    if changed:
        raise ConfigError(
            what=f"the run of {folder.name} cannot go on with other settings",
            got="; ".join(f"{name}: {before.get(name)} in the checkpoint -> {now[name]} now" for name in changed),
            why="its loss curve would be that of neither setting; only the length of the run may change",
            fix="set these as in the checkpoint, or start anew without --resume_from_checkpoint",
        )


def _curve(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that change the curve, from all of them."""
    data_seed = values.get("data_seed")
    return {name: values.get(name) for name in _SAME} | {
        "precision": in_checkpoint(values),
        "data_seed": values.get("seed") if data_seed is None else data_seed,
        "per_device_train_batch_size * gradient_accumulation_steps": values.get("per_device_train_batch_size", 0)
        * values.get("gradient_accumulation_steps", 0),
    }


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def _write(path: Path, values: Mapping[str, Any]) -> None:
    try:
        text = json.dumps(values, indent=2, default=_plain)
    except TypeError as error:
        raise ConfigError(
            what=f"{path.name}: the state cannot be written",
            got=str(error),
            why="checkpoints hold plain numbers and texts: they can be read without running code",
            fix="use a schedule of torch or of --lr_scheduler_type, or --save_strategy no",
        ) from error
    path.write_text(text + "\n", "utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _alike(kept: Any, fresh: Any) -> Any:
    """Return what was read in the types of a fresh state: JSON knows neither tuples nor numbers as names."""
    if isinstance(fresh, Counter):
        return Counter({int(name): count for name, count in kept.items()})
    if isinstance(fresh, dict):
        return {name: _alike(value, fresh.get(name)) for name, value in kept.items()}
    if isinstance(fresh, Tensor):
        return fresh.new_tensor(kept)
    if isinstance(fresh, list) and isinstance(kept, list) and len(fresh) == len(kept):
        return [_alike(old, new) for old, new in zip(kept, fresh, strict=True)]
    return tuple(kept) if isinstance(fresh, tuple) else kept
