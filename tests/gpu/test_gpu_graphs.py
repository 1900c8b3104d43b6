"""Passes by graphs of CUDA: the results, masks and memory of those that are launched one kernel at a time."""

from __future__ import annotations

import json
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
from whet.models.families import deberta
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


def test_tables_of_a_graph_stay_when_others_push_them_out() -> None:
    """As an evaluation with rows of many lengths does; their memory would be used again."""
    one, wanted = model("deberta-v2"), model("deberta-v2", graphs=False)
    steps(one, ON_GPU[:2])
    steps(wanted, ON_GPU[:2])
    encoder = one.deberta.encoder
    buckets, most = getattr(encoder, "position_buckets", -1), encoder.max_relative_positions
    for other in range(300):
        deberta._places_on(buckets, most, 128 + other, encoder.rel_embeddings.weight.device)
    used_again = [torch.full((size,), 7, dtype=torch.int32, device="cuda") for size in (255, 511) for _ in range(500)]
    assert n_graphs(one) == 1
    assert_equal(steps(one, ON_GPU[:2]), steps(wanted, ON_GPU[:2]))
    assert used_again


def test_several_backward_passes_of_one_forward_pass() -> None:
    results = []
    for graphs in (True, False):
        one = model(graphs=graphs)
        steps(one, ON_GPU[:2])
        out = one(**ON_GPU[0])
        out.start_logits.square().mean().backward(retain_graph=True)
        loss_of(one, ON_GPU[1]).backward()
        (out.end_logits.square() * out.start_logits).mean().backward()
        results.append([weight.grad for weight in one.parameters()])
    assert_equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_pass_that_comes_again_has_the_masks_of_its_forward_pass(dtype: torch.dtype) -> None:
    one = model(dropout=0.3, dtype=dtype)
    steps(one, ON_GPU[:2])
    one.zero_grad()
    loss = loss_of(one, ON_GPU[0])
    loss.backward(retain_graph=True)
    first = [weight.grad.clone() for weight in one.parameters()]
    one.zero_grad()
    loss.backward()
    for weight, before in zip(one.parameters(), first, strict=True):
        assert float((weight.grad - before).norm()) <= 1e-2 * float(before.norm()) + 1e-6  # sums in any order


def test_a_failed_recording_leaves_other_graphs_their_seeds() -> None:
    """Without that, their masks would be those of the generator that was there before."""
    one = model(dropout=0.3, dtype=torch.bfloat16)
    steps(one, ON_GPU[:2])
    torch.manual_seed(1)
    before = [float(loss_of(one, ON_GPU[0]).detach()) for _ in range(2)]
    made = tiny_model("bert").cuda()
    layer = made.bert.encoder.layer[1].intermediate.dense
    inner = layer.forward
    layer.forward = lambda x: inner(x) * float((x.mean() > -1e9).item())
    steps(whet.optimize(made).train(), ON_GPU[:2])
    for _ in range(2):  # launch by launch, then recorded again
        torch.manual_seed(1)
        after = []
        for _ in range(2):
            loss = loss_of(one, ON_GPU[0])
            after.append(float(loss.detach()))
            loss.backward()
        assert after == pytest.approx(before, rel=2e-2)  # bf16, and flash kernels that sum in any order
    assert before[0] != before[1]
    assert n_graphs(one) == 1


def test_experts_train_on_a_gpu(tmp_path: Path) -> None:
    curves = []
    for graphs in (True, False):
        made = whet.upcycle(tiny_model("bert"), whet.ExpertSettings(experts=4, every=1, aux_loss_coef=0.1))
        args = arguments(tmp_path / str(graphs), use_cpu=False, max_steps=6, cuda_graphs=graphs)
        trainer = engine.Trainer(model=made, args=args, train_dataset=tiny_rows(24))
        trainer.train()
        curves.append(losses(trainer))
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)


@pytest.mark.parametrize("settings", [{"auto_find_batch_size": True}, {"precision": "auto"}])
def test_trials_before_the_first_step_leave_the_graphs_on(tmp_path: Path, settings: dict[str, Any]) -> None:
    made = tiny_model("bert", hidden_size=128, num_hidden_layers=4, intermediate_size=256)
    usual = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    args = arguments(tmp_path, use_cpu=False, **(usual | settings))
    trainer = engine.Trainer(model=made, args=args, train_dataset=tiny_rows(24, lengths=(30, 30)))
    trainer.train()
    assert n_graphs(made) > 0


def test_a_pass_that_does_not_fit_next_to_graphs_runs_without_them() -> None:
    one, wanted = model(), model(graphs=False)
    large = {name: value.repeat(400, 1) for name, value in ON_GPU[3].items()}
    torch.cuda.reset_peak_memory_stats()
    loss_of(wanted, large).backward()
    peak = torch.cuda.max_memory_allocated()
    wanted.zero_grad()
    fewer = {name: value[: len(value) * 3 // 4] for name, value in large.items()}
    try:
        for _ in range(3):
            loss_of(one, fewer).backward()
        assert n_graphs(one) == 1
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.3 * peak / total)  # and not 1.75
        loss_of(one, large).backward()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert n_graphs(one) == 0


def test_a_profile_shows_operators_of_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments(tmp_path, use_cpu=False, per_device_train_batch_size=4, max_steps=12, profile=True)
    trainer = engine.Trainer(model=tiny_model("bert"), args=args, train_dataset=tiny_rows(24, lengths=(30, 30)))
    trainer.train()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith('{"profile"')]
    seen = json.loads(line)["profile"]
    assert seen["cuda_graphs"] == "paused"
    assert all(seen["groups"][name]["ms"] > 0 for name in ("attention", "matrix_products", "norms"))
