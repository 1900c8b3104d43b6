"""`whet migrate`: the command of whet for a command line or a configuration of other programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whet.cli.commands import COMMANDS, RANKED, command
from whet.config.command_line import Command
from whet.config.rules.ranges import broken_if
from whet.config.settings import checked
from whet.errors import ConfigError

_RULES = (
    broken_if(
        "something_is_migrated",
        ("source", "words"),
        lambda asked: not asked.source.strip() and not asked.words,
        what="there is nothing to migrate",
        why="a command line, or a file, becomes a command of whet",
        fix="put the command line in quotes: whet migrate 'python run_qa.py ...', or name a file",
    ),
    broken_if(
        "one_thing_is_migrated",
        ("source", "words"),
        lambda asked: asked.source.strip() and asked.words,
        what="there are two things to migrate",
        why="a file, or a command line in quotes, or the words after two dashes are read",
        fix="keep one of them",
    ),
)


@checked(headings={"source": "Migrate"}, rules=_RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class MigrateArguments:
    """What becomes a command of whet."""

    source: str = ""
    """A command line in quotes, or a file: a shell script, the configuration of accelerate or DeepSpeed, a manifest of
    Kubernetes, a Python script with TrainingArguments, or options as JSON or YAML. Comes first, with or without its
    flag."""
    task: Literal["qa", "classify", "tag", "lm"] | None = None
    """What a script that whet does not know trains, if its options are those of transformers' scripts. null: the name
    of the script says it."""
    words: tuple[str, ...] = ()
    """A command line without quotes, after two dashes."""


def _run(asked: MigrateArguments) -> int:
    from whet.migrate import answer, files, lines

    own = answer.OwnCommands(names=COMMANDS, ranked=RANKED, command=command)
    path = _file(asked.source)
    if asked.words:
        drafts = [lines.of_words(asked.words, asked.task, own)]
    elif path is not None and path.suffix in (".py", ".json", ".yaml", ".yml"):
        drafts = [files.of_file(path, asked.task, own)]
    elif path is not None:
        drafts = lines.of_text(_text(path), asked.task, own)
    elif any(map(str.isspace, asked.source.strip())):
        drafts = lines.of_text(asked.source, asked.task, own)
    else:
        raise _no_file(asked.source)
    return answer.answered(drafts, own)


def _file(source: str) -> Path | None:
    """Return the file that is named; None if a command line is given."""
    try:
        path = Path(source).expanduser()
        return path if path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # longer than a name can be, or with characters that none has
        return None


def _no_file(source: str) -> ConfigError:
    return ConfigError(
        what="there is no such file, and a command line has several words",
        got=source,
        why="whet migrate reads a command line, or a file: a shell script, accelerate's or DeepSpeed's configuration, "
        "a manifest of Kubernetes, a Python script, or options as JSON or YAML",
        fix="put a command line in quotes: whet migrate 'python run_qa.py ...', or after two dashes: whet migrate -- "
        "python run_qa.py ...",
    )


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            what="the script is not UTF-8", got=str(path), why=str(error), fix="save it as UTF-8",
        ) from None  # fmt: skip


COMMAND = Command(
    name="whet migrate",
    summary=(
        "Print the command of whet for a command line of transformers' scripts, TRL, torchrun, mpirun, ipexrun,"
        " accelerate or deepspeed, with a table that says what became of each option and variable. Nothing is run."
        " The exit code is 78 if something could not be translated."
    ),
    usage="'COMMAND LINE'|FILE [--OPTION VALUE ...], or whet migrate -- COMMAND ...",
    lone="source",
    rest="words",
    examples=(
        "whet migrate 'mpirun -n 2 python run_qa.py --model_name_or_path bert-base-uncased --dataset_name squad"
        " --do_train --output_dir out --no_cuda --xpu_backend ccl'",
        "whet migrate train.sh",
        "whet migrate ds_config.json --task lm",
    ),
    parts=(MigrateArguments,),
    run=_run,
)
