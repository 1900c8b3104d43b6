"""`whet lm`: train and evaluate a causal language model."""

from collections.abc import Callable
from functools import partial

from whet.config.arguments import TrainingArguments
from whet.config.command_line import Command
from whet.jobs.command import MAIN_OPTIONS, USAGE, missing_places
from whet.tasks.lm.arguments import LmArguments
from whet.tasks.lm.rules import check_run


def _run(job: LmArguments, args: TrainingArguments) -> Callable[[], int]:
    from whet.jobs.run import run_job
    from whet.tasks.lm.run import TASK

    return partial(run_job, TASK, job, args)


COMMAND = Command(
    name="whet lm",
    summary=(
        "Fine-tune a causal language model on texts, on prompts with completions, or on conversations, and compute its"
        " perplexity. The options are those of transformers' run_clm.py and TrainingArguments, and of TRL's SFTConfig."
    ),
    usage=USAGE,
    examples=(
        "whet lm --model_name_or_path HuggingFaceTB/SmolLM2-135M --train_file book.txt --do_train --output_dir out",
        "whet lm run.yaml --train_file chats.jsonl --max_length 512 --output_dir out",
    ),
    parts=(LmArguments, TrainingArguments),
    main=(*MAIN_OPTIONS, "dataset_text_field", "max_length"),
    lone="config",
    takes_config=True,
    check=check_run,
    places=missing_places,
    run=_run,
)
