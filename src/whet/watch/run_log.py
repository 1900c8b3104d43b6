"""`run.log` in the output folder: all messages of a run from level info on, and what the run printed, with times.

A run that resumes appends to it. Disk errors do not end the run: there is one warning, and lines are lost while the
disk cannot be written. The file is never opened through a link, nor through a hard link to another file.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from whet import log
from whet.config.ranks import here
from whet.config.rules.training import LOG_NAME, OLDER_LOG_NAME
from whet.errors import WhetError
from whet.log import Discreet, logger
from whet.version import __version__
from whet.watch import files as output_files

LARGEST_BYTES = 5_000_000
"""A larger file is renamed to `run.log.1`, which replaces an older one."""
_MOST_BEFORE = 500
_FORM = "%(asctime)s %(levelname)-7s %(message)s"
_TIMES = "%Y-%m-%d %H:%M:%S"


class _EarlyMessages(logging.Handler):
    """Keeps the messages from before the file is opened; they are written to it then."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: deque[logging.LogRecord] = deque(maxlen=_MOST_BEFORE)

    def emit(self, record: logging.LogRecord) -> None:
        if not _open:
            self.records.append(record)


class _RunLog(logging.Handler):
    """Appends lines to the file. Lines that cannot be written are lost, with one warning."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(Discreet(_FORM, _TIMES))
        self.path = folder.absolute() / LOG_NAME  # the process may change its working directory
        self._handle: int | None = None
        self._pid = os.getpid()
        self._said = False

    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() != self._pid:  # a forked worker prints its messages, and only the run writes the file
            return
        try:
            self._append(self.format(record) + "\n")
        except OSError as error:
            self._give_up(error)
        except Exception:  # a message whose arguments do not fit it, as the base class treats it
            self.handleError(record)

    def close(self) -> None:
        if self._handle is not None:
            with suppress(OSError):
                os.close(self._handle)
            self._handle = None
        super().close()

    def _append(self, text: str) -> None:
        if self._handle is None or os.fstat(self._handle).st_size > LARGEST_BYTES:
            self._open()
        assert self._handle is not None
        os.write(self._handle, text.encode("utf-8", "backslashreplace"))

    def _open(self) -> None:
        """Open the file; a large one is renamed first."""
        old, self._handle = self._handle, None
        if old is not None:
            os.close(old)
        with suppress(FileNotFoundError):
            if self.path.lstat().st_size > LARGEST_BYTES:
                self.path.replace(self.path.with_name(OLDER_LOG_NAME))
        self._handle = output_files.open_to_append(self.path)

    def _give_up(self, error: OSError) -> None:
        if not self._said:
            self._said = True
            logger.warning("%s cannot be written (%s): the run continues without some of its lines", LOG_NAME, error)


_early_messages = _EarlyMessages()
_open: list[_RunLog] = []
"""The file of the run that this process is in: one at most."""
_begun: set[Path] = set()
"""Files that this process has begun to write."""


@contextmanager
def buffered() -> Iterator[None]:
    """Keep the messages of the block for the run.log that is opened next, unless one is open already."""
    if _open or _early_messages in logger.handlers:
        yield
        return
    _early_messages.records.clear()
    with log.also_to(_early_messages):
        yield


@contextmanager
def written_to(folder: str | Path) -> Iterator[None]:
    """Write the messages within the block to the folder's run.log too, on rank 0; an inner block changes nothing."""
    if _open or not here().is_first:
        yield
        return
    handler = _RunLog(Path(folder))
    _open.append(handler)
    try:
        with log.also_to(handler):
            if handler.path not in _begun:
                _begun.add(handler.path)
                write([f"whet {__version__}: process {os.getpid()}"])
            while _early_messages.records:
                handler.emit(_early_messages.records.popleft())
            yield
    except BaseException as error:
        write(f"the run ended: {_described(error)}".splitlines())
        raise
    finally:
        _open.remove(handler)
        handler.close()


def _described(error: BaseException) -> str:
    """Return the message of an error that whet raises on purpose, a traceback for any other."""
    if isinstance(error, WhetError | SystemExit | KeyboardInterrupt):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error))


def write(lines: Iterable[str]) -> None:
    """Write lines to the open run.log only, if there is one."""
    for handler in _open:
        for line in lines:
            handler.emit(logger.makeRecord(logger.name, logging.INFO, "", 0, "%s", (line,), None))
