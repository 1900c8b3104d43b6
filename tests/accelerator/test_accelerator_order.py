"""Samplers of every kind: one order for all ranks, which a loop resumes within an epoch; a script for ranks too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import DataLoaderConfiguration
from own_loops import fresh, leave, made
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import whet

SIZE, N_ROWS, N_BATCHES, STOP = 4, 40, 8, 2
ROWS = range(N_ROWS)
CHOSEN = range(3, 35)
"""Of these two ranks have as many batches as one, without a row to fill up."""
Seen = list[tuple[list[int], float]]
"""The rows of each batch, and what the loop draws after it, as dropout would."""


class OwnBatches:
    """A batch sampler of a user's own, which shuffles its batches by numpy and by a generator that it keeps."""

    def __init__(self) -> None:
        self.numbers, self.batch_size, self.drop_last = np.random.default_rng(os.getpid()), SIZE, False

    def __iter__(self) -> Iterator[list[int]]:
        """Yield batches of neighbours."""
        for n in np.random.permutation(N_BATCHES):
            yield self.numbers.permutation(CHOSEN[SIZE * n : SIZE * n + SIZE]).tolist()

    def __len__(self) -> int:
        """Return the number of batches."""
        return N_BATCHES


def _rank_seed() -> int:
    return 5 + int(os.environ.get("RANK", "0"))


KINDS: dict[str, Any] = {
    "shuffle": lambda: {"batch_size": SIZE, "shuffle": True},
    "random, replaced": lambda: {"batch_size": SIZE, "sampler": RandomSampler(ROWS, replacement=True, num_samples=32)},
    "subset": lambda: {"batch_size": SIZE, "sampler": SubsetRandomSampler(CHOSEN)},
    "subset with a generator": lambda: {
        "batch_size": SIZE, "sampler": SubsetRandomSampler(CHOSEN, torch.Generator().manual_seed(_rank_seed()))
    },
    "weighted": lambda: {"batch_size": SIZE, "sampler": WeightedRandomSampler([1.0] * 20 + [2.0] * 20, 32)},
    "batches of a subset": lambda: {"batch_sampler": BatchSampler(SubsetRandomSampler(CHOSEN), SIZE, False)},
    "own batches": lambda: {"batch_sampler": OwnBatches()},
}  # fmt: skip


class Run:
    """A loop that looks at the batches of one loader."""

    def __init__(self, kind: str, seed: int, config: Any = None, **options: Any) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        self.accelerator = made("whet", dataloader_config=config)
        self.loader = self.accelerator.prepare(DataLoader(ROWS, **KINDS[kind](), **options))  # type: ignore[arg-type]

    def seen(self, epoch: int, first: int = 0, last: int | None = None) -> Seen:
        """Return what an epoch gives."""
        self.loader.set_epoch(epoch)
        batches = self.accelerator.skip_first_batches(self.loader, first) if first else self.loader
        found = []
        for done, batch in enumerate(batches, start=first + 1):
            found.append((torch.as_tensor(batch).tolist(), float(torch.rand(()))))
            if done == last:
                break
        return found


def stopped_and_resumed(kind: str, seed: int, folder: str, **options: Any) -> tuple[Seen, Seen, Seen]:
    """Return two epochs without a stop, and those of a loop that stops in its second epoch and of its successor."""
    with fresh():
        straight = Run(kind, seed, **options)
        wanted = straight.seen(0) + straight.seen(1)
        straight.accelerator.wait_for_everyone()
    with fresh():
        before = Run(kind, seed, **options)
        found = before.seen(0) + before.seen(1, last=STOP)
        before.accelerator.save_state(folder)
    with fresh():
        after = Run(kind, seed + 94, **options)
        after.accelerator.load_state(folder)
        rest = after.seen(1, first=STOP)
        after.accelerator.wait_for_everyone()
    return wanted, found, rest


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=["", "worker"])
@pytest.mark.parametrize("seedable", [None, False], ids=["whet's settings", "the user's settings"])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_loop_has_the_rows_that_the_one_without_a_stop_had(
    kind: str, seedable: bool | None, options: dict[str, Any], tmp_path: Path
) -> None:
    config = None if seedable is None else DataLoaderConfiguration(use_seedable_sampler=seedable)
    wanted, found, rest = stopped_and_resumed(kind, 3, str(tmp_path / "state"), config=config, **options)
    assert found + rest == wanted
    rows = [one for one, _ in wanted]
    assert rows[: len(rows) // 2] != rows[len(rows) // 2 :]  # each epoch has an order of its own


@pytest.mark.parametrize(("kind", "rows"), [("shuffle", ROWS), ("subset", CHOSEN), ("own batches", CHOSEN)])
def test_epoch_that_a_loop_leaves_early_begins_again_with_other_rows(kind: str, rows: range, tmp_path: Path) -> None:
    """Also its resumed one has the rest of the last order."""
    with fresh():
        run = Run(kind, 3)
        first, second, third = (batches_of(run, STOP) for _ in range(3))
        assert first != second != third != first
        run.accelerator.save_state(tmp_path / "state")
        rest = batches_of(run, skipped=STOP)
        assert sorted(chain.from_iterable(third + rest)) == list(rows)
    with fresh():
        later = Run(kind, 97)
        later.accelerator.load_state(tmp_path / "state")
        assert batches_of(later, skipped=STOP) == rest


def batches_of(run: Run, last: int | None = None, skipped: int = 0) -> list[Any]:
    batches = run.accelerator.skip_first_batches(run.loader, skipped) if skipped else run.loader
    return [torch.as_tensor(batch).tolist() for batch in islice(batches, last)]


def test_loop_of_rounds_resumes_with_the_round_that_comes_next(tmp_path: Path) -> None:
    """Saved between two rounds, or within one, of which it then has the rest."""
    with fresh():
        run = Run("shuffle", 3)
        rounds = [batches_of(run, STOP)]
        run.accelerator.save_state(tmp_path / "between")
        inside = []
        for batch in islice(run.loader, STOP):
            inside.append(torch.as_tensor(batch).tolist())
            if len(inside) == 1:
                run.accelerator.save_state(tmp_path / "within")
        rounds += [inside, batches_of(run, STOP)]
    for name, skipped, wanted in (("between", 0, rounds[1]), ("within", 1, rounds[1][1:])):
        with fresh():
            later = Run("shuffle", 97)
            later.accelerator.load_state(tmp_path / name)
            assert batches_of(later, STOP - skipped, skipped) == wanted, name
            assert batches_of(later, STOP) == rounds[2], name


@pytest.mark.parametrize("leaves", ["islice", "break"])
def test_loop_of_rounds_that_end_with_the_last_batch_resumes_with_the_next_round(leaves: str, tmp_path: Path) -> None:
    """accelerate has seen the end of the loader by then, but not begun its next epoch."""
    n_batches = N_ROWS // SIZE

    def one_round(run: Run) -> list[Any]:
        if leaves == "islice":
            return batches_of(run, n_batches)
        found = []
        for batch in run.loader:
            found.append(torch.as_tensor(batch).tolist())
            if len(found) == n_batches:
                break
        return found

    with fresh():
        run = Run("shuffle", 3)
        first = one_round(run)
        run.accelerator.save_state(tmp_path / "state")
        second, third = one_round(run), one_round(run)
        assert sorted(chain.from_iterable(second)) == [*ROWS]
        assert first != second != third != first
    with fresh():
        later = Run("shuffle", 97)
        later.accelerator.load_state(tmp_path / "state")
        assert [one_round(later), one_round(later)] == [second, third]


def test_state_after_a_complete_epoch_begins_the_next_one(tmp_path: Path) -> None:
    with fresh():
        run = Run("shuffle", 3)
        batches_of(run)
        run.accelerator.save_state(tmp_path / "state")
        second = batches_of(run)
    with fresh():
        later = Run("shuffle", 97)
        later.accelerator.load_state(tmp_path / "state")
        assert batches_of(later) == second


def test_loader_that_accelerate_cannot_prepare_is_refused_with_the_way_to_go_on() -> None:
    sampler = BatchSampler(SubsetRandomSampler(CHOSEN), SIZE, False)
    with fresh(), pytest.raises(whet.ConfigError, match="batch_sampler="):
        made("whet").prepare(DataLoader(ROWS, batch_size=None, sampler=sampler))  # type: ignore[arg-type]


@pytest.mark.reliability
def test_ranks_with_seeds_of_their_own_share_one_order_and_resume_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    both = json.loads((tmp_path / "facts.json").read_text("utf-8"))
    for rank, facts in enumerate(both):
        for kind, (wanted, found, rest) in facts.items():
            assert found + rest == wanted, (rank, kind)
    first, second = both
    for kind, (wanted, *_) in first.items():
        other = second[kind][0]
        together = [batch[0] for pair in zip(wanted, other, strict=True) for batch in pair]
        half = len(together) // 2
        if kind not in ("shuffle", "random, replaced", "weighted"):
            assert sorted(chain.from_iterable(together[:half])) == list(CHOSEN), kind
        if kind == "shuffle":
            assert sorted(chain.from_iterable(together[:half])) == list(ROWS)
        if "generator" not in kind and "own" not in kind:
            with fresh():
                alone = Run(kind, 3)
                assert together[:half] == [batch for batch, _ in alone.seen(0)], kind


def main(folder: str) -> None:
    """Write what the ranks see, each with seeds of its own."""
    facts = {kind: stopped_and_resumed(kind, 3 + 10 * int(os.environ["RANK"]), f"{folder}/{kind}") for kind in KINDS}
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, facts)
    if os.environ["RANK"] == "0":
        Path(folder, "facts.json").write_text(json.dumps(gathered), "utf-8")
    leave()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
