"""`whet.TrainingArguments`: transformers' own, with the settings that whet adds and the older names that guides use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_args

import torch
import transformers
from transformers.training_args import OptimizerNames

from whet.config import ranks
from whet.config.aliases import NOT_HONOURED_OLD, WITHDRAWN, Refused
from whet.config.fields import LastBlockTokens, PaddingInLoss, TrainingFields
from whet.config.optimizer_names import DEFAULT, names, plugged_in
from whet.config.rules.optimizer import optim_args_are_known, optim_args_are_pairs, optimizer_is_known
from whet.errors import ConfigError, Problem
from whet.log import logger

_THEIRS = frozenset(one.value for one in OptimizerNames)
"""The optimizers that transformers builds."""
_PRECISIONS = ("auto", "fp32", "bf16", "fp16")
_SAVE_ERRORS = ("stop", "continue")
_EXACT = "adamw_torch_fused"
"""What transformers reads while it checks settings whose optimizer is whet's: the same rule of the update."""


def is_own_optimizer(name: str) -> bool:
    """Return whether whet, or a plug-in, builds this optimizer, and not transformers."""
    row = names().get(name)
    if row is None:
        return name in plugged_in() and name not in _THEIRS
    return bool(row.replaces) or name not in _THEIRS


_OWN_NAMES = [name for name in names() if is_own_optimizer(name) and name != DEFAULT]


class _OlderNames(type):
    """Lets a class of settings take the names of older releases, and refuse what only whet's commands honour."""

    def __call__(cls, *placed: Any, **given: Any) -> Any:
        """Return the settings; raises one ConfigError for all names that cannot be honoured."""
        return super().__call__(*placed, **_translated(cls, given))


@dataclass
class TrainingArguments(transformers.TrainingArguments, metaclass=_OlderNames):
    """The settings of `whet.Trainer`: every field of transformers' class, as it is there, and those below.

    They may be changed after they were made, and a subclass may add fields, as in transformers. Names of older releases
    are accepted and logged (`no_cuda`, `evaluation_strategy`, `group_by_length` ...). Settings that need the engine of
    whet's commands raise ConfigError.
    """

    optim: str = field(
        default="auto",
        metadata={
            "help": "The optimizer. auto: whet's own AdamW on a CPU, torch's fused one elsewhere. Also "
            f"{', '.join(_OWN_NAMES)}, those of plug-ins, and every name of transformers."
        },
    )
    precision: str = field(
        default="auto",
        metadata={
            "help": "Number format of the matrix products: auto, fp32, bf16 or fp16. auto: fp32 and bf16 are timed on "
            "your model and data when training begins, and bf16 is used if it is clearly faster. bf16 and fp16 are the "
            "fields of these names, which count if this one is auto."
        },
    )
    padding_in_loss: str = field(
        default="auto",
        metadata={
            "help": "What a head that reads the hidden states of padding tokens gets, as `padding` of whet.optimize: "
            "auto, none, sampled or all."
        },
    )
    last_block_tokens: str = field(
        default="read",
        metadata={"help": "Tokens that the last block computes: those that the head reads (read), or all."},
    )
    cuda_graphs: bool = field(
        default=True,
        metadata={"help": "On one GPU, launch the forward and the backward pass of the encoder as one each."},
    )
    max_nonfinite_steps: int = field(
        default=3,
        metadata={
            "help": "A step whose gradient is not finite does not change the weights; training stops with an error "
            "after this many such steps in a row. 0: they are applied, as in transformers."
        },
    )
    memory_limit_gb: float | None = field(
        default=None,
        metadata={
            "help": "Save and stop before the process uses more memory than this many GiB. None: the limits of the "
            "system (cgroups). 0: no limit."
        },
    )
    save_on_signal: bool = field(
        default=True,
        metadata={
            "help": "On SIGTERM, SIGUSR1, SIGHUP, or Ctrl-C, save a checkpoint of the completed steps before training "
            "stops, also with save_strategy no. Signals for which the program has a handler of its own are left to it."
        },
    )
    save_error_policy: str = field(
        default="stop",
        metadata={"help": "What follows if a checkpoint cannot be written: stop, or continue without it."},
    )
    logging_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder of TensorBoard's files, as in earlier releases of transformers. None: the environment's "
            "TENSORBOARD_LOGGING_DIR, or runs in the output folder."
        },
    )

    def __post_init__(self) -> None:
        """Check whet's fields, then transformers' own."""
        problems = _wrong_values(self)
        if problems:
            raise ConfigError.of(problems)
        if self.precision in ("bf16", "fp16"):
            setattr(self, self.precision, True)
        elif self.bf16 or self.fp16:
            self.precision = "bf16" if self.bf16 else "fp16"
        chosen = str(getattr(self.optim, "value", self.optim))
        own = is_own_optimizer(chosen)
        self.optim = _EXACT if own else chosen
        if not torch.accelerator.is_available():
            self.use_cpu = True  # transformers asks for it before it computes in bf16, or joins ranks, on a CPU
        place, backend = ranks.here(), self.ddp_backend
        if place.n_ranks == 1:
            self.ddp_backend = None  # accelerate would ask for the process group that one process does not have
        elif self.use_cpu and backend in (None, "gloo"):
            self._join_ranks(place)
        super().__post_init__()
        if self.precision == "fp32":
            self.mixed_precision = "no"  # whatever accelerate's variable says
        self.ddp_backend = backend
        if own:
            self.optim = chosen

    def _join_ranks(self, place: ranks.Place) -> None:
        """Join the ranks that a launcher has started on CPUs; on one machine over its loopback interface alone.

        A worker of Ray Train, which has joined already, gets its share of the node's cores.
        """
        from whet.dist import group, ray_workers

        if said := ray_workers.use_cores(place):
            logger.warning("%s", said)
        group.join("gloo", self.ddp_timeout)


def setting(args: Any, name: str) -> Any:
    """Return a setting that whet adds, or its default if the arguments are transformers' own."""
    return getattr(args, name, getattr(TrainingArguments, name))


def precision_of(args: Any) -> str:
    """Return the number format that the settings ask for now: auto, fp32, bf16, fp16, or another one of accelerate's.

    transformers' own arguments ask for what accelerate has. Raises ConfigError for a precision that there is not.
    """
    asked = getattr(args, "precision", None)
    if asked not in (None, *_PRECISIONS):
        raise ConfigError.of([_no_such_value("precision", asked, _PRECISIONS)])
    if asked not in (None, "auto"):
        return asked
    flags = (name for name in ("bf16", "fp16") if getattr(args, name))
    of_accelerate = getattr(args, "mixed_precision", "no")
    return next(flags, of_accelerate if of_accelerate != "no" else asked or "fp32")


def _no_such_value(name: str, value: Any, values: Sequence[Any]) -> Problem:
    return Problem(
        what=f"{name} has no such value",
        got=repr(value),
        why=f"it is one of {', '.join(values)}",
        fix=f"use {name}={values[0]!r}",
    )


def _wrong_values(args: TrainingArguments) -> list[Problem]:
    choices: Mapping[str, tuple[Any, ...]] = {
        "precision": _PRECISIONS,
        "padding_in_loss": ("auto", *get_args(PaddingInLoss)),
        "last_block_tokens": get_args(LastBlockTokens),
        "save_error_policy": _SAVE_ERRORS,
    }
    found = [
        _no_such_value(name, getattr(args, name), values)
        for name, values in choices.items()
        if getattr(args, name) not in values
    ]
    if args.optim not in _THEIRS and (problem := optimizer_is_known(args)):
        found.append(problem)
    elif is_own_optimizer(args.optim):
        found += [problem for rule in (optim_args_are_pairs, optim_args_are_known) if (problem := rule(args))]
    asked = {name for name in ("bf16", "fp16") if getattr(args, name)}
    if args.precision in ("fp32", "bf16", "fp16") and asked - {args.precision}:
        found.append(
            Problem(
                what="two number formats are asked for",
                got=f"precision={args.precision!r} and {', '.join(f'{name}=True' for name in sorted(asked))}",
                why="the products run in one of them",
                fix=f"keep precision={args.precision!r} alone",
            )
        )
    if args.train_sampling_strategy == "batch_rebalance" and not _has_batch_rebalance():
        found.append(
            Problem(
                what="this transformers has no batch_rebalance, and would shuffle instead",
                got=f"transformers {transformers.__version__}",
                why="its Trainer has the sampler since 5.17",
                fix="pip install transformers>=5.17; or use train_sampling_strategy='group_by_length'; whet's commands"
                " have it with every transformers",
            )
        )
    if "fp16" in {args.precision, *asked} and len(asked) < 2 and (args.use_cpu or not torch.cuda.is_available()):
        found.append(
            Problem(
                what="fp16 needs a GPU here",
                got="a CPU",
                why="accelerate scales losses for GPUs alone",
                fix="use bf16, or leave the format out: auto measures; whet's commands train in fp16 on a CPU too",
            )
        )
    return found


def _has_batch_rebalance() -> bool:
    from transformers import trainer_pt_utils

    return hasattr(trainer_pt_utils, "BatchRebalanceSampler")


_COMMANDS_ALONE = frozenset({
    "max_tokens_per_batch", "checkpointing_policy", "activation_offload", "methods", "freeze_layers",
    "cache_frozen_trunk", "recipe", "min_steps", "layerwise_lr_decay", "reinit_layers", "weight_averaging_start",
    "span_loss", "optimizer_in_backward", "max_loss_spike", "save_interval_s", "save_async", "profile", "log_format",
    "zero_stage", "offload", "ddp_comm_hook",
    "resume_allow_changes", "attn_implementation",
})  # fmt: skip
"""Fields of the commands that need their engine."""
_INSTEAD: Mapping[str, str] = {
    "zero_stage": "use fsdp or deepspeed, which transformers hands on to accelerate",
    "offload": "use fsdp or deepspeed, which transformers hands on to accelerate",
    "attn_implementation": "pass attn_implementation to the model's from_pretrained",
    "freeze_layers": "set requires_grad = False on the parameters of these layers before you make the Trainer",
    "methods": "set requires_grad = False on the embeddings before you make the Trainer, in place of freeze_tables",
}


def _translated(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by their present names; raises ConfigError for those that whet.Trainer cannot honour."""
    own = {one.name for one in fields(cls)}  # pyright: ignore[reportArgumentType]
    defaults = {one.name: one.default for one in fields(TrainingFields)}
    kept: dict[str, Any] = {}
    problems: list[Problem] = []
    if given.get("warmup_ratio") and not given.get("warmup_steps"):  # no steps are no number of steps
        given = {name: value for name, value in given.items() if name != "warmup_steps"}
    for name, value in given.items():
        if _NEWER.get(name) in own and _NEWER[name] not in given:
            kept[_NEWER[name]] = value  # without the warning that transformers would show
        elif _OLDER.get(name) in own and name not in own:
            kept[_OLDER[name]] = value
        elif name in own:
            kept[name] = value
        elif name in _TRANSLATIONS:
            found = _TRANSLATIONS[name](value, given)
            if twice := sorted(found.keys() & given.keys()):
                problems += [_given_twice(name, one) for one in twice]
                continue
            logger.info("%s=%r: an older name, read as %s", name, value, _shown(found))
            kept |= {one: {**kept.get(one, {}), **new} if isinstance(new, dict) else new for one, new in found.items()}
        elif name in _COMMANDS_ALONE:
            if value != defaults.get(name):
                problems.append(_of_commands(name, value))
        elif name in _GONE:
            if not any(value == off and type(value) is type(off) for off in _GONE[name].off or (False, None)):
                problems.append(
                    Problem(
                        what=f"whet.Trainer has no setting {name} any more",
                        got=f"{name}={value!r}",
                        why="a setting without effect would be misleading",
                        fix=_GONE[name].instead,
                    )
                )
        else:
            kept[name] = value  # Python refuses it by name
    if problems:
        raise ConfigError.of(problems)
    return kept


def _shown(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in found.items()) or "nothing: it has no effect any more"


def _given_twice(older: str, name: str) -> Problem:
    return Problem(
        what=f"{name} is given twice", got=f"{older} and {name}", why=f"{older} is its older name", fix=f"keep {name}"
    )


def _of_commands(name: str, value: Any) -> Problem:
    return Problem(
        what=f"{name} is a setting of whet's commands, which whet.Trainer does not have",
        got=f"{name}={value!r}",
        why="it needs the engine of the commands; whet.Trainer runs transformers' own loop",
        fix=_INSTEAD.get(name, "use the command of your task for this run (whet --help lists them)")
        + f"; or leave {name} out",
    )


def _renamed(name: str) -> Any:
    return lambda value, _: {name: value}


def _if_on(name: str, wanted: Any) -> Any:
    return lambda value, _: {name: wanted} if value else {}


def _gone(_value: Any, _given: Any) -> dict[str, Any]:
    return {}


def _warmup_ratio(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the share of steps as transformers does now: a number of steps below 1. Steps that are given win."""
    return {"warmup_steps": float(value)} if value and "warmup_steps" not in given else {}


def _backend(value: Any, _given: Any) -> dict[str, Any]:
    """Return gloo for ccl: Intel's bindings of oneCCL for PyTorch are archived."""
    return {"ddp_backend": "gloo" if str(value).lower() == "ccl" else value} if value else {}


def _accelerator_config(name: str) -> Any:
    return lambda value, _: {} if value is None else {"accelerator_config": {name: value}}


_GONE: Mapping[str, Refused] = {**NOT_HONOURED_OLD, **WITHDRAWN}
"""Names of earlier releases, of transformers or of whet, that nothing stands for today -> what to do instead."""
_NEWER: Mapping[str, str] = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
"""Names that the guides use -> what transformers calls them since 5.18; both can be given, with any release."""
_OLDER: Mapping[str, str] = {newer: older for older, newer in _NEWER.items()}

_TRANSLATIONS: Mapping[str, Any] = {
    "no_cuda": _renamed("use_cpu"),
    "evaluation_strategy": _renamed("eval_strategy"),
    "evaluate_during_training": _if_on("eval_strategy", "steps"),
    "per_gpu_train_batch_size": _renamed("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": _renamed("per_device_eval_batch_size"),
    "group_by_length": _if_on("train_sampling_strategy", "group_by_length"),
    "include_inputs_for_metrics": _if_on("include_for_metrics", ["inputs"]),
    "include_tokens_per_second": _if_on("include_num_input_tokens_seen", True),
    "adafactor": _if_on("optim", "adafactor"),
    "torchdynamo": _renamed("torch_compile_backend"),
    "xpu_backend": _backend,
    "warmup_ratio": _warmup_ratio,
    "dispatch_batches": _accelerator_config("dispatch_batches"),
    "split_batches": _accelerator_config("split_batches"),
    "use_ipex": _gone,
    "overwrite_output_dir": _gone,
    "push_to_hub_token": _renamed("hub_token"),
    "push_to_hub_model_id": _renamed("hub_model_id"),
}
"""Names of earlier releases -> what they set today, from the value and all settings given."""
