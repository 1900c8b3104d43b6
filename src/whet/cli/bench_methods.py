"""`whet bench-methods`: what each technique brings, measured on your own model and data."""

from whet.bench.arguments import BenchArguments
from whet.config.arguments import TrainingArguments
from whet.config.command_line import Command
from whet.errors import Problem
from whet.jobs.command import MAIN_OPTIONS
from whet.tasks.qa.arguments import QaArguments


def _run(asked: BenchArguments, qa: QaArguments, args: TrainingArguments) -> int:
    from whet.bench.run import run_bench_methods

    return run_bench_methods(asked, qa, args)


def _problems(asked: BenchArguments, qa: QaArguments, args: TrainingArguments) -> list[Problem]:
    found = []
    if qa.auto:
        found.append(
            Problem(
                what="whet bench-methods chooses nothing",
                got="--auto",
                why="it compares techniques with a plain run, whose settings are those that are given",
                fix="leave --auto out; whet qa --auto chooses, and trains",
            )
        )
    if qa.dry_run:
        found.append(
            Problem(
                what="whet bench-methods forecasts nothing",
                got="--dry_run",
                why="it measures runs of each technique",
                fix="leave --dry_run out, or use it with whet qa; --steps 1 --rounds 1 makes short runs",
            )
        )
    if qa.seeds > 1:
        found.append(
            Problem(
                what="whet bench-methods runs one seed",
                got=f"--seeds {qa.seeds}",
                why="it compares speed, memory and the loss of the same steps; --rounds repeats them",
                fix="leave --seeds out; whet qa --seeds shows the spread of the results",
            )
        )
    return found


COMMAND = Command(
    name="whet bench-methods",
    summary=(
        "Measure what each technique brings on your own model, data and machine: steps a second, peak memory and the"
        " loss after some steps, compared with a plain run and with what the guides say. Each run has its own process;"
        " a technique that cannot run here shows why in its row. The plain run is what --precision fp32 and all other"
        " options below make it. Where a technique must not change the loss, the table checks it, and the exit code"
        " is 1 if one does. Writes methods.json after each run, and the picture methods.png, to --output_dir."
        " Do nothing else on the machine meanwhile."
    ),
    usage="--model_name_or_path MODEL --train_file FILE [--OPTION VALUE ...]",
    examples=(
        "whet bench-methods --model_name_or_path distilbert-base-uncased --train_file train.json --output_dir bench",
        "whet bench-methods bench.yaml --only checkpointing_blocks,adafactor --steps 20 --rounds 5",
    ),
    parts=(BenchArguments, QaArguments, TrainingArguments),
    main=(
        *(one for one in MAIN_OPTIONS if one != "auto"),
        "only",
        "skip",
        "steps",
        "rounds",
        "limit_s",
        "max_seq_length",
    ),
    lone="config",
    takes_config=True,
    check=_problems,
    run=_run,
)
