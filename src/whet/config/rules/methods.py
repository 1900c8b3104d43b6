"""The rules about methods that are asked for by name, and about layers that are not trained."""

from whet.config.fields import TrainingFields
from whet.config.names.methods import asked_by, names_to_ask_for
from whet.config.rules.ranges import Rule, at_least, only_with
from whet.errors import Problem


def methods_are_known(args: TrainingFields) -> Problem | None:
    """Some methods have a setting of their own; the others are asked for by name."""
    strange = [name for name in args.methods if name not in names_to_ask_for()]
    if not strange:
        return None
    reasons = [_why(name, asked_by()[name]) for name in strange if name in asked_by()]
    return Problem(
        what="methods names what cannot be asked for by name",
        got=", ".join(strange),
        why="; ".join(reasons) or "no file of whet/methods has a card with this name",
        fix=f"use some of {', '.join(names_to_ask_for())}, or leave --methods out",
    )


def _why(name: str, setting: str) -> str:
    if setting == "default":
        return f"{name} is applied without being asked for"
    return f"{name} has a setting of its own, --{setting}"


def kept_states_are_those_of_passes(args: TrainingFields) -> Problem | None:
    """States are kept for packed batches without padding tokens, as whet's own operators compute them."""
    odd = {
        "torch_compile": args.torch_compile or None,
        "precision": args.precision if args.precision == "int8" else None,
        "padding_in_loss": args.padding_in_loss if args.padding_in_loss != "none" else None,
        "label_smoothing_factor": args.label_smoothing_factor or None,
        "deepspeed": args.deepspeed,
    }
    given = {name: value for name, value in odd.items() if value}
    if not args.cache_frozen_trunk or not given:
        return None
    return Problem(
        what=f"cache_frozen_trunk does not go with {' and '.join(given)}",
        got=given,
        why="the hidden states of the frozen layers are kept as whet's operators compute them in fp32 or bf16, without "
        "padding tokens",
        fix=f"leave --cache_frozen_trunk out, or {' and '.join(f'--{name}' for name in given)}",
    )


METHOD_RULES: tuple[Rule, ...] = (
    methods_are_known,
    at_least("freeze_layers", 0, "blocks are counted from the input"),
    only_with(
        "some_layers_are_frozen",
        "freeze_layers of 1 or more",
        ("cache_frozen_trunk",),
        is_on=lambda args: bool(args.freeze_layers),
        why="it keeps the results of layers that are not trained",
        fix="add --freeze_layers 4, or leave --cache_frozen_trunk out",
    ),
    kept_states_are_those_of_passes,
)
