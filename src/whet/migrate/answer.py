"""Asks whet's own parser and rules about a command, and prints it with what became of each part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from whet import console, json_output
from whet.config.command_line import Command, kinds_of, load
from whet.config.ranks import Elsewhere, checked_for
from whet.config.settings import Names
from whet.config.values import read_flag
from whet.errors import EXIT_BAD_CONFIG, EXIT_OK, ConfigError, Problem, escape_controls
from whet.migrate import variables
from whet.migrate.draft import STATUSES, Draft, Row, plain_words
from whet.optional import is_installed


@dataclass(frozen=True)
class OwnCommands:
    """What whet's commands are, which this room does not import."""

    names: Collection[str]
    ranked: Collection[str]
    """Those that several ranks can run together."""
    command: Callable[[str], Command]

    def options(self, name: str) -> Names:
        """Return the names of options that a command knows."""
        return Names.of(self.command(name).parts, say="--{}".format)


def answered(drafts: Sequence[Draft], own: OwnCommands) -> int:
    """Print the command of each run, and what became of each part; return the exit code."""
    for draft in drafts:
        variables.translate(draft)
        draft.refuse_unknown(draft.parts())
        _check(draft, own)
    if json_output.is_wanted():
        json_output.add(**_object(drafts))
        if problems := [problem for draft in drafts for problem in draft.problems]:
            json_output.fail(problems, {})
    else:
        for number, draft in enumerate(drafts):
            _show(draft, first=number == 0)
    return EXIT_OK if all(draft.complete for draft in drafts) else EXIT_BAD_CONFIG


def _check(draft: Draft, own: OwnCommands) -> None:
    """Ask whet about the command; leave out an option that it refuses for itself, and say so."""
    command = replace(own.command(draft.task or "qa"), places=lambda *_: [])
    is_part = draft.partial or draft.task is None
    usual = {problem.what for problem in _problems(Draft(), command)} if is_part else set()
    if _has_unread_file(draft):
        draft.say(f"{draft.value('deepspeed')}", "kept", "the file is not here, and its keys were not checked")
    problems = [one for one in _problems(draft, command) if one.what not in usual]
    for _ in range(len(draft.options)):
        found = next((pair for one in problems if (pair := _culprit(draft, one, problems, command, usual))), None)
        if found is None:
            break
        name, problem = found
        del draft.options[name]
        draft.correct(name, "refused", why=f"{problem.why}: {problem.fix}")
        problems = [one for one in _problems(draft, command) if one.what not in usual]
    draft.problems += [*problems, *_of_launch(draft, own), *_of_cluster(draft, own)]


def _has_unread_file(draft: Draft) -> bool:
    """Return whether the configuration of DeepSpeed is not here, and its keys cannot be checked."""
    path = draft.value("deepspeed")
    if path is None or path.lstrip().startswith("{"):
        return False
    with suppress(OSError):  # a name that no disk can store
        return not Path(path).expanduser().is_file()
    return True


def _problems(draft: Draft, command: Command) -> list[Problem]:
    """Return what whet's parser and rules say about the options."""
    names, kinds = Names.of(command.parts), kinds_of(command.parts)
    words = [*plain_words(draft, lambda name: _sample(name, names, kinds))]
    if _has_unread_file(draft):
        words = [word for word in words if not word.startswith("--deepspeed=")]
    try:
        with checked_for(Elsewhere(n_ranks=draft.ranks.n_ranks, has_deepspeed=is_installed("deepspeed"))):
            load(command, words)
    except ConfigError as error:
        return list(error.problems)
    return []


def _sample(name: str, names: Names, kinds: Mapping[str, Any]) -> str:
    """Return a value that an option takes, its default if it has one: no rule is broken by it."""
    option = names.options.get(name)
    if option is not None and option.default not in (None, "", ()):
        return str(option.default).lower() if isinstance(option.default, bool) else str(option.default)
    for text in ("8", "true", "null", "x"):
        try:
            read_flag(text, kinds.get(name))
        except (ValueError, KeyError, TypeError):
            continue
        return text
    return "x"


def _culprit(
    draft: Draft, problem: Problem, problems: Sequence[Problem], command: Command, usual: Collection[str]
) -> tuple[str, Problem] | None:
    """Return the option without which the problem is gone and no other appears; None if it is not one option."""
    before = {one.what for one in problems}
    found = []
    for name in draft.options:
        rest = replace(draft, options={key: value for key, value in draft.options.items() if key != name})
        after = {one.what for one in _problems(rest, command)} - set(usual)
        if problem.what not in after and after < before:
            found.append(name)
    return (found[0], problem) if len(found) == 1 else None


def _of_launch(draft: Draft, own: OwnCommands) -> list[Problem]:
    """Return what `whet launch` says about its part of the command."""
    if not draft.ranks.through_whet:
        return []
    from whet.launch.run import require_startable

    words = [f"--{name}={'1' if value.live else value.text}" for name, value in draft.ranks.flags().items()]
    words += [f"--env={name}=x" for name in draft.ranks.passed()]
    try:
        asked, hosts = load(own.command("launch"), [*words, "--", draft.task or "qa"]).settings
        require_startable(asked, hosts, own.names, own.ranked)
    except ConfigError as error:
        return list(error.problems)
    return []


def _of_cluster(draft: Draft, own: OwnCommands) -> list[Problem]:
    """Return what `whet k8s` says about its part of the command."""
    if not draft.cluster_name:
        return []
    words = [f"--{name}={value.text}" for name, values in draft.cluster.items() for value in values]
    try:
        load(own.command("k8s"), ["render", draft.cluster_name, *words, "--", draft.task or "qa"])
    except ConfigError as error:
        return list(error.problems)
    return []


def _object(drafts: Sequence[Draft]) -> dict[str, Any]:
    """Return what `--json` prints."""
    runs = [
        {
            "command": None if draft.problems else draft.command(),
            "task": draft.task,
            "program": draft.program,
            "partial": draft.partial,
            "complete": draft.complete,
            "rows": [asdict(row) for row in draft.rows],
            "problems": [{"what": one.what, "why": one.why, "fix": one.fix} for one in draft.problems],
        }
        for draft in drafts
    ]
    commands = [run["command"] for run in runs if run["command"]]
    return {"command": "\n".join(commands) or None, "complete": all(draft.complete for draft in drafts), "runs": runs}


def _show(draft: Draft, *, first: bool) -> None:
    """Print the command to standard output, and the table to standard error."""
    if not first:
        print()
    if draft.problems:
        _tell(f"whet does not accept this command yet:\n\n{draft.command()}")
    else:
        print(draft.command(), flush=True)
    for status, heading in STATUSES.items():
        rows = [row for row in draft.rows if row.status == status]
        if rows:
            _tell(f"\n{heading}:")
            _tell("\n".join(_lines(rows)))
    if draft.task is None:
        _tell("\nin place of TASK put qa, classify, tag or lm, with a model and data; --task names it here")
    elif draft.partial and "model_name_or_path" not in draft.options:
        _tell("\nadd a model, data and --output_dir")
    if draft.problems:
        _tell("\n" + "\n".join(f"error: {problem}" for problem in draft.problems))


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the rows: what was given, what stands for it, and below it why; those with one reason stand together."""
    width = console.width()
    together: dict[str, list[str]] = {}
    for row in rows:
        if not row.becomes:
            together.setdefault(row.why, []).append(row.given)
    for why, given in together.items():
        yield from (f"  {line}" for line in console.folded(given, width - 2, indent=""))
        yield from _reason(why, width)
    for row in rows:
        if row.becomes:
            yield from console.folded_message(f"  {row.given}  ->  {row.becomes}", width, " " * 6)
            yield from _reason(row.why, width)


def _reason(why: str, width: int) -> list[str]:
    return console.folded_message(f"      {why}", width, " " * 6) if why else []


def _tell(text: str) -> None:
    print("\n".join(escape_controls(line) for line in text.split("\n")), file=sys.stderr)
