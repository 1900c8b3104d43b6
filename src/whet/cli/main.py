"""The program `whet`: chooses the command, prints what went wrong, ends with an exit code."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from whet import __version__, lasting
from whet.cli.commands import ANSWERING, COMMANDS, RANKED, STOPPABLE, TRAINING, WITHOUT_TORCH, command
from whet.config import environment
from whet.config.ranks import here, require_one_process
from whet.errors import (
    EXIT_BAD_CONFIG,
    EXIT_IO,
    EXIT_OK,
    ConfigError,
    WhetError,
    escape_controls,
)
from whet.launch import pinning
from whet.watch import stop

_ONLY_PRINTS = frozenset({"__help", "_h", "__print_config"})
"""The flags, dashes as underscores, with which a command that trains prints something instead."""
_HELP_WORDS = ("--help", "-h", "help")
_WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
"""The variables with which a user decides how threads wait."""
_INTERRUPTED = 128 + 2  # what shells report for SIGINT
_PIPE_CLOSED = 128 + 13  # and for SIGPIPE
_HELP = "\n".join(
    [
        "whet fine-tunes transformer models on CPUs.",
        "",
        "Examples:",
        "  whet demo",
        "  whet qa --model_name_or_path distilbert-base-uncased --dataset_name squad \\",
        "      --do_train --output_dir out",
        "",
        "Usage: whet COMMAND [--OPTION VALUE ...]",
        "",
        "Commands:",
        *(f"  {name:<15}{text}" for name, text in COMMANDS.items()),
        "",
        "  whet COMMAND --help       the options that matter most, with examples",
        "  whet COMMAND --help all   every option of a command",
        "  whet --version            the version",
    ]
)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with its exit code."""
    if "_ARGCOMPLETE" in os.environ:
        from whet.config.command_line import complete

        complete(COMMANDS, command)
    words = list(sys.argv[1:] if argv is None else argv)
    trains = words[:1] != [] and words[0] in TRAINING and not _ONLY_PRINTS & {word.replace("-", "_") for word in words}
    no_output = 1 in lasting.open_closed() and words[:1] and not trains
    _print_whatever_the_locale()
    lasting.keep_outputs(standard_output=trains)
    _let_idle_threads_sleep()
    code = run(words, hears_signals=True)
    if words[:1] and words[0] in STOPPABLE:
        stop.ignore()  # what there was to do is done: a signal that comes now changes nothing
    if no_output and code == EXIT_OK:
        code = _lost(OSError(errno.EBADF, os.strerror(errno.EBADF)))
    code = _flushed(code)
    if "whet.dist.group" in sys.modules:
        from whet.dist.ending import end_rank

        end_rank(code)
    sys.exit(code)


def _let_idle_threads_sleep() -> None:
    """Have OpenMP's threads spin for about 0.1 ms between two operators, and then sleep.

    They would spin for about 10 ms, and on a shared machine take the time of the threads that they wait for. The
    OpenMP library reads the variable when torch loads it.
    """
    if not _WAITING & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "2000"


def _flushed(code: int) -> int:
    """Return the exit code, or that of a standard output which does not take what was printed."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        return _lost(error)
    return code


def _lost(error: OSError) -> int:
    """Say that standard output is broken, in silence where its reader has seen enough; return the exit code."""
    with contextlib.suppress(OSError):
        lasting.to_null(1)
    if isinstance(error, BrokenPipeError):
        return _PIPE_CLOSED
    print(f"whet: standard output: {error.strerror}", file=sys.stderr)
    return EXIT_IO


def _print_whatever_the_locale() -> None:
    """Print characters that the locale cannot write as escapes: an answer in Greek is no error under LC_ALL=C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError, ValueError):  # a stream that is closed, or shared with another process
                stream.reconfigure(errors="backslashreplace")


def run(argv: Sequence[str], *, hears_signals: bool = False) -> int:
    """Run the command line and return its exit code; errors that a user can fix are printed, others are raised.

    `hears_signals`: this process is the command line's alone, so signals are handled.
    """
    try:
        if hears_signals and argv and argv[0] in STOPPABLE:
            stop.install()  # before all that takes time, such as importing torch
        elif hears_signals and argv and argv[0] in ANSWERING:
            stop.hear_interrupts()
        return _dispatch(list(argv))
    except WhetError as error:
        from whet.cli.complain import complain

        complain(error)
        if error.again:
            from whet.cli.again import tell_command

            tell_command(argv, error.again)
        if list(argv) in ([name] for name in COMMANDS):
            print(f"its options, with examples: whet {argv[0]} --help", file=sys.stderr)
        return error.exit_code
    except stop.Stopped as stopped:
        from whet.cli.again import tell

        return tell(stopped, argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error is getattr(sys.stdout, "lost", None):
            return _lost(error)
        from whet.cli.complain import complain, refusal

        refused = refusal(error)
        if refused is None:
            raise
        complain(refused)
        return refused.exit_code


def _dispatch(argv: list[str]) -> int:
    name = argv[0] if argv else None
    if name in _HELP_WORDS and argv[1:2] and argv[1] in COMMANDS:
        name, argv = argv[1], [argv[1], "--help", *argv[2:]]
    if name not in COMMANDS:
        return _without_command(name)

    from whet.config.command_line import load
    from whet.delayed_imports import delayed
    from whet.optional import quiet_libraries

    asked = command(name)
    loaded = load(asked, argv[1:])
    for note in loaded.notes:
        _note(note)
    if loaded.text is not None:
        return _show(loaded.text)
    if name != "doctor":  # it reports these variables itself
        environment.require_known(_note)
    if name in RANKED:
        if said := pinning.widened(here(), os.environ):
            _note(said)
    elif name in TRAINING:
        require_one_process(f"whet {name}")
    if name not in WITHOUT_TORCH:
        from whet.cli.complain import require_address_space

        require_address_space()
    with quiet_libraries(), delayed():
        done = asked.run(*loaded.settings)
        return done if isinstance(done, int) else done()


def _note(text: str) -> None:
    print(f"note: {escape_controls(text)}", file=sys.stderr)


def _without_command(word: str | None) -> int:
    """Show the version or the help text; raise ConfigError for any other word."""
    if word in ("--version", "-V"):
        return _show(f"whet {__version__}")
    if word in _HELP_WORDS:
        return _show(_HELP)
    if word is None:
        print(_HELP, file=sys.stderr)
        return EXIT_BAD_CONFIG
    raise _unknown(word)


def _show(text: str) -> int:
    print(text)
    return _flushed(EXIT_OK)


def _unknown(word: str) -> ConfigError:
    from whet.config.settings import nearest

    like = nearest(word, list(COMMANDS))
    return ConfigError(
        what="unknown command",
        got=word,
        why=f"whet has the commands {', '.join(COMMANDS)}",
        fix=f"did you mean whet {like}?" if like else "see whet --help",
    )
