"""`whet predict`: the predictions of a trained model for a file, whatever its task is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet import tasks
from whet.config.command_line import Command
from whet.config.settings import refuse
from whet.errors import ConfigError
from whet.jobs.predict.arguments import PredictArguments
from whet.jobs.task import Task

_PREDICTING = [task for task in tasks.tasks() if task.predict is not None]


def _any_of(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


_TASKS = _any_of([*dict.fromkeys(task.head.task for task in _PREDICTING)])


def _run(asked: PredictArguments) -> int:
    import logging

    from whet import log
    from whet.data.files.file_bytes import require_file

    log.set_up(logging.WARNING)
    require_file(Path(asked.file))

    from whet.jobs.predict.outputs import require_room_for_json
    from whet.jobs.predict.trained import folder_of, read_reading
    from whet.models.loading.adapter import trained_head

    require_room_for_json(asked)
    folder = folder_of(asked.model)
    reading = read_reading(folder)
    for task in _PREDICTING:
        if task.knows(folder):
            return _predict(task, asked, reading if reading.get("task") == task.name else {})
    head, named = trained_head(asked.model, [task.head for task in tasks.tasks()])
    fitting = [task for task in tasks.tasks() if head in (None, task.head)]
    by_record = [task for task in fitting if task.name == reading.get("task")]
    by_head = [] if head is None else fitting
    for task in by_record or by_head:
        if task.predict is not None:
            return _predict(task, asked, reading if task in by_record else {})
    raise ConfigError(
        what="the model has no head that whet predicts with",
        got=f"{asked.model}: {named}",
        why=f"the architecture says the task: {_TASKS}",
        fix=f"name a model that {_any_of([f'whet {task.name}' for task in _PREDICTING])} trained",
    )


def _predict(task: Task, asked: PredictArguments, reading: Mapping[str, Any]) -> int:
    """Let the task write its predictions; refuse options that it does not honour."""
    assert task.predict is not None
    refuse(task.unread(asked, reading))
    from whet.jobs.predict.outputs import is_array

    if is_array(asked) and "corpus_file" not in task.predict_takes:
        raise ConfigError(
            what="output is a file of JSON lines",
            got=asked.output,
            why=f"an array has no place for the names of a prediction, and the model is for {task.head.task}",
            fix="name it so, such as predictions.jsonl",
        )
    return task.predict(asked, reading)


COMMAND = Command(
    name="whet predict",
    summary=(
        "Write the predictions of a trained model for a file, with scores. The model's configuration says the task:"
        f" {_TASKS}."
    ),
    usage="MODEL --file FILE [--OPTION VALUE ...]",
    examples=(
        "whet predict out --file test.csv --output predictions.jsonl",
        "whet predict out --file test.json --top_k 5",
    ),
    parts=(PredictArguments,),
    lone="model",
    run=_run,
)
