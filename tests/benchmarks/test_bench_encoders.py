"""The encoders' benchmark: real workers, the same batches for everybody, and quality judged on held-out data."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import quality
import steps
from jobs import JOBS, SHAPES, tokenizer_of

DATA_SETS = ("banking77", "xquad", "ud_ewt")


@pytest.fixture(scope="module")
def data(xquad_dir: Path) -> Path:
    """The folder with all data sets."""
    missing = [name for name in DATA_SETS if not (xquad_dir.parent / name).is_dir()]
    if missing:
        pytest.skip(f"the data sets {', '.join(missing)} are not here")
    return xquad_dir.parent


def test_batches_are_random_or_of_like_length_and_begin_with_the_longest() -> None:
    rows = [{"input_ids": [0] * n, "number": n} for n in range(1, 401)]
    for grouped in (False, True):
        batches = steps.batches_of(rows, 4, 5, grouped=grouped)
        lengths = [[len(row["input_ids"]) for row in batch] for batch in batches]
        assert len(batches) == 5 + 2
        assert all(len(batch) == 4 for batch in batches)
        assert sum(lengths[0]) == max(map(sum, lengths))
        spread = statistics.median(max(one) - min(one) for one in lengths)
        assert spread < 40 if grouped else spread > 100  # of 400 lengths, grouped within quarters of an epoch


@pytest.mark.parametrize("job", JOBS)
def test_rows_hold_what_their_head_reads(job: str, data: Path, minilm_dir: Path) -> None:
    rows = list(JOBS[job].rows(data, tokenizer_of("tiny")))[:200]
    labels = {label for row in rows for label in _labels(row)} - {-100}
    assert len(rows) >= 150
    assert labels <= set(range(JOBS[job].n_labels))
    assert all(len(row["labels"]) == len(row["input_ids"]) for row in rows if isinstance(row.get("labels"), list))
    if job == "pairs":
        assert [row["labels"] for row in rows] == [1, 0] * (len(rows) // 2)


def _labels(row: dict) -> list[int]:
    found = row.get("labels", [])
    return found if isinstance(found, list) else [found]


@pytest.mark.gate
@pytest.mark.slow
@pytest.mark.parametrize("small", [False, True])
def test_all_sides_take_steps(
    data: Path, tmp_path: Path, minilm_dir: Path, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single steps, or ten at a time after thirty."""
    monkeypatch.setitem(SHAPES, "tiny", replace(SHAPES["tiny"], small=small))
    bench = steps.Bench(data, tmp_path, sys.executable, n_threads=1, rounds=2)
    found = steps.match(bench, "tags", "tiny", "best_fp32")
    assert found["seconds"].keys() == {"best_fp32", "whet_fp32", "whet_auto"}
    assert all(len(one) == 2 and min(one) > 0 for one in found["seconds"].values())
    assert [n >= m for n, m in zip(found["places"], found["tokens"], strict=True)] == [True, True]
    assert min(found["tokens"]) > (400 if small else 40)  # rows of about 16 pieces, 8 in a step
    assert "no padding" in found["ready"]["whet_fp32"]["changes"]
    assert "changes" not in found["ready"]["best_fp32"]
    assert steps.line_of("tags", "best_fp32", found).split()[0] == "best_fp32"


def test_the_table_of_qualities_pairs_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {
        "library": {
            "1": {"processor_seconds": 20.0, "quality": 0.5},
            "2": {"processor_seconds": 30.0, "quality": 0.7},
            "3": {},
        },
        "whet": {"1": {"processor_seconds": 10.0, "quality": 0.6}, "2": {"processor_seconds": 10.0, "quality": 0.7}},
    }
    monkeypatch.setattr(quality, "RESULTS", tmp_path / "quality.json")
    quality.RESULTS.write_text(json.dumps({"tags": runs}), "utf-8")
    assert quality.table()[2:] == [
        "| tags, 2 seeds | 0.6000 | 0.6500 | +0.0500 (standard error 0.0500) | 25, 10 | 2.50 |"
    ]


def test_shapes_are_those_of_the_published_models() -> None:
    import transformers

    sizes = {"mpnet": (768, 12, 30527), "modernbert": (768, 22, 50368), "deberta": (768, 12, 128_100)}
    for shape, (width, layers, vocabulary) in sizes.items():
        found = SHAPES[shape]
        config = transformers.AutoConfig.for_model(found.model_type, **found.settings)
        assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (width, layers, vocabulary)
