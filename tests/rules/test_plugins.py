"""Plug-ins are found by being there: every file of their folders, and what it says to be read without an import."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import whet
from whet import plugins
from whet.config import method_names, optimizer_names
from whet.config.method_names import BY_NAME, method_files
from whet.config.methods import MethodSettings
from whet.methods import order
from whet.models.family import owner_of
from whet.models.known import known
from whet.optim import registry

FAMILIES = "whet.models.families"
_SRC = Path(whet.__file__).parents[1]


@pytest.mark.parametrize(
    ("package", "constant"), [(FAMILIES, "PACKAGES"), (optimizer_names.PACKAGE, "OPTIMIZERS")], ids=["family", "optim"]
)
def test_every_file_of_the_folder_is_a_plug_in(package: str, constant: str) -> None:
    folder = _SRC.joinpath(*package.split("."))
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert files == plugins.constants(package, constant).keys()


def test_every_card_of_the_folder_of_methods_is_a_method() -> None:
    folder = _SRC.joinpath(*method_names.PACKAGE.split("."))
    with_card = {path.relative_to(folder) for path in folder.rglob("*.py") if "CARD = " in path.read_text("utf-8")}
    found = {Path(*file.module.split(".")).with_suffix(".py") for file in method_files().values()}
    assert found == with_card
    assert {method.CARD.name for method in order.methods()} == method_files().keys()


def test_card_of_a_method_says_in_its_source_who_wants_it() -> None:
    settings = {one.name: one.default for one in fields(MethodSettings)}
    for method in order.methods():
        card, file = method.CARD, method_files()[method.CARD.name]
        assert (file.asked_by, file.wanted_by, file.needs) == (card.asked_by, card.wanted_by, card.needs)
        field, _, value = file.wanted_by.partition("=")
        assert file.asked_by == BY_NAME or (field in settings and settings[field] != value), card.name


def test_families_are_found_by_the_packages_of_their_classes() -> None:
    for family in known().values():
        for module in (family.package, f"{family.package}.modeling"):
            assert owner_of(type("Model", (), {"__module__": module})) is family
        assert owner_of(type("Model", (), {"__module__": f"{family.package}_of_mine"})) is not family
    assert owner_of(int) is None


def test_optimizers_are_found_by_every_name() -> None:
    for name, row in optimizer_names.names().items():
        assert registry.entry(name).name == row.name
    assert [one.name for one in registry.entries()] == [*optimizer_names.rows()]


def test_source_of_a_constant_ends_at_its_bracket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf" / "__init__.py").touch()
    (tmp_path / "shelf" / "one.py").write_text('"""One."""\n\nKINDS = ("a",)\nrest = ...\n', "utf-8")
    (tmp_path / "shelf" / "two.py").write_text('"""Two."""\n\nKINDS = (\n    "b",\n    "c",\n)\n\nfailing(\n', "utf-8")
    (tmp_path / "shelf" / "none.py").write_text('"""No KINDS = here."""\n', "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = plugins.constants("shelf", "KINDS")
    assert {name: [one.value for one in tree.elts] for name, tree in found.items()} == {"one": ["a"], "two": ["b", "c"]}
