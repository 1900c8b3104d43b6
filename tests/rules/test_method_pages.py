"""Every card of a technique links a section of the docs, and the tables of docs/methods.md are made from the cards."""

import re
from pathlib import Path

import pytest
from markdown_page import anchors
from methods_page import OPTIMIZERS_PAGE, PAGE, cards, written

from whet.bench.techniques import PLAIN, TECHNIQUES, Base
from whet.card import Card
from whet.config.arguments import TrainingArguments

PAGES = sorted({card.page.partition("#")[0] for card in cards() if card.page})


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_techniques_names_a_command_that_measures(name: str) -> None:
    assert re.search(r"whet bench-|benchmarks/\S+\.py", (PAGE.parent / name).read_text("utf-8"))


@pytest.mark.parametrize("card", [card for card in cards() if card.page], ids=lambda card: card.name)
def test_a_card_links_a_section_that_exists(card: Card) -> None:
    name, _, anchor = card.page.partition("#")
    assert anchor in anchors(PAGE.parent / name), card.page


@pytest.mark.parametrize("page", [PAGE, OPTIMIZERS_PAGE], ids=lambda page: page.stem)
def test_the_tables_are_made_from_the_code(page: Path) -> None:
    assert page.read_text("utf-8") == written(page), "run: python -m tests.rules.methods_page"


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
