"""The keys of DeepSpeed's configuration: which type each has, and what whet's own stages of ZeRO make of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    for path, name, key, value in _values(found):
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
    for path, name, key, value in _values(found):
        is_dtype = name == "communication_data_type"
        same = _FOR_HOOKS.get(hook, hook) if is_dtype else key.same
        if same is not None and value is not None and value not in (same, AUTO):
            instead = " (with stage 1, --ddp_comm_hook sets it)" if is_dtype else ""
            yield f"{path} is {value!r}, and {WITHOUT_ENGINE} {same!r}{instead}"


def tunes_engine(found: Mapping[str, Any]) -> Sequence[str]:
    """Return the paths of keys that tune DeepSpeed's engine or its log, and have no effect without it."""
    of_engine = {*OF_ENGINE, *(f"zero_optimization.{name}" for name in OF_ZERO)}
    others = {"zero_optimization.stage", *(f"zero_optimization.{name}" for name in OFFLOADS)}
    return [path for path, _, key, _ in _values(found) if key.same is None and path in of_engine - others]


def _values(found: Mapping[str, Any]) -> Iterator[tuple[str, str, Key, Any]]:
    """Yield path, name, key and value of all that is known."""
    for section, keys in SECTIONS.items():
        part = at(found, section)
        if isinstance(part, Mapping):
            prefix = f"{section}." if section else ""
            yield from ((f"{prefix}{name}", name, keys[name], part[name]) for name in keys if name in part)
