"""The runs that a command line or a shell script holds, each as a draft in the words of whet."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from whet import console
from whet.errors import ConfigError
from whet.migrate import files, launchers
from whet.migrate.answer import OwnCommands
from whet.migrate.draft import Draft
from whet.migrate.programs import Program, own_program, program_of
from whet.migrate.shell import ASKS, PREPARES, RUNS, Simple, Word, read


def of_words(words: Sequence[str], task: str | None, own: OwnCommands) -> Draft:
    """Return the run of a command line that a shell has split already."""
    draft, found = Draft(), Simple([Word.of(word) for word in words], text=shlex.join(words))
    program, rest = _program(draft, found, task)
    if program is None:
        raise _unknown([found])
    files.read_options(draft, program, rest, own)
    return draft


def of_text(text: str, task: str | None, own: OwnCommands) -> list[Draft]:
    """Return a draft for each command of the text that trains, with the variables that were exported before it.

    A command that may train, and that whet does not translate, is refused in the draft behind it, or in the last one.
    """
    script = read(text)
    drafts: list[Draft] = []
    before: list[Simple] = []
    for found, given in launchers.started(script):
        draft = Draft(given_variables=given)
        program, rest = _program(draft, found, task)
        if program is None:
            before.append(found)
            continue
        launchers.say_before(draft, before)
        launchers.say_values(draft, script, found)
        files.read_options(draft, program, rest, own)
        drafts.append(draft)
        before = []
    if not drafts:
        raise _unknown(script.commands)
    launchers.say_left(drafts[-1], before)
    return drafts


def _program(draft: Draft, found: Simple, task: str | None) -> tuple[Program | None, list[Word]]:
    """Return what a command trains, and its options; what stands before the script goes into the draft."""
    if not found.sure:
        return None, []
    script, words = launchers.peeled(draft, found.words)
    program, rest = program_of(script, words)
    if task is None or (program is not None and program.task == task):
        return program, rest
    name = script.rsplit("/", 1)[-1]
    is_other = name in PREPARES | ASKS or launchers.wraps(script, words)
    if not words or is_other or (RUNS.search(name) and not name.endswith(".py")):
        return program, rest
    return own_program(task, name), words


def _unknown(commands: Sequence[Simple]) -> ConfigError:
    """Return the error for commands of which whet translates none."""
    left = [one for one in commands if launchers.may_train(one)]
    left = left or [one for one in commands if one.name not in PREPARES]
    if not left:
        return _error(f"{console.plural(len(commands), 'command')}, and no training", "name a command line that trains")
    found = next((one for one in left if launchers.trains(one)), None) or next(
        (one for one in left if one.sure), left[0]
    )
    if not found.sure:
        return launchers.not_decided(found)
    name, _ = launchers.peeled(Draft(), found.words)
    is_name = name and not any(map(str.isspace, name))
    return _error(name if is_name else launchers.written(found), launchers.why_left(found))


def _error(got: str, fix: str) -> ConfigError:
    return ConfigError(
        what="no script in it is one that whet knows",
        got=got,
        why="whet migrates run_qa.py, run_glue.py, run_classification.py, run_ner.py, run_clm.py, trl sft and trl dpo",
        fix=fix,
    )
