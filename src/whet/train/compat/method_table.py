"""The methods of transformers' Trainer: whether whet's has them, and whether a subclass may override them.

`train/compat/overrides.py` checks subclasses against these tables; `docs/transformers.md` is generated from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SEEN_IN = "5.24"
"""The release of transformers that these tables were compared with."""

ALTERNATIVE = "use transformers' own Trainer with whet.optimize(model), which is as fast"
"""What to do instead of overriding a method that whet's loop does not call."""


@dataclass(frozen=True)
class Method:
    """One public method of transformers' Trainer."""

    override: Literal["honoured", "refused"]
    """What happens if a subclass or an instance replaces it."""
    note: str = ""
    """How it differs from transformers', if it does."""
    refused: str = ""
    """Why a call is refused and what to do instead; empty if the method works."""


_ONE_PROCESS = "always 1: each rank has the complete model and complete rows"
_HONOURED, _FIXED = Method("honoured"), Method("refused")

METHODS: Mapping[str, Method] = {
    "add_callback": _HONOURED,
    "autocast_smart_context_manager": Method("refused", "the context of the run's precision"),
    "call_model_init": _HONOURED,
    "compute_loss": Method(
        "honoured", "gets a padded batch; a model of a known family computes it without its padding"
    ),
    "compute_loss_context_manager": Method("refused", "the context of the run's precision"),
    "create_accelerator_and_postprocess": Method(
        "refused", refused="whet does not run on accelerate; trainer.accelerator has what Trainers use of it"
    ),
    "create_model_card": _HONOURED,
    "create_optimizer": _HONOURED,
    "create_optimizer_and_scheduler": _HONOURED,
    "create_scheduler": _HONOURED,
    "end": Method("honoured", "ends the runs of the trackers"),
    "evaluate": Method("honoured", "eval_loss is the mean over targets, not over batches"),
    "evaluation_loop": _HONOURED,
    "floating_point_ops": _HONOURED,
    "get_batch_samples": _FIXED,
    "get_cp_size": Method("refused", _ONE_PROCESS),
    "get_decay_parameter_names": _HONOURED,
    "get_eval_dataloader": _HONOURED,
    "get_learning_rates": _HONOURED,
    "get_num_trainable_parameters": _HONOURED,
    "get_optimizer_cls_and_kwargs": Method(
        "honoured", "the class is a function that returns whet's optimizer for the parameter groups"
    ),
    "get_optimizer_group": _HONOURED,
    "get_sp_size": Method("refused", _ONE_PROCESS),
    "get_test_dataloader": _HONOURED,
    "get_total_train_batch_size": _FIXED,
    "get_tp_size": Method("refused", _ONE_PROCESS),
    "get_train_dataloader": Method(
        "honoured", "the loader decides the batches; a resumed run skips those that are done"
    ),
    "hyperparameter_search": Method("honoured", "with optuna; each trial runs in output_dir/run-N"),
    "init_hf_repo": _HONOURED,
    "is_local_process_zero": _HONOURED,
    "is_world_process_zero": _HONOURED,
    "log": _HONOURED,
    "log_metrics": _HONOURED,
    "metrics_format": _HONOURED,
    "num_examples": _HONOURED,
    "pop_callback": _HONOURED,
    "predict": _HONOURED,
    "prediction_step": _HONOURED,
    "push_to_hub": Method("honoured", "to the repository trainer.hub_model_id, by default named like output_dir"),
    "remove_callback": _HONOURED,
    "save_metrics": _HONOURED,
    "save_model": Method(
        "honoured", "called for each checkpoint too; training_args.json in place of training_args.bin"
    ),
    "save_state": _HONOURED,
    "set_initial_training_values": Method(
        "refused", refused="whet plans a run otherwise; read trainer.state.max_steps and num_train_epochs"
    ),
    "store_flos": Method("refused", "nothing to do: state.total_flos is counted at each step"),
    "train": Method("honoured", "resume_from_checkpoint also takes auto"),
    "training_step": Method("honoured", "called for each micro-batch, as in transformers"),
}
"""Public methods as of SEEN_IN."""

ARGUMENTS: Mapping[str, str] = {
    "model": "",
    "args": "whet's TrainingArguments, or those of transformers, which are translated field by field",
    "data_collator": "`DataCollatorWithPadding` and none at all let question answering models run without padding",
    "train_dataset": "rows without a length (iterable, streaming) need `max_steps`",
    "eval_dataset": "one data set, or a dict of them",
    "processing_class": "`tokenizer` is taken too, its older name",
    "model_init": "",
    "compute_loss_func": "",
    "compute_metrics": "",
    "callbacks": "objects or classes; they need only the methods they have; `on_epoch_end` comes before the log, "
    "evaluation and save of its step, so that a checkpoint holds what it did",
    "optimizers": "",
    "optimizer_cls_and_kwargs": "",
    "preprocess_logits_for_metrics": "",
}
"""Arguments of the constructor as of SEEN_IN -> how they differ, if they do."""

HONOURED_INTERNAL = frozenset({"_get_train_sampler", "_prepare_inputs"})
"""Methods with an underscore that a subclass may override."""

INTERNAL = frozenset(
    {
        "_build_accelerator_args",
        "_clip_grad_norm",
        "_defer_fsdp_gradient_reduction",
        "_determine_best_metric",
        "_evaluate",
        "_finalize_training",
        "_finish_current_push",
        "_get_collator_with_removed_columns",
        "_get_dataloader",
        "_get_eval_sampler",
        "_get_grad_norm",
        "_get_learning_rate",
        "_get_num_items_in_batch",
        "_get_output_dir",
        "_get_train_sampler",
        "_has_mixed_mesh_grads",
        "_hp_search_setup",
        "_init_training_state",
        "_inner_training_loop",
        "_issue_warnings_after_load",
        "_load_best_model",
        "_load_callback_state",
        "_load_from_checkpoint",
        "_load_optimizer_and_scheduler",
        "_load_rng_state",
        "_load_scaler",
        "_maybe_log_save_evaluate",
        "_mixed_mesh_grad_norm",
        "_move_model_to_device",
        "_prepare_context_parallel_inputs",
        "_prepare_for_training",
        "_prepare_input",
        "_prepare_inputs",
        "_push_from_checkpoint",
        "_remove_unused_columns",
        "_report_to_hp_search",
        "_run_epoch",
        "_save",
        "_save_checkpoint",
        "_save_optimizer_and_scheduler",
        "_save_rng_state",
        "_save_scaler",
        "_set_signature_columns_if_needed",
        "_sync_replicated_trainable_parameters",
        "_track_num_input_tokens",
        "_tune_save_checkpoint",
        "_update_auto_batch_size",
        "_validate_args",
        "_wrap_model",
    }
)
"""Methods with an underscore as of SEEN_IN."""

EARLIER = (
    frozenset(
        {
            "_gather_and_numpify",
            "_nested_gather",
            "_pad_across_processes",
            "_pad_tensors_to_max_len",
            "_rotate_checkpoints",
            "_sorted_checkpoints",
            "_add_sm_patterns_to_gitignore",
            "_activate_neftune",
            "_deactivate_neftune",
            "_fsdp_qlora_plugin_updates",
            "ipex_optimize_model",
            "is_local_master",
            "is_world_master",
            "propagate_args_to_deepspeed",
            "torch_jit_model_eval",
        }
    )
    - METHODS.keys()
)
"""Methods of earlier releases (4.26 to 5.22) that a subclass may still override; refused like INTERNAL."""
