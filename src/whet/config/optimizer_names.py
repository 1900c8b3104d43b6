"""The optimizers that `--optim` knows, the options of each in `--optim_args`, and where to find the others."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from whet.config.values import expected, read
from whet.errors import Problem

ENTRY_POINTS = "whet.optimizers"
"""Entry point group for optimizers of other packages: name = "module:function", called with (model, args, options)."""

_Dtype = Literal["float32", "bfloat16", "float16"]
_TORCHAO = {"block_size": int, "bf16_stochastic_round": bool}

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "auto": {},
    "adamw_torch": {},
    "adamw_torch_fused": {},
    "adamw_hf": {},
    "adamw_apex_fused": {},
    "adamw_anyprecision": {
        "use_kahan_summation": bool,
        "momentum_dtype": _Dtype,
        "variance_dtype": _Dtype,
        "compensation_buffer_dtype": _Dtype,
    },
    "adamw_whet": {},
    "adamw_whet_8bit": {},
    "adamw_bnb_8bit": {"min_8bit_size": int},
    "adamw_8bit": {"min_8bit_size": int},
    "adamw_torch_8bit": _TORCHAO,
    "adamw_torch_4bit": _TORCHAO,
    "adafactor": {
        "scale_parameter": bool,
        "relative_step": bool,
        "clip_threshold": float,
        "decay_rate": float,
        "beta1": float,
        "eps1": float,
        "eps2": float,
    },
    "muon": {
        "momentum": float,
        "nesterov": bool,
        "ns_steps": int,
        "adjust_lr_fn": Literal["original", "match_rms_adamw"],
    },
    "lion_32bit": {},
    "adagrad": {"lr_decay": float, "eps": float, "initial_accumulator_value": float},
    "rmsprop": {"momentum": float, "alpha": float, "eps": float, "centered": bool},
    "sgd": {"momentum": float, "dampening": float, "nesterov": bool},
}
"""Every optimizer that whet builds -> its optim_args and their types."""

_BITSANDBYTES = "paged_adamw_32bit paged_adamw_8bit ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit \
    lion_8bit paged_lion_32bit paged_lion_8bit rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit"
_GALORE = "galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise galore_adamw_8bit_layerwise \
    galore_adafactor_layerwise"
_PACKAGES = {
    "bitsandbytes": _BITSANDBYTES,
    "galore-torch": _GALORE,
    "apollo-torch": "apollo_adamw apollo_adamw_layerwise",
    "lomo-optim": "lomo adalomo",
    "grokadamw": "grokadamw",
    "schedulefree": "schedule_free_radam schedule_free_adamw schedule_free_sgd",
    "torch-optimi": "stable_adamw",
    "torch_xla": "adamw_torch_xla",
    "torch_npu": "adamw_torch_npu_fused",
}
ELSEWHERE: Mapping[str, str] = {name: package for package, names in _PACKAGES.items() for name in names.split()}
"""Optimizers of transformers that whet does not build -> the package that has them."""

NO_BETAS = frozenset({"adafactor", "adagrad", "rmsprop", "sgd"})
"""Optimizers without adam_beta1 and adam_beta2."""
NO_EPSILON = NO_BETAS | {"lion_32bit"}
"""Optimizers without adam_epsilon."""


@cache
def plugged_in() -> Mapping[str, EntryPoint]:
    """Return the optimizers that installed packages offer, by name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def texts(optim_args: str | None) -> dict[str, str]:
    """Return "key=value,key=value" as a dict of texts; ValueError for a part without "=" or a key given twice."""
    found: dict[str, str] = {}
    for part in filter(None, (optim_args or "").replace(" ", "").split(",")):
        key, equals, value = part.partition("=")
        if not (key and equals and value) or key in found:
            raise ValueError(part)
        found[key] = value
    return found


def options(optim: str, optim_args: str | None) -> dict[str, Any]:
    """Return the options of an optimizer, converted by its annotation in OPTIONS; those of a plug-in stay texts."""
    kinds = OPTIONS.get(optim)
    given = texts(optim_args)
    return dict(given) if kinds is None else {key: read(value, kinds[key]) for key, value in given.items()}


def wrong_options(optim: str, optim_args: str | None) -> list[Problem]:
    """Return what is wrong with the options of an optimizer that whet builds."""
    kinds = OPTIONS[optim]
    takes = ", ".join(kinds) or "no options"
    problems = []
    for key, value in texts(optim_args).items():
        why = f"{optim} takes {takes}" if key not in kinds else _misfit(key, value, kinds[key])
        if why:
            fix = f"take {key} out of --optim_args" if key not in kinds else f"correct {key} in --optim_args"
            hint = "; --weight_decay sets the decay" if key == "weight_decay" else ""
            what = f"optim_args holds what {optim} does not take"
            problems.append(Problem(what=what, got=f"{key}={value}", why=why, fix=fix + hint))
    return problems


def _misfit(key: str, value: str, kind: Any) -> str:
    try:
        read(value, kind)
    except ValueError:
        return f"{key} is {expected(kind)}"
    return ""
