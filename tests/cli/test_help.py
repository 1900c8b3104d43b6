"""The help texts: quick, complete and readable."""

import subprocess
import sys
import time

import pytest

from whet.cli.commands import COMMANDS, command
from whet.cli.main import run
from whet.config.command_line import Command, render
from whet.config.settings import help_texts, options_of
from whet.tasks.qa.task import QA

pytestmark = pytest.mark.true_start

_EACH = [command(name) for name in COMMANDS]
_PARTS = list(dict.fromkeys(part for one in _EACH for part in one.parts))
_LONG = [one.name.removeprefix("whet ") for one in _EACH if one.main]


@pytest.mark.parametrize(("words", "limit_s"), [(["--help"], 0.4), (["qa", "--help"], 1.0), (["ask", "-h"], 1.0)])
def test_help_is_quick(words: list[str], limit_s: float) -> None:
    """The limits are several times what an idle machine takes (0.03 s to 0.1 s); the best of five counts."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "whet", *words], check=True, capture_output=True)
        times.append(time.perf_counter() - began)
    print(f"whet {' '.join(words)}: {min(times):.3f} s, limit {limit_s} s")
    assert min(times) < limit_s


def test_neither_torch_nor_transformers_is_imported_before_the_work() -> None:
    code = (
        "import sys, whet.cli.main as main\n"
        "for name in main.COMMANDS: main.run([name, '--help'])\n"
        "main.run(['qa', '--print_config']); main.run(['qa', '--sed', '3'])\n"
        "from whet.config.arguments import TrainingArguments; TrainingArguments(output_dir='out', bf16=True)\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_program_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown and text in shown for name, text in COMMANDS.items())


@pytest.mark.parametrize("command", _EACH, ids=lambda command: command.name)
def test_help_begins_with_two_examples_and_shows_every_option(command: Command) -> None:
    lines = render(command, 100, every=True).splitlines()
    assert lines[0] == "Examples:"
    examples = "\n".join(lines[1 : lines.index("")]).replace("\\\n", " ").splitlines()
    assert len(examples) >= 2
    assert command.name in examples[0]
    for part in command.parts:
        for name in options_of(part).keys() - {command.rest}:
            assert any(line.startswith(f"  --{name} ") for line in lines), name


@pytest.mark.parametrize("name", _LONG)
def test_help_shows_a_dozen_options_and_how_to_see_all(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    short = capsys.readouterr().out
    assert run([name, "--help", "all"]) == 0
    every = capsys.readouterr().out
    shown = [line.split()[0] for line in short.splitlines() if line.startswith("  --")]
    options = {line.split()[0] for line in every.splitlines() if line.startswith("  --")}
    assert len(shown) <= 25, "a dozen, those of the command itself, and those of what bench-methods measures"
    assert options.issuperset(shown)
    assert len(options) > len(shown)
    assert short.splitlines()[-1].endswith(f"options: whet {name} --help all")
    assert "options: whet" not in every


@pytest.mark.parametrize("words", [["help", "qa", "all"], ["qa", "--help=all"], ["qa", "--seed", "1", "--help", "all"]])
def test_help_all_shows_every_option(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 0
    assert capsys.readouterr().out == render(QA, every=True) + "\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_main_options_exist(name: str) -> None:
    asked = command(name)
    assert set(asked.main) <= {option for part in asked.parts for option in options_of(part)}


def test_help_of_qa_is_grouped() -> None:
    lines = render(QA, 100, every=True).splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings[2:] == ["Model:", "Data:", "Answers:", "Run:", "Training:", "Evaluation:", "Saving:", "Logging:"]


def test_types_and_defaults_are_shown() -> None:
    shown = render(QA, 100, every=True)
    for line in (
        "  --model_name_or_path TEXT  [required]",
        "  --learning_rate NUMBER  [default: 5e-05]",
        "  --bf16 true|false  [default: null]",
        "  --eval_steps NUMBER  [default: null]",
        "  --eval_strategy no|steps|epoch  [default: no]",
        "  --report_to none|all|tensorboard|wandb|mlflow|trackio,...  [default: none]",
    ):
        assert f"{line}\n" in shown


@pytest.mark.parametrize("part", _PARTS, ids=lambda part: part.__name__)
def test_every_option_has_a_text_of_whole_sentences(part: type) -> None:
    texts = help_texts(part)
    assert list(texts) == list(options_of(part))
    for name, text in texts.items():
        assert text.endswith((".", "off", "off.")), name
        begins = text.partition(". ")[0]
        assert text[0].isupper() or ": " in begins or name == "action", name  # or with a value that it explains


@pytest.mark.parametrize("columns", [80, 100, 300])
@pytest.mark.parametrize("command", _EACH, ids=lambda command: command.name)
def test_help_fits_the_terminal(command: Command, columns: int) -> None:
    lines = render(command, columns).splitlines()
    assert [line for line in lines if len(line) > min(columns, 100)] == []
    joined = render(command, columns).replace(" \\\n     ", "")  # as a shell joins a copied command
    assert all(f"  {example}\n" in joined for example in command.examples)


def test_the_list_of_commands_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []
