"""Compares a run with the checkpoint that it resumes from, and refuses changes that are not allowed by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.config.ranks import here
from whet.config.rules.schedule import BY_METRIC
from whet.config.rules.training import CURVE_FIELDS, EVALUATION_FIELDS, METRIC_FIELDS
from whet.config.settings import options_of
from whet.errors import ConfigError
from whet.log import logger
from whet.precision import policy
from whet.train.checkpoint import manifest
from whet.train.checkpoint.manifest import digest_of
from whet.train.resume import fingerprint
from whet.train.run import Run

ARGUMENTS, FINGERPRINT = "training_args.json", "identity.json"
OPTIMIZER, _WEIGHTS, _EVALUATION_DATA, _LOSS = "optimizer", "weights", "evaluation_data", "loss"
SCHEDULE = {
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "layerwise_lr_decay",
}  # fmt: skip
_IN_GROUPS = {
    "learning_rate": ("lr", "initial_lr"), "layerwise_lr_decay": ("lr", "initial_lr"),
    "adam_beta1": ("betas",), "adam_beta2": ("betas",), "adam_epsilon": ("eps",), "weight_decay": ("weight_decay",),
}  # fmt: skip
"""Settings that an optimizer stores in its parameter groups, and their names there."""
_OF_FIRST_VERSION = {"order": "the shuffle and the cuts of whet's first version"}
"""Facts that the first checkpoints do not hold."""
_LEARNED = {"lr", "initial_lr", "betas", "eps", "weight_decay"}
_MOST_LINES = 6
_LONGEST_SHOWN = 60
_MEANT = {
    "rows_per_step": "per_device_train_batch_size times gradient_accumulation_steps times ranks",
    "data_seed": "the order of the rows; without it, seed",
}
"""Compared names that are not settings themselves -> the settings that they follow from."""


def require_same(run: Run, identity: Mapping[str, Any], folder: Path) -> set[str]:
    """Return the allowed differences from the checkpoint; raises ConfigError for the others."""
    lines = dict(_settings(run.args, folder))
    if (folder / FINGERPRINT).is_file():
        before = _OF_FIRST_VERSION if run.plan.order_rule else {}
        lines |= _facts(identity, {**before, **_read(folder / FINGERPRINT)}, folder)
    _refuse(lines, run.args, folder)
    for text in lines.values():
        logger.warning("resuming from %s with a change that was allowed: %s", folder.name, text)
    return set(lines)


def require_same_settings(args: TrainingArguments, folder: Path) -> None:
    """Raise ConfigError with the settings that must not differ but do; needs neither model nor data."""
    _refuse(dict(_settings(args, folder)), args, folder)


def config_digest(args: TrainingArguments, identity: Mapping[str, Any]) -> str:
    """Return a checksum of everything that a resume compares."""
    facts = {name: value for name, value in identity.items() if name != "environment"}
    settings = args.to_dict()
    return digest_of({"settings": _curve(settings, here().n_ranks) | {"data_seed": _data_seed(settings)}, **facts})


def group_settings(changed: set[str], group: Mapping[str, Any]) -> set[str]:
    """Return the entries of an optimizer's group that come from the new settings, not from the checkpoint."""
    wanted = {entry for name in changed for entry in _IN_GROUPS.get(name, ())}
    if "optim" in changed:
        wanted |= group.keys() - _LEARNED
    return wanted & group.keys()


def _refuse(lines: Mapping[str, str], args: TrainingArguments, folder: Path) -> None:
    allowed = set(args.resume_allow_changes)
    if "optim" in allowed:
        allowed.add(OPTIMIZER)
    refused = {name: text for name, text in lines.items() if name not in allowed}
    if refused:
        raise _refusal(folder, refused, args.resume_allow_changes)


def _settings(args: TrainingArguments, folder: Path) -> Iterator[tuple[str, str]]:
    kept, given = _read(folder / ARGUMENTS), json.loads(args.to_json_string())
    before, now = _curve(kept, manifest.n_ranks_of(folder)), _curve(given, here().n_ranks)
    if kept.get("data_seed") is not None or given["data_seed"] is not None:  # else the order follows seed
        before["data_seed"], now["data_seed"] = _data_seed(kept), _data_seed(given)
    if args.precision == "auto":  # takes what the checkpoint has
        del now["precision"]
    for name, value in now.items():
        if name in before and before[name] != value:
            hint = f" ({_MEANT[name]})" if name in _MEANT else ""
            yield name, f"{name}: {_shown(before[name])} in the checkpoint -> {_shown(value)} now{hint}"


def _shown(value: Any) -> str:
    """Return a setting for people, shortened if it is long."""
    text = "not set" if value is None else json.dumps(value) if isinstance(value, bool | dict) else str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _facts(now: Mapping[str, Any], before: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return a text for each kind of difference; the log warns if only the last bits may differ."""
    found = {}
    if _EVALUATION_DATA not in before:  # written by an earlier version
        before = {**before, _EVALUATION_DATA: now.get(_EVALUATION_DATA)}
    for kind in ("model", "data", _EVALUATION_DATA, "order", "dtype", _WEIGHTS, OPTIMIZER, _LOSS):
        if kind == "model":
            lines = list(fingerprint.model_differences(before[kind], now[kind], folder))
        else:
            lines = list(fingerprint.differences(before.get(kind), now.get(kind), kind))
        if lines:
            more = len(lines) - _MOST_LINES
            found[kind] = "; ".join(lines[:_MOST_LINES]) + (f"; and {more} more" if more > 0 else "")
    elsewhere = list(fingerprint.differences(before.get("environment"), now["environment"]))
    if elsewhere:
        logger.warning("the run resumes, but not bit for bit as it would have: %s", "; ".join(elsewhere))
    return found


def _refusal(folder: Path, refused: Mapping[str, str], allowed: Sequence[str]) -> ConfigError:
    """Return the error; its fix keeps the changes that are already allowed."""
    names = [*allowed] + [name if name != OPTIMIZER else "optim" for name in refused if name != _WEIGHTS]
    allow = f", or accept the change with --resume_allow_changes {','.join(dict.fromkeys(names))}"
    return ConfigError(
        what=f"the run of {folder.name} cannot resume with other settings: {', '.join(refused)}",
        got="; ".join(refused.values()),
        why="its loss curve would be that of neither setting; only the length of the run may change freely",
        fix="use the settings of the checkpoint; or start a new run in another --output_dir, without "
        "--resume_from_checkpoint" + ("" if _WEIGHTS in refused else allow),
    )


def _curve(values: Mapping[str, Any], n_ranks: int) -> dict[str, Any]:
    """Return the settings that change the loss curve, without those that have no effect in this run."""
    rows, batches = values.get("per_device_train_batch_size", 0), values.get("gradient_accumulation_steps", 0)
    options = options_of(TrainingArguments)
    padding = values.get("padding_in_loss", "none")  # checkpoints of earlier versions have no such setting
    found = {name: values.get(name, options[name].default) for name in CURVE_FIELDS} | {
        "padding_in_loss": padding,
        "precision": policy.in_checkpoint(values),
        "methods": ",".join(values.get("methods", ())),
        "rows_per_step": rows * batches * n_ranks,
    }
    if padding != "none":
        found["per_device_train_batch_size"] = values.get("per_device_train_batch_size")
    if values.get("metric_for_best_model"):
        found |= {name: values.get(name) for name in METRIC_FIELDS}
    if values.get("lr_scheduler_type") in BY_METRIC:
        found |= {name: values.get(name) for name in EVALUATION_FIELDS}
    return found


def _data_seed(values: Mapping[str, Any]) -> Any:
    """Return the seed of the row order: data_seed, or else seed."""
    own = values.get("data_seed")
    return values.get("seed") if own is None else own


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))
