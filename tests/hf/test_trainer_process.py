"""`whet.Trainer` in a process that does more than train: what it forks, its other threads, the memory it keeps."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import transformers
from hf_runs import arguments, classifier, forked, mask_tokens, masked_words, output, pad, rows

import whet
from tiny import tiny_config
from whet.errors import OutputError
from whet.hardware import memory
from whet.kernels.allocator import keep_freed_memory

_FORK = multiprocessing.get_context("fork")
_ENDS_WITHIN_S = 10.0


def _classify(folder: Path, *callbacks: Any, given: Any = None, **changes: Any) -> whet.Trainer:
    return whet.Trainer(
        classifier(), arguments(folder, **changes), pad, given or rows(), rows(8), callbacks=[*callbacks]
    )


def _fill_in(folder: Path, *callbacks: Any) -> whet.Trainer:
    """Masked words, whose masks and dropout are drawn from the generators of the process."""
    given = rows(labelled=False)
    return whet.Trainer(masked_words(), arguments(folder), mask_tokens, given, callbacks=[*callbacks])


# ---- processes ----


def _watch(ready: Any = None) -> None:
    """Watch a training for longer than anybody waits, as monitors do."""
    if ready is not None:
        ready.set()
    for _ in range(600):
        time.sleep(0.1)


class Watched(transformers.TrainerCallback):
    """Starts a process of the program's own with the training."""

    def __init__(self) -> None:
        self.ready = _FORK.Event()
        self.process = _FORK.Process(target=_watch, args=(self.ready,), daemon=True)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.process.start()


def test_process_forked_in_a_training_ends_by_the_signals_that_end_it_without_whet(tmp_path: Path) -> None:
    def train(_rank: int) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as without nohup
        ends = {signal.SIGTERM: -signal.SIGTERM, signal.SIGHUP: -signal.SIGHUP, signal.SIGUSR1: -signal.SIGUSR1}
        ends[signal.SIGINT] = 1  # a KeyboardInterrupt
        for number, code in ends.items():
            watched = Watched()
            _classify(tmp_path / "out", watched, max_steps=1, save_strategy="no").train()
            assert watched.ready.wait(_ENDS_WITHIN_S)
            os.kill(watched.process.pid or 0, number)
            watched.process.join(_ENDS_WITHIN_S)
            assert watched.process.exitcode == code, number

    assert forked(train, tmp_path / "t") == [0], output(tmp_path / "t")


def test_process_that_is_ended_as_soon_as_it_is_forked_ends(tmp_path: Path) -> None:
    """The signal comes while the child is still being made."""

    class Brief(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            started = [_FORK.Process(target=_watch, daemon=True) for _ in range(8)]
            for one in started:
                one.start()
                one.terminate()
            for one in started:
                one.join(_ENDS_WITHIN_S)
            assert [one.exitcode for one in started] == [-signal.SIGTERM] * 8

    trained = forked(lambda _: _classify(tmp_path, Brief(), max_steps=3, save_strategy="no").train(), tmp_path / "t")
    assert trained == [0], output(tmp_path / "t")


def test_pool_that_an_error_in_a_metric_leaves_is_closed(tmp_path: Path) -> None:
    def fails(_: Any) -> NoReturn:
        with _FORK.Pool(2) as pool:
            assert pool.map(abs, [-1, 2]) == [1, 2]
            raise ValueError("no such class")

    def train(_rank: int) -> None:
        trainer = _classify(tmp_path / "out", max_steps=2, eval_strategy="steps", eval_steps=1)
        trainer.compute_metrics = fails
        with pytest.raises(ValueError, match="no such class"):
            trainer.train()

    assert forked(train, tmp_path / "t") == [0], output(tmp_path / "t")


class _SlowRows(list[Any]):
    """Rows that take so long that a step waits for them."""

    def __getitem__(self, number: Any) -> Any:
        time.sleep(0.03)
        return super().__getitem__(number)


class _TerminalAt(transformers.TrainerCallback):
    """Sends a signal to all processes of this one's group, as a terminal does."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.killpg(0, self.number)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGHUP, 75, marks=pytest.mark.reliability)]
)
def test_signal_of_a_terminal_saves_the_step_although_data_loaders_get_it_too(
    number: int, code: int, tmp_path: Path
) -> None:
    """The step that follows waits for rows of a loader, and then the training stops."""

    def train(_rank: int) -> None:
        os.setpgrp()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        workers = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 1}
        _classify(tmp_path / "out", _TerminalAt(3, number), given=_SlowRows(rows()), **workers).train()

    assert forked(train, tmp_path / "t") == [code], output(tmp_path / "t")
    assert (tmp_path / "out" / "checkpoint-3" / "model.safetensors").is_file()


# ---- threads ----


class _Meets(transformers.TrainerCallback):
    """Lets another thread act after a step of this training, until it has done so or some seconds are over."""

    def __init__(self, step: int, within_s: float) -> None:
        self.step, self.within_s = step, within_s
        self.here, self.done = threading.Event(), threading.Event()
        self.ended_s = 0.0

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.here.set()
            self.done.wait(self.within_s)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.ended_s = time.monotonic()


def _in_a_thread(trainer: whet.Trainer) -> threading.Thread:
    thread = threading.Thread(target=trainer.train)
    thread.start()
    return thread


def test_second_training_of_a_process_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    meeting = _Meets(6, 60.0)
    first, second = _classify(tmp_path, meeting), _classify(tmp_path, max_steps=1)
    thread = _in_a_thread(first)
    assert meeting.here.wait(60.0)
    half_written = tmp_path / ".checkpoint-8.partial"
    half_written.mkdir()
    with pytest.raises(OutputError, match="another thread of this process") as refused:
        second.train()
    assert "use another --output_dir" in str(refused.value)
    assert half_written.is_dir()
    half_written.rmdir()
    meeting.done.set()
    thread.join()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-4", "checkpoint-8", "checkpoint-12"}
    second.train()  # the folder is free again


def test_trainings_in_two_threads_take_turns_and_each_is_as_it_is_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Begins(transformers.TrainerCallback):
        began_s = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began_s = time.monotonic()

    alone = _fill_in(tmp_path / "alone")
    alone.train()
    begins, meeting = Begins(), _Meets(6, 0.5)
    second = _classify(tmp_path / "second", begins)
    first = _fill_in(tmp_path / "first", meeting)
    thread = _in_a_thread(first)
    assert meeting.here.wait(60.0)
    second.train()
    thread.join()
    assert "waits for one in another thread" in caplog.text
    assert begins.began_s > meeting.ended_s > 0.0
    for name, weight in alone.model.state_dict().items():
        assert torch.equal(first.model.state_dict()[name], weight), name


# ---- memory ----


def test_training_returns_the_memory_of_its_steps_at_its_end(tmp_path: Path) -> None:
    if not keep_freed_memory():
        pytest.skip("this process does not keep the memory that it frees")
    held: list[int] = []

    class Holds(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            held.append(memory.resident_bytes() or 0)

    def train(_rank: int) -> None:
        config = tiny_config("bert", hidden_size=64, intermediate_size=256, max_position_embeddings=128)
        model = transformers.AutoModelForSequenceClassification.from_config(config)
        row = {"input_ids": [7] * 128, "attention_mask": [1] * 128, "labels": 1}
        settings = arguments(tmp_path / "out", max_steps=2, save_strategy="no", per_device_train_batch_size=128)
        whet.Trainer(model, settings, pad, [row] * 128, callbacks=[Holds()]).train()
        freed = held[-1] - (memory.resident_bytes() or 0)
        print(held, freed)
        assert freed > 32 << 20

    assert forked(train, tmp_path / "t") == [0], output(tmp_path / "t")
