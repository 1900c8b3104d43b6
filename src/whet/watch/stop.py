"""Signals that ask a run to stop: SIGTERM, SIGINT, SIGUSR1 and SIGHUP, handled where no work is lost.

Windows has SIGBREAK in place of the last two.

The command line installs the handlers before it imports anything large. As long as nothing is worth saving, a signal
ends the process at once. After `defer_signals` a signal is only noted, and the run stops where it calls `requested()`:
between two micro-batches, between two batches of an evaluation, or after a save. A library installs no handler unless
the caller asks for it, so Ctrl-C stays the caller's, and processes that the caller forks have the caller's handlers.

Python runs a handler between two instructions of the main thread. A long native call, such as tokenising one large
text, would delay it. So a thread of the command line reads the signals from a pipe that the interpreter's C handler
writes to, and acts in place of the main thread. A second signal, a second or more after the first, ends the process at
once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

from whet import json_output, system
from whet.errors import EXIT_STOPPED_AND_SAVED, ConfigError, WhetError
from whet.log import logger

SIGNALS = system.STOP_SIGNALS
_SAME_S = 1.0
"""Signals within this time of the first count as the same request: launchers and terminals often send two."""
_PATIENCE_S = 2.0
"""How long a run that has nothing to save may take to stop by itself, for example inside a compiler."""
_KILLED = 128
"""Shells report a process that a signal ended by this number plus that of the signal."""
_HEARD = "whet: heard {}: the run saves and stops at the next safe point; once more ends it at once"
_NOTHING_YET = "there was nothing to save yet; start again with the same command"


class Stopped(SystemExit):
    """The run stopped because it was asked to, with exit code 75. It is not an Exception, so nothing swallows it."""

    def __init__(self, what: str, again: Mapping[str, object], code: int = EXIT_STOPPED_AND_SAVED) -> None:
        super().__init__(code)
        self.what = what
        """Which signal came, and where the run is saved."""
        self.again = dict(again)
        """The settings that resume from there; empty if the same settings do."""

    def __str__(self) -> str:
        return self.what


class Interrupted(KeyboardInterrupt):
    """Ctrl-C has stopped a training: a program of the user's may continue after it, a command ends as by `Stopped`."""

    code = EXIT_STOPPED_AND_SAVED

    def __init__(self, what: str, again: Mapping[str, object]) -> None:
        super().__init__(what)
        self.again = dict(again)
        """The settings that resume from where the run is saved; empty if there are none."""


@dataclass
class _SignalState:
    """The state of signal handling in this process."""

    requested: str | None = None
    """Name of the first signal that came."""
    deferred: bool = False
    """Whether a signal is only noted, because work in progress may be worth saving."""
    worth_saving: bool = False
    """Whether a step was completed that ending at once would lose."""
    first_s: float | None = None
    """When the first signal came, by the monotonic clock."""
    numbers: system.SignalNumbers | None = None
    """What the interpreter writes signals to. Only in the command line."""
    leaving: threading.Lock = field(default_factory=threading.Lock)
    progress: str = _NOTHING_YET
    again: Mapping[str, object] = field(default_factory=dict)
    previous_handlers: dict[int, Any] = field(default_factory=dict)
    """Signal -> its handler before `install`; empty while nothing is installed."""
    pid: int = 0
    cleanups: list[Callable[[], None]] = field(default_factory=list)
    """Functions that run before the process ends at once."""


_current = _SignalState()


def install(*, deferred: bool = False) -> None:
    """Handle signals from now on. Only the main thread of a process can; in other threads this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        return
    respecting_nohup = [one for one in SIGNALS if one.name != "SIGHUP" or signal.getsignal(one) != signal.SIG_IGN]
    _handle_these(respecting_nohup, deferred=deferred)
    for one in system.signals("SIGPIPE"):
        signal.signal(one, signal.SIG_IGN)  # a closed pipe is an error of the write and must not end the process
    if not deferred:
        _read_signals(_current)


def _handle_these(numbers: Iterable[signal.Signals], *, deferred: bool) -> None:
    global _current
    _care_for_children()
    _current = _SignalState(deferred=deferred, pid=os.getpid())
    for number in numbers:
        _current.previous_handlers[number] = signal.signal(number, _on_signal)


def hear_interrupts() -> None:
    """Let SIGINT end this process within seconds, also in a long native call; for commands that save nothing.

    Python raises KeyboardInterrupt once the call is over. If that takes too long, a thread ends the process.
    """
    heard = threading.Event()

    def interrupt(*_: object) -> None:
        heard.set()
        raise KeyboardInterrupt

    def watch() -> None:
        while found := numbers.read():
            if signal.SIGINT in found and not heard.wait(_PATIENCE_S):
                os.write(2, b"interrupted\n")
                json_output.finish_at_once(_KILLED + signal.SIGINT, "interrupted by SIGINT")
                os._exit(_KILLED + signal.SIGINT)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # ignored, as under nohup, or the caller's
    signal.signal(signal.SIGINT, interrupt)
    numbers = system.SignalNumbers()
    threading.Thread(target=watch, name="whet-interrupts", daemon=True).start()


def say_what_ends() -> None:
    """Have the JSON object of a command that saves nothing name the SIGTERM or SIGHUP that ends it."""
    if not json_output.is_wanted():
        return

    def end(number: int, _: Any) -> None:
        json_output.finish_at_once(_KILLED + number, f"ended by {signal.Signals(number).name}")
        system.end_by(number)

    for number in system.signals("SIGTERM", "SIGHUP"):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, end)


def restore() -> None:
    """Restore the handlers from before `install`."""
    global _current
    before = _current
    _set_handlers(before.previous_handlers)
    _current = _SignalState()
    if before.numbers is not None:
        before.numbers.close()  # which ends the thread


def _set_handlers(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


# ---- children ----

_LOADERS = ("torch.utils.data._utils.worker", "torchdata.stateful_dataloader.worker")
"""The modules of what processes of a DataLoader run."""


@cache
def _care_for_children() -> None:
    """See to the handlers of each child that is forked from now on, once."""
    system.after_fork(_give_back_in_child, before=SIGNALS)


def _give_back_in_child() -> None:
    """Restore the handlers from before `install`, if this child was forked in a program that uses whet as a library.

    With those of a training it would let SIGTERM pass for ever, and whoever ends it and waits would wait for ever. The
    run of a command ends its children itself. Processes of a DataLoader keep the handlers: Ctrl-C reaches all processes
    of a terminal, and the training needs them to complete its step. torch has them end by SIGTERM.
    """
    global _current
    if not _current.previous_handlers or _current.numbers is not None or _feeds_loader(sys._getframe(1)):
        return
    previous_handlers, _current = _current.previous_handlers, _SignalState()
    _set_handlers(previous_handlers)


def _feeds_loader(forking: FrameType) -> bool:
    """Return whether the frame that has called os.fork is multiprocessing's, for a process of a DataLoader."""
    process = forking.f_locals.get("process_obj")
    return getattr(getattr(process, "_target", None), "__module__", None) in _LOADERS


def ignore() -> None:
    """Ignore the signals: in worker processes of data loading, and in a process whose work is done.

    Signals reach the complete process group, and the run ends its workers itself.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def mark_work_done() -> None:
    """Ignore signals from now on: the work of the command line is done, and only results are printed."""
    if _current.numbers is not None:
        ignore()


@contextlib.contextmanager
def handling_signals(wanted: bool | None) -> Iterator[None]:
    """Handle signals within the block if `wanted`; raises ConfigError outside the main thread."""
    if not wanted or _current.previous_handlers:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            what="enable_jit_checkpoint is on outside the main thread",
            got=threading.current_thread().name,
            why="Python handles signals in the main thread only",
            fix="call train() in the main thread, or set enable_jit_checkpoint=False",
        )
    install(deferred=True)
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def noting_signals() -> Iterator[None]:
    """Note the signals within the block, for `requested`; one that the program handles or ignores stays with it.

    One that comes at the end of the block, where nothing asks for it any more, has its usual effect after it.
    In another thread than the main one, where Python allows no handlers, nothing is noted, and the log says so once.
    """
    if _current.previous_handlers:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        _warn_of_thread()
        yield
        return
    caught = system.caught_signals()
    usual = {
        one: signal.getsignal(one) == signal.default_int_handler
        or (signal.getsignal(one) == signal.SIG_DFL and one not in caught)
        for one in SIGNALS
    }
    _handle_these([one for one in SIGNALS if usual[one]], deferred=True)
    noted = _current
    try:
        yield
    except WhetError:  # with an exit code and a way on of its own, such as a save that the signal asked for
        restore()
        raise
    except Exception:
        restore()
        if noted.requested is not None:
            logger.exception("%s came, and the training ended with an error", noted.requested)
            _give_back(noted)
        raise
    except BaseException:  # the stop itself
        restore()
        raise
    restore()
    _give_back(noted)


def _give_back(state: _SignalState) -> None:
    """Let the signal that was noted, and that nobody acted on, have its usual effect."""
    if state.requested is not None:
        signal.raise_signal(signal.Signals[state.requested])


@cache
def _warn_of_thread() -> None:
    logger.warning(
        "this training runs in another thread than the main one, where Python handles no signals: SIGTERM and Ctrl-C "
        'do not save it; call train() in the main thread, or save often and resume with resume_from_checkpoint="auto"; '
        "save_on_signal=False leaves this message out"
    )


def defer_signals() -> None:
    """From now on only note a signal: the run stops at the next point from which it can resume."""
    _current.deferred = True


def mark_step_done() -> None:
    """Note that a step was completed: from now on ending at once would lose work."""
    _current.worth_saving = True


def has_step_done() -> bool:
    """Return whether a step was completed: what the folder holds of checkpoints is of this run from then on."""
    return _current.worth_saving


def before_exit(clean: Callable[[], None]) -> None:
    """Call this before a signal ends the process at once."""
    _current.cleanups.append(clean)


def requested() -> str | None:
    """Return the name of the signal that asked this run to stop, or None."""
    return _current.requested


def record_progress(what: str, **again: object) -> None:
    """Note what is finished when the next signal comes, and the settings that resume from there."""
    _current.progress, _current.again = what, again


def check(agree: Callable[[str | None], str | None]) -> None:
    """Raise Stopped if a signal came; `agree` returns the name of the signal that the ranks of a run act on."""
    name = agree(_current.requested)
    if name is not None:
        raise Stopped(f"stopped by {name}: {_current.progress}", _current.again)


def _on_signal(number: int, _: Any) -> None:
    if os.getpid() != _current.pid:  # a forked worker that has kept it: the run ends it
        return
    first, now_s = _current.requested is None, time.monotonic()
    if _current.numbers is None and _current.deferred:  # in a library no thread reads them
        _end_on_repeat(number, now_s)
    _current.requested = _current.requested or signal.Signals(number).name
    if first and not _current.deferred:
        _exit_at_once(_current, _stopped_before_first_step(_current.requested), EXIT_STOPPED_AND_SAVED)


def _end_on_repeat(number: int, now_s: float) -> None:
    """Raise an exception that ends train() at once if the signal is repeated."""
    if _current.first_s is None:
        _current.first_s = now_s
        _write_stderr(_HEARD.format(signal.Signals(number).name))
    elif now_s - _current.first_s >= _SAME_S:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(_KILLED + number)


def _read_signals(state: _SignalState) -> None:
    """Start the thread that handles signals while the main thread is busy."""
    state.numbers = system.SignalNumbers()
    system.after_fork(_forget_pipe)
    threading.Thread(target=_read_numbers, args=(state, state.numbers), name="whet-signals", daemon=True).start()


def _forget_pipe() -> None:
    """Stop writing the signals of a forked child to the pipe of its parent."""
    if _current.pid != os.getpid():
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)


def _read_numbers(state: _SignalState, source: system.SignalNumbers) -> None:
    """Read signals until the source is closed; end the process if no work is lost, or at a second signal."""
    while True:
        waits = state.first_s is not None and not state.worth_saving
        numbers = source.read(_PATIENCE_S if waits else None)
        if numbers is None:
            if not state.worth_saving and state.requested is not None:
                _exit_at_once(state, _stopped_before_first_step(state.requested), EXIT_STOPPED_AND_SAVED)
            continue
        if not numbers:
            source.close_reading()
            return
        for number in numbers:
            if number in state.previous_handlers:
                _handle(state, number)


def _handle(state: _SignalState, number: int) -> None:
    """Handle one signal: the first asks the run to stop, a later one ends it at once."""
    name, now_s = signal.Signals(number).name, time.monotonic()
    if state.first_s is None:
        state.first_s, state.requested = now_s, state.requested or name
        if not state.deferred:
            _exit_at_once(state, _stopped_before_first_step(name), EXIT_STOPPED_AND_SAVED)
        _write_stderr(_HEARD.format(name))
    elif now_s - state.first_s >= _SAME_S:
        text = f"whet: {name} came again: ended at once; the last checkpoint is kept"
        _exit_at_once(state, text, _KILLED + number)


def _stopped_before_first_step(name: str) -> str:
    return f"whet: stopped by {name} before the first step: {_NOTHING_YET}"


def _write_stderr(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _exit_at_once(state: _SignalState, text: str, code: int) -> None:
    """End the process here. An exception is not reliable: some imports swallow it, others crash."""
    if not state.leaving.acquire(blocking=False):
        return
    for clean in reversed(state.cleanups):
        with contextlib.suppress(Exception):
            clean()
    if threading.current_thread() is threading.main_thread():  # another thread could wait for it inside a write
        with contextlib.suppress(Exception):
            sys.stdout.flush()
    _write_stderr(text)
    json_output.finish_at_once(code, text.removeprefix("whet: "), state.again)
    os._exit(code)
