"""Values without effect for fields that whet does not carry out; they are accepted silently."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
