"""One optimised model in several threads, and passes within passes: each call is what it is alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from optimized import Inputs, gradients, inputs, logits, optimized
from torch import Tensor

from tiny import FAMILIES, tiny_model, tiny_rows
from whet.config.methods import MethodSettings
from whet.data.batch import Batch, pack
from whet.methods import fuse, order
from whet.models.packed import PackedModel, prepare
from whet.models.view import ModelView

N_THREADS, N_CALLS = 8, 6


@pytest.fixture(autouse=True)
def _one_core_in_small_slices() -> Iterator[None]:
    """Products add up in one order, so that results can be compared bitwise; threads take turns very often."""
    n_threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)
    torch.set_num_threads(n_threads)


def together(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Return what the jobs give when each has a thread of its own and all start at once."""
    start = Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        start.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [done.result() for done in [pool.submit(run, job) for job in jobs]]


def equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return torch.equal(found, expected)
    return len(found) == len(expected) and all(equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_threads_train_and_evaluate_one_model_as_one_thread_does(family: str) -> None:
    """Bitwise: threads share weights alone, and each sum is made by one thread in one order."""
    model = optimized(family)

    def evaluate(batch: Inputs) -> Tensor:
        with torch.inference_mode():
            return logits(model, batch)

    def work(thread: int) -> list[Any]:
        step = evaluate if thread % 2 else lambda batch: gradients(model, batch)
        return [step(inputs(3 + thread, 20 - i, 7, 1 + i, seed=10 * thread + i)) for i in range(N_CALLS)]

    alone = [work(thread) for thread in range(N_THREADS)]
    assert equal(together([lambda t=thread: work(t) for thread in range(N_THREADS)]), alone)


def wait(meeting: Barrier) -> None:
    meeting.wait()


def test_two_threads_in_the_midst_of_their_passes_see_their_own_rows() -> None:
    """Both passes stand in the same blocks at the same time, with as many tokens but other rows."""
    model, (one, other) = optimized(), (inputs(12, 8, seed=1), inputs(5, 15, seed=2))
    with torch.no_grad():
        alone = [logits(model, batch) for batch in (one, other)]
        meeting = Barrier(2, timeout=60)
        for block in model.bert.encoder.layer:
            block.attention.register_forward_hook(lambda *_: wait(meeting))
        found = together([torch.no_grad()(lambda b=batch: logits(model, b)) for batch in (one, other)])
    assert equal(found, alone)


def keyed_model(policy: str) -> PackedModel:
    packed = prepare(tiny_model("bert", dropout=0.3).train())
    assert packed is not None
    order.apply(ModelView(packed.module), MethodSettings(operators="auto", checkpointing=policy))  # pyright: ignore[reportArgumentType]
    return packed


def loss_of(packed: PackedModel, batch: Batch, step: int) -> Tensor:
    out: Any = packed(batch, seed=1, step=step)
    return torch.stack([out.start_logits, out.end_logits]).square().mean()


@pytest.mark.each_value
@pytest.mark.parametrize("policy", ["blocks", "selective"])
def test_recomputed_blocks_meet_the_masks_of_their_own_pass_in_any_thread(operators: None, policy: str) -> None:
    """Forward and backward run in different threads, as on a GPU; bitwise, with dropout and checkpointing on."""
    packed = keyed_model(policy)
    weights = list(packed.module.parameters())
    batches = [pack(tiny_rows(3, seed=i), first_slot=0, position_offset=0) for i in range(N_THREADS)]

    def gradient(step: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss_of(packed, batches[step], step), weights)

    alone = [gradient(step) for step in range(N_THREADS)]
    steps = range(N_THREADS)
    assert equal(together([lambda s=step: gradient(s) for step in steps]), alone)
    losses = together([lambda s=step: loss_of(packed, batches[s], s) for step in steps])
    turned = [loss for _, loss in sorted(enumerate(losses), key=lambda pair: -pair[0])]
    found = together([lambda x=loss: torch.autograd.grad(x, weights) for loss in turned])
    assert equal(found[::-1], alone)


def test_gradients_that_threads_add_up_in_one_table_are_all_there() -> None:
    """The gradient of the word table that whet keeps between steps, to rounding: threads add in any order."""
    packed = prepare(tiny_model("bert").train())
    assert packed is not None
    if not fuse.possible(packed):
        pytest.skip("no native operators here")
    fuse.apply(ModelView(packed.module), MethodSettings(operators="auto", row_gradients=True))
    batches = [pack(tiny_rows(3, seed=i), first_slot=0, position_offset=0) for i in range(N_THREADS)]

    def total(run: Callable[[list[Callable[[], Any]]], Any]) -> list[Tensor]:
        packed.module.zero_grad()
        run([lambda i=i: loss_of(packed, batches[i], i).backward() for i in range(N_THREADS)])
        return [parameter.grad.clone() for parameter in packed.module.parameters() if parameter.grad is not None]

    one_by_one = total(lambda jobs: [job() for job in jobs])
    for _ in range(3):
        for found, expected in zip(total(together), one_by_one, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
