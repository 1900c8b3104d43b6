"""The benchmark's workers: real Trainers that take one step when told, on the same rows."""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import figure_limit
import pytest
from figure_limit import products
from figure_rest import require_same_windows
from figure_steps import judged, match
from protocol import Worker, WorkerFailedError
from questions import write_questions

import tiny
from bench import Bench

ROWS = tiny.tiny_rows(60)
pytestmark = [pytest.mark.slow, pytest.mark.night]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, minilm_dir: Path) -> Bench:
    """A benchmark of a tiny model whose peers run in this environment."""
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it: pip install accelerate")
    assert minilm_dir.exists()  # its tokenizer pads the peers' rows
    folder = tmp_path_factory.mktemp("bench")
    ROWS.save(folder / "train.safetensors")
    made = Bench(data=folder, folder=folder, peers=sys.executable, n_threads=1, n_rounds=2, batch=6)
    made.__dict__["train_rows"] = folder / "train.safetensors"
    return made


@pytest.fixture(scope="module")
def whet(bench: Bench) -> Iterator[Worker]:
    with bench.start_whet("tiny", "fp32") as worker:
        yield worker


@pytest.mark.gate  # the other matches are shorter
def test_everybody_takes_steps_on_the_same_rows(bench: Bench, whet: Worker) -> None:
    rounds = match(bench, "tiny", ("guides_fp32", "optimize_fp32"), {"fp32": whet})
    assert len(rounds) == 2
    assert rounds[0]["guides_fp32"]["rows"] != rounds[1]["guides_fp32"]["rows"]
    for one in rounds:
        rows = one["guides_fp32"]["rows"]
        n_tokens = int(ROWS.lengths[rows].sum())
        assert len(set(rows)) == 6
        assert [answer["rows"] for answer in one.values()] == [rows] * 3
        assert [answer["n_tokens"] for answer in one.values()] == [n_tokens] * 3
        assert one["guides_fp32"]["n_places"] == 6 * 384
        assert all(answer["seconds"] > 0 and math.isfinite(answer["loss"]) for answer in one.values())
    lines = judged("tiny", ("guides_fp32", "optimize_fp32"), rounds)
    assert [line.figure for line in lines] == ["guides_fp32", "optimize"]
    assert lines[0].values == [one["guides_fp32"]["seconds"] / one["whet_fp32"]["seconds"] for one in rounds]


@pytest.mark.night
def test_the_best_peer_pads_rows_of_like_length_to_the_longest(bench: Bench, whet: Worker) -> None:
    rounds = match(bench, "tiny", ("best_fp32",), {"fp32": whet})
    assert len(match(bench, "tiny", ("best_fp32",), {"fp32": whet}, once=True)) == 1
    for one in rounds:
        lengths = ROWS.lengths[one["best_fp32"]["rows"]]
        assert one["best_fp32"]["n_places"] == 6 * lengths.max()
        assert lengths.max() - lengths.min() <= 15  # of 6 to 40: sorted within a quarter of an epoch
        assert one["whet_fp32"]["rows"] == one["best_fp32"]["rows"]
    assert bench.workers[-1]["attention"] == "sdpa"
    assert "fused" in bench.workers[-1]["optim"].lower()


def test_a_worker_that_waits_leaves_the_processor_alone(whet: Worker) -> None:
    whet.ask("step", rows=list(range(6)))
    time.sleep(0.2)  # the pause between turns, in which a thread pool goes to sleep
    before = whet.processor_s()
    time.sleep(1.0)
    assert whet.processor_s() - before <= 0.05
    assert whet.peak_bytes() > 50e6  # a Python with torch in it


def test_products_have_the_work_that_is_counted(bench: Bench) -> None:
    with bench.start("gemm_worker") as gemm:
        for dtype in ("fp32", "bf16"):
            found = products(gemm, bench.encoder("tiny"), 50, dtype)
            assert found["seconds"] > 0
            assert len(found["products"]) == 5 * 3  # joined projection, its output, two inner layers, head


@pytest.mark.gate  # tests/qa/test_windows.py compares windows with the tokenizer itself
def test_the_guides_windows_are_whets(bench: Bench, xquad_dir: Path, tmp_path: Path) -> None:
    """The same work is compared only if both find the same windows and the same answers in them."""
    file = tmp_path / "questions.jsonl"
    write_questions(xquad_dir, file, 150, "copied")
    model = bench.model("tiny")
    with bench.start("peer_windows", "--model", model, peer=True) as peer, \
         bench.start("whet_windows", "--model", model) as whet:  # fmt: skip
        theirs, ours = (worker.ask("windows", file=str(file)) for worker in (peer, whet))
    require_same_windows(theirs, ours)
    assert ours["n_windows"] >= 150


def test_other_work_is_seen_before_a_part() -> None:
    run = runpy.run_path(str(Path(figure_limit.__file__).with_name("run.py")))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            time.sleep(0.2)
            used = run["busy_cores"]()
        finally:
            other.kill()
    assert used > run["BUSY_CORES"]


def test_a_worker_that_dies_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "input(); raise SystemExit('out of coffee')"]
    with Worker(command, tmp_path / "log", n_threads=1, with_whet=True) as worker:
        with pytest.raises(WorkerFailedError, match="out of coffee"):
            worker.ask("step")
        with pytest.raises(WorkerFailedError, match="out of coffee"):  # also when asked again
            worker.ask("step")
