"""B12: signals are heard inside long native calls, within 3 s; a second one ends the run at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_runs import Corpus, corpus, hook, qa
from tiny_qa import write_json
from tiny_runs import Toy, toy_trainer
from transformers import TrainerCallback

from not_shown import needs_free_memory

__all__ = ["corpus"]  # a fixture

pytestmark = pytest.mark.reliability
MOST_S = 3.0


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data with a context of 50 MB, whose tokens need gigabytes: a smaller machine refuses it before the call."""
    needs_free_memory("R22", 18e9)  # 50 million characters of up to 320 bytes, and what tests next to it take
    context = "the old town lies on a river and was built by people who came from the sea " * 670_000
    answer = {"text": "river", "answer_start": context.index("river")}
    question = {"id": "q", "question": "where does the town lie", "answers": [answer]}
    data = {"data": [{"title": "t", "paragraphs": [{"context": context, "qas": [question]}]}]}
    return write_json(tmp_path_factory.mktemp("huge") / "huge.json", data)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("after_s", [0.5, 2.0])
def test_signal_is_heard_while_a_huge_context_is_tokenised(
    corpus: Corpus, huge: Path, tmp_path: Path, number: int, after_s: float
) -> None:
    """In the call of the tokenizer itself, of which the test is told; nothing is left of the run."""
    out = tmp_path / "out"
    words = corpus.words(out, train_file=huge, validation_file=huge)
    child = qa(words, tmp_path / "log", _tell_only("whet.tasks.qa.windows", "encode_texts"))
    assert child.until_told(), child.text()
    time.sleep(after_s)
    started_s = time.monotonic()
    child.kill(number)
    assert child.wait() == 75, child.text()
    assert time.monotonic() - started_s < MOST_S
    assert "start again with the same command" in child.text()
    assert not out.exists()


def _tell_only(module: str, name: str):
    """Return what tells of the first call of a function, without staying there."""

    def prepare(tell) -> None:
        from importlib import import_module

        home = import_module(module)
        real = getattr(home, name)

        def told(*given, **named):
            tell()
            return real(*given, **named)

        setattr(home, name, told)

    return prepare


def test_second_signal_ends_a_run_at_once(corpus: Corpus, tmp_path: Path) -> None:
    """The run is inside a step that does not end; the checkpoints that it has are kept."""
    out = tmp_path / "out"
    stays = hook("whet.objectives.span", "PackedSpans.loss_sum", 20, tmp_path / "never")
    child = qa(corpus.words(out), tmp_path / "log", stays)
    assert child.until_told()
    child.kill(signal.SIGTERM)
    time.sleep(1.5)
    assert not child.ended()
    started_s = time.monotonic()
    child.kill(signal.SIGTERM)
    assert child.wait() == 128 + signal.SIGTERM, child.text()
    assert time.monotonic() - started_s < MOST_S
    assert "heard SIGTERM" in child.text()
    assert "checkpoint-8" in {path.name for path in out.iterdir()}
    assert not (out / ".whet.lock").exists()


def test_signal_ends_a_run_that_has_nothing_to_save(corpus: Corpus, tmp_path: Path) -> None:
    """In a first step that does not end, as in a long compilation: no edge is reached."""
    stays = hook("whet.objectives.span", "PackedSpans.loss_sum", 1, tmp_path / "never")
    child = qa(corpus.words(tmp_path / "out"), tmp_path / "log", stays)
    assert child.until_told()
    started_s = time.monotonic()
    child.kill(signal.SIGTERM)
    assert child.wait() == 75, child.text()
    assert time.monotonic() - started_s < MOST_S + 1
    assert "start again with the same command" in child.text()


def test_nohup_is_respected(corpus: Corpus, tmp_path: Path) -> None:
    def ignored(tell: Callable[[], None]) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        tell()

    child = qa(corpus.words(tmp_path / "out", max_steps=4), tmp_path / "log", ignored)
    assert child.until_told()
    while not child.ended():
        child.kill(signal.SIGHUP)
        time.sleep(0.05)
    assert child.code == 0, child.text()


class _Sends(TrainerCallback):
    """Asks twice, the second time after a while."""

    def on_substep_end(self, args, state, control, **_) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


def test_second_signal_ends_train_in_a_library(tmp_path: Path) -> None:
    trainer = toy_trainer(
        tmp_path, model=Toy(), callbacks=[_Sends()], enable_jit_checkpoint=True, per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == 128 + signal.SIGTERM
