"""Rules about memory and batches."""

from whet.config.rules.ranges import Rule, at_least, broken_if, excludes, only_with

MEMORY_RULES: tuple[Rule, ...] = (
    only_with(
        "checkpointing_is_on",
        "gradient_checkpointing",
        ("checkpointing_policy", "gradient_checkpointing_kwargs"),
        is_on=lambda args: args.gradient_checkpointing,
        why="they say how activations are computed again, and nothing asks for that",
        fix="add --gradient_checkpointing, or leave them out",
    ),
    broken_if(
        "checkpointing_kwargs_are_known",
        ("gradient_checkpointing_kwargs",),
        lambda args: args.gradient_checkpointing_kwargs not in (None, {}, {"use_reentrant": False}),
        what="gradient_checkpointing_kwargs holds what whet does not carry out",
        why="whet checkpoints without reentrant autograd, as torch advises, and has no other setting",
        fix="leave --gradient_checkpointing_kwargs out, or give '{\"use_reentrant\": false}'",
    ),
    broken_if(
        "offload_has_a_gpu",
        ("activation_offload", "use_cpu"),
        lambda args: args.activation_offload and args.use_cpu,
        what="activation_offload goes with a GPU",
        why="it moves activations from a GPU to the host's memory, and on a CPU they are there already",
        fix="leave --activation_offload out; --gradient_checkpointing saves memory on a CPU",
    ),
    excludes(
        "offload_meets_what_is_kept",
        "activation_offload",
        ("checkpointing_policy=selective",),
        why="the products that selective checkpointing keeps would stay on the GPU",
        fix="use --checkpointing_policy blocks with --activation_offload, or one of the two alone",
    ),
    at_least("torch_empty_cache_steps", 1, "memory is returned after a step, at the earliest"),
    at_least("max_tokens_per_batch", 1, "a forward pass needs a token"),
    broken_if(
        "flash_computes_in_half",
        ("attn_implementation", "precision"),
        lambda args: args.attn_implementation == "flash_attention_2" and not args.bf16 and not args.fp16,
        what="flash_attention_2 does not compute in float32",
        why="its kernels take 16-bit numbers only",
        fix="use --attn_implementation sdpa; or, on a GPU, add --bf16 or --fp16",
    ),
    broken_if(
        "token_budget_is_packed",
        ("max_tokens_per_batch", "attn_implementation"),
        lambda args: (
            args.max_tokens_per_batch is not None
            and args.attn_implementation not in (None, "whet", "flash_attention_2")
        ),
        what="max_tokens_per_batch goes with packed batches",
        why="with this attention, batches run padded, and a padded batch's size is not its tokens",
        fix="leave --attn_implementation out, or lower --per_device_train_batch_size instead",
    ),
)


PREFETCH_FACTOR = 2
"""Batches that a worker makes ahead where nobody says: as torch does."""


LOADING_RULES: tuple[Rule, ...] = (
    at_least("dataloader_num_workers", 0, "it is a number of threads; 0 makes batches in the main one"),
    at_least("dataloader_prefetch_factor", 1, "a worker that makes nothing ahead is none"),
    only_with(
        "workers_make_ahead",
        "dataloader_num_workers",
        ("dataloader_prefetch_factor", "dataloader_persistent_workers"),
        is_on=lambda args: args.dataloader_num_workers,
        why="they say how workers make batches ahead, and there is no worker",
        fix="add --dataloader_num_workers 2, or leave them out",
    ),
    excludes(
        "found_size_may_accumulate",
        "auto_find_batch_size",
        ("optimizer_in_backward",),
        why="where fewer rows fit, the gradients of several batches are summed, and a step inside backward keeps none",
        fix="leave one of the two out; --per_device_train_batch_size sets the rows by hand",
    ),
)
