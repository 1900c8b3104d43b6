"""The description of a command."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from whet.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: its name, its options, its function."""

    name: str
    """As typed: `whet qa`."""
    summary: str
    """What it does, in a sentence or two."""
    usage: str
    """The arguments after the name."""
    examples: tuple[str, ...]
    """Command lines, shown at the top of the help text."""
    parts: tuple[type, ...]
    """The settings classes of its flags."""
    lone: str | None = None
    """The meaning of a word without a flag: `config`, or the name of an option."""
    second_lone: str | None = None
    """The option that a second word without a flag is."""
    rest: str | None = None
    """The setting that takes the words after `--` as they are."""
    takes_config: bool = False
    """Whether it reads --config files and prints --print_config."""
    check: Callable[..., list[Problem]] = lambda *_: []
    """Problems between the instances of `parts`."""
    places: Callable[..., list[Problem]] = lambda *_: []
    """Missing files, checked if there are other problems; otherwise `run` reports them."""
    usual: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}
    """Defaults of this command that are computed from given values."""
    run: Callable[..., int | Callable[[], int]]
    """Does the work with one instance of each of `parts` and returns the exit code, or returns what does so."""

    @property
    def own_flags(self) -> tuple[str, ...]:
        """Flags that are not settings."""
        return ("help", "config", "print_config") if self.takes_config else ("help",)
