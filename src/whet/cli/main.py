"""The program `whet`: chooses the command, prints what went wrong and how to resume, ends with an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

from whet import __version__, json_output, lasting
from whet.cli.commands import ANSWERING, COMMANDS, RANKED, STOPPABLE, TRAINING, WITHOUT_TORCH, command
from whet.config import environment
from whet.config.ranks import here, place_or_alone, require_one_process
from whet.errors import (
    EXIT_BAD_CONFIG,
    EXIT_IO,
    EXIT_OK,
    EXIT_OTHER,
    MASK,
    ConfigError,
    StorageError,
    WhetError,
    escape_controls,
    hide_secrets,
)
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
        "  whet COMMAND --json       one JSON object as the last line, for programs",
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
    if words[:1] != ["run"]:  # it sets variables of the script, unless it is switched off
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
    if not _wants_json(argv):
        return _run(argv, hears_signals=hears_signals)
    name = argv[0] if argv[0] in COMMANDS else ""
    with json_output.begun(name, lambda: place_or_alone().is_first, own_process=hears_signals):
        try:
            code = _run(argv, hears_signals=hears_signals)
        except Exception as error:
            json_output.fail_unexpectedly(error)
            json_output.finish(EXIT_OTHER)
            raise
        try:
            json_output.finish(code)
        except OSError as error:
            return _lost(error)
    return code


def _wants_json(argv: Sequence[str]) -> bool:
    return len(_without_json(argv)) < len(argv)


def _without_json(argv: Sequence[str]) -> list[str]:
    """Return the words without the command's own --json; words of a program that it starts stay."""
    n_own = list(argv).index("--") if "--" in argv else len(argv)
    if list(argv[:1]) == ["run"]:  # a script, with words of its own, follows without dashes
        from whet.config.command_line import own_words

        n_own = 1 + len(own_words(argv[1:], command("run")))
    own, kept = list(argv[:n_own]), list[str]()
    while own:
        word = own.pop(0)
        if word == "--json" and own[:1] == ["true"]:
            own.pop(0)
        elif word not in ("--json", "--json=true") or own[:1] == ["false"]:
            kept.append(word)
    return [*kept, *argv[n_own:]]


def _run(argv: Sequence[str], *, hears_signals: bool) -> int:
    try:
        if hears_signals and argv and argv[0] in STOPPABLE:
            stop.install()  # before all that takes time, such as importing torch
        elif hears_signals and argv and argv[0] in ANSWERING:
            stop.hear_interrupts()
        if hears_signals and argv and argv[0] not in STOPPABLE:
            stop.say_what_ends()
        return _dispatch(argv)
    except WhetError as error:
        _complain(error)
        json_output.fail(error.problems, error.again)
        if error.again:
            _show_how_to_resume(argv, error.again)
        if list(argv) in ([name] for name in COMMANDS):
            print(f"its options, with examples: whet {argv[0]} --help", file=sys.stderr)
        return error.exit_code
    except (stop.Stopped, stop.Interrupted) as stopped:
        if place_or_alone().is_first:
            from whet import console

            text = f"whet: {escape_controls(str(stopped))}"
            print(console.paragraph(text, "  ") if console.is_terminal(sys.stderr) else text, file=sys.stderr)
        _show_how_to_resume(argv, stopped.again)
        json_output.stop(str(stopped), stopped.again)
        return int(str(stopped.code))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        json_output.stop("interrupted by SIGINT")
        return _INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error is getattr(sys.stdout, "lost", None):
            return _lost(error)
        refused = refusal(error)
        if refused is None:
            raise
        _complain(refused)
        json_output.fail(refused.problems, refused.again)
        return refused.exit_code


def _widened() -> str | None:
    """Return what was done about a launcher that has bound this rank to fewer cores than it should use."""
    place = here()
    if place.n_ranks == 1:
        return None
    from whet.launch import pinning

    return pinning.widened(place, os.environ)


def _dispatch(given: Sequence[str]) -> int:
    argv = _without_json(given)
    name = argv[0] if argv else None
    if name in _HELP_WORDS and argv[1:2] and argv[1] in COMMANDS:
        name, argv = argv[1], [argv[1], "--help", *argv[2:]]
    if name not in COMMANDS:
        return _without_command(name)

    from whet.config.command_line import load
    from whet.delayed_imports import delayed
    from whet.optional import quiet_libraries

    asked = command(name, argv[1:])
    loaded = load(asked, argv[1:])
    for note in loaded.notes:
        _note(note)
    if loaded.text is not None:
        json_output.add(**loaded.facts)
        return _show(loaded.text)
    if name in STOPPABLE:
        json_output.resumes_by(partial(resuming_command, given))
    if name != "doctor":  # it reports these variables itself
        environment.require_known(_note)
    if name in RANKED:
        if said := _widened():
            _note(said)
    elif name in TRAINING:
        require_one_process(f"whet {name}")
    if name not in WITHOUT_TORCH:
        _require_address_space()
    with quiet_libraries(), delayed(), _recorded(argv, loaded.sources):
        done = asked.run(*loaded.settings)
        return done if isinstance(done, int) else done()


def _recorded(argv: Sequence[str], sources: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
    """Let the record of a training name its command and where each setting came from."""
    if argv[0] not in TRAINING:
        return contextlib.nullcontext()
    from whet.watch import record

    text = hide_secrets(" ".join(map(_shell_word, ["whet", *_masked(argv)])))
    return record.of_command(record.CommandLine(text, sources, argv))


def _note(text: str) -> None:
    print(f"note: {escape_controls(text)}", file=sys.stderr)
    json_output.warn(text)


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
    if json_output.is_wanted():
        json_output.add(text=text)
        return EXIT_OK
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


_ERROR = "error: "
_STYLES = {"  got:": "yellow", "  fix:": "green"}
_LEAST_BYTES = 1100 << 20
"""Of address space: with less, torch hangs, or ends the process with std::bad_alloc, which nobody can catch."""


def _require_address_space() -> None:
    """Raise ConfigError if the process has not the address space that torch's libraries take."""
    from whet.hardware import memory

    limit = memory.address_space_bytes()
    if limit is not None and limit < _LEAST_BYTES:
        raise ConfigError(
            what="the limit on this process's address space is too small",
            got=f"{limit:,} bytes",
            why=f"torch's libraries alone take about {_LEAST_BYTES:,}",
            fix="raise it: ulimit -v unlimited",
        )


def refusal(error: BaseException) -> WhetError | None:
    """Return the error of what the system refused, memory or a file, to print; None for any other exception."""
    from whet.hardware import memory

    if (lack := memory.lack(error)) is not None:
        return lack
    if isinstance(error, OSError):
        return StorageError(
            what="the system refused to read or to write",
            got=str(error),
            why="the command cannot continue without it",
            fix=f"check that the place exists, that this user may use it, and that its disk has room{_moved(error)}",
        )
    return None


_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "HF_HOME",
            "XDG_CACHE_HOME")  # fmt: skip
"""Variables that name folders for files of libraries; the more special come first."""
_USUAL = {
    "/torchinductor_": "TORCHINDUCTOR_CACHE_DIR", "/.cache/huggingface": "HF_HOME", "/.cache/": "XDG_CACHE_HOME",
}  # fmt: skip
"""Part of a path that a library has chosen -> the variable that names another folder."""


def _moved(error: OSError) -> str:
    """Return how to name another folder, if a variable of the environment does that; else nothing."""
    if "No usable temporary directory" in str(error):
        variable = "TMPDIR"
    else:
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        named = {folder: name for name in _FOLDERS if (folder := os.environ.get(name))}
        parts = [*named.items(), *_USUAL.items()]
        variable = next((variable for part, variable in parts if any(part in name for name in names)), None)
    return "" if variable is None else f"; or name a folder that this user may write to in the variable {variable}"


def _complain(error: WhetError) -> None:
    """Print the problems to standard error, in colour where that is a terminal."""
    if sys.stderr.isatty():
        _in_colour(error)
    else:
        print("\n".join(f"error: {problem}" for problem in error.problems), file=sys.stderr)


def _in_colour(error: WhetError) -> None:
    from rich.console import Console
    from rich.text import Text

    from whet import console

    shown, width = Console(stderr=True), console.width()
    for problem in error.problems:
        what, *rest = str(problem).splitlines()
        first, *others = console.folded_message(f"{_ERROR}{what}", width, "  ")
        shown.print(Text.assemble((_ERROR, "bold red"), (first.removeprefix(_ERROR), "bold")), soft_wrap=True)
        for line in others:
            shown.print(Text(line, style="bold"), soft_wrap=True)
        for line in rest:
            for part in console.folded_message(line, width, " " * 7):
                shown.print(Text(part, style=_STYLES.get(line[:6], "")), soft_wrap=True)


def _show_how_to_resume(argv: Sequence[str], again: Mapping[str, object]) -> None:
    """Print the command that resumes with these settings, if there are any: alone on its line, so it can be copied.

    Of several ranks the first prints it; how they were started, a rank does not know.
    """
    place = place_or_alone()
    if again and place.is_first:
        how = "" if place.n_ranks == 1 else f" your launcher and, for its {place.n_ranks} ranks, the command"
        print(f"whet: continue with{how}:\n\n{resuming_command(argv, again)}\n", file=sys.stderr)


def resuming_command(argv: Sequence[str], again: Mapping[str, object]) -> str:
    """Return the command line as it was, secrets masked, with these settings in place of those that it had."""
    from whet.config.command_line import kinds_of, without

    kinds = kinds_of(command(argv[0], _without_json(argv)[1:]).parts)
    added = [word for name, value in again.items() for word in (f"--{name}", _text(value))]
    return " ".join(map(_shell_word, ["whet", *without(_masked(argv), again, kinds), *added]))


def _shell_word(word: str) -> str:
    """Return the word as a shell reads it back; bytes that are not to be printed stand in it as escapes ($'...')."""
    if escape_controls(word) == word and _prints(word):
        return shlex.quote(word)
    escaped = (chr(byte) if 32 <= byte < 127 and byte not in b"\\'" else f"\\x{byte:02x}" for byte in os.fsencode(word))
    return f"$'{''.join(escaped)}'"


def _prints(word: str) -> bool:
    try:
        word.encode(sys.stderr.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _masked(argv: Sequence[str]) -> list[str]:
    from whet.config.settings import options_of

    parts = command(argv[0], _without_json(argv)[1:]).parts
    secrets = {option.name for part in parts for option in options_of(part).values() if option.secret}
    words: list[str] = []
    hide = False
    for word in argv:
        name, equals, _ = word.lstrip("-").partition("=")
        is_secret = word.startswith("-") and name.replace("-", "_") in secrets
        words.append(MASK if hide else f"{word.partition('=')[0]}={MASK}" if is_secret and equals else word)
        hide = is_secret and not equals
    return words


def _text(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
