"""What a command of the command line is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from whet.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: what it is called, what it is given, what it does."""

    name: str
    """As it is typed: `whet qa`."""
    summary: str
    """What it does, in a sentence or two."""
    usage: str
    """What may follow the name."""
    examples: tuple[str, ...]
    """Command lines, shown at the top of the help text."""
    parts: tuple[type, ...]
    """The settings classes that its flags come from."""
    lone: str | None = None
    """What a word without a flag is: `config`, or the name of an option."""
    takes_config: bool = False
    """Whether it reads --config files and prints --print_config."""
    check: Callable[..., list[Problem]] = lambda *_: []
    """What is wrong between the instances of `parts`."""
    places: Callable[..., list[Problem]] = lambda *_: []
    """What is missing on the disk, asked where something else is wrong already: else `run` tells it."""
    usual: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}
    """Values that this command takes where none is given, worked out from those that are."""
    run: Callable[..., int]
    """Does the work with one instance of each of `parts`; returns the exit code."""

    @property
    def own_flags(self) -> tuple[str, ...]:
        """Flags that are no settings."""
        return ("help", "config", "print_config") if self.takes_config else ("help",)
