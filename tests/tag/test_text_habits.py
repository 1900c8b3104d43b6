"""Files as people have them: headers or none, capitals, CoNLL-U, CSV with lists, the line ends of three systems."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from pyarrow import parquet

from text_tasks import words, write_csv
from whet.cli.main import run
from whet.errors import EXIT_BAD_DATA, DataError
from whet.tasks.classify import examples as texts
from whet.tasks.classify.examples import Examples, Named
from whet.tasks.tag import read as tagged
from whet.tasks.tag.job import Tags
from whet.tasks.tag.sentences import Named as NamedWords
from whet.tasks.tag.sentences import Sentences


def _texts(path: Path, content: str, *, need_label: bool = True) -> Examples:
    path.write_bytes(content.encode())
    return texts.read_file(path, Named(), delimiter=None, need_label=need_label, limit=None, skip_bad=False)


def _sentences(path: Path, content: str, *, need_tags: bool = True) -> Sentences:
    path.write_bytes(content.encode())
    return tagged.read_file(path, NamedWords(), need_tags=need_tags, limit=None, skip_bad=False)


@pytest.mark.parametrize(
    "content",
    [
        "text,label\ngood bread,fine food\nno sail,bad\n",
        "\ufeffText , Label\r\ngood bread, fine food \r\n\r\nno sail,bad\r\n",
        "TEXT\tLABEL\rgood bread\tfine food\rno sail\tbad",
    ],
)
def test_headers_and_line_ends_of_all_kinds_are_read(tmp_path: Path, content: str) -> None:
    found = _texts(tmp_path / "rows.csv", content)
    assert (list(found.texts), list(found.labels or ())) == (["good bread", "no sail"], ["fine food", "bad"])


@pytest.mark.parametrize("need_label", [True, False])
@pytest.mark.parametrize("content", ["the bread was good,fine\nno sail today,bad\n", "the bread was good\nno sail\n"])
def test_first_row_is_not_lost_as_a_header(tmp_path: Path, content: str, need_label: bool) -> None:
    with pytest.raises(DataError, match="write a line with names above it, such as text,label"):
        _texts(tmp_path / "rows.csv", content, need_label=need_label)


def test_one_class_alone_is_refused(word_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_csv(tmp_path / "rows.csv", [{"text": "a boat", "label": "sea"}, {"text": "a sail", "label": "sea"}])
    assert run(words("classify", word_encoder, tmp_path / "out", "--do_train", train_file=file)) == EXIT_BAD_DATA
    assert "all examples have the same label" in capsys.readouterr().err


def test_conllu_gives_words_and_parts_of_speech(tmp_path: Path) -> None:
    rest = "\t_" * 6
    content = (
        f"# text = Hi du\n1\tHi\thi\tINTJ{rest}\n2-3\tdu\t_\t_{rest}\n2\tde\tde\tADP{rest}\n3\tle\tle\tDET{rest}\n\n"
    )
    found = _sentences(tmp_path / "rows.conllu", content)
    assert (found.words, found.tags) == ([["Hi", "de", "le"]], [["INTJ", "ADP", "DET"]])


def test_csv_with_lists_is_read(tmp_path: Path) -> None:
    found = _sentences(tmp_path / "rows.csv", 'tokens,tags\n"[""a"", ""b""]","[""O"", ""B-X""]"\n')
    assert (found.words, found.tags) == ([["a", "b"]], [["O", "B-X"]])


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_header_of_columns_is_no_word(tmp_path: Path, end: str) -> None:
    content = end.join(["word tag", "Mira B-PER", "sailed O", "", "Borin B-PER", ""])
    found = _sentences(tmp_path / "rows.conll", content)
    assert (found.words, found.tags) == ([["Mira", "sailed"], ["Borin"]], [["B-PER", "O"], ["B-PER"]])


def test_running_text_is_not_taken_for_columns(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 2 has 3 columns, and line 1 has 4") as error:
        _sentences(tmp_path / "text.txt", "the boat lay still\nwe set sail\n", need_tags=False)
    assert "write one word a line" in str(error.value)


def test_words_and_tags_with_a_comma_between_are_read(tmp_path: Path) -> None:
    found = _sentences(tmp_path / "rows.csv", "Mira,B-PER\nsailed,O\n")
    assert (found.words, found.tags) == ([["Mira", "sailed"]], [["B-PER", "O"]])


@pytest.mark.parametrize("command", ["classify", "tag"])
def test_flags_of_the_scripts_without_effect_are_accepted(
    word_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    line = words(command, word_encoder, tmp_path / "out", "--do_train", train_file=tmp_path / "missing.csv")
    more = ["--remove_columns", "id", "--remove_splits", "test"] if command == "classify" else []
    assert run([*line, "--use_fast_tokenizer", "true", *more]) != 0
    assert "use_fast_tokenizer" not in capsys.readouterr().err
    assert run([*line, "--use_fast_tokenizer", "false"]) != 0
    assert "whet does not honour --use_fast_tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("comment", ["", "# text = The dog\n"])
@pytest.mark.parametrize(("words", "tags"), [("1", "3"), ("1", None), (None, "3"), ("-9", "-7")])
def test_columns_of_conllu_are_counted_though_the_first_word_has_that_number(
    tmp_path: Path, comment: str, words: str | None, tags: str | None
) -> None:
    """The first line of a sentence begins with 1, which is no heading."""
    rest = "\t_" * 6
    sentence = f"{comment}1\tThe\tthe\tDET{rest}\n2\tdog\tdog\tNOUN{rest}\n\n"
    (tmp_path / "rows.conllu").write_text(sentence * 2, "utf-8")
    named = NamedWords(words, tags)
    found = tagged.read_file(tmp_path / "rows.conllu", named, need_tags=True, limit=None, skip_bad=False)
    assert found.words == [["The", "dog"]] * 2
    assert found.tags == [["DET", "NOUN"]] * 2


def test_columns_apart_by_tabs_are_counted_though_a_word_is_such_a_number(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("x\t1\tNUM\ny\tdogs\tNOUN\n", "utf-8")
    found = tagged.read_file(tmp_path / "rows.tsv", NamedWords("1", "2"), need_tags=True, limit=None, skip_bad=False)
    assert (found.words, found.tags) == ([["1", "dogs"]], [["NUM", "NOUN"]])


def test_a_number_that_keeps_words_out_of_losses_is_no_tag(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tags\[1\] is -100, which is no tag"):
        _sentences(tmp_path / "rows.jsonl", '{"tokens": ["Mira", "saw"], "tags": [1, -100]}\n')


def test_one_tag_alone_is_refused(word_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.conll").write_text("a O\nboat O\n\na O\nsail O\n", "utf-8")
    done = run(words("tag", word_encoder, tmp_path / "out", "--do_train", train_file=tmp_path / "rows.conll"))
    assert done == EXIT_BAD_DATA
    assert "all words have the same tag" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "odd"),
    [
        (("O", "b-per", "i-per"), "b-per"), (("O", "PER-B", "PER-I"), "PER-B"), (("B_PER", "O"), "B_PER"),
        (("B-PER", "O"), None), (("NOUN", "VERB"), None), (("b-per", "NOUN"), None), (("O",), None),
    ],
)  # fmt: skip
def test_tags_that_nearly_mark_entities_are_noticed(names: tuple[str, ...], odd: str | None) -> None:
    assert Tags(names).almost_entity() == odd


@pytest.mark.parametrize(
    "content",
    [
        "sep=;\r\ntext;label\r\ngood, bread;fine\r\nno sail;bad\r\n",
        "\ufeffSEP=;\ntext;label\ngood, bread;fine\nno sail;bad\n",
        "text;label;;\ngood, bread;fine;;\nno sail;bad;;\n",
        "text;label\ngood, bread;fine\nno sail;bad\n   \n",
    ],
)
def test_what_spreadsheets_leave_behind_is_no_data(tmp_path: Path, content: str) -> None:
    found = _texts(tmp_path / "rows.csv", content)
    assert (list(found.texts), list(found.labels or ())) == (["good, bread", "no sail"], ["fine", "bad"])


def test_a_blank_text_of_a_table_with_one_column_is_a_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 3: text is empty"):
        _texts(tmp_path / "rows.csv", 'text\ngood bread\n" "\nno sail\n', need_label=False)


def test_lines_are_counted_with_the_one_that_names_the_delimiter(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 4"):
        _texts(tmp_path / "rows.csv", "sep=;\ntext;label\na;b\nno sail\n")


def test_a_column_without_a_name_that_has_values_is_kept(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="columns have the same name"):
        _texts(tmp_path / "rows.csv", "text,label,,\ngood bread,fine,,x\n")


@pytest.mark.parametrize("task", ["classify", "tag"])
def test_parquet_of_a_data_set_keeps_the_names_of_its_classes(tmp_path: Path, task: str) -> None:
    """`datasets` writes them next to the schema; their order is that of the model's logits."""
    names, path = ["worse", "better"], tmp_path / "rows.parquet"
    if task == "classify":
        features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
        Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, 1]}, features).to_parquet(path)
        found = texts.read_file(path, Named(), delimiter=None, need_label=True, limit=None, skip_bad=False)
        assert found.labels == ["better", "worse", "better"]
        assert found.label_order == ("worse", "better")
        return
    features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=names))})
    Dataset.from_dict({"tokens": [["a", "b"], ["c"]], "ner_tags": [[1, 0], [1]]}, features).to_parquet(path)
    sentences = tagged.read_file(path, NamedWords(), need_tags=True, limit=None, skip_bad=False)
    assert sentences.tags == [["better", "worse"], ["better"]]
    assert sentences.tag_order == ("worse", "better")


@pytest.mark.parametrize(
    "said",
    [b"no JSON", b"[]", b"{}", b'{"info": {"features": 7}}', b"\xff",
     b'{"info": {"features": {"label": {"_type": "ClassLabel"}}}}',
     b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": [1, 2]}}}}', b"[" * 100_000],
)  # fmt: skip
def test_what_else_stands_there_is_left_alone(tmp_path: Path, said: bytes) -> None:
    table = pyarrow.table({"text": ["a", "b"], "label": [1, 0]}).replace_schema_metadata({b"huggingface": said})
    parquet.write_table(table, tmp_path / "rows.parquet")
    found = texts.read_file(
        tmp_path / "rows.parquet", Named(), delimiter=None, need_label=True, limit=None, skip_bad=False
    )
    assert found.labels == [1, 0]
