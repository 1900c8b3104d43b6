"""DeepSpeed's configuration: a file or a dict, compared with the arguments and completed from them.

As in transformers, "auto" takes the value of the argument, and a value that differs from a given argument is an error.
Arguments that are not given take the value of the configuration; one of the wrong type sets nothing, and is refused.
The tables of keys say which type each has, and what whet's own stages of ZeRO make of it.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from whet.config.fields import TrainingFields
from whet.config.optimizer_names import names
from whet.config.ranks import elsewhere, here
from whet.errors import ConfigError, Problem
from whet.optional import is_installed

AUTO = "auto"
_TYPES: Mapping[str, tuple[type, ...]] = {
    "true or false": (bool,), "a count": (int, float), "a number": (int, float), "a text": (str,), "a section": (dict,),
}  # fmt: skip
WITHOUT_ENGINE = "without DeepSpeed it is"
_DTYPES = ("fp32", "fp16", "bfp16")
_FOR_HOOKS = {"none": "fp32", "fp16": "fp16", "bf16": "bfp16"}
"""Values of ddp_comm_hook -> the same in DeepSpeed's words."""


@dataclass(frozen=True)
class Key:
    """What is accepted under one key."""

    kind: str
    """One of the types of JSON."""
    same: Any = None
    """The value that whet's own stages have; None: the key tunes DeepSpeed's engine or its log, and no result."""
    optional: bool = False
    """Whether null is accepted."""

    def is_of_kind(self, value: Any) -> bool:
        """Return whether the value has the type: true is no number, and 1 is not true."""
        if value is None or value == AUTO:
            return self.optional or value == AUTO
        if not isinstance(value, _TYPES[self.kind]) or (isinstance(value, bool) and self.kind != "true or false"):
            return False
        return self.kind != "a count" or (math.isfinite(value) and value == int(value) and value >= 0)


_SWITCH, _COUNT, _NUMBER = Key("true or false"), Key("a count"), Key("a number")
OF_ENGINE: Mapping[str, Key] = {
    "steps_per_print": Key("a count", optional=True),
    "wall_clock_breakdown": Key("true or false", same=False),
    "prescale_gradients": Key("true or false", same=False),
    "gradient_predivide_factor": Key("a number", same=1.0),
    "communication_data_type": Key("a text", same="fp32", optional=True),
    "zero_allow_untested_optimizer": Key("true or false", same=True),
    "zero_force_ds_cpu_optimizer": Key("true or false", same=False),
    "dump_state": Key("true or false", same=False),
    "disable_allgather": Key("true or false", same=False),
    "aio": Key("a section"),
}
"""Keys that the engine takes as they are."""
_OF_OFFLOAD = {
    "device": Key("a text"), "nvme_path": Key("a text", optional=True), "buffer_count": _COUNT, "buffer_size": _COUNT,
    "max_in_cpu": _COUNT, "pin_memory": _SWITCH, "pipeline_read": _SWITCH, "pipeline_write": _SWITCH,
    "fast_init": _SWITCH, "ratio": _NUMBER,
}  # fmt: skip
OFFLOADS = ("offload_optimizer", "offload_param")
OF_ZERO: Mapping[str, Key] = {
    "stage": _COUNT, "contiguous_gradients": _SWITCH, "reduce_scatter": _SWITCH, "reduce_bucket_size": _COUNT,
    "use_multi_rank_bucket_allreduce": _SWITCH, "allgather_partitions": _SWITCH, "allgather_bucket_size": _COUNT,
    "overlap_comm": Key("true or false", optional=True), "load_from_fp32_weights": Key("true or false", same=True),
    "sub_group_size": _COUNT, "round_robin_gradients": _SWITCH,
    "ignore_unused_parameters": Key("true or false", same=True), "stage3_max_live_parameters": _COUNT,
    "stage3_max_reuse_distance": _COUNT, "stage3_prefetch_bucket_size": _COUNT,
    "stage3_param_persistence_threshold": _COUNT, "stage3_model_persistence_threshold": _COUNT,
    "stage3_gather_16bit_weights_on_model_save": _SWITCH, "stage3_module_granularity_threshold": _COUNT,
    **dict.fromkeys(OFFLOADS, Key("a section")),
}  # fmt: skip
OF_FP16: Mapping[str, Key] = {
    "enabled": _SWITCH, "auto_cast": _SWITCH, "loss_scale": _NUMBER, "loss_scale_window": _COUNT,
    "initial_scale_power": _COUNT, "hysteresis": _COUNT, "min_loss_scale": _NUMBER, "consecutive_hysteresis": _SWITCH,
}  # fmt: skip
_OF_SIZES = {
    "train_batch_size": _COUNT, "train_micro_batch_size_per_gpu": _COUNT, "gradient_accumulation_steps": _COUNT,
    "gradient_clipping": _NUMBER,
}  # fmt: skip
SECTIONS: Mapping[str, Mapping[str, Key]] = {
    "": {**_OF_SIZES, **OF_ENGINE}, "zero_optimization": OF_ZERO, "fp16": OF_FP16, "bf16": {"enabled": _SWITCH},
    **{f"zero_optimization.{name}": _OF_OFFLOAD for name in OFFLOADS},
}  # fmt: skip
"""Path of a section -> its keys; "" is the outermost one, which has other sections too."""


def at(found: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path, and everything for an empty one; None if there is no value."""
    part: Any = found
    for name in path.split(".") if path else ():
        part = part.get(name) if isinstance(part, Mapping) else None
    return part


def wrong_types(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is said about each value of a known key that has another type than it should."""
    for path, name, key, value in _known_values(found):
        if key.kind != "a section" and not key.is_of_kind(value):
            yield f"{path} is {value!r}, and takes {key.kind}"
        elif name == "communication_data_type" and value not in (None, *_DTYPES):
            yield f"{path} is {value!r}, and DeepSpeed knows {', '.join(_DTYPES)}"


def fixed_otherwise(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is said about values that whet sets itself when it starts the engine."""
    for name in ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"):
        if name in found and found[name] not in (OF_ENGINE[name].same, AUTO):
            yield f"{name} is {found[name]!r}, and the optimizer is whet's"


def need_engine(found: Mapping[str, Any], hook: str) -> Iterator[str]:
    """Yield what is said about values that change a result and that DeepSpeed's engine alone carries out.

    `hook` is ddp_comm_hook.
    """
    for path, name, key, value in _known_values(found):
        is_dtype = name == "communication_data_type"
        same = _FOR_HOOKS.get(hook, hook) if is_dtype else key.same
        if same is not None and value is not None and value not in (same, AUTO):
            instead = " (with stage 1, --ddp_comm_hook sets it)" if is_dtype else ""
            yield f"{path} is {value!r}, and {WITHOUT_ENGINE} {same!r}{instead}"


def _tuned(found: Mapping[str, Any]) -> list[str]:
    """Return the paths of keys that tune DeepSpeed's engine or its log, and have no effect without it."""
    of_engine = {*OF_ENGINE, *(f"zero_optimization.{name}" for name in OF_ZERO)}
    others = {"zero_optimization.stage", *(f"zero_optimization.{name}" for name in OFFLOADS)}
    return [path for path, _, key, _ in _known_values(found) if key.same is None and path in of_engine - others]


def _known_values(found: Mapping[str, Any]) -> Iterator[tuple[str, str, Key, Any]]:
    """Yield path, name, key and value of all that is known."""
    for section, keys in SECTIONS.items():
        part = at(found, section)
        if isinstance(part, Mapping):
            prefix = f"{section}." if section else ""
            yield from ((f"{prefix}{name}", name, keys[name], part[name]) for name in keys if name in part)


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


def config_is_honoured(args: TrainingFields) -> Problem | None:
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
    engine = WITHOUT_ENGINE in said
    installs = "; or install its engine, which honours what it alone has: DS_BUILD_OPS=0 pip install "
    return f"in the file of --deepspeed, {', '.join(ways)}" + (
        f"{installs}--no-build-isolation deepspeed" if engine else ""
    )


def engine_config(args: TrainingFields, hidden_size: int | None) -> Config:
    """Return the configuration for the engine, with every "auto" replaced; the optimizer and precision are whet's."""
    found, _ = _completed(args)
    zero = found["zero_optimization"]
    for name in OFFLOADS:  # to nowhere, or on a CPU to where everything is
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
    kept = {name: value for name, value in found.items() if name in OF_ENGINE or name == "zero_optimization"}
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
    """Return the stage of ZeRO that a configuration asks for; 0 if it cannot be read."""
    try:
        stage = read(given).get("zero_optimization", {}).get("stage", 0)
    except (OSError, ValueError, AttributeError):
        return 0
    return int(stage) if stage in (1, 2, 3) and not isinstance(stage, bool) else 0


def tunes_engine(given: Any) -> list[str]:
    """Return the paths in a configuration that tune DeepSpeed's engine, and have no effect without it."""
    return _tuned(read(given))


def offloads(given: Any) -> bool:
    """Return whether a configuration asks for state or weights in the memory of a CPU."""
    try:
        zero = read(given).get("zero_optimization", {})
        return any(zero.get(name, {}).get("device") == "cpu" for name in OFFLOADS)
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
    for path, known in SECTIONS.items():
        reader.known(path, known if path else {*known, *sections})
    reader.section("aio")
    reader.wrong += wrong_types(reader.found)


def _check_values(reader: _Reader) -> None:
    found, zero = reader.found, reader.section("zero_optimization")
    if reader.section("fp16").get("enabled") is True:
        reader.wrong.append("fp16.enabled is true, and whet runs DeepSpeed in fp32 and bf16")
    stage = zero.get("stage")
    if not reader.is_odd("zero_optimization.stage") and stage not in (1, 2, 3):
        reader.wrong.append(f"zero_optimization.stage is {stage}, and whet runs DeepSpeed for stages 1, 2 and 3")
    for name in OFFLOADS:
        path = f"zero_optimization.{name}"
        device = reader.section(path).get("device", "none")
        if device not in ("none", "cpu") and not reader.is_odd(f"{path}.device"):
            reader.wrong.append(f"{path}.device is {device}, and {_ON_CPU_ALONE}")
    others = list(fixed_otherwise(found))
    if not runs(reader.args.deepspeed):
        others += need_engine(found, reader.args.ddp_comm_hook)
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
    kind = str(at(found, "scheduler.type"))
    if kind not in _SCHEDULES:
        return None
    floor = at(found, "scheduler.params.cos_min_ratio")
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


_NUMBERS = {
    "gradient_clipping": "max_grad_norm", "scheduler.params.warmup_max_lr": "learning_rate",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon", "optimizer.params.weight_decay": "weight_decay",
}  # fmt: skip
_BETAS = ("adam_beta1", "adam_beta2")
_ROWS, _STEPS = SIZES.values()
_FORMATS = ("bf16", "fp16")
_PRECISIONS = ("precision", *_FORMATS)
_SCHEDULE = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
_SET = (_ROWS, _STEPS, *dict.fromkeys(_NUMBERS.values()), *_BETAS, *_SCHEDULE, "precision")
"""All fields that a configuration can set."""


def values_for(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the configuration in these settings has for settings that are not given."""
    config = given.get("deepspeed")
    if config is None:
        return {}
    try:
        found = read(config)
    except (OSError, ValueError):
        return {}
    values = {**_plain(found), **_sizes(found, given), **_schedule(found)}
    if not any(given.get(name) is not None for name in _PRECISIONS) and (precision := _precision(found)):
        values["precision"] = precision
    return {name: value for name, value in values.items() if name not in given}


def described(args: TrainingFields) -> list[str]:
    """Return the stage that the run's configuration asks for and the settings it has a value for, in parts of a line.

    Empty without a configuration.
    """
    if args.deepspeed is None:
        return []
    values = values_for({"deepspeed": args.deepspeed})
    set_here = [f"{name} {values[name]}" for name in _SET if name in values and values[name] == getattr(args, name)]
    source = "" if isinstance(args.deepspeed, Mapping) else f"{Path(str(args.deepspeed)).name}: "
    return [f"{source}stage {stage_of(args.deepspeed)}", *set_here]


def _plain(found: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for path, name in _NUMBERS.items() if _is_number(value := at(found, path))}
    betas = at(found, "optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == len(_BETAS) and all(map(_is_number, betas)):
        values |= dict(zip(_BETAS, betas, strict=True))
    return {name: float(value) for name, value in values.items()}


def _schedule(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schedule of the learning rate, and the steps of its warm-up if they are a number."""
    schedule, steps = schedule_of(found), at(found, "scheduler.params.warmup_num_steps")
    if schedule is None:
        return {}
    values: dict[str, Any] = {"lr_scheduler_type": schedule[0]}
    if schedule[1]:
        values["lr_scheduler_kwargs"] = schedule[1]
    return values | ({"warmup_steps": int(steps)} if _is_count(steps) else {})


def _sizes(found: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, int]:
    """Return the rows of a micro-batch and the micro-batches of a step; what is missing follows from train_batch_size.

    DeepSpeed's rule: train_batch_size is the product of both and of the ranks; alone, it is that of one micro-batch.
    """
    known = {name: int(found[key]) for key, name in SIZES.items() if _is_count(found.get(key))}
    total = found.get("train_batch_size")
    decided = {**known, **{name: given[name] for name in (_ROWS, _STEPS) if _is_count(given.get(name))}}
    if not _is_count(total) or len(decided) == 2:
        return known
    (missing,) = {_ROWS, _STEPS} - {*decided} if decided else (_ROWS,)
    others = math.prod(decided.values()) * here().n_ranks
    rest = {} if decided else {_STEPS: 1}
    return {**known, **rest, missing: int(total) // others} if total % others == 0 else known


def _precision(found: Mapping[str, Any]) -> str | None:
    """Return the format that the sections ask for, fp32 where they leave it open; None if they ask for two."""
    on = [name for name in _FORMATS if at(found, f"{name}.enabled") is True]
    odd = any(at(found, f"{name}.enabled") not in (None, True, False, AUTO) for name in _FORMATS)
    return None if odd or len(on) > 1 else next(iter(on), "fp32")


def _is_count(value: Any) -> TypeGuard[int | float]:
    return _is_number(value) and value == int(value) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
