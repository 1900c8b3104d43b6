"""Changes of a Trainer's arguments after it was made: they are applied, or refused by name."""

from __future__ import annotations

from whet.config.arguments import TrainingArguments
from whet.config.names.translate import Given
from whet.config.options import options_of
from whet.errors import ConfigError
from whet.train.callbacks import trackers
from whet.train.compat.public import PublicTrainer
from whet.train.output import printing

CALLBACKS = ("disable_tqdm", "log_format", "profile", "report_to", "torch_empty_cache_steps")
"""Fields that decide which callbacks a Trainer makes for itself."""
TRACKER = ("run_name", "logging_dir")
"""Fields that a tracker reads once, when its run begins."""
MODEL = (
    "use_cpu", "precision", "bf16", "fp16", "tf32", "attn_implementation", "padding_in_loss", "label_names",
    "label_smoothing_factor", "remove_unused_columns", "max_tokens_per_batch", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "checkpointing_policy", "activation_offload", "torch_compile",
    "torch_compile_backend", "torch_compile_mode", "methods", "span_loss", "last_block_tokens", "ddp_backend",
    "ddp_timeout", "ddp_comm_hook", "ddp_bucket_cap_mb", "ddp_find_unused_parameters",
    "zero_stage", "fsdp", "deepspeed", "freeze_layers",
)  # fmt: skip
"""Fields that are applied when a Trainer gets its model: when it is made, or by `model_init` in each training."""
_IN_EVALUATIONS = ("per_device_eval_batch_size", "prediction_loss_only", "log_level")
"""Fields that may change while a training runs: each evaluation reads them again."""


def translate(trainer: PublicTrainer) -> None:
    """Translate arguments of transformers that replaced the Trainer's, and refuse later changes of the originals."""
    trainer.given_args.require_unchanged(trainer.args)
    if not isinstance(trainer.args, TrainingArguments):
        trainer.given_args = Given(trainer.args)
        trainer.args = trainer.given_args.translated


def apply(trainer: PublicTrainer) -> None:
    """Apply changed arguments, or raise ConfigError with the fields that can no longer change."""
    translate(trainer)
    now = trainer.args
    late = [*_differing(CALLBACKS, trainer.callbacks_args, now), *_differing(MODEL, trainer.model_args, now)]
    if trackers.running(trainer.events.callbacks):
        late += _differing(TRACKER, trainer.events.args, now)
    if late:
        raise _refusal(
            late, "a Trainer carries these out when it is made, and this change came later",
            "make a new Trainer with these arguments: whet.Trainer(model, args, ...)",
        )  # fmt: skip
    if now is not trainer.events.args:
        trainer.events.args = now
        printing.configure(now)


def require_same_run(trainer: PublicTrainer, begun: TrainingArguments) -> None:
    """Raise ConfigError if the arguments of a training changed while it runs."""
    if trainer.args is begun:
        return
    translate(trainer)
    names = [name for name in options_of(TrainingArguments) if name not in _IN_EVALUATIONS]
    if late := _differing(names, begun, trainer.args):
        raise _refusal(
            late, "a training reads its arguments when it begins, and this change came while it ran",
            "set trainer.args before train(); a callback can stop the training by control.should_training_stop",
        )  # fmt: skip
    apply(trainer)


def _differing(names: list[str] | tuple[str, ...], before: TrainingArguments, now: TrainingArguments) -> list[str]:
    pairs = ((name, getattr(before, name), getattr(now, name)) for name in names)
    return [f"{name}: {old!r} -> {new!r}" for name, old, new in pairs if old != new]


def _refusal(late: list[str], why: str, fix: str) -> ConfigError:
    names = [text.partition(":")[0] for text in late]
    return ConfigError(
        what=f"{', '.join(names)} of trainer.args changed too late", got="; ".join(late), why=why, fix=fix
    )
