"""The scripts of the skill that need a library: they train a search, and export a model and serve it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from skill_scripts import TRAINING, Agent, warm_programs
from text_tasks import TOPICS, save_encoder, topic_rows, words, write_csv
from whet.cli.main import run


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with warm_programs(tmp_path_factory.mktemp("programs")) as folder:
        yield folder


@pytest.fixture
def agent(tmp_path: Path, programs: Path) -> Agent:
    save_encoder(tmp_path / "model")
    return Agent(tmp_path, programs)


def test_a_search_is_trained_and_asked(agent: Agent) -> None:
    pytest.importorskip("sentence_transformers", reason="needs sentence-transformers: make test-libraries installs it")
    pairs = [{"question": texts[n], "answer": texts[n + 1]} for texts in TOPICS.values() for n in range(3)]
    write_csv(agent.folder / "pairs.csv", pairs)
    found = agent.run("embed_and_search", "model", "pairs.csv", "out", "a wave", *TRAINING, "--max_steps", 2)
    assert found["scores"]
    assert all(0 <= one["before"] <= 1 and 0 <= one["after"] <= 1 for one in found["scores"].values())
    assert len(found["hits"]) == 3
    assert {one["text"] for one in found["hits"]} <= {pair["answer"] for pair in pairs}


def test_an_export_is_checked_and_served(agent: Agent) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime: make test-libraries installs it")
    rows = write_csv(agent.folder / "rows.csv", topic_rows())
    out = agent.folder / "out"
    assert run(words("classify", agent.folder / "model", out, "--do_train", train_file=rows, max_steps=2)) == 0
    found = agent.run("export_and_serve", out, '{"text": "the boat lay in the harbour"}')
    assert found["largest_difference"] < 1e-4, "what whet export allows"
    assert found["answer"]["label"] in TOPICS
    assert set(found["answer"]["scores"]) == set(TOPICS)
