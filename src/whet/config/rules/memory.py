"""Rules about memory and batches."""

from whet.config.fields import TrainingFields
from whet.config.rules.ranges import Rule, at_least, broken_if
from whet.errors import Problem


def checkpointing_is_on(args: TrainingFields) -> Problem | None:
    """What steers checkpointing does nothing without it."""
    given = {"checkpointing_policy": args.checkpointing_policy} if args.checkpointing_policy != "blocks" else {}
    if args.gradient_checkpointing_kwargs:
        given["gradient_checkpointing_kwargs"] = str(args.gradient_checkpointing_kwargs)
    if args.gradient_checkpointing or not given:
        return None
    return Problem(
        what=f"{' and '.join(given)} without gradient_checkpointing",
        got=given,
        why="it says how activations are computed again, and nothing asks for that",
        fix="add --gradient_checkpointing, or leave it out",
    )


def checkpointing_kwargs_are_known(args: TrainingFields) -> Problem | None:
    """Of torch's two ways to checkpoint, one is left."""
    given = dict(args.gradient_checkpointing_kwargs or {})
    if given in ({}, {"use_reentrant": False}):
        return None
    return Problem(
        what="gradient_checkpointing_kwargs holds what whet does not carry out",
        got=given,
        why="whet checkpoints without reentrant autograd, as torch advises, and has no other setting",
        fix="leave --gradient_checkpointing_kwargs out, or give '{\"use_reentrant\": false}'",
    )


MEMORY_RULES: tuple[Rule, ...] = (
    checkpointing_is_on,
    checkpointing_kwargs_are_known,
    broken_if(
        "offload_has_a_gpu",
        ("activation_offload", "use_cpu"),
        lambda args: args.activation_offload and args.use_cpu,
        what="activation_offload goes with a GPU",
        why="it moves activations from a GPU to the host's memory, and on a CPU they are there already",
        fix="leave --activation_offload out; --gradient_checkpointing saves memory on a CPU",
    ),
    broken_if(
        "offload_meets_what_is_kept",
        ("activation_offload", "checkpointing_policy"),
        lambda args: args.activation_offload and args.checkpointing_policy == "selective",
        what="activation_offload does not go with selective checkpointing",
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


def workers_make_ahead(args: TrainingFields) -> Problem | None:
    """What steers workers does nothing without any."""
    given: dict[str, object] = {}
    if args.dataloader_prefetch_factor is not None:
        given["dataloader_prefetch_factor"] = args.dataloader_prefetch_factor
    if args.dataloader_persistent_workers:
        given["dataloader_persistent_workers"] = True
    if args.dataloader_num_workers or not given:
        return None
    return Problem(
        what=f"{' and '.join(given)} without dataloader_num_workers",
        got=given,
        why="it says how workers make batches ahead, and there is no worker",
        fix="add --dataloader_num_workers 2, or leave it out",
    )


LOADING_RULES: tuple[Rule, ...] = (
    at_least("dataloader_num_workers", 0, "it is a number of threads; 0 makes batches in the main one"),
    at_least("dataloader_prefetch_factor", 1, "a worker that makes nothing ahead is none"),
    workers_make_ahead,
    broken_if(
        "found_size_may_accumulate",
        ("auto_find_batch_size", "optimizer_in_backward"),
        lambda args: args.auto_find_batch_size and args.optimizer_in_backward,
        what="auto_find_batch_size does not go with optimizer_in_backward",
        why="where fewer rows fit, the gradients of several batches are summed, and a step inside backward keeps none",
        fix="leave one of the two out; --per_device_train_batch_size sets the rows by hand",
    ),
)
