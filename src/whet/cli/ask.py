"""`whet ask`: put questions to a trained model."""

from whet.config.command_line import Command
from whet.tasks.qa.arguments import AskArguments


def _run(asked: AskArguments) -> int:
    from whet.tasks.qa.ask import run_ask

    return run_ask(asked)


COMMAND = Command(
    name="whet ask",
    summary="Find the answers to questions in a text, with a model that whet qa trained.",
    usage="MODEL --context FILE --question TEXT [--OPTION VALUE ...]",
    examples=(
        'whet ask out --context notes.txt --question "Who found it?" --question "When?"',
        'cat notes.txt | whet ask out --context - --question "Who found it?"',
    ),
    parts=(AskArguments,),
    lone="model",
    run=_run,
)
