"""Names of settings that whet knows besides its own: older and newer ones, and those that it does not carry out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


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


SEEN_IN = "5.24"
"""The release of transformers that NOT_HONOURED was compared with."""


class Refused(NamedTuple):
    """A name that is known but not honoured."""

    instead: str
    """What to do instead; "" if there is no advice."""
    off: tuple[object, ...] = ()
    """The values that switch it off, or request what whet always does: they are accepted. So is a part of a dict."""


def refused(instead: str, *off: object) -> Refused:
    """Return what is said of a name, and its values without effect."""
    return Refused(instead, off)


_NO_SPACE = "pass Trainer a callback that calls trackio.init with it, in place of --report_to trackio"
_LIGER = "whet's own fused operators are used for every model that they support"
_FSDP = (
    "use --fsdp full_shard, or shard_grad_op to keep weights from forward to backward; each block is shared by itself"
)
_OTHER_SHARDING = "use --zero_stage 1, 2 or 3, which share state, gradients and weights between the ranks"
_OF_ACCELERATE = {
    "split_batches": False, "dispatch_batches": None, "even_batches": True, "use_seedable_sampler": True,
    "non_blocking": False, "gradient_accumulation_kwargs": None, "use_configured_state": False,
}  # fmt: skip
"""What transformers writes for accelerator_config if nobody has set it."""
_ALONE = "ranks exchange gradients in each step: send less by --ddp_comm_hook bf16 or --gradient_accumulation_steps"

NOT_HONOURED: Mapping[str, Refused] = {
    # what is computed
    "neftune_noise_alpha": refused("use --weight_decay, or more dropout in the model's configuration", None),
    "optim_target_modules": refused(
        "the optimizers that read it are not built in; pass one as optimizers=(it, None)", None
    ),
    "use_cache": refused(
        "whet trains without a cache of keys and values; set it in the model's configuration to generate", False
    ),
    "use_liger_kernel": refused(_LIGER, False),
    "liger_kernel_config": refused(_LIGER, None),
    "bf16_full_eval": refused("use --bf16, which evaluation computes in too; the weights stay float32", False),
    "fp16_full_eval": refused("use --fp16, which evaluation computes in too; the weights stay float32", False),
    # data
    "dataloader_multiprocessing_context": refused(
        "whet chooses how to prepare batches, and never forks a process with threads", None
    ),
    # evaluation
    "batch_eval_metrics": refused(
        "evaluate batch by batch with Trainer's evaluation=, which gets the trainer and the data set", False
    ),
    # logs
    "include_num_input_tokens_seen": refused(
        "the results always contain train_tokens_per_second, which does not count padding", False
    ),
    "skip_memory_metrics": refused(
        "use --memory_limit_gb to watch the memory of a run, and --profile for its time", True
    ),
    "debug": refused(
        "use --max_nonfinite_steps 1 to stop at the first step that is not finite, and --profile for time", "", ()
    ),
    "project": refused(_NO_SPACE, "huggingface"),
    "trackio_space_id": refused(_NO_SPACE, None),
    "trackio_bucket_id": refused(_NO_SPACE, None),
    "trackio_static_space_id": refused(_NO_SPACE, False, None),
    # several processes
    "accelerator_config": refused(
        "whet does not run on accelerate; batches are set by --per_device_train_batch_size and "
        "--gradient_accumulation_steps alone",
        None,
        _OF_ACCELERATE,
    ),
    "fsdp_config": refused(_FSDP, None),
    "parallelism_config": refused(_OTHER_SHARDING, None),
}
"""Fields of transformers' TrainingArguments, as of SEEN_IN, that whet does not carry out -> what to do instead."""

NOT_HONOURED_OLD: Mapping[str, Refused] = {
    "adafactor": refused("use --optim adafactor", False),
    "fp16_backend": refused("use --fp16: it runs through torch's own autocast, the only backend left", "auto"),
    "fp16_opt_level": refused("use --fp16, which equals apex's level O1: products in fp16, weights in float32", "O1"),
    "half_precision_backend": refused(
        "use --bf16 or --fp16: both run through torch's own autocast, the only backend left", "auto"
    ),
    "jit_mode_eval": refused("evaluation runs through whet's fused operators; torch has replaced TorchScript", False),
    "include_tokens_per_second": refused("the results always contain train_tokens_per_second", False),
    "past_index": refused(
        "no model of today carries its state from batch to batch; pass Trainer a model that does so itself", -1
    ),
    "ray_scope": refused("run whet once for each trial of a search, and compare the eval_results.json files", "last"),
    "save_safetensors": refused("whet always writes safetensors", True),
    "use_legacy_prediction_loop": refused("there is one loop for evaluation and prediction", False),
    "use_mps_device": refused("whet runs on CPUs and NVIDIA's GPUs; on a Mac it takes the CPU", False),
    "tpu_metrics_debug": refused("whet runs on CPUs and NVIDIA's GPUs; on other machines it takes the CPU", False),
    "tpu_num_cores": refused("whet runs on CPUs and NVIDIA's GPUs; on other machines it takes the CPU", None),
    "push_to_hub_model_id": refused("name it in --hub_model_id", None),
    "push_to_hub_token": refused("give it in --hub_token, or in HF_TOKEN", None),
    "push_to_hub_organization": refused("name it in --hub_model_id ORGANIZATION/NAME", None),
    "fsdp_min_num_params": refused(_FSDP, 0),
    "fsdp_transformer_layer_cls_to_wrap": refused(_FSDP, None),
    "sharded_ddp": refused(_OTHER_SHARDING, False, "", ()),
    "mp_parameters": refused(_OTHER_SHARDING, ""),
}
"""Fields that transformers had in releases 4.26 to 4.57 and removed since, and that whet does not carry out."""

WITHDRAWN: Mapping[str, Refused] = {
    "local_sgd_steps": refused(_ALONE, 0),
    "outer_learning_rate": refused(_ALONE, 1.0),
    "outer_momentum": refused(_ALONE, 0.0),
}
"""Fields that whet had itself and gave up (docs/decisions/0029-torchs-agent-starts-the-ranks.md)."""

REFUSED: Mapping[str, Refused] = dict(sorted({**NOT_HONOURED, **NOT_HONOURED_OLD, **WITHDRAWN}.items()))
"""Every name that is known but not honoured."""


def is_off(value: object, off: tuple[object, ...], reader: Callable[[object, Any], Any]) -> bool:
    """Return whether the value, as `reader(value, annotation)` reads it, is one of `off`."""
    return any(_reads_as(value, one, reader) for one in off)


def kind_of(off: tuple[object, ...]) -> Any:
    """Return bool for a switch, whose bare flag means true; str for a field that accepts text; else None."""
    if any(isinstance(value, bool) for value in off) and any(isinstance(value, str | tuple) for value in off):
        return str
    return bool if off and isinstance(off[0], bool) else None


def _reads_as(value: object, off: object, reader: Callable[[object, Any], Any]) -> bool:
    try:
        found = reader(value, _KINDS[type(off)])
        return found == off or (isinstance(off, dict) and bool(found) and off | found == off)
    except (ValueError, OverflowError):
        return False


_KINDS: Mapping[type, Any] = {
    bool: bool, float: float, int: int, str: str, tuple: tuple[str, ...], dict: dict, type(None): str | None,
}  # fmt: skip
