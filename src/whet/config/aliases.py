"""Names from other places: older and newer spellings that whet takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Alias:
    """An older name, and what it became."""

    to: str | None
    """The field that took its place; None where nothing is left to set."""
    kind: Any
    """The annotation of what the older name takes."""
    convert: Callable[[Any], Any] = lambda value: value
    """Turns the older value into the field's."""
    unset: tuple[object, ...] = ()
    """Older values that ask for nothing, so that the field keeps its default."""
    name: str = "an older name"
    """What this name is, as the log calls it."""
    note: str = ""
    """Why the name has no effect, where it has none."""

    def speaks(self, value: object) -> bool:
        """Return whether the user should hear about it: not where something without effect is switched off anyway."""
        return self.to is not None or bool(value)


_Strategy = Literal["no", "steps", "epoch"]
_ONE_PROCESS = "whet runs one process, and a communication backend serves several"

ALIASES: Mapping[str, Alias] = {
    "no_cuda": Alias(to="use_cpu", kind=bool),
    "evaluation_strategy": Alias(to="eval_strategy", kind=_Strategy),
    "evaluate_during_training": Alias(
        to="eval_strategy", kind=bool, convert=lambda wanted: "steps" if wanted else "no"
    ),
    "per_gpu_train_batch_size": Alias(to="per_device_train_batch_size", kind=int),
    "per_gpu_eval_batch_size": Alias(to="per_device_eval_batch_size", kind=int),
    "activation_checkpointing": Alias(to="gradient_checkpointing", kind=bool, name="the newer name"),
    "activation_checkpointing_kwargs": Alias(
        to="gradient_checkpointing_kwargs", kind=dict[str, Any] | None, name="the newer name"
    ),
    "group_by_length": Alias(
        to="train_sampling_strategy", kind=bool, convert=lambda _: "group_by_length", unset=(False,)
    ),
    "use_ipex": Alias(
        to=None, kind=bool, note="Intel's extension for PyTorch is archived since March 2026; whet has its own CPU path"
    ),
    "xpu_backend": Alias(to=None, kind=str | None, note=_ONE_PROCESS),
    "ddp_backend": Alias(to=None, kind=str | None, note=_ONE_PROCESS),
}
