"""Copies of a model that whet has changed: deepcopy, pickle, torch.save, another process."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whet
from tiny import FAMILIES, Pad, arguments, tiny_model, tiny_rows

pytestmark = pytest.mark.usefixtures("operators")


def batch_of(family: str = "bert") -> dict[str, Tensor]:
    batch = Pad(1 if "roberta" in family else 0)([tiny_rows(4, family)[n] for n in range(4)])
    return {name: value for name, value in batch.items() if "positions" not in name}


def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the start logits of real tokens."""
    return model(**batch).start_logits[batch["attention_mask"].bool()]


def changed_by(how: str, family: str, folder: Path) -> Any:
    """Return a model that whet has changed, by its call or by a Trainer."""
    model = tiny_model(family, dropout=0.1)
    if how == "optimize":
        return whet.optimize(model)
    changes = {"gradient_checkpointing": True} if how == "checkpointing" else {}
    args = arguments(folder, max_steps=1, **changes)
    trainer = whet.Trainer(model=model, args=args, train_dataset=tiny_rows(4, family))
    trainer.train()
    return model


HOWS = ("optimize", "trainer", "checkpointing")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_deep_copy_is_independent_and_works(family: str, how: str, tmp_path: Path) -> None:
    model, batch = changed_by(how, family, tmp_path).eval(), batch_of(family)
    wanted = logits(model, batch).detach()
    other = copy.deepcopy(model)
    torch.testing.assert_close(logits(other, batch), wanted)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(logits(other, batch), wanted)
    logits(other.train(), batch).square().sum().backward()
    assert all(parameter.grad is None or how != "optimize" for parameter in model.parameters())
    assert any(parameter.grad.count_nonzero() for parameter in other.parameters() if parameter.grad is not None)
    if how == "optimize":
        assert whet.changes(other).fused == whet.changes(model).fused
        whet.restore(model)
        torch.testing.assert_close(logits(other.eval(), batch), wanted)
        plain = whet.restore(other)
        assert not [module for module in plain.modules() if "forward" in module.__dict__]
        torch.testing.assert_close(logits(plain, batch), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pickled_model_works(family: str, how: str, tmp_path: Path) -> None:
    model, batch = changed_by(how, family, tmp_path).eval(), batch_of(family)
    wanted = logits(model, batch)
    other = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(logits(other, batch), wanted)
    if how == "optimize":
        assert whet.changes(other) == whet.changes(model)
        torch.testing.assert_close(logits(whet.restore(other), batch), wanted, rtol=1e-4, atol=1e-5)


_LOAD = """
import sys, torch
model, batch, wanted = torch.load(sys.argv[1], weights_only=False)
real = batch["attention_mask"].bool()
torch.testing.assert_close(model(**batch).start_logits[real], wanted)
import whet
print(whet.changes(model))
whet.restore(model)
torch.testing.assert_close(model(**batch).start_logits[real], wanted, rtol=1e-4, atol=1e-5)
"""


def test_a_saved_model_works_in_another_program(tmp_path: Path) -> None:
    model, batch = changed_by("optimize", "bert", tmp_path).eval(), batch_of()
    torch.save((model, batch, logits(model, batch).detach()), tmp_path / "model.pt")
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, tmp_path / "model.pt"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "no padding" in done.stdout


def _answer(model: Any, batch: dict[str, Tensor], pipe: Any) -> None:
    pipe.send(logits(model, batch).detach().numpy())


@pytest.mark.slow
def test_a_model_can_be_sent_to_a_worker(tmp_path: Path) -> None:
    model, batch = changed_by("optimize", "bert", tmp_path).eval(), batch_of()
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    worker = context.Process(target=_answer, args=(model, batch, theirs))
    worker.start()
    assert mine.poll(120), "the worker sent nothing"
    found = torch.from_numpy(mine.recv())
    worker.join()
    torch.testing.assert_close(found, logits(model, batch).detach())


def test_a_compiled_model_refuses_to_be_pickled(tmp_path: Path) -> None:
    args = arguments(tmp_path, torch_compile=True, torch_compile_backend="eager")
    trainer = whet.Trainer(model=tiny_model("bert"), args=args, train_dataset=tiny_rows(4))
    with pytest.raises(whet.WhetError, match="compiled"):
        pickle.dumps(trainer.model)
