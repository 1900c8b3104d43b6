"""A memory cgroup, version 1 or 2, in which the kernel ends what holds more than a limit."""

from __future__ import annotations

import os
from contextlib import suppress

from whet.hardware.cgroup import folders

_LIMITS = ("memory.max", "memory.limit_in_bytes")


class Limited:
    """A cgroup below that of this process, for as long as the block lasts."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """What its processes may hold together, in bytes."""
        self.folder = folders("memory")[0] / f"whet-bench-{os.getpid()}"

    def __enter__(self) -> Limited:
        """Make it; end this program where the user may not."""
        try:
            self.folder.mkdir()
            limit = next(path for name in _LIMITS if (path := self.folder / name).exists())
            limit.write_text(str(self.limit), "utf-8")
        except (OSError, StopIteration) as error:
            raise SystemExit(
                f"no memory cgroup can be made in {self.folder.parent} ({error}): run it as root"
            ) from error
        with suppress(OSError):  # not every kernel counts it; with swap, the limit would only make it slow
            (self.folder / "memory.swap.max").write_text("0", "utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        """Remove it."""
        self.folder.rmdir()

    def join(self) -> None:
        """Put this process, and those that it will start, into it."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()), "utf-8")

    @property
    def n_killed(self) -> int:
        """How many processes of it the kernel has ended for want of memory."""
        told = next(path for name in ("memory.events", "memory.oom_control") if (path := self.folder / name).exists())
        return int(dict(line.split() for line in told.read_text("utf-8").splitlines())["oom_kill"])
