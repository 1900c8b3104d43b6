"""Labels that a head cannot learn from: what the error names, in the engine and under whet.optimize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMultipleChoice, AutoModelForSequenceClassification, AutoModelForTokenClassification

import engine
import whet
from tiny import arguments, tiny_config

CLASSES, TAGS, CHOICES = (
    AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForMultipleChoice,
)  # fmt: skip
IDS = [5, 6, 7, 8]
NAMED = {"label2id": {"no": 0, "yes": 1}, "id2label": {0: "no", 1: "yes"}}
SEVERAL = {"num_labels": 3, "problem_type": "multi_label_classification"}
MISSING: dict[str, tuple[Any, dict[str, Any], dict[str, Any], list[str]]] = {
    "text": (CLASSES, {}, {"labels": "yes"}, ["column labels holds text", "got: yes", "names.index(row['labels'])"]),
    "text that the model knows": (
        CLASSES, NAMED, {"labels": "yes"}, ["column labels holds text", "model.config.label2id[row['labels']]"],
    ),
    "text named label": (
        CLASSES, NAMED, {"label": "no"}, ["column label holds text", "model.config.label2id[row['label']]"],
    ),
    "tags of text": (TAGS, {}, {"labels": ["O", "B", "O", "O"]}, ["column labels holds text"]),
    "another name": (CLASSES, {}, {"intent": 1}, ["no labels", "intent", "rename_column('intent', 'labels')"]),
    "no column": (CLASSES, {}, {}, ["no labels", "input_ids", "add the column labels"]),
    "none": (CLASSES, {}, {"labels": None}, ["no labels", "labels None"]),
}  # fmt: skip


def new(head: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    return head.from_config(tiny_config("bert", **changes))


@pytest.mark.parametrize(("head", "config", "columns", "said"), MISSING.values(), ids=MISSING)
def test_rows_without_labels_name_the_column_and_the_fix(
    head: Any, config: Any, columns: Any, said: list[str], tmp_path: Path
) -> None:
    rows = [{"input_ids": IDS, **columns}] * 8
    with pytest.raises(whet.DataError) as caught:
        engine.Trainer(new(head, **config), arguments(tmp_path), train_dataset=rows).train()
    for part in said:
        assert part in str(caught.value)


def test_rows_without_labels_are_predicted_all_the_same(tmp_path: Path) -> None:
    found = engine.Trainer(new(CLASSES), arguments(tmp_path)).predict([{"input_ids": IDS}] * 3)
    assert found.predictions.shape == (3, 2)


ODD: dict[str, tuple[Any, dict[str, Any], Any, list[str]]] = {
    "class too large": (CLASSES, {}, 7, ["label 7", "num_labels=8"]),
    "class below 0": (CLASSES, {}, -1, ["label -1", "from 0"]),
    "float for a class": (CLASSES, {"num_labels": 3}, 1.0, ["float32", "int(label)"]),
    "ints for several labels": (CLASSES, SEVERAL, [0, 1, 0], ["int64", "[float(name in found) for name in names]"]),
    "one int for several labels": (CLASSES, SEVERAL, 1, ["int64", "single_label_classification"]),
    "too many of several labels": (CLASSES, SEVERAL, [0.0, 1.0], ["(4, 2)", "3 numbers"]),
    "tag too large": (TAGS, {}, [0, 1, 2, 1], ["label 2", "num_labels=3"]),
    "too few tags": (TAGS, {}, [0, 1], ["another shape", "-100"]),
    "choice that is not there": (CHOICES, {}, 5, ["label 5", "2 classes", "from 0"]),
}
ODD_LABELS = pytest.mark.parametrize(("head", "config", "label", "said"), ODD.values(), ids=ODD)


def _ids(head: Any) -> list[Any]:
    return [IDS, IDS] if head is CHOICES else IDS


@ODD_LABELS
def test_labels_that_do_not_fit_are_named_in_training(
    head: Any, config: Any, label: Any, said: list[str], tmp_path: Path
) -> None:
    rows = [{"input_ids": _ids(head), "labels": label}] * 8
    with pytest.raises(whet.DataError) as caught:
        engine.Trainer(new(head, **config), arguments(tmp_path), train_dataset=rows).train()
    for part in said:
        assert part in str(caught.value)


@ODD_LABELS
def test_labels_that_do_not_fit_are_named_in_a_loop_of_ones_own(
    head: Any, config: Any, label: Any, said: list[str]
) -> None:
    model = whet.optimize(new(head, **config))
    with pytest.raises(whet.DataError) as caught:
        model(input_ids=torch.tensor([_ids(head)] * 4), labels=torch.tensor([label] * 4))
    for part in said:
        assert part in str(caught.value)
    assert model(input_ids=torch.tensor([_ids(head)] * 4)).logits.shape[0] == 4  # the next call is as good as ever


def test_a_class_that_is_not_there_is_still_an_index_error() -> None:
    """Loops that catch torch's own error go on working."""
    with pytest.raises(IndexError):
        whet.optimize(new(CLASSES))(input_ids=torch.tensor([IDS]), labels=torch.tensor([7]))


def test_multiple_choice_names_a_sequence_that_is_too_long(tmp_path: Path) -> None:
    rows = [{"input_ids": [[5] * 100, [5] * 100], "labels": 0}] * 4
    with pytest.raises(whet.DataError, match="100 tokens"):
        engine.Trainer(new(CHOICES), arguments(tmp_path), train_dataset=rows).train()


FITTING = [
    ({"num_labels": 1}, 7.5), ({"num_labels": 1}, 7), (SEVERAL, [0.0, 1.0, 1.0]), ({"num_labels": 3}, 2),
    ({"num_labels": 3}, [2]),
]  # fmt: skip


@pytest.mark.parametrize(("config", "label"), FITTING, ids=repr)
def test_labels_that_fit_are_learnt_as_in_transformers(config: Any, label: Any) -> None:
    batch = {"input_ids": torch.tensor([IDS] * 2), "labels": torch.tensor([label] * 2)}
    wanted = new(CLASSES, **config)(**batch).loss
    assert whet.optimize(new(CLASSES, **config))(**batch).loss.detach() == pytest.approx(wanted.item(), rel=1e-5)
