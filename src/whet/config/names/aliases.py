"""Older and newer names of fields that whet accepts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


def _same(value: Any) -> Any:
    return value


def _over_gloo(backend: Any) -> Any:
    """Return gloo for ccl, the backend of older guides: Intel's oneCCL bindings for PyTorch are archived."""
    return "gloo" if str(backend).lower() == "ccl" else backend


@dataclass(frozen=True, kw_only=True)
class Alias:
    """Another name of a field, and the field it sets."""

    to: str | None
    """The field that replaced it; None if the name sets nothing."""
    kind: Any
    """The annotation of the older name's value."""
    convert: Callable[[Any], Any] = _same
    """Converts the older value to the field's."""
    unset: tuple[object, ...] = ()
    """Older values without effect: the field keeps its default."""
    name: str = "an older name"
    """The kind of name, for the log."""
    note: str = ""
    """Why the name has no effect, if it has none."""

    quiet: bool = False
    """Whether the value does not affect a run of whet, so that no message is needed."""

    def speaks(self, value: object) -> bool:
        """Return whether to tell the user: not if a name without effect is switched off anyway."""
        return self.to is not None or (bool(value) and not self.quiet)


_Strategy = Literal["no", "steps", "epoch"]
_EXACT = "ranks always train the same rows and the same loss as one process"
_BY_FIRST = "rank 0 alone logs and writes files"
_BY_LAUNCHER = "the variables of the launcher say it"


def _no_difference(kind: Any, why: str) -> Alias:
    return Alias(to=None, kind=kind, note=why, quiet=True)


_NO_DIFFERENCE: Mapping[str, Alias] = {
    "average_tokens_across_devices": _no_difference(bool, _EXACT),
    "dataloader_in_order": _no_difference(bool, "batches always come in the order of train_sampling_strategy"),
    "ddp_broadcast_buffers": _no_difference(bool | None, "buffers are copied from rank 0 when the training begins"),
    "ddp_static_graph": _no_difference(bool | None, "the graph is followed in each step"),
    "dispatch_batches": _no_difference(bool | None, _EXACT),
    "eval_accumulation_steps": _no_difference(
        int | None, "predictions always go to the host's memory after each batch"
    ),
    "eval_use_gather_object": _no_difference(bool, _EXACT),
    "local_rank": _no_difference(int, _BY_LAUNCHER),
    "log_level_replica": _no_difference(str, _BY_FIRST),
    "log_on_each_node": _no_difference(bool, _BY_FIRST),
    "restore_callback_states_from_checkpoint": _no_difference(
        bool, "the states that callbacks export are restored on every resume"
    ),
    "save_on_each_node": _no_difference(bool, _BY_FIRST),
    "split_batches": _no_difference(bool | None, _EXACT),
}
"""Fields of transformers without effect, or whose behaviour whet always has."""

ALIASES: Mapping[str, Alias] = {
    "no_cuda": Alias(to="use_cpu", kind=bool),
    "evaluation_strategy": Alias(to="eval_strategy", kind=_Strategy),
    "evaluate_during_training": Alias(
        to="eval_strategy", kind=bool, convert=lambda wanted: "steps" if wanted else "no"
    ),
    "per_gpu_train_batch_size": Alias(to="per_device_train_batch_size", kind=int),
    "per_gpu_eval_batch_size": Alias(to="per_device_eval_batch_size", kind=int),
    "activation_checkpointing": Alias(
        to="gradient_checkpointing", kind=bool | None, unset=(None,), name="the newer name"
    ),
    "activation_checkpointing_kwargs": Alias(
        to="gradient_checkpointing_kwargs", kind=dict[str, Any] | None, name="the newer name"
    ),
    "group_by_length": Alias(
        to="train_sampling_strategy", kind=bool, convert=lambda _: "group_by_length", unset=(False,)
    ),
    "include_inputs_for_metrics": Alias(
        to="include_for_metrics", kind=bool, convert=lambda _: ("inputs",), unset=(False,)
    ),
    "use_ipex": Alias(
        to=None, kind=bool, note="Intel's extension for PyTorch is archived since March 2026; whet has its own CPU path"
    ),
    "torchdynamo": Alias(to="torch_compile_backend", kind=str | None, unset=(None,)),
    "logging_nan_inf_filter": Alias(
        to=None,
        kind=bool,
        note="losses are logged unfiltered; max_nonfinite_steps controls what happens if they are not finite",
    ),
    "xpu_backend": Alias(to="ddp_backend", kind=str | None, convert=_over_gloo, unset=(None,)),
    **_NO_DIFFERENCE,
}
