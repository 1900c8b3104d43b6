"""How a model with experts routes its tokens; kept in the model's configuration, and read from there again.

On disk such a model has a `model_type` of its own, so that nobody loads it as the dense model that it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from whet.errors import ConfigError
from whet.system import rename

KEY = "whet_experts"
"""The entry of a model's configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSettings:
    """Which feed-forward parts are sparse, and how their tokens find an expert."""

    experts: int
    """Experts of each sparse layer."""
    top_k: int = 1
    """Experts that compute each token."""
    every: int = 2
    """Every so many blocks, the feed-forward part is sparse."""
    capacity_factor: float | None = None
    """In training, an expert takes at most this many times its even share of the tokens of a sequence; None: all."""
    aux_loss_coef: float = 0.01
    """Weight of the balance loss in the training loss."""
    z_loss_coef: float = 0.001
    """Weight of the z loss in the training loss."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values that make no sparse layer."""
        problem = self._problem()
        if problem is not None:
            what, got, fix = problem
            raise ConfigError(what=what, got=got, why="a token goes to its best experts of several", fix=fix)

    def _problem(self) -> tuple[str, object, str] | None:
        counts = (self.experts, self.top_k, self.every)
        if any(type(one) is not int for one in counts) or self.experts < 2 or self.every < 1:
            return "experts are counted from 2, every from 1", asdict(self), "use --moe_experts 8 --moe_every 2"
        if not 1 <= self.top_k <= min(2, self.experts):
            return "top_k is not 1 or 2", self.top_k, "use --moe_top_k 1, or 2"
        numbers = [self.aux_loss_coef, self.z_loss_coef]
        numbers += [] if self.capacity_factor is None else [self.capacity_factor]
        if not all(isinstance(one, int | float) and math.isfinite(one) and one >= 0 for one in numbers):
            return "a factor of the experts is not a number from 0 up", numbers, "use the usual values: leave it out"
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            return "capacity_factor is 0", self.capacity_factor, "use --moe_capacity_factor 1.25, or leave it out"
        return None

    @property
    def structure(self) -> tuple[int, int]:
        """What decides which weights there are."""
        return self.experts, self.every


def settings_of(config: Any) -> ExpertSettings | None:
    """Return how the model of this configuration routes; None: it is dense. Raises ConfigError for a damaged entry."""
    return parsed(getattr(config, KEY, None))


def parsed(entry: Any) -> ExpertSettings | None:
    """Return the settings that an entry of config.json holds; None: there is none."""
    if entry is None:
        return None
    names = set(ExpertSettings.__dataclass_fields__)
    if not isinstance(entry, Mapping) or "experts" not in entry or not set(entry) <= names:
        raise ConfigError(
            what=f"the model's {KEY} is damaged",
            got=str(entry)[:200],
            why="it says how the experts of the model were trained",
            fix="copy config.json again from where the model comes",
        )
    return ExpertSettings(**entry)


def keep(config: Any, settings: ExpertSettings) -> None:
    """Write the settings into a model's configuration."""
    setattr(config, KEY, asdict(settings))


def with_factors(settings: ExpertSettings, **factors: float) -> str:
    """Return how a model gets its experts again with these factors: the options of a command, and a call in Python."""
    new = replace(settings, **factors)
    usual = ExpertSettings(experts=new.experts)
    named = {
        name: value
        for name, value in asdict(new).items()
        if name in ("experts", "top_k", "every") or value != getattr(usual, name)
    }
    flags = {f"moe_{name}": value for name, value in named.items()}
    options = " ".join(f"--{name} {value}" for name, value in flags.items())
    arguments = ", ".join(f"{name}={value}" for name, value in named.items())
    return f"{options} (in Python: whet.upcycle(model, whet.ExpertSettings({arguments})))"


PREFIX = "whet-experts-"
"""What stands before the model type of the dense model in config.json."""


def mark_saved(folder: Path, config: Any) -> None:
    """Name the saved model in `folder` as one with experts; a dense one stays as it is.

    transformers would load it as a dense model with new, random feed-forward parts. It does not know this type, and
    says so.
    """
    path = folder / "config.json"
    if getattr(config, KEY, None) is None or not path.exists():
        return
    values = json.loads(path.read_text("utf-8"))
    values["model_type"] = f"{PREFIX}{values['model_type'].removeprefix(PREFIX)}"
    unfinished = path.with_name(f".{path.name}.partial")  # others may read the folder
    unfinished.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", "utf-8")
    rename(unfinished, path, replaces=True)


def unmarked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of config.json with the type of the dense model; a type without experts is left as it is."""
    kind = values.get("model_type")
    known = isinstance(kind, str) and kind.startswith(PREFIX) and parsed(values.get(KEY)) is not None
    return {**values, "model_type": kind.removeprefix(PREFIX)} if known and isinstance(kind, str) else dict(values)
