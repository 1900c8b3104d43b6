"""The options of `whet bench-methods`, in addition to those of `whet qa`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from whet.bench.techniques import TECHNIQUES
from whet.config.rules.ranges import Rule, above, at_least
from whet.config.settings import checked
from whet.errors import Problem


def _names_are_known(name: str) -> Rule:
    def rule(asked: "BenchArguments") -> Problem | None:
        known = [one.name for one in TECHNIQUES]
        strange = [one for one in getattr(asked, name) if one not in known]
        if not strange:
            return None
        like = get_close_matches(strange[0], known, n=1)
        return Problem(
            what=f"{name} is not the name of a technique",
            got=", ".join(strange),
            why=f"the table has {', '.join(known)}",
            fix=f"did you mean --{name} {like[0]}?" if like else f"use some of these in --{name}",
        )

    rule.__name__ = f"{name}_is_known"
    return rule


_RULES: tuple[Rule, ...] = (
    _names_are_known("only"),
    _names_are_known("skip"),
    at_least("steps", 1, "without a timed step, nothing is measured"),
    at_least("warmup", 0, "the number of warm-up steps cannot be negative"),
    at_least("rounds", 1, "each technique must run at least once"),
    above("limit_s", 0, "a technique needs time to run"),
)


def _split_names(values: dict[str, Any]) -> dict[str, Any]:
    """Split the names at commas."""
    for name in ("only", "skip"):
        given = [values[name]] if isinstance(values[name], str) else values[name]
        values[name] = tuple(part.strip() for text in given for part in text.split(",") if part.strip())
    return values


@checked(headings={"only": "Measurement"}, rules=_RULES, resolve=_split_names)
@dataclass(frozen=True, kw_only=True, slots=True)
class BenchArguments:
    """Which techniques run, and how long."""

    only: Sequence[str] = field(default=(), metadata={"kind": tuple[str, ...]})
    """Measure only these techniques, for example checkpointing_blocks,adafactor. plain always runs, and so does a
    technique whose loss must be equal to one of them. none: all."""
    skip: Sequence[str] = field(default=(), metadata={"kind": tuple[str, ...]})
    """Skip these techniques."""
    steps: int = 10
    """Optimizer steps that are timed in each run."""
    warmup: int = 3
    """Untimed optimizer steps before those: the first ones allocate memory."""
    rounds: int = 3
    """Runs of each technique, each in a new process; the table shows medians."""
    limit_s: float = 1800.0
    """Seconds after which one run of a technique is stopped; its row then says so."""
