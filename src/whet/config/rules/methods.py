"""The rule about methods that are asked for by name."""

from whet.config.fields import TrainingFields
from whet.config.names.methods import asked_by, names_to_ask_for
from whet.config.rules.ranges import Rule
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


METHOD_RULES: tuple[Rule, ...] = (methods_are_known,)
