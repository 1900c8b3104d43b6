"""`whet plan`: what a training will take, before it runs. It takes the options of the training, and those of its task.

Without data the rows are made up, each as long as the settings allow. Without a task, the model and the data say it.
"""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from whet import console, json_output, tasks
from whet.config.arguments import TrainingArguments
from whet.config.command_line import Command, read_config
from whet.config.ranks import Elsewhere, checked_for, place_or_alone
from whet.config.rules.ranges import at_least, broken_if
from whet.config.settings import checked, options_of
from whet.errors import ConfigError, Problem
from whet.models.loading.heads import head_named
from whet.optional import is_installed

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_PICTURES = (".svg", ".png")
_MADE_UP = "made-up-rows"
"""The name of a file of rows that are made up; it stands for no file of the user's."""
_LEAST_ROWS = 32
_PEEKED = 1 << 16
"""Characters of a data file that its form is guessed from."""


_LEAST_BYTES = 10**6
"""No machine has less memory: a number below it, without a unit, is not one of bytes."""


def bytes_of(text: str) -> int | None:
    """Return an amount of memory, such as 16GB, 12GiB or 8000000000; None if it is none."""
    found = _SIZE.fullmatch(text.strip())
    return None if found is None else int(float(found[1]) * _UNITS[(found[2] or "").lower()])


def _lacks_unit(text: str) -> bool:
    found, n_bytes = _SIZE.fullmatch(text.strip()), bytes_of(text)
    return found is not None and not found[2] and n_bytes is not None and 0 < n_bytes < _LEAST_BYTES


@checked(
    headings={"task": "Plan"},
    rules=(
        broken_if(
            "memory_is_an_amount",
            ("memory",),
            lambda asked: asked.memory is not None and not bytes_of(asked.memory),
            what="memory is not an amount of memory",
            why="it is a number with a unit",
            fix="write it as --memory 16GB or --memory 12GiB",
        ),
        broken_if(
            "memory_has_a_unit",
            ("memory",),
            lambda asked: asked.memory is not None and _lacks_unit(asked.memory),
            what="memory has no unit",
            why="a number alone is one of bytes, and no machine has so few",
            fix="add its unit: --memory 16GB",
        ),
        broken_if(
            "memory_comes_from_one_place",
            ("memory", "hardware"),
            lambda asked: asked.memory is not None and asked.hardware is not None,
            what="the free memory is given twice",
            why="--hardware names the report of a machine, which says what is free there",
            fix="keep --memory or --hardware",
        ),
        at_least("ranks", 1, "it is a number of processes"),
        broken_if(
            "picture_is_svg_or_png",
            ("picture",),
            lambda asked: asked.picture is not None and not asked.picture.lower().endswith(_PICTURES),
            what="picture is not the name of a picture",
            why=f"its ending says what is written: {' or '.join(_PICTURES)}",
            fix="write it as --picture plan.svg",
        ),
    ),
)
@dataclass(frozen=True, kw_only=True, slots=True)
class PlanArguments:
    """What is planned, for which machine, and how it is printed."""

    task: str | None = None
    """The task: the name of its command, such as qa or lm. Comes first, with or without its flag. null: what the data
    and the model are made for."""
    memory: str | None = None
    """What the run may use, such as 16GB. null: what is free here."""
    hardware: str | None = None
    """Plan for another machine: the file that whet doctor --rates --json printed there. Without --rates it has no
    time."""
    ranks: int = 1
    """How many ranks will train together on one machine. What one of them holds is forecast, and its part of what is
    free there."""
    time: bool = True
    """Forecast the time as well. The first time it measures this machine, for about ten seconds; --no_time skips it."""
    fit: bool = False
    """If the run does not fit, list the changes of settings with which it does, those that cost the least first."""
    picture: str | None = None
    """Draw memory and time by part into this file, .svg or .png. With --fit, the settings that fit are drawn next to
    those that were asked for."""


_TRIES_NOTHING = Problem(
    what="whet plan tries nothing",
    got="--auto",
    why="it forecasts from the sizes of a model, and auto chooses by steps that are taken",
    fix="leave --auto out; --auto with --dry_run is for the command of the training: it tries, and trains nothing",
)


def _one_process(n_ranks: int) -> Problem:
    return Problem(
        what="whet plan runs in one process",
        got=f"one of {n_ranks} ranks",
        why="each rank would print the same forecast",
        fix=f"start it once, without the launcher, with --ranks {n_ranks}",
    )


def _trained() -> dict[str, Any]:
    by_engine = {task.name for task in tasks.tasks() if task.by_engine}
    return {name: entry for name, entry in tasks.entries().items() if name in by_engine}


def command_for(words: Sequence[str]) -> Command:
    """Return the command with the options of the task that these words are about."""
    name = _task_of(words)
    training, task = tasks.command(name), next(one for one in tasks.tasks() if one.name == name)

    def usual(given: Mapping[str, Any]) -> Mapping[str, Any]:
        has_data = any(given.get(one) for one in ("train_file", "dataset_name"))
        made_up = {} if has_data else {"train_file": str(Path(tempfile.gettempdir()) / _MADE_UP)}
        return {**training.usual(given), "do_train": True, **made_up}

    def run(asked: PlanArguments, job: Any, args: TrainingArguments) -> int:
        return _run(asked, task, job, args)

    def problems(asked: PlanArguments, job: Any, args: TrainingArguments) -> list[Problem]:
        found = [_TRIES_NOTHING] if job.auto else []
        if (place := place_or_alone()).n_ranks > 1:
            found.append(_one_process(place.n_ranks))
        return [*found, *task.problems(job, args)]

    return replace(
        training,
        name="whet plan",
        summary=(
            "Forecast what a training will take: its memory at the peak, by part, and whether it fits. No weights are"
            f" read. The options are those of the training; those of {training.name} now."
        ),
        usage="[TASK] --model_name_or_path MODEL [--train_file FILE] [--OPTION VALUE ...]",
        examples=(
            "whet plan qa --model_name_or_path bert-base-uncased --per_device_train_batch_size 12",
            "whet plan lm --model_name_or_path MODEL --train_file book.txt --bf16 --memory 16GB --json",
        ),
        parts=(PlanArguments, *training.parts),
        main=(
            "task",
            "fit",
            "memory",
            "hardware",
            "ranks",
            "picture",
            *(one for one in training.main if one != "auto"),
        ),
        lone="task",
        check=problems,
        places=lambda *_: [],
        usual=usual,
        run=run,
    )


def _task_of(words: Sequence[str]) -> str:
    """Return the task that is named, or else the one that data and model are made for."""
    known = [*_trained()]
    given = _given(words)
    first = words[0] if words and not words[0].startswith("-") else given.get("task") or None
    if first is not None:
        if first in known:
            return first
        raise ConfigError(
            what="the task to plan is unknown",
            got=first,
            why=f"whet plans {', '.join(known)}",
            fix=f"name one of them: whet plan {known[0]} --model_name_or_path MODEL",
        )
    own = {name: {option for part in tasks.command(name).parts for option in options_of(part)} for name in known}
    special = set.union(*own.values()) - set.intersection(*own.values())
    takes = [name for name in known if given.keys() & special <= own[name]]
    for guess in (_by_data(given.get("train_file")), _by_model(given.get("model_name_or_path"))):
        if guess in takes:
            return guess
    return next(iter(takes), known[0])


def _given(words: Sequence[str]) -> dict[str, str]:
    """Return what these words set by name, each with the word after it, and what the config files among them set.

    A later file counts more than an earlier one, and a flag more than a file. A file that cannot be read says so later.
    """
    flags: dict[str, str] = {}
    files: list[str] = []
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = value if equals else after
            files += [flags[name]] if name == "config" else []
    found: dict[str, str] = {}
    for file in files:
        with suppress(ConfigError):
            given = read_config(file).items()
            found |= {name.replace("-", "_"): "" if value is None else str(value) for name, value in given}
    return found | flags


_FORMS = {
    "qa": ('"question"', '"context"'),
    "tag": ('"tokens"', "_tags"),
    "lm": ('"messages"', '"prompt"', '"completion"', '"chosen"'),
}
"""What the text of a data file has in it, by task: any of these."""
_PLAIN = (".txt",)
_COLUMNS = (".conll", ".bio", ".iob")


def _by_data(path: str | None) -> str | None:
    """Return the task that a data file is made for, by its first lines; None if they do not say."""
    if not path or not Path(path).is_file():
        return None
    if path.endswith(_PLAIN):
        return "lm"
    if path.endswith(_COLUMNS):
        return "tag"
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        text = file.read(_PEEKED)
    return next((task for task, words in _FORMS.items() if any(word in text for word in words)), "classify")


def _by_model(name: str | None) -> str | None:
    """Return the task that a model is made for, by the head that its configuration names; None if it does not say."""
    path = Path(name or "") / "config.json"
    if not name or not path.is_file():
        return None
    try:
        named = json.loads(path.read_text("utf-8")).get("architectures") or []
    except (ValueError, AttributeError):
        return None
    head = head_named(named[:1], [task.head for task in tasks.tasks()])
    return next((task.name for task in tasks.tasks() if task.head is head and task.by_engine), None)


def _run(asked: PlanArguments, task: Any, job: Any, args: TrainingArguments) -> int:
    if asked.ranks == 1:
        return _planned(asked, task, job, args)
    with checked_for(Elsewhere(n_ranks=asked.ranks, has_deepspeed=is_installed("deepspeed"))):
        return _planned(asked, task, job, replace(args))


def _planned(asked: PlanArguments, task: Any, job: Any, args: TrainingArguments) -> int:
    import logging
    import sys

    from whet import log
    from whet.engine.forecast import Forecast
    from whet.jobs.dry_run import forecast, free_for, rates_for, there
    from whet.jobs.fit import that_fit
    from whet.plan import seconds, show

    log.set_up(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="whet-plan-") as folder, redirect_stdout(sys.stderr):
        if Path(job.train_file or "").name == _MADE_UP:
            job = replace(job, train_file=str(_made_up(task, job, args, Path(folder))))
        free = _free(asked, free_for(args), args.memory_limit_gb)
        if asked.hardware is not None:  # it is planned for the processor of that machine, whatever this one has
            args = replace(args, use_cpu=True)

        def planned(job: Any, args: TrainingArguments, held_bytes: int | None = None) -> Forecast:
            made = forecast(task, job, args, free, held_bytes=held_bytes)
            return made if asked.hardware is None else there(made, Path(asked.hardware))

        found, ways = planned(job, args), None
        if asked.fit and free is not None and not found.memory.fits:

            def changed(job: Any, args: TrainingArguments) -> Forecast:
                adds_modules = job.lora_r is not None  # peft; other changes import nothing, though this process grows
                return planned(job, args, None if adds_modules else found.held_bytes)

            ways = that_fit(job, args, free, found, changed)
        rates = rates_for(print, asked.hardware) if asked.time else None
        rates = rates and replace(rates, shared_by=asked.ranks)
    facts, lines = {"task": task.name, "memory": found.memory.as_json()}, []
    fitting = [_Way(one, None) for one in ways or ()]
    if rates is not None:
        sizes = (rates, found.anatomy, found.workload)
        took, costs = seconds.forecast(*sizes), seconds.prices(*sizes)
        facts["time"] = took.as_json() | {"prices": [asdict(price) for price in costs]}
        lines = ["", *seconds.table(rates, took, costs)]
        steps = [seconds.forecast(rates, one.forecast.anatomy, one.forecast.workload).step_s for one in ways or ()]
        fitting = [_Way(one, step_s / took.step_s) for one, step_s in zip(ways or (), steps, strict=True)]
        fitting.sort(key=lambda way: (not way.outcome.same_result, way.times_as_long))
    facts["fit"] = [way.as_json() for way in fitting]
    json_output.add(**facts)
    if not json_output.is_wanted():
        shown = [] if ways is None else _shown(fitting)
        print("\n".join([*show.table(found.anatomy, found.workload, found.memory), *shown, *lines]))
    if asked.picture is not None:
        _draw(Path(asked.picture), task, found, [way.outcome for way in fitting], rates)
    return 0


def _draw(path: Path, task: Any, found: Any, ways: Sequence[Any], rates: Any) -> None:
    """Write the picture of a forecast, and of those with the settings that fit."""
    from whet.plan import seconds
    from whet.report import bars

    plans = {"these settings": found} | {one.flags: one.forecast for one in ways}
    in_json = {
        words: {
            "memory": one.memory.as_json(),
            "time": None if rates is None else seconds.forecast(rates, one.anatomy, one.workload).as_json(),
        }
        for words, one in plans.items()
    }
    sizes, work = found.anatomy, found.workload
    model = f"{sizes.model_class}, {console.count(sizes.n_parameters)} parameters"
    length = f"{console.plural(work.n_steps, 'step')} over {console.plural(work.n_rows, 'row')}"
    bars.write(path, f"whet {task.name}: {model}\n{length}", bars.of_plans(in_json))


@dataclass(frozen=True)
class _Way:
    """Changes with which a run fits, and how much longer its steps take with them."""

    outcome: Any
    times_as_long: float | None
    """None: no rates are known."""

    def as_json(self) -> dict[str, Any]:
        return {
            "flags": self.outcome.flags,
            "memory": self.outcome.forecast.memory.as_json(),
            "times_as_long": self.times_as_long,
            "same_result": self.outcome.same_result,
        }


def _shown(ways: Sequence[_Way]) -> list[str]:
    """Return the changes with which a run fits, as lines."""
    if not ways:
        return ["", "no change of settings makes it fit: use a smaller model, or --lora_r 8 with --load_in_4bit true"]
    lines = ["", "fits with one of these, those that keep the result first, and of these the fastest:"]
    for way in ways:
        one, costs = way.outcome, [change.cost for change in way.outcome.changes]
        costs += [] if way.times_as_long is None else [f"a step takes {way.times_as_long:.2f} times as long"]
        costs += [] if one.same_result else ["the result changes"]
        lines += [
            f"  {console.amount(one.forecast.memory.peak_bytes):>7}  {one.flags}",
            f"           {'; '.join(costs)}",
        ]
    return lines


def _made_up(task: Any, job: Any, args: TrainingArguments, folder: Path) -> Path:
    """Write rows of the task that fill the length which the settings allow; return their file."""
    if task.sample is None:
        raise ConfigError(
            what="there are no rows to plan with",
            got=f"whet plan {task.name} without data",
            why=f"whet {task.name} has no rows to make up: the lengths of yours decide memory and time",
            fix="add --train_file FILE, or --dataset_name NAME",
        )
    n_rows = max(_LEAST_ROWS, 2 * args.train_rows_per_step)
    suffix, text = task.sample(job, n_rows)
    path = folder / f"{_MADE_UP}{suffix}"
    path.write_text(text, "utf-8")
    return path


def _free(asked: PlanArguments, here: int | None, limit_gb: float | None) -> int | None:
    """Return what a rank may use: as given, as the report of its machine says, or what is free here.

    It is never more than the limit on one process that the settings have, which counts in `here` already.
    """
    if asked.memory is not None:
        free = (bytes_of(asked.memory) or 0) // asked.ranks
    elif asked.hardware is not None:
        free = _free_there(asked.hardware) // asked.ranks
    else:
        return here
    return min(free, int(limit_gb * 2**30)) if limit_gb else free


def _free_there(path: str) -> int:
    try:
        report = json.loads(Path(path).read_text("utf-8"))
        machine = report["machine"]
        known = [machine[name] for name in ("memory_available_bytes", "memory_limit_bytes") if machine.get(name)]
        return min(int(one) for one in known)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            what="the report of the machine cannot be read",
            got=f"{path}: {error}",
            why="it says how much memory that machine has",
            fix="run whet doctor --json there, and name the file with what it prints",
        ) from error
