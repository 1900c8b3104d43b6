"""The options of `whet run`."""

from dataclasses import dataclass

from whet.config.settings import checked
from whet.launch.start import Allocator, OpenMP


@checked(headings={"memory_allocator": "Run"})
@dataclass(frozen=True, kw_only=True, slots=True)
class RunArguments:
    """What an unmodified script is started with."""

    memory_allocator: Allocator = "auto"
    """The allocator that is preloaded; auto takes that of LD_PRELOAD, else tcmalloc or jemalloc where installed."""
    openmp: OpenMP = "auto"
    """The OpenMP library that serves torch; auto takes that of LD_PRELOAD, else Intel's libiomp5 where installed."""
    words: tuple[str, ...] = ()
    """The script with its arguments, or options of Python and a script or -m MODULE; after --, any command."""
