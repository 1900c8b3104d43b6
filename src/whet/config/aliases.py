"""Names from other places: older spellings that whet takes, and transformers' settings that it does not honour."""

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
    "use_ipex": Alias(
        to=None, kind=bool, note="Intel's extension for PyTorch is archived since March 2026; whet has its own CPU path"
    ),
    "xpu_backend": Alias(to=None, kind=str | None, note=_ONE_PROCESS),
    "ddp_backend": Alias(to=None, kind=str | None, note=_ONE_PROCESS),
}

SEEN_IN = "5.23"
"""The release of transformers that NOT_HONOURED was compared with."""

NOT_HONOURED: frozenset[str] = frozenset(
    """
    accelerator_config
    average_tokens_across_devices batch_eval_metrics bf16_full_eval dataloader_in_order
    dataloader_multiprocessing_context
    ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph
    ddp_timeout debug deepspeed eval_accumulation_steps eval_delay eval_do_concat_batches
    eval_use_gather_object fp16_full_eval fsdp fsdp_config full_determinism
    hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token
    ignore_data_skip include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor
    length_column_name liger_kernel_config local_rank log_level log_level_replica log_on_each_node
    logging_nan_inf_filter neftune_noise_alpha optim_target_modules parallelism_config
    prediction_loss_only project push_to_hub remove_unused_columns restore_callback_states_from_checkpoint
    save_on_each_node save_only_model skip_memory_metrics torch_compile torch_compile_backend
    torch_compile_mode trackio_bucket_id trackio_space_id trackio_static_space_id
    use_cache use_liger_kernel
    """.split()  # noqa: SIM905 - one name a line, or one line of 600 columns, reads worse
)
"""Fields of transformers' TrainingArguments, as of SEEN_IN, that whet does not carry out."""

NOT_HONOURED_OLD: frozenset[str] = frozenset(
    """
    adafactor dispatch_batches fp16_backend fp16_opt_level fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap
    group_by_length half_precision_backend include_inputs_for_metrics include_tokens_per_second jit_mode_eval
    mp_parameters past_index push_to_hub_model_id push_to_hub_organization push_to_hub_token ray_scope
    save_safetensors sharded_ddp split_batches torchdynamo tpu_metrics_debug tpu_num_cores
    use_legacy_prediction_loop use_mps_device
    """.split()  # noqa: SIM905 - one name a line, or one line of 600 columns, reads worse
)
"""Fields that transformers had in releases 4.26 to 4.57, gone since, that whet does not carry out."""

_HINTS: Mapping[str, str] = {
    "fp16_full_eval": "use --fp16, which evaluation computes in too; the weights stay float32",
    "bf16_full_eval": "use --bf16, which evaluation computes in too; the weights stay float32",
    "half_precision_backend": "use --bf16 or --fp16: both run through torch's own autocast, the only backend left",
    "fp16_backend": "use --fp16: it runs through torch's own autocast, the only backend left",
    "fp16_opt_level": "use --fp16, which is what apex's level O1 was: products in fp16, weights in float32",
    "group_by_length": "rows are packed end to end without padding, so grouping them would save nothing",
    "remove_unused_columns": "whet always leaves out what the model does not read",
    "save_safetensors": "whet always writes safetensors",
    "adafactor": "use --optim adafactor",
    "local_rank": "whet runs one process",
}

REFUSED: Mapping[str, str] = {name: _HINTS.get(name, "") for name in sorted(NOT_HONOURED | NOT_HONOURED_OLD)}
"""Every name that is known but not honoured -> what to do instead, where there is something to say."""
