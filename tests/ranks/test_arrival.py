"""A rank that ends with an error before it joins: the others learn it, and do not wait for their timeout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from many import ends, free_port, start

from whet.config.ranks import Place
from whet.dist import arrival

pytestmark = [pytest.mark.slow, pytest.mark.reliability]

_ENDS = "rank 1 of {n} ended before it joined the others"
_JOINS = """
import os, sys
from whet.cli import main
from whet.cli.main import RANKED
from whet.dist import group

def run(words):
    if os.environ["RANK"] == "1":
        if sys.argv[1] == "raises":
            raise ValueError("this rank has a fault")
        return int(sys.argv[1])
    group.join(None, 300.0)
    return 0

def complaining(words):
    from whet.cli.complain import complain
    from whet.errors import WhetError
    try:
        return run(words)
    except WhetError as error:
        complain(error)
        return error.exit_code

main.run = complaining
main.main(["qa"])
"""
"""Ranks of `whet qa` whose work is to join, or, on rank 1, to end."""


@pytest.mark.parametrize(("n_ranks", "how", "code"), [(2, "65", 65), (3, "78", 78), (2, "raises", 1)])
def test_ranks_do_not_wait_for_one_that_has_ended(n_ranks: int, how: str, code: int, tmp_path: Path) -> None:
    found = ends(start(n_ranks, ["-c", _JOINS, how], tmp_path), within=120)
    assert [rank.code for rank in found] == [78, code, 78][:n_ranks], found
    for rank in (found[0], *found[2:]):
        assert _ENDS.format(n=n_ranks) in rank.err
        assert f"exit code {code}" in rank.err


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny_qa

    path = tmp_path_factory.mktemp("data") / "questions.json"
    path.write_text(json.dumps(tiny_qa.squad()), "utf-8")
    return path


_LATER = """
import os, socket, sys, time
from whet.cli.main import main

words = sys.argv[1:]
if os.environ["RANK"] == "1":
    words += ["--train_file", "missing.json"]
    while True:  # until rank 0 serves its store, which it does before it reads data; the test has a limit
        try:
            socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))).close()
            break
        except OSError:
            time.sleep(0.05)
main(words)
"""


def test_a_file_that_one_rank_lacks_ends_the_other(tmp_path: Path, encoder: Path, questions: Path) -> None:
    """As on two machines, one without the data: rank 0 joins after it has read its own."""
    words = [
        "qa", "--model_name_or_path", str(encoder), "--train_file", str(questions), "--do_train", "--max_steps", "1",
        "--max_seq_length", "40", "--doc_stride", "12", "--output_dir", str(tmp_path / "out"),
    ]  # fmt: skip
    first, second = ends(start(2, ["-c", _LATER, *words], tmp_path), within=120)
    assert "missing.json" in second.err
    assert second.code == 65
    assert first.code == 78, first.err
    assert _ENDS.format(n=2) in first.err


def test_a_rank_that_ends_alone_waits_a_while_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert not arrival.say_ended(Place(1, 2), 65, environment, longest_s=0.1)
    assert "rank 1 of 2 has ended, and waits up to" in capsys.readouterr().err
    under_torchrun = environment | {"TORCHELASTIC_RESTART_COUNT": "0"}
    assert not arrival.say_ended(Place(1, 2), 65, under_torchrun)
    assert capsys.readouterr().err == ""
