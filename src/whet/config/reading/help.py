"""The help text of a command, made from the fields of its settings."""

import shutil
import textwrap
from collections.abc import Iterator

from whet.config.command import Command
from whet.config.options import Option, help_texts, options_of
from whet.config.reading.values import is_many, placeholder

_WIDEST = 100
"""Columns; longer lines are hard to read."""
_CONFIG_HELP = (
    ("--config FILE", "YAML or JSON file with a value for any option below. Repeat it: later files, then flags, win."),
    ("--print_config", "Print every option with its value, in the form that --config reads, and stop."),
    ("--help", "Print this text and stop."),
)
_SWITCHES = "An option that is true|false may stand alone: --bf16 is --bf16 true, and --no_bf16 is --bf16 false."


def render(command: Command, columns: int | None = None) -> str:
    """Return the help text, wrapped to `columns` (default: the terminal's)."""
    width = min(columns or shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
    return "\n".join([*_head(command, width), *_command_part(command, width), *_option_parts(command, width)])


def _head(command: Command, width: int) -> Iterator[str]:
    yield "Examples:"
    for example in command.examples:
        yield from _wrap_command(example, width)
    yield ""
    yield from _wrap(command.summary, width, "")
    yield ""
    yield from _wrap(f"Usage: {command.name} {command.usage}", width, "")


def _command_part(command: Command, width: int) -> Iterator[str]:
    yield ""
    yield "General:"
    for flag, text in _CONFIG_HELP:
        if flag.split()[0].removeprefix("--") in command.own_flags:
            yield f"  {flag}"
            yield from _wrap(text, width, " " * 6)
    yield ""
    yield from _wrap(_SWITCHES, width, "  ")


def _option_parts(command: Command, width: int) -> Iterator[str]:
    heading = None
    for part in command.parts:
        texts = help_texts(part)
        for option in options_of(part).values():
            if option.name == command.rest:
                continue
            if option.heading != heading:
                heading = option.heading
                yield ""
                yield f"{heading}:"
            yield _first_line(option, width)
            yield from _wrap(texts.get(option.name, ""), width, " " * 6)


def _first_line(option: Option, width: int) -> str:
    usual = "required" if option.required else f"default: {_shown(option)}"
    line = f"  --{option.name} {placeholder(option.kind)}"
    joined = f"{line}  [{usual}]"
    return joined if len(joined) <= width else f"{_wrap_choices(line, width)}\n      [{usual}]"


def _wrap_choices(line: str, width: int) -> str:
    """Return the line broken after some of its bars where it is too long: a|b|c."""
    lines = [""]
    for choice in line.replace("|", "|\n").splitlines():
        if len(lines[-1]) + len(choice) > width and lines[-1].strip():
            lines.append(" " * 6)
        lines[-1] += choice
    return "\n".join(lines)


def _wrap_command(command: str, width: int) -> list[str]:
    """Return the command in lines that a shell joins again when they are copied."""
    parts = command.replace(" --", "\n--").splitlines()  # an option and its value stay on one line
    lines = [f"  {parts[0]}"]
    for part in parts[1:]:
        if len(lines[-1]) + 1 + len(part) > width - 2:
            lines[-1] += " \\"
            lines.append(f"      {part}")
        else:
            lines[-1] += f" {part}"
    return lines


def _shown(option: Option) -> str:
    if is_many(option.kind):
        return ",".join(option.default or ()) or ("null" if option.default is None else "none")
    if option.default is None or isinstance(option.default, bool):
        return str(option.default).lower().replace("none", "null")
    return str(option.default)


def _wrap(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
