"""Passes by graphs of CUDA: the results, masks and memory of those that are launched one kernel at a time."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
import whet
from tiny import arguments, losses, tiny_model, tiny_rows
from whet.log import logger
from whet.models import captured, record
from whet.models.packed import GRAPHS, packed_model

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
from test_captured import (
    BATCHES,
    _attend_less,
    _drop_more,
    _freeze,
    _hook,
    _move,
    _new_weights,
    _own_forward,
    _stop_dropping,
    _watch,
    assert_equal,
    loss_of,
    steps,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ON_GPU = (
    [{name: value.cuda() for name, value in given.items()} for given in BATCHES] if torch.cuda.is_available() else []
)


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Products in float32 and not TF32, so that sizes may differ."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def model(family: str = "bert", *, dropout: float = 0.0, graphs: bool = True, **options: Any) -> Any:
    made = tiny_model(family, dropout=dropout, **({"pad_token_id": 0} if family == "roberta" else {})).cuda()
    return whet.optimize(made, cuda_graphs=graphs, **options).train()


def n_graphs(model: Any) -> int:
    passes: captured.Passes = record.read(packed_model(model).module, GRAPHS)  # pyright: ignore
    assert passes.why_not is None
    return len(passes._passes)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "mpnet", "modernbert", "albert", "deberta-v2"])
def test_steps_by_graphs_are_those_without(family: str) -> None:
    wanted = steps(model(family, graphs=False), ON_GPU)
    found = model(family)
    assert_equal(steps(found, ON_GPU), wanted)
    assert n_graphs(found) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_of_a_graph_are_those_of_its_first_pass(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Without a graph the same sizes run launch by launch: equal but for what sums in any order."""
    found = steps(model(dropout=0.3, dtype=dtype), ON_GPU * 2)
    monkeypatch.setattr(captured, "_MOST_GRAPHS", 0)
    wanted = steps(model(dropout=0.3, dtype=dtype), ON_GPU * 2)
    # twelve steps of AdamW in half precision, whose gradients of queries are summed in any order
    within = 1e-3 if dtype == torch.float32 else 0.1
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm()) <= within * float(other.norm()) + 1e-5
    losses_of = [one for one in found if one.dim() == 0]
    assert len({round(float(one), 6) for one in losses_of}) == len(losses_of)


def test_other_steps_have_other_masks() -> None:
    found = model(dropout=0.3)
    steps(found, ON_GPU[:2])
    assert n_graphs(found) == 1
    torch.manual_seed(1)
    one, two = (float(loss_of(found, ON_GPU[0]).detach()) for _ in range(2))
    torch.manual_seed(1)
    assert float(loss_of(found, ON_GPU[0]).detach()) == one != two


@pytest.mark.parametrize(
    "change", [_freeze, _drop_more, _move, _attend_less, _new_weights, _own_forward, _stop_dropping, _hook, _watch]
)
def test_changes_of_the_model_count_afterwards(change: Any) -> None:
    found, wanted = model(), model(graphs=False)
    results = []
    for one in (found, wanted):
        steps(one, ON_GPU[:2])
        one.zero_grad()
        change(one)
        if change is _drop_more:
            for part in one.modules():
                if isinstance(part, torch.nn.Dropout):
                    part.p = 0.0
        results.append(steps(one, ON_GPU[:2]) + steps(one, ON_GPU[:2]))
    assert_equal(*results)


def test_two_passes_before_one_backward_and_chosen_gradients() -> None:
    results = []
    for graphs in (True, False):
        one = model(graphs=graphs)
        steps(one, ON_GPU[:2])
        (loss_of(one, ON_GPU[0]) * loss_of(one, ON_GPU[1])).backward()
        weights = list(one.parameters())
        results.append([*torch.autograd.grad(loss_of(one, ON_GPU[1]), weights), *(weight.grad for weight in weights)])
    assert_equal(*results)


def test_a_pass_that_reads_numbers_back_runs_launch_by_launch(caplog: pytest.LogCaptureFixture) -> None:
    made = tiny_model("bert").cuda()
    layer = made.bert.encoder.layer[1].intermediate.dense
    inner = layer.forward
    layer.forward = lambda x: inner(x) * float((x.mean() > -1e9).item())
    found = whet.optimize(made).train()
    with caplog.at_level(logging.WARNING, logger.name):
        results = steps(found, ON_GPU)
    assert "CUDA graphs: off" in caplog.text
    assert_equal(results, steps(model(graphs=False), ON_GPU))


def test_graphs_share_one_memory() -> None:
    """The activations of many sizes lie in the same place: with them a step takes little more than without."""
    rows = [{name: value.repeat(n, 1) for name, value in ON_GPU[3].items()} for n in (50, 44, 38, 33, 28, 24, 20)]
    peaks = []
    for graphs in (False, True):
        one = model(graphs=graphs)
        for given in rows:
            for _ in range(3):
                loss_of(one, given).backward()
        torch.cuda.synchronize()
        if graphs:
            assert n_graphs(one) > 3
        torch.cuda.empty_cache()
        peaks.append(torch.cuda.memory_reserved())
        del one
        torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    loss_of(model(graphs=False), rows[0]).backward()
    largest = torch.cuda.max_memory_allocated()
    assert peaks[1] - peaks[0] < 3 * largest


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_resumed_training_has_the_curve_of_one_that_was_not(tmp_path: Path, precision: str) -> None:
    def run(folder: Path, **more: Any) -> list[float]:
        args = arguments(folder, use_cpu=False, precision=precision, max_steps=12, seed=5, **more)
        trainer = engine.Trainer(model=tiny_model("bert", dropout=0.1), args=args, train_dataset=tiny_rows(24))
        trainer.train(more.get("resume_from_checkpoint"))
        return losses(trainer)

    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", save_strategy="steps", save_steps=6)
    for folder in sorted((tmp_path / "parts").glob("*12")):
        shutil.rmtree(folder)
    resumed = run(tmp_path / "parts", resume_from_checkpoint="auto")
    assert resumed[-6:] == pytest.approx(whole[-6:], rel=1e-3 if precision == "fp32" else 2e-2)


def test_a_gradient_that_somebody_keeps_stays_as_it_was() -> None:
    one = model()
    steps(one, ON_GPU[:2])
    loss_of(one, ON_GPU[0]).backward()
    weights = list(one.parameters())
    kept = [weight.grad for weight in weights]
    before = [grad.clone() for grad in kept if grad is not None]
    one.zero_grad()
    loss_of(one, ON_GPU[1]).backward()
    loss_of(one, ON_GPU[0]).backward()
    assert all(torch.equal(grad, other) for grad, other in zip(kept, before, strict=True))  # pyright: ignore
    wanted = model(graphs=False)
    steps(wanted, ON_GPU[:2])
    for given in (ON_GPU[1], ON_GPU[0]):
        loss_of(wanted, given).backward()
    assert_equal([weight.grad for weight in weights], [weight.grad for weight in wanted.parameters()])  # pyright: ignore


def test_states_that_somebody_keeps_are_not_overwritten() -> None:
    one = model()
    steps(one, ON_GPU[:2])
    kept: list[Tensor] = []
    for given in ON_GPU[:2]:
        out = one.bert(**given).last_hidden_state
        kept += [out, out.detach().clone()]
        out.sum().backward()
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[2], kept[3])
