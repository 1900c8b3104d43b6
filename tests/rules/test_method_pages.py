"""Every page of docs/methods answers the same questions, under the same labels, and names a command that measures."""

import re
from pathlib import Path

import pytest
from markdown_page import blocks, commands
from methods_page import OPTIMIZERS_PAGE, PAGE, cards, written

from whet.bench.techniques import PLAIN, TECHNIQUES, Base
from whet.config.arguments import TrainingArguments
from whet.methods.order import METHODS

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "methods"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
LABELS = ["What", "Why", "Same result", "When it hurts", "Source", "Measured"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_every_part_in_order(page: Path) -> None:
    found = re.findall(r"^\*\*([\w ]+)\*\*:", page.read_text("utf-8"), re.MULTILINE)
    assert [label for label in found if label in LABELS] == LABELS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_was_measured_names_its_command(page: Path) -> None:
    text = page.read_text("utf-8")
    at = text[: text.index("**Measured**:")].count("\n") + 1
    below = [block for block in blocks(page) if block.line > at and block.language == "bash"]
    words = [word for block in below for command in commands(block.text) for word in command]
    assert any(re.match("bench-|benchmarks/", word) for word in words)


def test_the_overview_links_every_page() -> None:
    overview = (FOLDER / "README.md").read_text("utf-8")
    assert [page.name for page in PAGES if f"({page.name})" not in overview] == []


@pytest.mark.parametrize("page", [PAGE, OPTIMIZERS_PAGE], ids=lambda page: page.stem)
def test_the_tables_are_made_from_the_code(page: Path) -> None:
    assert page.read_text("utf-8") == written(page), "run: python -m tests.rules.methods_page"


def test_every_page_belongs_to_a_card() -> None:
    assert {page.name for page in PAGES} == {card.page for card in cards() if card.page}


def test_every_card_says_all_of_it_in_sentences() -> None:
    for card in cards():
        assert card.does.endswith("."), card
        assert card.hurts.endswith("."), card
        assert card.source, card
    assert len({card.name for card in cards()}) == len(cards())


def test_every_technique_of_the_benchmark_has_a_card() -> None:
    """The settings that `whet bench-methods` changes are those that cards are asked for by."""
    asked = {name for card in cards() for name in card.asked_by.split(", ")}
    asked |= {"per_device_train_batch_size", "checkpointing_policy", "max_grad_norm"}  # parts of others
    settings = {name: getattr(TrainingArguments(), name) for name in TrainingArguments().to_dict()}
    for technique in TECHNIQUES:
        if technique.name != PLAIN:
            assert set(technique.changes(Base(settings, 384))) <= asked, technique.name


def test_a_setting_on_a_card_exists() -> None:
    fields = TrainingArguments().to_dict()
    named = {name for card in cards() for name in card.asked_by.split(", ")} - {"default"}
    assert named - fields.keys() == set()


def test_the_page_shows_a_method_as_it_is() -> None:
    """The example of "Add a method" is the code of a method, with a test of its own."""
    shown = [block.text for block in blocks(PAGE) if block.language == "python"]
    files = {Path(str(method.__dict__["__file__"])).name: method for method in METHODS}
    assert "freeze_tables.py" in files
    source = Path(str(files["freeze_tables.py"].__dict__["__file__"])).read_text("utf-8")
    assert any(block.strip() == source.strip() for block in shown)
