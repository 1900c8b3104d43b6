"""Standard output and error that survive a broken pipe or a closed terminal, so that training continues.

Text that cannot be written is dropped. A stream whose reader is gone is redirected to the null device, also for C
libraries and for Python's flush at exit. On a full disk, each write is tried again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

_GONE = {errno.EPIPE, errno.EBADF, errno.EIO, errno.ENXIO, errno.ESHUTDOWN, errno.ECONNRESET, errno.ENOTCONN}
_STANDARD = (1, 2)


class Lasting:
    """A text stream that wraps another one and does not raise if that one is broken.

    With `raises` it does raise, and stores the error in `lost`: a command then knows the source of an OSError.
    """

    def __init__(self, stream: Any, *, raises: bool = False) -> None:
        self._stream = stream
        self._raises = raises
        self.lost: Exception | None = None

    def write(self, text: str) -> int:
        """Write the text, with escapes for characters that the encoding lacks; drop it if the stream is broken."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            return self.write(text.encode("ascii", "backslashreplace").decode("ascii"))
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._lose(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the lines."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write the buffered text if the stream works."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: Exception) -> None:
        if self._raises:
            self.lost = error
            raise error
        if isinstance(error, OSError) and error.errno not in _GONE:
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):
            number = self._stream.fileno()
            if number in _STANDARD:
                to_null(number)


def to_null(number: int) -> None:
    """Redirect a file descriptor to the null device."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)


def open_closed() -> list[int]:
    """Open the null device for closed standard descriptors, and return those.

    Otherwise the next opened file would get that number, and printed text would be written into it.
    """
    closed = []
    for number in (0, *_STANDARD):
        try:
            os.fstat(number)
        except OSError:
            to_null(number)
            closed.append(number)
    return closed


@contextlib.contextmanager
def outputs() -> Iterator[None]:
    """Make standard output and error survive their readers within the block, for Python and C code."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_lasting(stream) for stream in before)
    after = sys.stdout, sys.stderr
    try:
        yield
    finally:
        for stream in after:
            stream.flush()
        sys.stdout = before[0] if sys.stdout is after[0] else sys.stdout
        sys.stderr = before[1] if sys.stderr is after[1] else sys.stderr


def keep_outputs(*, standard_output: bool) -> None:
    """Do the same for the rest of the process: for standard error, and on request for standard output."""
    sys.stderr = _lasting(sys.stderr)
    sys.stdout = Lasting(sys.stdout, raises=True) if sys.stdout and not standard_output else _lasting(sys.stdout)


def _lasting(stream: Any) -> Any:
    if isinstance(stream, Lasting):
        return stream
    return Lasting(open(os.devnull, "w", encoding="utf-8") if stream is None else stream)  # noqa: PTH123
