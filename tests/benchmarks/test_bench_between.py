"""Where a step's time goes outside of its products: parts that add up to it, and the least that each must take."""

from __future__ import annotations

from pathlib import Path

import figure_between
import pytest
from flops import Encoder, attention_flops, linear_flops

import tiny
from bench import Bench

SMALL = Encoder(width=8, inner=32, n_layers=3)


def test_parts_add_up_to_the_step() -> None:
    operators = {
        "aten::mm": [0.2, 4],
        "whet::add_norm_backward": [0.03, 6],
        "aten::addmm": [0.1, 1],
        "detach": [0.01, 9],
    }
    found = figure_between.seconds_of(operators, step_s=0.5)
    assert sum(found.values()) == pytest.approx(0.5)
    assert (found["products"], found["norms"], found["rest"]) == pytest.approx((0.3, 0.03, 0.17))


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4)])
def test_least_times_are_those_of_bytes_and_operations(dtype: str, size: int) -> None:
    lengths, rate, linear_s = [5, 3], 1000.0, 2.0
    found = figure_between.least_s(SMALL, lengths, dtype, rate, linear_s)
    assert found["products"] == linear_s
    assert found["norms"] == 8 * 8 * size * 9 * 6 / rate  # tokens, width, tensors of both passes, two in each layer
    assert found["activations"] == 8 * 32 * size * 5 * 3 / rate
    by_operations = attention_flops(SMALL, lengths) / (linear_flops(SMALL, 8) / linear_s)
    assert found["attention"] == max(by_operations, 8 * 8 * size * 12 * 3 / rate)


@pytest.mark.slow
@pytest.mark.night
def test_a_real_step_is_taken_apart(tmp_path: Path, minilm_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert minilm_dir.exists()
    rows = tiny.tiny_rows(60)
    rows.save(tmp_path / "train.safetensors")
    made = Bench(data=tmp_path, folder=tmp_path, peers="", n_threads=1, n_rounds=2, batch=6, models=("tiny",))
    made.__dict__["train_rows"] = tmp_path / "train.safetensors"
    lines, raw = figure_between.run(made)
    assert lines == []
    one = raw["tiny"]["fp32"]["rounds"][0]
    assert sum(one["parts_s"].values()) == pytest.approx(one["step_s"])
    assert min(one["parts_s"][name] for name in ("products", "attention", "norms", "activations", "optimizer")) > 0
    assert "outside" in capsys.readouterr().out
