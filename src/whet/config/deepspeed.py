"""DeepSpeed's configuration: a file or a dict, compared with the arguments and completed from them.

As in transformers, "auto" takes the value of the argument, and a value that differs from a given argument is an error.
Arguments that are not given take the value of the configuration (config/deepspeed_values.py).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.config.elsewhere import elsewhere
from whet.config.fields import TrainingFields
from whet.config.names import deepspeed_keys as keys
from whet.config.names.deepspeed_keys import AUTO
from whet.config.optimizer_names import names
from whet.config.ranks import here
from whet.errors import ConfigError, Problem
from whet.optional import is_installed

Config = dict[str, Any]
_OPTIMIZERS = {"adam", "adamw"}
_ADAM = {
    "lr": "learning_rate",
    "betas": "adam_beta1, adam_beta2",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
}
SIZES = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
"""Key for a size of a batch -> its argument."""
_ON_CPU_ALONE = "whet offloads to the memory of a cpu alone"
_SCHEDULES: Mapping[str, str] = {
    "WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine_with_min_lr",
}  # fmt: skip
"""DeepSpeed's schedules -> the same in lr_scheduler_type, with a linear warm-up."""
_COSINE_FLOOR = 1e-4
"""DeepSpeed's own share of the learning rate at the end of WarmupCosineLR."""
_OF_SCHEDULES: Mapping[str, Collection[str]] = {
    "WarmupLR": {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration"},
    "WarmupCosineLR": {"total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type",
                       "last_batch_iteration"},
}  # fmt: skip
_NOT_MEANT = {"torch_adam", "adam_w_mode", "bias_correction"}
"""Settings of DeepSpeed's own Adam that agree with whet's AdamW if they are true."""


class _Reader:
    """Walks a configuration, and collects what whet cannot honour."""

    def __init__(self, args: TrainingFields, given: Mapping[str, Any]) -> None:
        self.args, self.found, self.wrong = args, copy.deepcopy(dict(given)), list[str]()

    def section(self, path: str) -> Config:
        """Return a section, empty if it is left out; one that is not an object is reported, and emptied."""
        part, names = self.found, path.split(".") if path else []
        for number, name in enumerate(names, start=1):
            held = part.get(name, {})
            if not isinstance(held, dict):
                self.wrong.append(f"{'.'.join(names[:number])} is no section")
                held = part[name] = {}
            part = held
        return part

    def match(self, path: str, expected: Any, argument: str) -> None:
        """Fill "auto" in, or compare with the value of an argument."""
        above, _, name = path.rpartition(".")
        part = self.section(above)
        if name not in part or self.is_odd(path):
            return
        if part[name] == AUTO:
            part[name] = expected
        elif not _same(part[name], expected):
            self.wrong.append(f"{path} is {part[name]}, and {argument} gives {expected}")

    def is_odd(self, path: str) -> bool:
        """Return whether this value was reported already."""
        return any(one.startswith(f"{path} is ") for one in self.wrong)

    def known(self, path: str, names: Collection[str]) -> None:
        """Report every key of a section that is not one of these."""
        prefix = f"{path}." if path else ""
        self.wrong += [f"{prefix}{name} is not known" for name in sorted(set(self.section(path)) - {*names}, key=str)]


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
        fix=_fix(wrong),
    )


def _fix(wrong: Sequence[str]) -> str:
    """Return the ways forward from these faults: an installation of DeepSpeed is one where its engine would do more."""
    said = "; ".join(wrong)
    ways = ['write "auto" for what arguments set', "write 1, 2 or 3 as zero_optimization.stage"]
    if _ON_CPU_ALONE in said:
        ways.append('write "cpu" as the device of an offload, or remove its section')
    if "scheduler" in said:
        kinds = " or ".join(_SCHEDULES)
        ways.append(f'write {kinds} as scheduler.type and "auto" for its params, or remove the section')
    ways.append("remove the other keys that are named, or the section of an optimizer of another type")
    engine = keys.WITHOUT_ENGINE in said
    installs = "; or install its engine, which honours what it alone has: DS_BUILD_OPS=0 pip install "
    return f"in the file of --deepspeed, {', '.join(ways)}" + (
        f"{installs}--no-build-isolation deepspeed" if engine else ""
    )


def engine_config(args: TrainingFields, hidden_size: int | None) -> Config:
    """Return the configuration for the engine, with every "auto" replaced; the optimizer and precision are whet's."""
    found, _ = _completed(args)
    zero = found["zero_optimization"]
    for name in keys.OFFLOADS:  # to nowhere, or on a CPU to where everything is
        zero.pop(name, None)
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
    kept = {name: value for name, value in found.items() if name in keys.OF_ENGINE or name == "zero_optimization"}
    return kept | {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size, "gradient_accumulation_steps": 1,
        "gradient_clipping": args.max_grad_norm, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "steps_per_print": found.get("steps_per_print"),
    }  # fmt: skip


def runs(given: Any) -> bool:
    """Return whether the engine of DeepSpeed carries this configuration out; else whet does, if there is one."""
    other = elsewhere()
    return given is not None and (is_installed("deepspeed") if other is None else other.has_deepspeed)


def fixed_sizes(given: Any) -> dict[str, tuple[str, Any]]:
    """Return the keys for sizes of a batch that are not "auto", each with the name of its argument and its value."""
    found = {} if given is None else read(given)
    return {key: (name, found[key]) for key, name in SIZES.items() if found.get(key, AUTO) != AUTO}


def stage_of(given: Any) -> int:
    """Return the stage of ZeRO that a configuration asks for; 0 if it cannot be read, which `problem_of` reports."""
    try:
        stage = read(given).get("zero_optimization", {}).get("stage", 0)
    except (OSError, ValueError, AttributeError):
        return 0
    return int(stage) if stage in (1, 2, 3) and not isinstance(stage, bool) else 0


def tunes_engine(given: Any) -> list[str]:
    """Return the paths in a configuration that tune DeepSpeed's engine, and have no effect without it."""
    return list(keys.tunes_engine(read(given)))


def offloads(given: Any) -> bool:
    """Return whether a configuration asks for state or weights in the memory of a CPU."""
    try:
        zero = read(given).get("zero_optimization", {})
        return any(zero.get(name, {}).get("device") == "cpu" for name in keys.OFFLOADS)
    except (OSError, ValueError, AttributeError):
        return False


def _completed(args: TrainingFields) -> tuple[Config, list[str]]:
    reader = _Reader(args, read(args.deepspeed))
    _check_sections(reader)
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
    _check_values(reader)
    _check_scheduler(reader)
    return reader.found, reader.wrong


def _check_sections(reader: _Reader) -> None:
    """Report sections that are no objects, unknown keys, and values of another type."""
    sections = {"zero_optimization", "optimizer", "scheduler", "bf16", "fp16"}
    for path, known in keys.SECTIONS.items():
        reader.known(path, known if path else {*known, *sections})
    reader.section("aio")
    reader.wrong += keys.wrong_types(reader.found)


def _check_values(reader: _Reader) -> None:
    found, zero = reader.found, reader.section("zero_optimization")
    if reader.section("fp16").get("enabled") is True:
        reader.wrong.append("fp16.enabled is true, and whet runs DeepSpeed in fp32 and bf16")
    stage = zero.get("stage")
    if not reader.is_odd("zero_optimization.stage") and stage not in (1, 2, 3):
        reader.wrong.append(f"zero_optimization.stage is {stage}, and whet runs DeepSpeed for stages 1, 2 and 3")
    for name in keys.OFFLOADS:
        path = f"zero_optimization.{name}"
        device = reader.section(path).get("device", "none")
        if device not in ("none", "cpu") and not reader.is_odd(f"{path}.device"):
            reader.wrong.append(f"{path}.device is {device}, and {_ON_CPU_ALONE}")
    others = list(keys.fixed_otherwise(found))
    if not runs(reader.args.deepspeed):
        others += keys.need_engine(found, reader.args.ddp_comm_hook)
    reader.wrong += [one for one in others if not reader.is_odd(one.partition(" is ")[0])]
    _check_optimizer(reader)


def _check_optimizer(reader: _Reader) -> None:
    if "optimizer" not in reader.found:
        return
    reader.known("optimizer", {"type", "params"})
    section, optim = reader.section("optimizer"), reader.args.optim
    row = names().get(optim)
    if str(section.get("type")).lower() not in _OPTIMIZERS or row is None or row.rule != "AdamW":
        reader.wrong.append(f"optimizer.type is {section.get('type')}, and optim is {optim}")
    params = reader.section("optimizer.params")
    for name in sorted(set(params) - set(_ADAM), key=str):
        if name not in _NOT_MEANT or params[name] is not True:
            reader.wrong.append(f"optimizer.params.{name} is not known")


def _check_scheduler(reader: _Reader) -> None:
    """Compare the schedule with that of the arguments: whet's own runs, and has the same shape."""
    if "scheduler" not in reader.found:
        return
    args = reader.args
    reader.known("scheduler", {"type", "params"})
    kind = str(reader.section("scheduler").get("type"))
    if kind not in _SCHEDULES:
        reader.wrong.append(f"scheduler.type is {kind}, and whet reads {', '.join(_SCHEDULES)}")
        return
    if args.lr_scheduler_type != _SCHEDULES[kind]:
        reader.wrong.append(f"scheduler.type is {kind}, and lr_scheduler_type is {args.lr_scheduler_type}")
    names = _OF_SCHEDULES.get(kind, {*_OF_SCHEDULES["WarmupLR"], "total_num_steps"})
    reader.known("scheduler.params", names)
    floor = (args.lr_scheduler_kwargs or {}).get("min_lr_rate", _COSINE_FLOOR)
    for name, expected, argument in (
        ("warmup_min_lr", 0, "the warm-up begins at 0, which"),
        ("warmup_min_ratio", 0, "the warm-up begins at 0, which"),
        ("last_batch_iteration", -1, "the run begins at its first step, which"),
        ("warmup_max_lr", args.learning_rate, "learning_rate"),
        ("warmup_num_steps", args.warmup_steps, "warmup_steps"),
        ("total_num_steps", args.max_steps if args.max_steps > 0 else "its own number", "the run"),
        ("cos_min_ratio", floor, "lr_scheduler_kwargs min_lr_rate"),
        ("warmup_type", "linear", "whet's warm-up"),
    ):
        reader.match(f"scheduler.params.{name}", expected, argument)


def schedule_of(found: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the schedule of a configuration as lr_scheduler_type and lr_scheduler_kwargs; None if it has none."""
    kind = str(keys.at(found, "scheduler.type"))
    if kind not in _SCHEDULES:
        return None
    floor = keys.at(found, "scheduler.params.cos_min_ratio")
    share = _COSINE_FLOOR if floor in (None, AUTO) else floor
    return _SCHEDULES[kind], {"min_lr_rate": share} if kind == "WarmupCosineLR" else {}


def _same(given: Any, expected: Any) -> bool:
    """Return whether a value of JSON is this one: true is not 1."""
    if isinstance(given, list) and isinstance(expected, list):
        return len(given) == len(expected) and all(map(_same, given, expected))
    return isinstance(given, bool) == isinstance(expected, bool) and given == expected


def read(given: Any) -> Config:
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
