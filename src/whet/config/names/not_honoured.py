"""Settings of transformers that whet does not carry out, each with what to do instead."""

from collections.abc import Mapping

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
