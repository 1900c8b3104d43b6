"""The runs that a command line or a shell script holds, each as a draft in the words of whet."""

from __future__ import annotations

from collections.abc import Sequence

from whet import console
from whet.errors import ConfigError
from whet.migrate import files, launchers
from whet.migrate.answer import OwnCommands
from whet.migrate.draft import Draft
from whet.migrate.programs import Program, own_program, program_of, why_not
from whet.migrate.shell import Simple, Word, read


def of_words(words: Sequence[str], task: str | None, own: OwnCommands) -> Draft:
    """Return the run of a command line that a shell has split already."""
    draft = Draft()
    script, rest = launchers.peeled(draft, [Word.of(word) for word in words])
    program, rest = _program(script, rest, task)
    if program is None:
        raise _unknown(script or " ".join(words))
    files.read_options(draft, program, rest, own)
    return draft


def of_text(text: str, task: str | None, own: OwnCommands) -> list[Draft]:
    """Return a draft for each command of the text that trains, with the variables that were exported before it."""
    script = read(text)
    drafts: list[Draft] = []
    others: list[str] = []
    before: list[Simple] = []
    for found, given in launchers.started(script):
        draft = Draft(given_variables=given)
        name, rest = launchers.peeled(draft, found.words)
        program, rest = _program(name, rest, task)
        if program is None:
            before.append(found)
            others += [name] if name.endswith(".py") or name in ("bash", "sh") else []
            continue
        launchers.say_before(draft, before)
        launchers.say_values(draft, script, found)
        files.read_options(draft, program, rest, own)
        drafts.append(draft)
    if not drafts:
        raise _unknown(others[0] if others else f"{console.plural(len(script.commands), 'command')}, and no training")
    return drafts


def _program(script: str, words: list[Word], task: str | None) -> tuple[Program | None, list[Word]]:
    program, rest = program_of(script, words)
    if task is not None and script and (program is None or program.task != task):
        return own_program(task, script.rsplit("/", 1)[-1]), words
    return program, rest


def _unknown(script: str) -> ConfigError:
    return ConfigError(
        what="no script in it is one that whet knows",
        got=script,
        why="whet migrates run_qa.py, run_glue.py, run_classification.py, run_ner.py, run_clm.py, trl sft and trl dpo",
        fix=why_not(script),
    )
