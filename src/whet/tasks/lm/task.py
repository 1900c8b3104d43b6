"""`whet lm`, `whet generate` and `whet demo-lm`: the commands of language models, and what their run consists of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from whet.config.arguments import TrainingArguments
from whet.config.command_line import Command
from whet.jobs.command import training_command
from whet.jobs.fields import HONOURED_BY_CALLS
from whet.jobs.task import Task
from whet.models.loading.heads import CAUSAL_LM
from whet.tasks.lm.arguments import SHOWN, DemoLmArguments, GenerateArguments, LmArguments, check_run

if TYPE_CHECKING:
    from whet.jobs.job import Job
    from whet.tasks.lm.examples import Examples


def _read(job: LmArguments, name: str) -> Examples:
    from whet.tasks.lm.splits import read_split

    return read_split(job, name)


def _prepare(job: LmArguments, args: TrainingArguments, examples: Mapping[str, Examples]) -> Job:
    from whet.tasks.lm.job import prepare

    return prepare(job, args, examples)


def _generate(asked: GenerateArguments) -> int:
    from whet.tasks.lm.generate import run_generate

    return run_generate(asked)


def _demo(demo: DemoLmArguments) -> int:
    from whet.tasks.lm.demo import run_demo

    return run_demo(demo)


TASK = Task(
    name="lm",
    head=CAUSAL_LM,
    check=check_run,
    read=_read,
    prepare=_prepare,
    takes=HONOURED_BY_CALLS,
    shown=SHOWN,
    judged_by=("perplexity", "loss"),
    lower_is_better=True,
)
LM = training_command(
    TASK,
    LmArguments,
    main=("dataset_text_field", "max_length"),
    summary=(
        "Fine-tune a causal language model on texts, on prompts with completions, or on conversations, and compute its"
        " perplexity. The options are those of transformers' run_clm.py and TrainingArguments, and of TRL's SFTConfig."
    ),
    examples=(
        "whet lm --model_name_or_path HuggingFaceTB/SmolLM2-135M --train_file book.txt --do_train --output_dir out",
        "whet lm run.yaml --train_file chats.jsonl --max_length 512 --output_dir out",
    ),
)
GENERATE = Command(
    name="whet generate",
    summary="Continue a text with a language model, or chat with it in the terminal.",
    usage="MODEL --prompt TEXT [--OPTION VALUE ...]",
    examples=(
        'whet generate out --prompt "Once upon a time" --max_new_tokens 60 --do_sample --temperature 0.8',
        "whet generate HuggingFaceTB/SmolLM2-135M-Instruct --chat",
    ),
    parts=(GenerateArguments,),
    lone="model",
    run=_generate,
)
DEMO = Command(
    name="whet demo-lm",
    summary="Train a small decoder from scratch, and show what it writes. Nothing is downloaded.",
    usage="[--OPTION VALUE ...]",
    examples=("whet demo-lm", "whet demo-lm --output_dir demo --max_steps 600 --seed 7"),
    parts=(DemoLmArguments,),
    run=_demo,
)
COMMANDS = (LM, GENERATE, DEMO)
