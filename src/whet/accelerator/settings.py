"""What an Accelerator is asked for: which of accelerate's settings are passed on, and which are refused."""

from __future__ import annotations

import os
from typing import Any

from whet import optional
from whet.config import ranks
from whet.errors import ConfigError, Problem

_PASSED_ON = (
    "device_placement", "dataloader_config", "rng_types", "log_with", "project_dir", "project_config",
    "gradient_accumulation_plugin", "step_scheduler_with_optimizer", "kwargs_handlers",
)  # fmt: skip
_FORMATS = ("no", "bf16", "fp16")
_STRATEGIES = ("NO", "MULTI_CPU", "MULTI_GPU")
_WITHOUT = "whet.Accelerator trains complete models, one on each rank, with the operators of whet.optimize"
_JOINS_WITHIN_S = 1800.0
"""torch's own default, which accelerate has."""
OTHERWISE = "use accelerate.Accelerator, and call whet.optimize(model) before its prepare"
"""The way that works for everything that accelerate has and whet has not."""


def accelerate() -> Any:
    """Return the package accelerate."""
    return optional.require("accelerate", needed_for="whet.Accelerator", install="accelerate")


def made(mixed_precision: str | None, n_accumulated: int, cpu: bool | None, more: dict[str, Any]) -> Any:
    """Return accelerate's own Accelerator for these settings; raises one ConfigError that names all odd ones."""
    mixed_precision = _with_older_names(mixed_precision, more)
    if problems := _problems(mixed_precision, more):
        raise ConfigError.of(problems)
    package = accelerate()
    config = more.pop("dataloader_config", None) or package.DataLoaderConfiguration(use_seedable_sampler=True)
    if "gradient_accumulation_plugin" not in more or n_accumulated != 1:
        more["gradient_accumulation_steps"] = n_accumulated  # accelerate refuses both
    _join_here(more.get("kwargs_handlers"), on_cpu=bool(_on_cpu(cpu)))
    try:
        inner = package.Accelerator(
            mixed_precision=mixed_precision, cpu=_on_cpu(cpu), dataloader_config=config, **more
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(
            what="accelerate does not take these settings",
            got=str(error)[:300],
            why="whet.Accelerator runs on accelerate's own, which checks its settings",
            fix="change the setting that the message names; a process has one configuration for all its Accelerators",
        ) from error
    _require_plain(inner)
    return inner


def _join_here(handlers: Any, *, on_cpu: bool) -> None:
    """Join the ranks of one machine over its loopback interface, unless the user says how; accelerate joins all others.

    accelerate's store and torch's gloo listen on every interface.
    """
    from whet.dist import group

    says = any("backend" in vars(one) for one in handlers or ())  # accelerate's InitProcessGroupKwargs
    place = ranks.here()
    if on_cpu and place.n_ranks > 1 and place.one_machine and "RANK" in os.environ and not says:
        group.join("gloo", _JOINS_WITHIN_S)


def _with_older_names(mixed_precision: str | None, more: dict[str, Any]) -> str | None:
    """Take `fp16` and `bf16` out of the settings, as older versions of accelerate had them."""
    wanted = [name for name in ("fp16", "bf16") if more.pop(name, False)]
    return mixed_precision or (wanted[0] if wanted else None)


def _on_cpu(asked: bool | None) -> bool:
    """Return whether the model stays on the CPU; without a GPU accelerate would leave several ranks to themselves."""
    import torch

    return not torch.cuda.is_available() if asked is None else asked


def _problems(mixed_precision: str | None, more: dict[str, Any]) -> list[Problem]:
    unknown = {name: value for name, value in more.items() if name not in _PASSED_ON and value is not None}
    found = [
        Problem(what=f"whet.Accelerator does not take {name}", got=value, why=_WITHOUT, fix=OTHERWISE)
        for name, value in unknown.items()
    ]
    if mixed_precision not in (None, *_FORMATS):
        found.append(
            Problem(
                what=f"whet.Accelerator does not compute in {mixed_precision}",
                got=f"mixed_precision={mixed_precision!r}",
                why="the products of whet's operators run in float32, bfloat16 or float16",
                fix="use bf16, or leave mixed_precision out",
            )
        )
    for name in unknown:
        del more[name]
    for name in [name for name, value in more.items() if value is None]:
        del more[name]
    return found


def _require_plain(inner: Any) -> None:
    """Refuse what the environment of a launcher can ask accelerate for, as settings of the same names would be."""
    config, state = inner.dataloader_config, inner.state
    odd = {
        "strategy": inner.distributed_type.name if inner.distributed_type.name not in _STRATEGIES else None,
        "mixed_precision": inner.mixed_precision if inner.mixed_precision not in _FORMATS else None,
        "dynamo_backend": None if state.dynamo_plugin.backend.name == "NO" else state.dynamo_plugin.backend.name,
        "ACCELERATE_DEBUG_MODE": (state.debug and inner.num_processes > 1) or None,  # compares shapes through pickles
        "use_stateful_dataloader": True if getattr(config, "use_stateful_dataloader", False) else None,
        "project_config.automatic_checkpoint_naming": inner.project_configuration.automatic_checkpoint_naming or None,
    }
    if inner.mixed_precision == "fp16" and inner.device.type == "cpu":
        raise ConfigError(
            what="mixed_precision='fp16' would have no effect on a CPU",
            got="a CPU, on which accelerate computes in float32 instead",
            why="accelerate has float16 for GPUs alone",
            fix="use bf16 there; or whet.Trainer with fp16=True, which computes in it on a CPU",
        )
    if asked := {name: value for name, value in odd.items() if value is not None}:
        raise ConfigError(
            what=f"whet.Accelerator does not take {', '.join(asked)}", got=asked, why=_WITHOUT, fix=OTHERWISE
        )
