"""DeepSpeed's configuration: a file or a dict, compared with the arguments and completed from them.

As in transformers, "auto" takes the value of the argument, and a value that differs from the argument is an error.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from whet.config.fields import TrainingFields
from whet.config.ranks import here
from whet.errors import ConfigError, Problem
from whet.optional import is_installed

Config = dict[str, Any]
AUTO = "auto"
_OF_ENGINE = {
    "steps_per_print", "wall_clock_breakdown", "prescale_gradients", "gradient_predivide_factor",
    "communication_data_type", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dump_state",
    "disable_allgather", "aio",
}  # fmt: skip
"""Keys that the engine takes as they are."""
_OF_ZERO = {
    "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
    "allgather_partitions", "allgather_bucket_size", "overlap_comm", "load_from_fp32_weights", "sub_group_size",
    "round_robin_gradients", "ignore_unused_parameters", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save", "stage3_module_granularity_threshold", "offload_optimizer",
    "offload_param",
}  # fmt: skip
_OF_FP16 = {
    "enabled", "auto_cast", "loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale",
    "consecutive_hysteresis",
}  # fmt: skip
_OPTIMIZERS = {"adam", "adamw"}
_ADAM = {
    "lr": "learning_rate",
    "betas": "adam_beta1, adam_beta2",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
}
_SIZES = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
_NOT_MEANT = {"torch_adam", "adam_w_mode", "bias_correction"}
"""Settings of DeepSpeed's own Adam that agree with whet's AdamW if they are true."""


class _Reader:
    """Walks a configuration, and collects what whet cannot honour."""

    def __init__(self, args: TrainingFields, given: Mapping[str, Any]) -> None:
        self.args, self.found, self.wrong = args, copy.deepcopy(dict(given)), list[str]()

    def match(self, path: str, expected: Any, argument: str) -> None:
        """Fill "auto" in, or compare with the value of an argument."""
        *parents, name = path.split(".")
        part: Any = self.found
        for parent in parents:
            part = part.get(parent)
            if not isinstance(part, dict):
                return
        if name not in part:
            return
        if part[name] == AUTO:
            part[name] = expected
        elif part[name] != expected:
            self.wrong.append(f"{path} is {part[name]}, and {argument} gives {expected}")

    def known(self, path: str, names: set[str]) -> None:
        """Report every key of a section that is not one of these."""
        part = self.found.get(path, {}) if path else self.found
        if not isinstance(part, dict):
            self.wrong.append(f"{path} is no section")
            self.found[path] = {}
            return
        prefix = f"{path}." if path else ""
        self.wrong += [f"{prefix}{name} is not known" for name in sorted(set(part) - names, key=str)]

    def section(self, parent: Config, name: str, path: str) -> Config:
        """Return a section within another one, empty if it is left out; report it if it is not an object."""
        part = parent.get(name, {})
        if isinstance(part, dict):
            return part
        self.wrong.append(f"{path} is no section")
        return {}


def problem_of(args: TrainingFields) -> Problem | None:
    """Return what is wrong with the configuration of these arguments; None if nothing is, or if there is none."""
    if args.deepspeed is None:
        return None
    try:
        _, wrong = _completed(args)
    except (OSError, ValueError) as error:
        return Problem(
            what="the configuration of DeepSpeed cannot be read",
            got=str(error),
            why="--deepspeed names a file that holds one JSON object, in which no key is given twice",
            fix="correct the path in --deepspeed, or the file: python -m json.tool FILE shows where it is no JSON",
        )
    if not wrong:
        return None
    return Problem(
        what="the configuration of DeepSpeed cannot be honoured",
        got="; ".join(wrong),
        why="every value has to agree with the arguments, and a key that whet left out would change the run in silence",
        fix='in the file of --deepspeed, write "auto" for what arguments set, write 1, 2 or 3 as '
        "zero_optimization.stage, and remove the other keys that are named, or the section of an optimizer of another "
        "type",
    )


def engine_config(args: TrainingFields, hidden_size: int | None) -> Config:
    """Return the configuration for the engine, with every "auto" replaced; the optimizer and precision are whet's."""
    found, _ = _completed(args)
    zero = found["zero_optimization"]
    if hidden_size is not None:
        sizes = {
            "reduce_bucket_size": hidden_size**2, "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
            "stage3_param_persistence_threshold": 10 * hidden_size,
        }  # fmt: skip
        zero |= {name: size for name, size in sizes.items() if zero.get(name) == AUTO}
    left = [path for path, value in _values(found) if value == AUTO]
    if left:
        raise ConfigError(
            what='the configuration of DeepSpeed has "auto" where nothing sets the value',
            got=", ".join(left), why="the arguments and the model do not say it", fix="write a number there",
        )  # fmt: skip
    kept = {name: value for name, value in found.items() if name in _OF_ENGINE or name == "zero_optimization"}
    return kept | {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size, "gradient_accumulation_steps": 1,
        "gradient_clipping": args.max_grad_norm, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "steps_per_print": found.get("steps_per_print"),
    }  # fmt: skip


def runs(given: Any) -> bool:
    """Return whether the engine of DeepSpeed carries this configuration out; else whet does, if there is one."""
    return given is not None and is_installed("deepspeed")


def fixed_sizes(given: Any) -> dict[str, tuple[str, Any]]:
    """Return the keys for sizes of a batch that are not "auto", each with the name of its argument and its value."""
    found = {} if given is None else _read(given)
    return {key: (name, found[key]) for key, name in _SIZES.items() if found.get(key, AUTO) != AUTO}


def stage_of(given: Any) -> int:
    """Return the stage of ZeRO that a configuration asks for; 0 if it cannot be read, which `problem_of` reports."""
    try:
        stage = _read(given).get("zero_optimization", {}).get("stage", 0)
    except (OSError, ValueError, AttributeError):
        return 0
    return stage if stage in (1, 2, 3) else 0


def _completed(args: TrainingFields) -> tuple[Config, list[str]]:
    reader = _Reader(args, _read(args.deepspeed))
    rows, steps, n_ranks = args.per_device_train_batch_size, args.gradient_accumulation_steps, here().n_ranks
    product = f"per_device_train_batch_size x gradient_accumulation_steps x ranks ({rows} x {steps} x {n_ranks})"
    for path, expected, argument in (
        ("train_micro_batch_size_per_gpu", rows, "per_device_train_batch_size"),
        ("gradient_accumulation_steps", steps, "gradient_accumulation_steps"),
        ("train_batch_size", rows * steps * n_ranks, product),
        ("gradient_clipping", args.max_grad_norm, "max_grad_norm"),
        ("optimizer.params.lr", args.learning_rate, "learning_rate"),
        ("optimizer.params.betas", [args.adam_beta1, args.adam_beta2], "adam_beta1, adam_beta2"),
        ("optimizer.params.eps", args.adam_epsilon, "adam_epsilon"),
        ("optimizer.params.weight_decay", args.weight_decay, "weight_decay"),
        ("bf16.enabled", args.precision == "bf16", "precision"),
        ("fp16.enabled", args.precision == "fp16", "precision"),
    ):
        reader.match(path, expected, argument)
    _check_sections(reader)
    return reader.found, reader.wrong


def _check_sections(reader: _Reader) -> None:
    found = reader.found
    known = {
        "zero_optimization", "optimizer", "bf16", "fp16", "train_batch_size", "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps", "gradient_clipping",
    }  # fmt: skip
    reader.known("", known | _OF_ENGINE)
    reader.known("zero_optimization", _OF_ZERO)
    reader.known("bf16", {"enabled"})
    reader.known("fp16", _OF_FP16)
    reader.section(found, "aio", "aio")
    if found.get("fp16", {}).get("enabled") is True:
        reader.wrong.append("fp16.enabled is true, and whet runs DeepSpeed in fp32 and bf16")
    stage = found.setdefault("zero_optimization", {}).get("stage")
    if stage not in (1, 2, 3):
        reader.wrong.append(f"zero_optimization.stage is {stage}, and whet runs DeepSpeed for stages 1, 2 and 3")
    for name in ("offload_optimizer", "offload_param"):
        section = reader.section(found["zero_optimization"], name, f"zero_optimization.{name}")
        if section.get("device", "none") != "none":
            reader.wrong.append(
                f"zero_optimization.{name}.device is {section['device']}, and whet runs DeepSpeed without"
            )
    _check_optimizer(reader)


def _check_optimizer(reader: _Reader) -> None:
    section = reader.found.get("optimizer", {})
    reader.known("optimizer", {"type", "params"})
    if not isinstance(section, dict) or "optimizer" not in reader.found:
        return
    if str(section.get("type")).lower() not in _OPTIMIZERS or not reader.args.optim.startswith(("adamw", "auto")):
        reader.wrong.append(f"optimizer.type is {section.get('type')}, and optim is {reader.args.optim}")
    params = reader.section(section, "params", "optimizer.params")
    for name in sorted(set(params) - set(_ADAM), key=str):
        if name not in _NOT_MEANT or params[name] is not True:
            reader.wrong.append(f"optimizer.params.{name} is not known")


def _read(given: Any) -> Config:
    """Return the configuration of a file or a dict; raises OSError or ValueError."""
    if isinstance(given, Mapping):
        return dict(given)
    text = Path(str(given)).read_text("utf-8")
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise ValueError(f"{given} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{given} holds no object")
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> Config:
    names = [name for name, _ in pairs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(repeated)} is given twice in one section")
    return dict(pairs)


def _values(part: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in part.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
