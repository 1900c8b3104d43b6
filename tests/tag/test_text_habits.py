"""Files as people have them: headers or none, capitals, CoNLL-U, CSV with lists, the line ends of three systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from text_tasks import words, write_csv
from whet.cli.main import run
from whet.errors import EXIT_BAD_DATA, DataError
from whet.tasks.classify import splits as texts
from whet.tasks.classify.examples import Examples, Named
from whet.tasks.tag import splits as tagged
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
    with pytest.raises(DataError, match="line 2 has 3 columns, and the line before 4") as error:
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
