"""Names of settings that whet knows besides its own: older and newer ones, and those that it does not carry out."""

from __future__ import annotations

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


SEEN_IN = "5.24"
"""The release of transformers that NOT_HONOURED was compared with."""

_NO_UPLOAD = "upload output_dir after the run, by `hf upload` or huggingface_hub's upload_folder"
_NO_SPACE = "pass Trainer a callback that calls trackio.init with it, in place of --report_to trackio"
_LIGER = "whet's own fused operators are used for every model that they support"
_FSDP = (
    "use --fsdp full_shard, or shard_grad_op to keep weights from forward to backward; each block is shared by itself"
)
_OTHER_SHARDING = "use --zero_stage 1, 2 or 3, which share state, gradients and weights between the ranks"
_ALONE = "ranks exchange gradients in each step: send less by --ddp_comm_hook bf16 or --gradient_accumulation_steps"

NOT_HONOURED: Mapping[str, str] = {
    # what is computed
    "neftune_noise_alpha": "use --weight_decay, or more dropout in the model's configuration",
    "optim_target_modules": "the optimizers that read it are not built in; pass one as optimizers=(it, None)",
    "use_cache": "whet trains without a cache of keys and values; set it in the model's configuration to generate",
    "use_liger_kernel": _LIGER,
    "liger_kernel_config": _LIGER,
    "bf16_full_eval": "use --bf16, which evaluation computes in too; the weights stay float32",
    "fp16_full_eval": "use --fp16, which evaluation computes in too; the weights stay float32",
    # data
    "dataloader_multiprocessing_context": "whet chooses how to prepare batches, and never forks a process with threads",
    # evaluation
    "batch_eval_metrics": "evaluate batch by batch with Trainer's evaluation=, which gets the trainer and the data set",
    # saving
    # logs
    "include_num_input_tokens_seen": "the results always contain train_tokens_per_second, which does not count padding",
    "skip_memory_metrics": "use --memory_limit_gb to watch the memory of a run, and --profile for its time",
    "debug": "use --max_nonfinite_steps 1 to stop at the first step that is not finite, and --profile for time",
    "project": _NO_SPACE,
    "trackio_space_id": _NO_SPACE,
    "trackio_bucket_id": _NO_SPACE,
    "trackio_static_space_id": _NO_SPACE,
    # upload
    "push_to_hub": _NO_UPLOAD,
    "hub_model_id": _NO_UPLOAD,
    "hub_strategy": _NO_UPLOAD,
    "hub_token": _NO_UPLOAD,
    "hub_private_repo": _NO_UPLOAD,
    "hub_always_push": _NO_UPLOAD,
    "hub_revision": _NO_UPLOAD,
    # several processes
    "accelerator_config": "whet does not run on accelerate; batches are set by --per_device_train_batch_size and "
    "--gradient_accumulation_steps alone",
    "fsdp_config": _FSDP,
    "parallelism_config": _OTHER_SHARDING,
}
"""Fields of transformers' TrainingArguments, as of SEEN_IN, that whet does not carry out -> what to do instead."""

NOT_HONOURED_OLD: Mapping[str, str] = {
    "adafactor": "use --optim adafactor",
    "fp16_backend": "use --fp16: it runs through torch's own autocast, the only backend left",
    "fp16_opt_level": "use --fp16, which equals apex's level O1: products in fp16, weights in float32",
    "half_precision_backend": "use --bf16 or --fp16: both run through torch's own autocast, the only backend left",
    "jit_mode_eval": "evaluation runs through whet's fused operators; torch has replaced TorchScript",
    "include_tokens_per_second": "the results always contain train_tokens_per_second",
    "past_index": "no model of today carries its state from batch to batch; pass Trainer a model that does so itself",
    "ray_scope": "run whet once for each trial of a search, and compare the eval_results.json files",
    "save_safetensors": "whet always writes safetensors",
    "use_legacy_prediction_loop": "there is one loop for evaluation and prediction",
    "use_mps_device": "whet runs on CPUs and NVIDIA's GPUs; on a Mac it takes the CPU",
    "tpu_metrics_debug": "whet runs on CPUs and NVIDIA's GPUs; on other machines it takes the CPU",
    "tpu_num_cores": "whet runs on CPUs and NVIDIA's GPUs; on other machines it takes the CPU",
    "push_to_hub_model_id": _NO_UPLOAD,
    "push_to_hub_organization": _NO_UPLOAD,
    "push_to_hub_token": _NO_UPLOAD,
    "fsdp_min_num_params": _FSDP,
    "fsdp_transformer_layer_cls_to_wrap": _FSDP,
    "sharded_ddp": _OTHER_SHARDING,
    "mp_parameters": _OTHER_SHARDING,
}
"""Fields that transformers had in releases 4.26 to 4.57 and removed since, and that whet does not carry out."""

WITHDRAWN: Mapping[str, str] = {
    "local_sgd_steps": _ALONE,
    "outer_learning_rate": _ALONE,
    "outer_momentum": _ALONE,
}
"""Fields that whet had itself and gave up (docs/decisions/0029-torchs-agent-starts-the-ranks.md)."""

REFUSED: Mapping[str, str] = dict(sorted({**NOT_HONOURED, **NOT_HONOURED_OLD, **WITHDRAWN}.items()))
"""Every name that is known but not honoured -> what to do instead."""


OFF: Mapping[str, tuple[object, ...]] = {
    # what is computed
    "neftune_noise_alpha": (None,),
    "optim_target_modules": (None,),
    "use_cache": (False,),
    "use_liger_kernel": (False,),
    "liger_kernel_config": (None,),
    "bf16_full_eval": (False,),
    "fp16_full_eval": (False,),
    # data
    "dataloader_multiprocessing_context": (None,),
    # evaluation
    "batch_eval_metrics": (False,),
    # saving
    # logs
    "include_num_input_tokens_seen": (False,),  # its word "no" reads as false
    "skip_memory_metrics": (True,),
    "debug": ("", ()),
    "project": ("huggingface",),
    "trackio_space_id": (None,),
    "trackio_bucket_id": (None,),
    "trackio_static_space_id": (False, None),
    # upload
    "push_to_hub": (False,),
    "hub_model_id": (None,),
    "hub_strategy": ("every_save",),
    "hub_token": (None,),
    "hub_private_repo": (False, None),
    "hub_always_push": (False,),
    "hub_revision": (None,),
    # several processes
    "accelerator_config": (None,),
    "fsdp_config": (None,),
    "parallelism_config": (None,),
    # whet's own earlier ones
    "local_sgd_steps": (0,),
    "outer_learning_rate": (1.0,),
    "outer_momentum": (0.0,),
    # older releases
    "adafactor": (False,),
    "fp16_backend": ("auto",),
    "fp16_opt_level": ("O1",),
    "ray_scope": ("last",),
    "half_precision_backend": ("auto",),
    "jit_mode_eval": (False,),
    "include_tokens_per_second": (False,),
    "past_index": (-1,),
    "save_safetensors": (True,),
    "use_legacy_prediction_loop": (False,),
    "use_mps_device": (False,),
    "tpu_metrics_debug": (False,),
    "tpu_num_cores": (None,),
    "push_to_hub_model_id": (None,),
    "push_to_hub_organization": (None,),
    "push_to_hub_token": (None,),
    "fsdp_min_num_params": (0,),
    "fsdp_transformer_layer_cls_to_wrap": (None,),
    "sharded_ddp": (False, "", ()),
    "mp_parameters": ("",),
}
"""Name -> the values that switch it off, or request what whet always does. Names without such a value are missing."""


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
        return reader(value, _KINDS[type(off)]) == off
    except (ValueError, OverflowError):
        return False


_KINDS: Mapping[type, Any] = {
    bool: bool, float: float, int: int, str: str, tuple: tuple[str, ...], type(None): str | None,
}  # fmt: skip
