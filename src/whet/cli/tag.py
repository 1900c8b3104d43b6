"""`whet tag`: train, evaluate and predict with a tagger of words."""

from collections.abc import Callable
from functools import partial

from whet.config.arguments import TrainingArguments
from whet.config.command_line import Command
from whet.jobs.command import MAIN_OPTIONS, USAGE, missing_places
from whet.tasks.tag.arguments import TagArguments
from whet.tasks.tag.rules import check_run


def _run(job: TagArguments, args: TrainingArguments) -> Callable[[], int]:
    from whet.jobs.run import run_job
    from whet.tasks.tag.run import TASK

    return partial(run_job, TASK, job, args)


COMMAND = Command(
    name="whet tag",
    summary=(
        "Fine-tune a model that gives each word a tag: names of entities, parts of speech, chunks; evaluate it and"
        " predict. The options are those of transformers' run_ner.py and TrainingArguments; their older names work too."
    ),
    usage=USAGE,
    examples=(
        "whet tag --model_name_or_path distilbert-base-uncased --train_file train.conll --do_train --output_dir out",
        "whet tag run.yaml --task_name pos --label_all_tokens --output_dir out",
    ),
    parts=(TagArguments, TrainingArguments),
    main=(*MAIN_OPTIONS, "text_column_name", "label_column_name"),
    lone="config",
    takes_config=True,
    check=check_run,
    places=missing_places,
    run=_run,
)
