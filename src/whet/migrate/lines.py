"""The runs that a command line or a shell script holds, each as a draft in the words of whet."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from whet import console
from whet.config.values import is_switch
from whet.errors import ConfigError
from whet.migrate import files, launchers, variables
from whet.migrate.answer import OwnCommands
from whet.migrate.draft import Draft
from whet.migrate.programs import Program, flags_of, own_program, program_of, translate, why_not
from whet.migrate.shell import Script, Simple, Word, read


def of_words(words: Sequence[str], task: str | None, own: OwnCommands) -> Draft:
    """Return the run of a command line that a shell has split already."""
    draft = Draft()
    script, rest = launchers.peeled(draft, [Word.of(word) for word in words])
    program, rest = _program(script, rest, task)
    if program is None:
        raise _unknown(script or " ".join(words))
    _read_options(draft, program, rest, own)
    return draft


def of_text(text: str, task: str | None, own: OwnCommands) -> list[Draft]:
    """Return a draft for each command of the text that trains, with the variables that were exported before it."""
    script = read(text)
    drafts: list[Draft] = []
    others: list[str] = []
    exported: dict[str, Word] = {}
    before: list[Simple] = []
    for found in _commands(script):
        exported |= _exported(found)
        if not found.words or found.name == "export":
            continue
        draft = Draft(given_variables={**exported, **found.variables})
        name, rest = launchers.peeled(draft, found.words)
        program, rest = _program(name, rest, task)
        if program is None:
            before.append(found)
            others += [name] if name.endswith(".py") or name in ("bash", "sh") else []
            continue
        _say_before(draft, before)
        _say_values(draft, script, found)
        _read_options(draft, program, rest, own)
        drafts.append(draft)
    if not drafts:
        raise _unknown(others[0] if others else f"{console.plural(len(script.commands), 'command')}, and no training")
    return drafts


def _commands(script: Script) -> Iterator[Simple]:
    """Yield the commands, those within `eval` in its place."""
    for found in script.commands:
        if found.name != "eval":
            yield found
            continue
        for inner in read(" ".join(word.text for word in found.words[1:])).commands:
            yield replace(inner, variables=found.variables | inner.variables, exported=found.exported)


def _exported(found: Simple) -> dict[str, Word]:
    if found.name not in ("export", "declare", "typeset"):
        return {}
    return {pair[0].text: pair[1] for word in found.words[1:] if (pair := word.cut("="))}


_SETUP = ("source", ".", "conda", "module", "cd", "ulimit", "micromamba")
"""Commands that change the shell which runs the script."""


def _say_before(draft: Draft, before: Sequence[Simple]) -> None:
    for found in before:
        text = " ".join(word.text for word in found.words)
        if found.name not in _SETUP:
            continue
        if re.search(r"(?:setvars|vars)\.sh", text):
            draft.say(text, "no effect", "it sets paths of oneCCL and Intel MPI, which whet does not use")
        else:
            draft.say(text, "kept", "run it before, as now")


def _say_values(draft: Draft, script: Script, found: Simple) -> None:
    """Say what became of variables that the script sets for itself."""
    for name, value in script.values.items():
        if name in script.used:
            draft.given_variables.pop(name, None)
            draft.say(f"{name}={value.text}", "translated", "its value, where it is used")
        elif name not in draft.given_variables and name not in found.exported:
            hint = ": export it if a library is to read it" if variables.is_known(name) else ""
            draft.say(f"{name}={value.text}", "no effect", f"it is not exported, and nothing reads it{hint}")


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


def _read_options(draft: Draft, program: Program, words: Sequence[Word], own: OwnCommands) -> None:
    names = own.options(program.task)
    flags, lone = flags_of(words, lambda name: is_switch(names.kind(name)))
    config = flags.pop("config", None)
    settings = [word for word in lone if word.text.endswith((".json", ".yaml", ".yml"))]
    if config is not None:
        settings += config.values
    for word in lone:
        if word.is_variable:
            draft.trailing.append(word)
            draft.say(word.text, "kept", "whet reads words that only the shell knows by the same rules")
        elif word not in settings:
            draft.say(word.text, "refused", "the script takes options alone: put its flag before it")
    for word in settings:
        path = Path(word.text).expanduser()
        if path.is_file():
            found = files.options_of(files.read_config(str(path)))
            draft.say(word.text, "translated", "its values follow")
            for name, value in _environment(found).items():
                draft.given_variables[name] = value
            flags = {**found, **flags}
        else:
            draft.say(word.text, "refused", "the file is not here: run whet migrate where it is")
    translate(draft, program, flags, names)


def _environment(found: dict[str, files.Flag]) -> Mapping[str, Word]:
    """Take the variables that a configuration of TRL sets out of its options."""
    env = found.pop("env", None)
    values = json.loads(env.value.text) if env is not None and env.value.text.startswith("{") else {}
    return {str(name): Word.of(value) for name, value in values.items()}
