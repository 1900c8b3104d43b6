"""What `whet bench-methods` is asked, beside the options of `whet qa`."""

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
            what=f"{name} names no technique",
            got=", ".join(strange),
            why=f"the table has {', '.join(known)}",
            fix=f"did you mean --{name} {like[0]}?" if like else f"use some of these in --{name}",
        )

    rule.__name__ = f"{name}_is_known"
    return rule


_RULES: tuple[Rule, ...] = (
    _names_are_known("only"),
    _names_are_known("skip"),
    at_least("steps", 1, "a table without a step measures nothing"),
    at_least("warmup", 0, "a warm-up cannot be shorter than nothing"),
    at_least("rounds", 1, "each technique runs at least once"),
    above("limit_s", 0, "a technique needs time to run"),
)


def _settle(values: dict[str, Any]) -> dict[str, Any]:
    """Part the names at commas, as the choices of other options are."""
    for name in ("only", "skip"):
        given = [values[name]] if isinstance(values[name], str) else values[name]
        values[name] = tuple(part.strip() for text in given for part in text.split(",") if part.strip())
    return values


@checked(headings={"only": "Measurement"}, rules=_RULES, settle=_settle)
@dataclass(frozen=True, kw_only=True, slots=True)
class BenchArguments:
    """Which techniques are measured, and for how long."""

    only: Sequence[str] = field(default=(), metadata={"kind": tuple[str, ...]})
    """Measure these techniques alone, such as checkpointing_blocks,adafactor. plain, and what a technique's loss must
    be equal to, always run. none: all."""
    skip: Sequence[str] = field(default=(), metadata={"kind": tuple[str, ...]})
    """Leave these techniques out."""
    steps: int = 10
    """Optimizer steps that are timed in each run."""
    warmup: int = 3
    """Optimizer steps before those, which are not timed: the first ones allocate memory."""
    rounds: int = 3
    """How often each technique runs, every time in a new process; the table shows medians."""
    limit_s: float = 1800.0
    """Seconds after which one run of a technique is ended, and its row says so."""
