"""auto_find_batch_size: the largest micro-batch that fits, found without a trace and without running what does not."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import toy_trainer

import engine
import whet
from tiny import arguments, losses, tiny_model, tiny_rows, weights_of
from whet.engine.trials import batch_size
from whet.engine.trials.batch_size import HostMemory
from whet.hardware import memory, trim
from whet.hardware.memory import MemoryLimit
from whet.watch.guard import STOP_FRAC, WARN_FRAC, MemoryGuard
from whet.watch.stop import Stopped

MIB = 2**20
_ROOT = Path(__file__).resolve().parents[2]
LOSS_TOLERANCE = 1e-6  # as for accumulation: sums of float32 in another order


_ALONE: list[str] = []
"""Names of the tests that run in a process of their own: memory that this one keeps would hide what they measure."""


def in_another_process(test: Callable[..., None]) -> Callable[..., None]:
    """Run the test in another process, the same for all of these and started once."""
    _ALONE.append(test.__name__)

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        if os.environ.get("WHET_TEST_ALONE"):
            test(*args, **fixtures)
            return
        text = _outcomes_alone()
        assert f"PASSED {_node(test.__name__)}" in text, text

    return run


@functools.cache
def _outcomes_alone() -> str:
    """Return what pytest says of each test that runs in another process."""
    words = [sys.executable, "-m", "pytest", "-q", "-rA", *map(_node, _ALONE)]
    done = subprocess.run(words, cwd=_ROOT, env=os.environ | {"WHET_TEST_ALONE": "1"}, capture_output=True, text=True)
    return done.stdout + done.stderr


def _node(name: str) -> str:
    return f"{Path(__file__).relative_to(_ROOT)}::{name}"


class _Machine:
    """Peaks that rise with the rows, and a limit."""

    def __init__(self, limit: int, base: int = 300, per_row: float = 40, bend: float = 0.0) -> None:
        self.limit, self.base, self.per_row, self.bend = limit, base, per_row, bend
        self.ran: list[int] = []

    def of(self, rows: int) -> int:
        return int(self.base + self.per_row * rows + self.bend * rows * rows)

    def peak(self, rows: int) -> int:
        self.ran.append(rows)
        return self.of(rows)

    def fits(self, peak: int) -> bool:
        return peak <= self.limit


@pytest.mark.parametrize("limit", [339, 340, 380, 700, 1000, 1500, 2860, 10**6])
@pytest.mark.parametrize("most", [1, 2, 7, 64])
def test_the_largest_that_fits_is_found_and_nothing_larger_is_run(limit: int, most: int) -> None:
    machine = _Machine(limit)
    found = batch_size.largest_measured(machine.peak, machine.fits, most)
    assert found == min(most, max((limit - 300) // 40, 0))
    # Memory that rises in a line is foreseen after two passes: the first two alone are run blindly.
    assert all(rows <= max(found, 2) for rows in machine.ran)
    assert len(machine.ran) <= 6


@pytest.mark.parametrize("bend", [-0.2, 0.5])
def test_memory_that_bends_is_measured_again(bend: float) -> None:
    machine = _Machine(1500, bend=bend)
    found = batch_size.largest_measured(machine.peak, machine.fits, 64)
    assert machine.fits(machine.of(found))
    assert found == 64 or not machine.fits(machine.of(found + 1))
    assert max(machine.ran) <= 4 * found


@pytest.mark.parametrize("fits", [0, 1, 5, 23, 24])
def test_on_a_gpu_the_size_is_halved_until_it_runs(fits: int) -> None:
    tried: list[int] = []
    assert batch_size.largest_tried(lambda rows: tried.append(rows) or rows <= fits, 24) == fits
    assert tried[0] == 24
    assert len(tried) <= 6


@pytest.mark.slow
@in_another_process
def test_the_peak_of_work_is_seen_though_it_is_freed() -> None:
    room = HostMemory(lambda: [MemoryLimit(0, 2**40, "a test")], 0)
    before = memory.resident_bytes() or 0
    peaks = [room.peak(lambda n=n: np.ones(n * MIB, dtype=np.uint8).sum()) - before for n in (50, 200, 100)]
    assert [round(peak / MIB, -1) for peak in peaks] == [50, 200, 100]


def test_room_is_left_for_the_optimizer_and_before_the_guard_warns() -> None:
    holds = memory.resident_bytes() or 0
    room = MemoryLimit(holds, 4 * holds, "a test")  # a warning comes where less than 15 % of it are left
    for state, fits in ((0, True), (2 * holds, False)):
        assert HostMemory(lambda: [room], state).fits(2 * holds) is fits
    assert not HostMemory(lambda: [room], 0).fits(int(3.5 * holds))


def _wide_trainer(folder: Path, **changes: Any) -> engine.Trainer:
    """A model of which 32 rows take about 100 MiB more than it does itself."""
    model = tiny_model("bert", dropout=0.1, hidden_size=64, max_position_embeddings=512)
    usual = {"per_device_train_batch_size": 32, "max_steps": 2, "precision": "fp32"}
    rows = tiny_rows(40, lengths=(100, 500))
    return engine.Trainer(model=model, args=arguments(folder, **(usual | changes)), train_dataset=rows)


@pytest.mark.slow
@in_another_process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system does not tell what a process holds")
def test_fewer_rows_where_memory_ends_and_the_same_curve(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = _wide_trainer(tmp_path)
    wanted.train()
    if trim.why_not() is None:
        trim.trim()()
    # Above what the process holds there is room for 45 MiB before the guard would warn; 32 rows take about 100.
    limit_gb = ((memory.resident_bytes() or 0) / 2**30 + 45 / 1024) / (1 - WARN_FRAC)
    trainer = _wide_trainer(tmp_path, auto_find_batch_size=True, memory_limit_gb=limit_gb)
    sizes: list[int] = []
    forward = trainer.objective.forward
    trainer.objective.forward = lambda batch, **place: sizes.append(batch.n_rows) or forward(batch, **place)
    with caplog.at_level(logging.INFO):
        trainer.train()
    (told,) = [text for text in caplog.messages if text.startswith("auto_find_batch_size")]
    found = trainer.state.train_batch_size
    assert 1 <= found < 32, told
    assert f"{found} of 32 rows at a time fit; {-(-32 // found)} batches make a step of 32 rows" in told
    assert "memory_limit_gb allows" in told
    run = sizes[-(-(-32 // found) - (-8 // found)) :]  # its two steps have 32 rows and the 8 that are left
    assert (sum(run), max(run)) == (40, found)
    assert losses(trainer) == pytest.approx(losses(wanted), rel=LOSS_TOLERANCE)
    assert trainer.args.per_device_train_batch_size == 32


def test_resumed_run_keeps_the_rows_that_were_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The user has asked for more: the first run took 8 of 32, the second would take all of them."""
    saves: dict[str, Any] = {"auto_find_batch_size": True, "save_strategy": "steps", "save_steps": 1}
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
    _wide_trainer(tmp_path, **saves, **sizes, max_steps=1).train()
    resumed, whole = _wide_trainer(tmp_path, **saves), _wide_trainer(tmp_path / "whole", **saves, **sizes)
    with caplog.at_level(logging.INFO):
        resumed.train(resume_from_checkpoint="auto")
    assert "8 rows at a time fit, as before" in caplog.text
    assert resumed.state.train_batch_size == 8
    whole.train()
    after = weights_of(whole.model)
    assert [name for name, value in weights_of(resumed.model).items() if not torch.equal(value, after[name])] == []


@pytest.mark.slow
@in_another_process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system does not tell what a process holds")
def test_resumed_run_that_has_less_memory_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saves: dict[str, Any] = {"auto_find_batch_size": True, "save_strategy": "steps", "save_steps": 1}
    first = _wide_trainer(tmp_path, **saves, max_steps=1)
    first.train()
    assert first.state.train_batch_size == 32
    if trim.why_not() is None:
        trim.trim()()
    limit_gb = ((memory.resident_bytes() or 0) / 2**30 + 45 / 1024) / (1 - STOP_FRAC)
    resumed = _wide_trainer(tmp_path, **saves, memory_limit_gb=limit_gb)
    resumed.train(resume_from_checkpoint="auto")
    found = resumed.state.train_batch_size
    assert 1 <= found < 32
    assert f"the run resumes with {found} rows at a time, as the 32 of before do not fit" in caplog.text


def test_what_fits_stays_as_asked_for_and_leaves_no_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, searched = _wide_trainer(tmp_path), _wide_trainer(tmp_path, auto_find_batch_size=True)
    plain.train()
    with caplog.at_level(logging.INFO):
        searched.train()
    assert "32 rows at a time fit, as asked for" in caplog.text
    assert losses(searched) == losses(plain)
    after = weights_of(plain.model)
    assert [name for name, value in weights_of(searched.model).items() if not torch.equal(value, after[name])] == []


def test_a_table_frozen_after_the_trainer_was_made(tmp_path: Path) -> None:
    trainer = _wide_trainer(tmp_path, auto_find_batch_size=True)
    trainer.model.get_input_embeddings().requires_grad_(False)
    before = trainer.model.get_input_embeddings().weight.clone()
    trainer.train()
    assert torch.equal(trainer.model.get_input_embeddings().weight, before)


def test_not_even_one_row(tmp_path: Path) -> None:
    trainer = _wide_trainer(tmp_path, auto_find_batch_size=True, memory_limit_gb=0.01)
    with pytest.raises(whet.ConfigError, match="auto_find_batch_size finds no batch that fits"):
        trainer.train()


def test_any_module_and_any_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, searched = toy_trainer(tmp_path), toy_trainer(tmp_path, auto_find_batch_size=True)
    plain.train()
    with caplog.at_level(logging.INFO):
        searched.train()
    assert "4 rows at a time fit, as asked for" in caplog.text
    assert all(value.equal(weights_of(plain.model)[name]) for name, value in weights_of(searched.model).items())


def test_the_longest_rows_come_first() -> None:
    store = tiny_rows(30)
    longest = batch_size._longest(store, 5)
    assert sorted(store.lengths[longest], reverse=True) == sorted(store.lengths, reverse=True)[:5]
    assert list(batch_size._longest([dict(row) for row in store], 5)) == list(longest)  # pyright: ignore


@pytest.mark.parametrize(
    ("rows", "capability", "said"),
    [
        (8, (7, 5), None), (12, (7, 5), "multiple of 8"), (64, (8, 0), None), (32, (8, 0), "multiple of 64"),
        (96, (9, 0), "multiple of 64"), (24, (8, 6), None),
    ],
)  # fmt: skip
def test_sizes_that_a_gpu_likes(rows: int, capability: tuple[int, int], said: str | None) -> None:
    told = batch_size.slow_batch_note(rows, capability)
    assert (told is None) == (said is None)
    assert said is None or said in str(told)


@pytest.mark.parametrize(
    ("found", "asked", "again"),
    [
        (8, (8, 1), (4, 2)),
        (8, (8, 3), (4, 6)),
        (4, (8, 1), (2, 4)),  # not half of what was asked for, which is what has just been too much
        (7, (8, 2), (2, 8)),  # 3 do not divide the 16 rows of a step
        (3, (3, 2), (1, 6)),
        (1, (8, 1), None),
    ],
)
def test_where_memory_runs_out_later_half_of_what_was_found_is_proposed(
    found: int, asked: tuple[int, int], again: tuple[int, int] | None, tmp_path: Path
) -> None:
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    loop = toy_trainer(tmp_path, **dict(zip(names, asked, strict=True))).new_loop()
    loop.start(None)
    loop.safe_points.micro_rows, loop.counters.global_step = found, 1
    full = MemoryLimit(99 * MIB, 100 * MIB, "a test")
    loop.safe_points.memory = MemoryGuard(limits=lambda: [full], resident=lambda: 50 * MIB, peak=lambda: 50 * MIB)
    with pytest.raises(Stopped) as caught:
        loop.safe_points.check()
    changed = {} if again is None else dict(zip(names, again, strict=True))
    assert caught.value.again == {"resume_from_checkpoint": "auto"} | changed


@pytest.mark.parametrize(
    ("settings", "again", "says"),
    [
        ({"dataloader_drop_last": True}, {"auto_find_batch_size": True}, "smaller batches need less"),
        ({"train_sampling_strategy": "batch_rebalance"}, {"auto_find_batch_size": True}, "smaller batches need less"),
        ({"padding_in_loss": "sampled"}, {"auto_find_batch_size": True}, "smaller batches need less"),
        ({"optimizer_in_backward": True, "max_grad_norm": 0}, {}, "--gradient_checkpointing needs less"),
    ],
    ids=str,
)
def test_memory_stop_of_a_run_with_fixed_batches_names_settings_that_it_resumes_with(
    settings: dict[str, Any], again: dict[str, Any], says: str, tmp_path: Path
) -> None:
    def trainer_with(**changes: Any) -> engine.Trainer:
        given = arguments(tmp_path, **({"max_steps": 2, "save_strategy": "steps"} | settings | changes))
        return engine.Trainer(tiny_model("bert"), given, train_dataset=tiny_rows(12))

    def full() -> MemoryGuard:  # which looks again only after a while
        limit = MemoryLimit(99 * MIB, 100 * MIB, "a test")
        return MemoryGuard(limits=lambda: [limit], resident=lambda: 50 * MIB, peak=lambda: 50 * MIB)

    first = trainer_with().new_loop()
    first.start(None)
    first.safe_points.memory = full()
    with pytest.raises(whet.WhetError) as refused:
        first.safe_points.check()
    assert ("--auto_find_batch_size True" if again else "--optim adamw_whet_8bit") in refused.value.problems[0].fix
    first.counters.global_step, first.safe_points.memory = 1, full()
    with pytest.raises(Stopped, match=says) as stopped:
        first.safe_points.check()
    assert stopped.value.again == {"resume_from_checkpoint": "auto"} | again
    resumed = trainer_with(**stopped.value.again)
    resumed.train()
    assert resumed.state.global_step == 2


@pytest.mark.parametrize(
    ("of", "limit_gb", "fix", "other"),
    [
        ("the cgroup /sys/fs/cgroup/job", None, "docker run -m", "memory_limit_gb"),
        ("this machine", None, "a machine with more memory", "memory_limit_gb"),
        ("memory_limit_gb", 0.1, "a higher --memory_limit_gb", "docker"),
    ],
)
def test_first_step_without_memory_names_the_limit_to_raise(
    of: str, limit_gb: float | None, fix: str, other: str, tmp_path: Path
) -> None:
    loop = toy_trainer(tmp_path, memory_limit_gb=limit_gb).new_loop()
    loop.start(None)
    full = MemoryLimit(99 * MIB, 100 * MIB, of)
    loop.safe_points.memory = MemoryGuard(limits=lambda: [full], resident=lambda: 50 * MIB, peak=lambda: 50 * MIB)
    with pytest.raises(whet.WhetError) as caught:
        loop.safe_points.check()
    (problem,) = caught.value.problems
    assert f"that {of} allows" in str(problem.got)
    assert fix in problem.fix
    assert other not in problem.fix
    assert "no limit" not in problem.fix, "with 0 the kernel would kill the run"
