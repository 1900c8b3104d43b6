"""`whet generate`: continue a text with a language model, or chat with it."""

from whet.config.command_line import Command
from whet.tasks.lm.generate_arguments import GenerateArguments


def _run(asked: GenerateArguments) -> int:
    from whet.tasks.lm.generate import run_generate

    return run_generate(asked)


COMMAND = Command(
    name="whet generate",
    summary="Continue a text with a language model, or chat with it in the terminal.",
    usage="MODEL --prompt TEXT [--OPTION VALUE ...]",
    examples=(
        'whet generate out --prompt "Once upon a time" --max_new_tokens 60 --do_sample --temperature 0.8',
        "whet generate HuggingFaceTB/SmolLM2-135M-Instruct --chat",
    ),
    parts=(GenerateArguments,),
    lone="model",
    run=_run,
)
