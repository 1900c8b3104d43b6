"""What a run writes down so that it can go on, and how it goes on: bit for bit as if it had not stopped."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState

from whet.config.arguments import TrainingArguments
from whet.config.rules.saving import METRIC_FIELDS
from whet.errors import ConfigError, StorageError
from whet.log import logger
from whet.optim import schedule
from whet.precision import policy
from whet.train.checkpoint import best, manifest, weights
from whet.train.checkpoint import folder as checkpoint
from whet.train.checkpoint import lineage as lines
from whet.train.resume import compare as unchanged
from whet.train.resume import kinds as counters

if TYPE_CHECKING:
    from whet.train.loop import Fit

_STATE, _SCHEDULER, _RUN = "trainer_state.json", "scheduler.json", "meter.json"
_COUNTERS = (
    "global_step", "epoch", "log_history", "total_flos", "best_metric", "best_global_step",
)  # fmt: skip


def folder_to_resume(asked: str | bool | None, output_dir: Path) -> Path | None:
    """Return the checkpoint that is meant: None for none, or where "auto" finds no checkpoint at all."""
    if not asked or asked == "no":
        return None
    if asked is not True and asked != "auto":
        return checkpoint.require_good(Path(str(asked)))
    found = checkpoint.newest(output_dir)
    if found is None:
        logger.info("there is no checkpoint in %s: the run starts at its first step", output_dir)
    return found


def look_ahead(args: TrainingArguments) -> None:
    """Raise what is wrong with the settings of a run that goes on, as far as it shows without a model and its data.

    The checkpoint is only glanced at, so one that is damaged is not told here.
    """
    asked = args.resume_from_checkpoint
    if not args.do_train or not asked:
        return
    folders = checkpoint.every(Path(args.output_dir)) if asked == "auto" else [Path(str(asked))]
    folder = next((one for one in reversed(folders) if not checkpoint.problems_of(one, light=True)), None)
    if folder is not None:
        with _readable(folder):
            unchanged.require_same_settings(args, folder)


def texts(fit: Fit) -> dict[str, str]:
    """Return the small files of a checkpoint; data order and masks follow from the step's number."""
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
        "checkpoints": [path.name for path in fit.saver.folders],
        "precision": fit.trainer.precision.state(),
        "stream": fit.loader.state(),
    }
    return {
        unchanged.ARGUMENTS: policy.as_run(fit.args, fit.trainer.precision) + "\n",
        unchanged.IDENTITY: _text(unchanged.IDENTITY, fit.saver.identity),
        weights.OPTIMIZER_NUMBERS: weights.optimizer_numbers(fit.optimizer),
        _SCHEDULER: _text(_SCHEDULER, schedule.state_of(fit.scheduler)),
        _RUN: _text(_RUN, run),
        _STATE: json.dumps(best.as_saved(fit.state), indent=2, sort_keys=True) + "\n",
    }


def precision_of(folder: Path) -> str:
    """Return the precision that the checkpoint's run computes in: what `auto` came to."""
    with _readable(folder):
        return policy.in_checkpoint(_read(folder / unchanged.ARGUMENTS))


def restore(fit: Fit, folder: Path) -> None:
    """Put back what was saved; raises ConfigError where model, data or settings would bend the curve."""
    fit.saver.resume(folder)
    with _readable(folder):
        changed = unchanged.require_same(fit, folder)
        _require_counters(folder)
        weights.load_weights(fit.trainer.model, folder)
        _restore_optimizer(fit, folder, changed)
        _restore_schedule(fit, folder, changed)
        kept = TrainerState.load_from_json(str(folder / _STATE))
        for name in _COUNTERS:
            setattr(fit.state, name, getattr(kept, name))
        if changed & {*METRIC_FIELDS}:  # the best by another metric is no measure
            fit.state.best_metric, fit.state.best_global_step, kept.best_model_checkpoint = None, None, None
        best.take_over(fit, kept.best_model_checkpoint, folder)
        run, meter = _read(folder / _RUN), fit.meter
        meter.loss_total, meter.n_losses = run["loss_total"], run["n_losses"]
        meter.window = [float(loss) for loss in run["window"]]
        fit.n_bad_in_a_row, fit.n_left_out = run["n_bad_in_a_row"], run["n_left_out"]
        fit.trainer.precision.load_state(run.get("precision", {}))  # older checkpoints are never of fp16
        meter.n_skipped, fit.pending = run.get("n_skipped", 0), run.get("pending")
        fit.spikes.losses.extend(run.get("losses", []))
        stream = run.get("stream")
        fit.saver.take_over(_own(fit, folder, run["checkpoints"]))
    if stream is not None:  # rows are read: errors of the data set are not those of the folder
        fit.loader.go_to(stream)
    logger.info("resuming after step %d from %s", fit.state.global_step, folder)


def _require_counters(folder: Path) -> None:
    """Raise ValueError for counters of another kind, or of another step, than a run writes."""
    state = _read(folder / _STATE)
    counters.require_kinds(state, counters.STATE, _STATE)
    counters.require_kinds(_read(folder / _RUN), counters.RUN, _RUN)
    counters.require_step(state.get("global_step"), (manifest.facts_of(folder) or {}).get("step"), _STATE)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Tell of a folder that verifies and yet does not hold what whet writes."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise StorageError(
            what=f"{folder} does not fit this run",
            got=f"{type(error).__name__}: {error}",
            why="the files are intact, but belong to a different model or optimizer, or another program changed them",
            fix="name another checkpoint in --resume_from_checkpoint; or start a new run: leave "
            "--resume_from_checkpoint out and use another --output_dir",
        ) from error


def _restore_optimizer(fit: Fit, folder: Path, changed: set[str]) -> None:
    """Put back the optimizer's state, and keep the settings that were allowed to change."""
    fresh = [{name: value for name, value in group.items() if name != "params"} for group in fit.optimizer.param_groups]
    if unchanged.OPTIMIZER in changed:
        logger.warning("another optimizer than before: its state starts from zero")
        return
    weights.load_optimizer(fit.optimizer, folder)
    for group, new in zip(fit.optimizer.param_groups, fresh, strict=True):
        group.update({name: new[name] for name in unchanged.group_settings(changed, new)})


def _restore_schedule(fit: Fit, folder: Path, changed: set[str]) -> None:
    # The rates are in the optimizer's groups: a step of the schedule here would be one too many.
    kept = _alike(_read(folder / _SCHEDULER), fit.scheduler.state_dict())
    if changed & unchanged.SCHEDULE:
        kept = {name: kept[name] for name in ("last_epoch", "_step_count", "lr_lambdas") if name in kept}
    schedule.load_state(fit.scheduler, kept)
    if isinstance(fit.scheduler, LambdaLR):  # a function of the step: a longer run has another rate here
        rates = zip(fit.optimizer.param_groups, fit.scheduler.base_lrs, fit.scheduler.lr_lambdas, strict=True)
        for group, base, share in rates:
            group["lr"] = base * share(fit.scheduler.last_epoch)


def _own(fit: Fit, folder: Path, names: list[str]) -> list[Path]:
    """Return the run's checkpoints that are still there; none if it resumes in another folder."""
    output_dir = Path(fit.args.output_dir)
    if folder.resolve().parent != output_dir.resolve():
        return []
    wanted = {folder.name, *names}
    there = lines.places([path for path in checkpoint.every(output_dir) if path.name in wanted])
    return [one.folder for one in there if fit.saver.line.holds(one.line.run, one.step)]


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def _text(name: str, values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(values, indent=2, default=_plain) + "\n"
    except TypeError as error:
        raise ConfigError(
            what=f"{name}: the state cannot be written",
            got=str(error),
            why="checkpoints hold plain numbers and texts: they can be read without running code",
            fix="use a schedule of torch or of --lr_scheduler_type, or --save_strategy no",
        ) from error


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
