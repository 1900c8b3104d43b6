"""`whet predict`: the predictions of a trained model for a file, whatever its task is."""

from whet.config.command_line import Command
from whet.jobs.predict.arguments import PredictArguments


def _run(asked: PredictArguments) -> int:
    import logging
    from importlib import import_module
    from pathlib import Path

    from whet import log
    from whet.data.files.file_bytes import require_file
    from whet.models.loading.heads import QUESTION_ANSWERING, SEQUENCE_CLASSIFICATION

    log.set_up(logging.WARNING)
    require_file(Path(asked.file))

    from whet.jobs.predict.outputs import head_of

    tasks = {QUESTION_ANSWERING: "qa.predict_file", SEQUENCE_CLASSIFICATION: "classify.predict"}
    return import_module(f"whet.tasks.{tasks.get(head_of(asked), 'tag.predict')}").predict(asked)


COMMAND = Command(
    name="whet predict",
    summary=(
        "Write the predictions of a trained model for a file, with scores. The model's configuration says the task:"
        " question answering, text classification or tagging of words."
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
