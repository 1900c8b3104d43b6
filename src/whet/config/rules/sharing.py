"""The rules about what ranks share: the optimizer's state, gradients, weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from whet.config.fields import TrainingFields
from whet.config.optimizer_names import by_element
from whet.config.rules.ranges import Rule, broken_if
from whet.errors import Problem

_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl", "ccl", "hccl", "cncl", "mccl")
_FSDP: Mapping[str, int] = {"": 0, "false": 0, "true": 3, "full_shard": 3, "shard_grad_op": 2}
"""Words of transformers' fsdp -> the stage of ZeRO that they mean."""
_ALWAYS = {"auto_wrap"}
"""Words for what whet does in any case: the blocks of a model are shared one by one."""


def stage_of(fsdp: str | bool | None) -> int | None:
    """Return the stage of ZeRO that this value of fsdp means; None if whet does not carry it out."""
    words = [] if fsdp is None else [word for word in _words(fsdp) if word not in _ALWAYS]
    return _FSDP.get(words[0] if words else "") if len(words) < 2 else None


def stage_of_run(args: TrainingFields) -> int:
    """Return the stage of ZeRO that whet itself carries out; 0 if ranks share nothing, or DeepSpeed's engine does it.

    It is zero_stage, or what fsdp means, or the configuration of DeepSpeed where its engine is missing.
    """
    if args.zero_stage is not None:
        return args.zero_stage
    meant = stage_of(args.fsdp) or 0
    if meant or args.deepspeed is None or runs_deepspeed(args):
        return meant
    from whet.config import deepspeed

    return deepspeed.stage_of(args.deepspeed)


def runs_deepspeed(args: TrainingFields) -> bool:
    """Return whether DeepSpeed's engine carries out the run; its configuration is read for runs that name one alone."""
    if args.deepspeed is None:
        return False
    from whet.config import deepspeed

    return deepspeed.runs(args.deepspeed)


def instead(args: TrainingFields) -> str:
    """Return the words for what --zero_stage takes the place of: the other settings that ask for a stage."""
    given = {"--fsdp": bool(stage_of(args.fsdp)), "--deepspeed": args.deepspeed is not None}
    found = [flag for flag, is_given in given.items() if is_given]
    return f" in place of {' and '.join(found)}" if found else ""


def ddp_backend_is_known(args: TrainingFields) -> Problem | None:
    """A name that no build of torch has is a slip, in a process alone, too, where no backend is used."""
    if args.ddp_backend is None:
        return None
    loaded = sys.modules.get("torch.distributed")
    registered = getattr(getattr(loaded, "Backend", None), "backend_list", ())  # an extension may have added its own
    names = [part.rpartition(":")[2].strip().lower() for part in args.ddp_backend.split(",")]
    if all(name in _BACKENDS or name in registered for name in names):
        return None
    return Problem(
        what="ddp_backend names no backend of torch",
        got=args.ddp_backend,
        why=f"torch and its extensions have {', '.join(_BACKENDS)}",
        fix="leave --ddp_backend out, which means gloo on a CPU and nccl on GPUs, or name one of these",
    )


def fsdp_is_known(args: TrainingFields) -> Problem | None:
    """Not every word of transformers' fsdp has a meaning here."""
    if stage_of(args.fsdp) is not None:
        return None
    return Problem(
        what="fsdp asks for what whet does not carry out",
        got=args.fsdp,
        why="whet shares weights among all ranks, and keeps them in the memory of the device that computes",
        fix="use --fsdp full_shard (or true), which is --zero_stage 3, or --fsdp shard_grad_op, --zero_stage 2",
    )


def fsdp_and_stage_agree(args: TrainingFields) -> Problem | None:
    """Two words for one thing must not contradict each other."""
    meant = stage_of(args.fsdp)
    if not meant or args.zero_stage in (None, meant):
        return None
    return Problem(
        what="fsdp and zero_stage contradict each other",
        got=f"fsdp={args.fsdp}, which is stage {meant}, and zero_stage={args.zero_stage}",
        why="both say what the ranks share",
        fix="leave --zero_stage out, or leave --fsdp out",
    )


def offload_has_somewhere_to_go(args: TrainingFields) -> Problem | None:
    """On a CPU everything is in the host's memory already; on GPUs fully_shard moves what the ranks share."""
    if args.offload == "none":
        return None
    on_gpu = _has_gpu(args)
    if on_gpu and args.deepspeed is None and stage_of_run(args) >= 2:
        return None
    if on_gpu:
        why = "PyTorch moves what ranks share by fully_shard, and DeepSpeed's file has keys of its own"
        fix = "use --zero_stage 3 with --offload, on two ranks or more and without --deepspeed"
    else:
        why = "without a GPU, weights and the optimizer's state are in the host's memory already"
        fix = (
            "leave --offload out; to hold less on each rank, use --zero_stage 3; on one rank, --optim adafactor, "
            "--optim adamw_whet_8bit or --gradient_checkpointing"
        )
    return Problem(
        what=f"offload {args.offload} has nothing to do here" if not on_gpu else "offload does not go with this run",
        got=f"offload={args.offload}" + (f", zero_stage {stage_of_run(args)}" if on_gpu else ", on a CPU"),
        why=why,
        fix=fix,
    )


def _has_gpu(args: TrainingFields) -> bool:
    return args.device.type != "cpu"


def shared_gradients_have_one_sum(args: TrainingFields) -> Problem | None:
    """What is set for DistributedDataParallel has no counterpart in fully_shard."""
    return _excluded(args, _set_for_ddp(args), "ranks sum gradients block by block")


def deepspeed_sums_gradients_itself(args: TrainingFields) -> Problem | None:
    """The engine has an exchange of its own, at every stage."""
    names = _set_for_ddp(args) if runs_deepspeed(args) else []
    if not names:
        return None
    flags = " and ".join(f"--{name}" for name in names)
    return Problem(
        what=f"{', '.join(names)} does not go with deepspeed",
        got=", ".join(f"{name}={getattr(args, name)}" for name in names),
        why="these are settings of torch's exchange of gradients, and DeepSpeed's engine sums gradients itself",
        fix=f"leave {flags} out; keys of the engine's configuration set its own exchange, such as "
        "communication_data_type and zero_optimization.reduce_bucket_size",
    )


def _set_for_ddp(args: TrainingFields) -> list[str]:
    set_here = {
        "ddp_comm_hook": args.ddp_comm_hook != "none",
        "ddp_bucket_cap_mb": args.ddp_bucket_cap_mb is not None,
        "ddp_find_unused_parameters": bool(args.ddp_find_unused_parameters),
    }
    return [name for name, given in set_here.items() if given]


def shared_weights_are_moved_by_torch(args: TrainingFields) -> Problem | None:
    """Some settings need complete weights between two steps, or passes that differ between ranks."""
    set_here = {
        "fp16": args.precision == "fp16",
        "precision int8": args.precision == "int8",
        "torch_compile": args.torch_compile,
        "weight_averaging_start": args.weight_averaging_start is not None,
        "auto_find_batch_size": args.auto_find_batch_size,
        "activation_offload": args.activation_offload,
    }
    why = "it needs complete weights at times when a rank has its part alone"
    return _excluded(args, [name for name, given in set_here.items() if given], why)


def shared_weights_have_an_optimizer_by_element(args: TrainingFields) -> Problem | None:
    """From stage 2 on an optimizer sees some rows of each weight."""
    odd = [] if args.optim in by_element() else [f"optim {args.optim}"]
    return _excluded(args, odd, f"it has to read complete tensors; these do not: {', '.join(by_element())}")


def _excluded(args: TrainingFields, names: list[str], why: str) -> Problem | None:
    stage = stage_of_run(args)
    if stage < 2 or not names:
        return None
    return Problem(
        what=f"{', '.join(names)} does not go with zero_stage {stage}",
        got=f"zero_stage={stage}, {', '.join(names)}",
        why=why,
        fix=f"use --zero_stage 1{instead(args)}, or leave {' and '.join(_flag(name) for name in names)} out",
    )


def _flag(name: str) -> str:
    return "--fp16 or --precision fp16" if name == "fp16" else f"--{name.split()[0]}"


def _words(fsdp: str | bool) -> list[str]:
    return str(fsdp).lower().replace(",", " ").split()


def deepspeed_goes_alone(args: TrainingFields) -> Problem | None:
    """DeepSpeed's engine runs plain steps, at the stage of its configuration."""
    if args.deepspeed is None:
        return None
    from whet.config import deepspeed

    stage, by_engine = deepspeed.stage_of(args.deepspeed), deepspeed.runs(args.deepspeed)
    offloads = deepspeed.offloads(args.deepspeed)
    odd = {
        "offload from a GPU": offloads and (by_engine or stage < 2) and _has_gpu(args),
        f"fsdp {args.fsdp}": bool(stage_of(args.fsdp)),
        f"zero_stage {args.zero_stage}": args.zero_stage not in (None, stage),
        f"precision {args.precision}": args.precision not in ("fp32", "bf16"),
        "optimizer_in_backward": args.optimizer_in_backward,
        "auto_find_batch_size": args.auto_find_batch_size,
        "weight_averaging_start": args.weight_averaging_start is not None,
        "torch_compile": args.torch_compile,
        f"optim {args.optim}": args.optim not in by_element(),
    }
    if not (found := [name for name, is_set in odd.items() if is_set]):
        return None
    return Problem(
        what=f"{', '.join(found)} does not go with deepspeed",
        got=f"zero_optimization.stage {stage}, {', '.join(found)}",
        why="the engine steps over flat parts of the weights, in fp32 or bf16, at the stage of its configuration",
        fix="use --precision fp32 or bf16, and leave the other settings out",
    )


def deepspeed_is_honoured(args: TrainingFields) -> Problem | None:
    """Each key of DeepSpeed's configuration is carried out, or refused."""
    if args.deepspeed is None:
        return None
    from whet.config import deepspeed

    return deepspeed.config_is_honoured(args)


SHARING_RULES: tuple[Rule, ...] = (
    ddp_backend_is_known,
    broken_if(
        "zero_stage_is_known",
        ("zero_stage",),
        lambda args: args.zero_stage not in (None, 0, 1, 2, 3),
        what="zero_stage is no stage of ZeRO",
        why="1 shares the optimizer's state between the ranks, 2 the gradients too, 3 the weights too; 0 nothing",
        fix="use --zero_stage 1, 2 or 3, or leave it out",
    ),
    fsdp_is_known,
    fsdp_and_stage_agree,
    offload_has_somewhere_to_go,
    shared_gradients_have_one_sum,
    deepspeed_sums_gradients_itself,
    shared_weights_are_moved_by_torch,
    shared_weights_have_an_optimizer_by_element,
    deepspeed_is_honoured,
    deepspeed_goes_alone,
)
