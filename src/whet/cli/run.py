"""`whet run`: run a script that knows nothing of whet, with its models changed."""

from whet.cli.commands import COMMANDS
from whet.config.command_line import Command
from whet.run.arguments import RunArguments


def _run(asked: RunArguments) -> int:
    from whet.run.script import run_script

    return run_script(asked, COMMANDS)


COMMAND = Command(
    name="whet run",
    summary=(
        "Run a Python script unmodified: the models that it gives to a Trainer of transformers, TRL, SetFit or"
        " sentence-transformers, to accelerate, Lightning or spaCy run without padding, in native operators. Results,"
        " files, exit code and traceback are the script's own. The first two steps run unchanged; the last line says"
        " what later ones gained. WHET_RUN=off runs the script as if whet were not there."
    ),
    usage="[--OPTION VALUE ...] SCRIPT.py ...|-m MODULE ...|-- COMMAND ...",
    rest="words",
    rest_needs_dashes=False,
    examples=(
        "whet run run_qa.py --model_name_or_path bert-base-uncased --dataset_name squad --do_train --output_dir out",
        "whet run -m package.train --num_train_epochs 3",
        "whet run -- torchrun --nproc_per_node 2 train.py",
    ),
    parts=(RunArguments,),
    run=_run,
)
