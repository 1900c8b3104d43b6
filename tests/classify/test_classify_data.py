"""Examples from every format; bad rows and unknown labels are refused by file, line and field."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from text_tasks import topic_rows, write_csv, write_lines
from whet.errors import DataError
from whet.log import logger
from whet.tasks.classify.arguments import ClassifyArguments
from whet.tasks.classify.examples import (
    Columns,
    Examples,
    Named,
    Scheme,
    as_list,
    kind_of,
    read_file,
    read_split,
    require_clear,
    scheme_of,
)


def _read(path: Path, named: Named | None = None, **changes: Any) -> Examples:
    options: dict[str, Any] = {"delimiter": None, "need_label": True, "limit": None, "skip_bad": False} | changes
    return read_file(path, named or Named(), **options)


def _problems(path: Path, **changes: Any) -> list[str]:
    with pytest.raises(DataError) as caught:
        _read(path, **changes)
    return [problem.what for problem in caught.value.problems]


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What whet warns of."""
    monkeypatch.setattr(logger, "propagate", True)
    return caplog


def _rows_with_odd_texts() -> list[dict[str, Any]]:
    return [*topic_rows(), {"text": 'a "quoted"\nline; with | marks,\tand a tab', "label": "garden"}]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_csv_with_any_delimiter_gives_the_same_examples(tmp_path: Path, delimiter: str) -> None:
    rows = _rows_with_odd_texts()
    found = _read(write_csv(tmp_path / "data.csv", rows, delimiter))
    assert list(found.texts) == [row["text"] for row in rows]
    assert list(found.labels or ()) == [row["label"] for row in rows]
    assert found.places[-1] == "line 14"


def test_json_and_parquet_give_the_same_examples(tmp_path: Path) -> None:
    rows = _rows_with_odd_texts()
    for name, document in (("list", rows), ("data", {"data": rows})):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    write_lines(tmp_path / "lines.jsonl", rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table.parquet")
    wanted = [(row["text"], row["label"]) for row in rows]
    for name in ("list.json", "data.json", "lines.jsonl", "table.parquet"):
        found = _read(tmp_path / name)
        assert list(zip(found.texts, found.labels or (), strict=True)) == wanted, name


def test_a_hub_data_set_gives_names_of_classes_in_its_own_order(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=["zebra", "ant"])})
    Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features=features).to_parquet(tmp_path / "train.parquet")
    job = ClassifyArguments(model_name_or_path="m", dataset_name=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    found = read_split(job, "train")
    assert list(found.labels or ()) == ["zebra", "ant"]
    assert scheme_of(found, "single_label_classification").names == ("zebra", "ant")


def test_bad_rows_are_named_by_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text('text,label\ngood,a\n,a\n"two\nlines",\none too many,a,b\nlast,b\n')
    assert _problems(path)[:3] == [
        f"{path}: line 3: text is empty",
        f"{path}: line 4: label is empty",
        f"{path}: line 6: the row has 3 columns, and the header 2",
    ]
    found = _read(path, skip_bad=True)
    assert list(found.texts) == ["good", "last"]
    assert found.left_out.n_rows == 3


def test_bad_json_lines_are_named_by_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a", "label": "x"}\n{"text": 3, "label": "x"}\n[1]\n{"text": "b", "label": {"n": 1}}\n')
    assert _problems(path) == [
        f"{path}: line 2: text is a whole number, not a text",
        f"{path}: line 3: this is a list, not an object",
        f"{path}: line 4: label is an object",
    ]


def test_a_quote_that_never_ends_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "open.csv"
    path.write_text('text,label\nfine,a\n"never closed,b\nmore,c\n')
    (problem,) = _problems(path)
    assert "line" in problem
    assert "not a CSV table" in problem


def test_columns_that_are_missing_or_unclear_are_refused_with_the_flag(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "data.csv", [{"a": "x", "b": "y", "c": "z"}])
    with pytest.raises(DataError, match="--text_column_names"):
        _read(path)
    with pytest.raises(DataError, match=r"(?s)the column d is missing.*fix: correct --label_column_name, or"):
        _read(path, Named(text="a", label="d"))
    with pytest.raises(DataError, match=r"(?s)the column d is missing.*fix: correct --text_column_names, or"):
        _read(path, Named(text="d"))
    with pytest.raises(DataError, match="--label_column_name"):
        _read(path, Named(text="a"))


def test_several_columns_are_joined_and_pairs_stay_apart(tmp_path: Path) -> None:
    rows = [{"title": "On sails", "body": "", "sentence1": "a b", "sentence2": "c", "label": 1}]
    path = write_lines(tmp_path / "data.jsonl", rows)
    joined = _read(path, Named(text="title, sentence1,body", delimiter=" / "))
    assert list(joined.texts) == ["On sails / a b"]
    assert joined.pairs is None
    pair = _read(path)
    assert (list(pair.texts), list(pair.pairs or ())) == (["a b"], ["c"])


def _labelled(tmp_path: Path, labels: list[Any], name: str = "labels.jsonl") -> Examples:
    return _read(write_lines(tmp_path / name, [{"text": f"t{n}", "label": one} for n, one in enumerate(labels)]))


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (["b", "a"], "single_label_classification"),
        ([1, 0, 2], "single_label_classification"),
        (["1", "0"], "single_label_classification"),
        ([True, False], "single_label_classification"),
        ([0.5, 1.0], "regression"),
        (["0.5", "3"], "regression"),
        ([["a"], ["a", "b"], []], "multi_label_classification"),
        (['["a", "b"]', '["b"]'], "multi_label_classification"),
    ],
)
def test_the_data_decides_what_labels_are(tmp_path: Path, labels: list[Any], kind: str) -> None:
    assert kind_of(_labelled(tmp_path, labels), None, None)[0] == kind


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["0.5", "nan", "1.5"], "line 3: label is no number, and all others are"),
        (["0.5", "", "1.5"], "line 3: label is no number, and all others are"),
        (["0,5", "1,25", "2"], "line 2: label has a decimal comma"),
        ([[0, 1, 0], [1, 0, 0], [0, 1, 1]], "example 1: label is a list that names a label more than once"),
        ([[0.0, 0.0], [1.0, 0.0]], "example 1: label is a list that names a label more than once"),
        (["[0, 1, 0]", "[1, 0, 0]"], "line 2: label is a list that names a label more than once"),
        ([[0.0, 1.0], [1.0, 0.0]], "example 1: label is a list of zeros and ones, as in every row"),
        (["[0, 1]", "[1, 0]"], "line 2: label is a list of zeros and ones, as in every row"),
        (["['a', 'b']", "['a']", "[]"], "line 2: label is a list as Python prints it"),
    ],
)
def test_labels_that_look_like_another_task_are_refused(labels: list[Any], said: str) -> None:
    """As pandas and scikit-learn write them: training would go through, on classes that nobody meant."""
    in_csv = isinstance(labels[0], str)
    places = [f"line {row + 2}" if in_csv else f"example {row + 1}" for row in range(len(labels))]
    examples = Examples("data.csv", ["a"] * len(labels), None, labels, places, Columns(text=("text",), label="label"))
    with pytest.raises(DataError) as caught:
        require_clear(examples)
    assert caught.value.problems[0].what == f"data.csv: {said}"


@pytest.mark.parametrize(
    "labels",
    [["1", "2", "nan"], ["sport", "nan"], [["a", "b"], ["a"]], [[0, 1], [1]], ["0.5", "1.5"], ["[spam]", "ham"]],
)
def test_labels_that_can_be_meant_are_taken(labels: list[Any]) -> None:
    columns = Columns(text=("text",), label="label")
    require_clear(Examples("data.csv", ["a"] * len(labels), None, labels, ["line 1"] * len(labels), columns))


def test_do_regression_and_problem_type_decide_instead(tmp_path: Path) -> None:
    numbers = _labelled(tmp_path, [1.5, 2.5])
    assert kind_of(numbers, None, False)[0] == "single_label_classification"
    assert kind_of(numbers, "multi_label_classification", None)[0] == "multi_label_classification"
    assert kind_of(_labelled(tmp_path, [1, 2], "whole.jsonl"), None, True)[0] == "regression"


def test_labels_are_sorted_as_texts(tmp_path: Path) -> None:
    """As run_classification.py does: 10 comes before 2."""
    found = scheme_of(_labelled(tmp_path, [2, 10, 1, 2]), "single_label_classification")
    assert found.names == ("1", "10", "2")
    assert found.encode(_labelled(tmp_path, [10, 2], "eval.jsonl")).tolist() == [1, 2]


def test_labels_that_training_has_not_seen_are_named_by_line_column_and_value(tmp_path: Path) -> None:
    scheme = Scheme("single_label_classification", ("a", "b"))
    found = _labelled(tmp_path, ["a", "c", "b", "d"])
    with pytest.raises(DataError) as caught:
        scheme.encode(found)
    first, second = caught.value.problems
    assert first.what == f"{tmp_path / 'labels.jsonl'}: line 2: label is a label that the model does not know"
    assert (first.got, second.got) == ("c", "d")
    assert "a, b" in first.why
    assert "a, b" not in second.why  # the list of labels stands in the error once


@pytest.mark.parametrize("shuffle", [False, True])
def test_labels_of_rows_that_are_not_trained_are_known(tmp_path: Path, *, shuffle: bool) -> None:
    file = str(write_lines(tmp_path / "labels.jsonl", [{"text": "t", "label": one} for one in ["b", "c", "b", "a"]]))
    job = ClassifyArguments(
        model_name_or_path="m",
        train_file=file,
        max_train_samples=2,
        shuffle_train_dataset=shuffle,
        shuffle_seed=1 if shuffle else 42,
    )
    found = read_split(job, "train")
    assert len(found) == 2
    assert scheme_of(found, "single_label_classification").names == ("a", "b", "c")


def test_a_number_that_is_none_is_refused_in_regression(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 2: label is no number"):
        Scheme("regression").encode(_labelled(tmp_path, [1.5, "much"]))


def test_an_unlabelled_file_has_examples_without_labels(tmp_path: Path) -> None:
    found = _read(write_lines(tmp_path / "plain.jsonl", [{"text": "a"}, {"text": "b"}]), need_label=False)
    assert found.labels is None
    assert len(found) == 2


def test_options_that_commands_share_keep_what_they_say() -> None:
    """Each command's class reads the same inherited fields: one that is required, one that is secret."""
    from whet.config.settings import options_of
    from whet.tasks.qa.arguments import QaArguments

    for arguments in (QaArguments, ClassifyArguments):
        options = options_of(arguments)
        assert options["model_name_or_path"].required
        assert options["token"].secret
    assert "very-secret" not in str(
        ClassifyArguments(model_name_or_path="m", train_file="f", token="very-secret").to_dict()
    )


def test_fields_within_fields_of_json_are_columns(tmp_path: Path) -> None:
    rows = [{"id": 1, "doc": {"body": "a boat", "meta": {"topic": "sea"}}}, {"id": 2, "doc": {"body": "a bun"}}]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    named = Named(text="doc.body", label="doc.meta.topic")
    with pytest.raises(DataError, match=r"line 2: doc\.meta\.topic is missing"):
        _read(path, named)
    with pytest.raises(DataError, match=r"columns found: id, doc\.body, doc\.meta\.topic"):
        _read(path)
    path = write_lines(tmp_path / "rows.jsonl", rows[:1])
    found = _read(path, named)
    assert (list(found.texts), list(found.labels or ())) == (["a boat"], ["sea"])


def test_items_of_a_list_of_labels_are_checked_like_single_labels(tmp_path: Path) -> None:
    labels = [["a ", "b"], ["a", None], [" "], [], ["b", 3]]
    lines = write_lines(tmp_path / "rows.jsonl", [{"text": "t", "label": one} for one in labels])
    table = write_csv(tmp_path / "rows.csv", [{"text": "t", "label": json.dumps(one)} for one in labels])
    for file, first in ((lines, 1), (table, 2)):
        assert _problems(file) == [f"{file}: line {first + n}: label holds an empty label" for n in (1, 2)]
        found = _read(file, skip_bad=True)
        assert scheme_of(found, "multi_label_classification").names == ("3", "a", "b")
        assert [as_list(one) for one in found.labels or ()] == [["a", "b"], [], ["b", 3]]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_quotes_of_a_file_without_quoting_are_characters(
    tmp_path: Path, end: str, warned: pytest.LogCaptureFixture
) -> None:
    """As GLUE's: between an unpaired quote and the next one, rows would be joined."""
    lines = ["text\tlabel", '"It was good, he said\t1', 'the "best" of all\t1', 'it "was" bad"\t0', '"Fine."\t1', ""]
    (tmp_path / "rows.tsv").write_text(end.join(lines), "utf-8", newline="")
    found = _read(tmp_path / "rows.tsv")
    assert list(found.texts) == ['"It was good, he said', 'the "best" of all', 'it "was" bad"', '"Fine."']
    assert "quotes are read as characters" in warned.text


def test_rows_that_a_quote_joins_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    for more in ("", "cut off\n"):
        path.write_text(f'text\tlabel\n"It was good\t1\nfine\t1\nhe said it was bad"\t0\n{more}', "utf-8")
        assert _problems(path) == [f"{path}: line 2: a quote joins it with line 4"]


def test_quotes_around_a_cell_are_named(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rows.tsv").write_text('text\tlabel\n"Fine."\t1\nbad\t0\n', "utf-8")
    assert list(_read(tmp_path / "rows.tsv").texts) == ["Fine.", "bad"]
    assert "quotes around a cell are read as those of CSV" in warned.text


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
def test_what_csv_writers_quote_is_read_back(tmp_path: Path, quoting: Any, warned: pytest.LogCaptureFixture) -> None:
    texts = ['a "quoted" word', '"all of it"', '"', "a\ttab", "two\nlines", '"\n"\n', "an end\r\n", "plain", '5" pipe']
    with (tmp_path / "rows.tsv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, "excel-tab", quoting=quoting)
        writer.writerows([["text", "label"], *([text, "a"] for text in texts)])
    assert list(_read(tmp_path / "rows.tsv").texts) == texts
    assert not warned.text


def test_the_delimiter_of_odd_headers_is_found(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text;label\rgood bread;fine\rno sail;bad\n", "utf-8", newline="")
    assert list(_read(path).texts) == ["good bread", "no sail"]
    path.write_text(f"text;label;{'x' * 200_000}\ngood bread;fine;\n", "utf-8", newline="")
    assert list(_read(path).texts) == ["good bread"]
