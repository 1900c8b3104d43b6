"""What the message about a file that cannot be read tells its reader to do has to lead somewhere."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from whet.errors import DataError
from whet.tasks.qa.read import read_questions

ROW = {"id": "1", "question": "Who?", "context": "Ada.", "answers": {"text": ["Ada"], "answer_start": [0]}}
LINE = json.dumps(ROW)


def refusal(path: Path, data: bytes) -> tuple[str, str]:
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        read_questions(path)
    return caught.value.problems[0].what, caught.value.problems[0].fix


@pytest.mark.parametrize("bad", [f"{LINE}\n{LINE}\n{LINE[:-9]}\n", f'{LINE}\n{{"id": 1,}}\n{LINE}\n'])
def test_json_lines_check_command_accepts_good_lines(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    _, fix = refusal(path, bad.encode())
    found = re.search(r"python (-m json\.tool [^)]*) checks it", fix)
    assert found is not None
    line = f"{shlex.quote(sys.executable)} {found[1].replace('FILE', shlex.quote(str(path)))}"
    assert subprocess.run(line, shell=True, capture_output=True).returncode != 0
    path.write_text(f"{LINE}\n{LINE}\n")
    assert subprocess.run(line, shell=True, capture_output=True).returncode == 0


def test_json_check_command_is_for_one_document(tmp_path: Path) -> None:
    _, fix = refusal(tmp_path / "bad.json", b'{"data": [\n  {"title": "a",}\n]}')
    assert "json.tool FILE" in fix


BINARY = {
    "random bytes": random.Random(1).randbytes(5000),
    "a program": b"\x7fELF\x02\x01\x01" + bytes(9) + random.Random(2).randbytes(500),
    "numbers": b"".join(n.to_bytes(4, "little") for n in range(200, 900)),
    "bytes without nulls": bytes(random.Random(3).choices(range(1, 256), k=5000)),
}


@pytest.mark.parametrize("data", BINARY.values(), ids=BINARY)
def test_binary_data_gets_no_advice_for_text(data: bytes, tmp_path: Path) -> None:
    what, fix = refusal(tmp_path / "data.bin", data)
    assert "not text" in what
    assert "iconv" not in fix


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_mixed_encodings_get_no_conversion_of_the_complete_file(order: tuple[int, int], tmp_path: Path) -> None:
    text = json.dumps(ROW | {"context": "Ada at the café."}, ensure_ascii=False)
    lines = [text.encode(), text.encode("latin-1")]
    what, fix = refusal(tmp_path / "data.jsonl", b"\n".join([LINE.encode(), *(lines[n] for n in order)]))
    line = 2 + order.index(1)
    assert "mixes encodings" in what
    assert f"(line {line})" in what
    found = re.search(r"(sed -n \d+p) FILE \| (iconv -f \S+ -t \S+) ", fix)
    assert found is not None
    shown = subprocess.run(
        f"{found[1]} {tmp_path / 'data.jsonl'} | {found[2]}", shell=True, capture_output=True, check=True
    )
    assert shown.stdout.decode().strip() == text


@pytest.mark.parametrize(
    ("encoding", "named"), [("latin-1", "LATIN1"), ("utf-16-le", "UTF-16LE"), ("cp1252", "LATIN1")]
)
def test_other_encodings_get_a_command_for_utf8(encoding: str, named: str, tmp_path: Path) -> None:
    text = json.dumps(ROW | {"context": "Ada, née Byron."}, ensure_ascii=False)
    assert f"iconv -f {named} -t UTF-8" in refusal(tmp_path / "data.json", text.encode(encoding))[1]
