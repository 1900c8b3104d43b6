"""Shell completion by argcomplete: the commands, the options of each, and what an option may be."""

import argparse
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

from whet.config.command_line import Command
from whet.config.settings import options_of
from whet.config.values import is_switch


def answer(commands: Mapping[str, str]) -> None:
    """Write the completions that a shell asks for and end the process; `commands`: name -> what it does."""
    try:
        import argcomplete
    except ImportError:
        sys.exit(1)  # the shell has argcomplete, this environment has not: it shows nothing
    typed = os.environ.get("COMP_LINE", "").split()
    parser = argparse.ArgumentParser(prog="whet", add_help=False)
    parsers = parser.add_subparsers()
    for name, text in commands.items():
        of_command = parsers.add_parser(name, help=text, add_help=False)
        if name in typed[1:2]:
            _add_options(of_command, import_module(f"whet.cli.{name.replace('-', '_')}").COMMAND)
    argcomplete.autocomplete(parser, always_complete_options=False)


def _add_options(parser: argparse.ArgumentParser, command: Command) -> None:
    for name in command.own_flags:
        if name == "config":
            parser.add_argument("--config", action="append")
        else:
            parser.add_argument(f"--{name}", nargs="?", choices=["all"] if name == "help" else [])
    for option in (option for part in command.parts for option in options_of(part).values()):
        if option.name != command.rest:
            choices, nargs = _choices(option.kind) or None, "?" if is_switch(option.kind) else None
            parser.add_argument(f"--{option.name}", action="append", nargs=nargs, choices=choices)
    for name in filter(None, (command.lone, command.second_lone)):
        kind = next((options_of(part)[name].kind for part in command.parts if name in options_of(part)), str)
        parser.add_argument(name, nargs="?", choices=_choices(kind) or None)


def _choices(kind: Any) -> list[str]:
    """Return the words that a value may be; empty if it may be any."""
    if kind is bool:
        return ["true", "false"]
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    return [choice for member in get_args(kind) for choice in _choices(member)]
