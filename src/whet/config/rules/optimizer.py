"""The rules of `TrainingArguments` about optimizers."""

from difflib import get_close_matches
from typing import Any, Literal

from whet.config.fields import TrainingFields
from whet.config.optimizer_names import ELSEWHERE, ENTRY_POINTS, names, plugged_in, texts, wrong_options
from whet.config.rules.ranges import Rule
from whet.errors import Problem


def optimizer_is_known(args: Any) -> Problem | None:
    """An optimizer is one of whet's, or a package offers it."""
    if args.optim in names() or args.optim in plugged_in():
        return None
    if args.optim in ELSEWHERE:
        package = ELSEWHERE[args.optim]
        return Problem(
            what=f"whet does not build the optimizer {args.optim}",
            got=args.optim,
            why=f"it comes with the package {package}; whet takes such optimizers as plug-ins or ready-made",
            fix=f"use one of --optim {', '.join(names())}; or install {package} and pass "
            f"optimizers=(optimizer, None) to Trainer, or offer it under the entry point group {ENTRY_POINTS}",
        )
    like = get_close_matches(args.optim, [*names(), *plugged_in(), *ELSEWHERE], n=1)
    return Problem(
        what="optim names no optimizer",
        got=args.optim,
        why=f"whet has {', '.join([*names(), *plugged_in()])}",
        fix=f"did you mean --optim {like[0]}?" if like else "use one of these in --optim",
    )


def optim_args_are_pairs(args: Any) -> Problem | None:
    """The options of an optimizer are written as in transformers."""
    try:
        texts(args.optim_args)
    except ValueError as error:
        return Problem(
            what="optim_args are not key=value pairs",
            got=f"{error} in {args.optim_args}",
            why="they are written key=value,key=value, each key once",
            fix="write them so: --optim_args momentum=0.9,nesterov=true, for example",
        )
    return None


def optim_args_are_known(args: Any) -> Problem | None:
    """An optimizer takes only its own options; those of a plug-in are its own matter."""
    if args.optim not in names() or optim_args_are_pairs(args):
        return None
    problems = wrong_options(args.optim, args.optim_args)
    if len(problems) < 2:
        return problems[0] if problems else None
    return Problem(
        what=problems[0].what,
        got=", ".join(str(problem.got) for problem in problems),
        why="; ".join(dict.fromkeys(problem.why for problem in problems)),
        fix="; ".join(dict.fromkeys(problem.fix for problem in problems)),
    )


def _read_by_the_optimizer(name: str, part: Literal["betas", "epsilon"], usual: float) -> Rule:
    def rule(args: Any) -> Problem | None:
        value = getattr(args, name)
        row = names().get(args.optim)
        if row is None or getattr(row, part) or value == usual:
            return None
        takes = ", ".join(row.options) or "none"
        return Problem(
            what=f"{args.optim} does not read {name}",
            got=value,
            why="the setting belongs to AdamW and its kin and would change nothing",
            fix=f"leave --{name} out; {args.optim} has options of its own in --optim_args: {takes}",
        )

    rule.__name__ = f"{name}_is_read"
    return rule


def step_in_backward_is_whole(args: TrainingFields) -> Problem | None:
    """A gradient that is used and freed at once can neither be summed nor measured together with the others."""
    if not args.optimizer_in_backward:
        return None
    clashes = {
        f"gradient_accumulation_steps={args.gradient_accumulation_steps}": (
            args.gradient_accumulation_steps > 1,
            "accumulation sums the gradients of several batches before a step",
            "use --gradient_accumulation_steps 1",
        ),
        f"max_tokens_per_batch={args.max_tokens_per_batch}": (
            args.max_tokens_per_batch is not None,
            "a limit of tokens cuts a step into several batches, and each would take a step of its own",
            "leave --max_tokens_per_batch out and lower --per_device_train_batch_size",
        ),
        f"max_grad_norm={args.max_grad_norm}": (
            args.max_grad_norm > 0,
            "clipping needs the norm over all gradients before the first is used",
            "use --max_grad_norm 0",
        ),
        f"max_loss_spike={args.max_loss_spike}": (
            args.max_loss_spike is not None,
            "the loss is compared after the backward pass, when weights are updated already",
            "leave --max_loss_spike out",
        ),
        "fp16=True": (
            getattr(args, "fp16", False),
            "the loss scaler looks at all gradients before a step",
            "use --bf16 instead of --fp16",
        ),
    }
    got = {setting: (why, fix) for setting, (clash, why, fix) in clashes.items() if clash}
    if not got:
        return None
    return Problem(
        what="optimizer_in_backward does not go with these settings",
        got=", ".join(got),
        why="each gradient is used and freed while the backward pass runs, but "
        + "; and ".join(why for why, _ in got.values()),
        fix=", ".join(fix for _, fix in got.values()) + ", or leave --optimizer_in_backward out",
    )


OPTIMIZER_RULES: tuple[Rule, ...] = (
    optimizer_is_known,
    optim_args_are_pairs,
    optim_args_are_known,
    _read_by_the_optimizer("adam_beta1", "betas", 0.9),
    _read_by_the_optimizer("adam_beta2", "betas", 0.999),
    _read_by_the_optimizer("adam_epsilon", "epsilon", 1e-8),
    step_in_backward_is_whole,
)
