"""Copies of a model that whet has changed: deepcopy, pickle, torch.save, another process."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from changed import batch_of, changed_by, logits
from torch import Tensor
from transformers import AutoModelForTokenClassification

import engine
import whet
from tiny import arguments, tiny_config, tiny_model, tiny_rows

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


@pytest.mark.slow
@pytest.mark.usefixtures("operators")
def test_a_saved_model_works_in_another_program(tmp_path: Path) -> None:
    model, batch = changed_by("optimize", "bert", tmp_path).eval(), batch_of()
    torch.save((model, batch, logits(model, batch).detach()), tmp_path / "model.pt")
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, tmp_path / "model.pt"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "no padding" in done.stdout


_SAVE = """
import sys, torch, whet
model, batch = torch.load(sys.argv[1], weights_only=False)
whet.optimize(model)
for handle in [model.register_forward_hook(print) for _ in range(3)]:  # torch has given out three numbers more
    handle.remove()
with torch.no_grad():
    torch.save((model, batch, model(**batch).loss), sys.argv[2])
"""
_HOOK = """
import sys, torch
seen = []
model, batch, loss = torch.load(sys.argv[1], weights_only=False)
handles = [
    model.register_forward_pre_hook(lambda module, given: seen.append("before")),
    model.register_forward_hook(lambda module, given, out: seen.append("after")),
    model.bert.encoder.layer[0].register_forward_hook(lambda module, given, out: seen.append("inside")),
]
with torch.no_grad():
    torch.testing.assert_close(model(**batch).loss, loss)
print(*seen)
for handle in handles:
    handle.remove()
import whet
whet.restore(model)
print(len(model._forward_hooks), len(model._forward_pre_hooks))
"""


def test_hooks_of_another_program_leave_those_of_a_saved_model(tmp_path: Path) -> None:
    """torch numbers hooks by process; whet's see that the labels are at padding, and that there are hooks inside."""
    batch = {name: one for name, one in batch_of().items() if name != "token_type_ids"}
    model = AutoModelForTokenClassification.from_config(tiny_config("bert")).eval()
    torch.save((model, batch | {"labels": torch.ones_like(batch["input_ids"])}), tmp_path / "plain.pt")

    def run(program: str, *files: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", program, *(str(tmp_path / file) for file in files)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        return done

    run(_SAVE, "plain.pt", "optimized.pt")
    done = run(_HOOK, "optimized.pt")
    assert done.stdout.splitlines() == ["before inside after", "0 0"]
    assert "hooks on encoder.layer.0 get packed tensors" in done.stderr


def _answer(model: Any, batch: dict[str, Tensor], pipe: Any) -> None:
    pipe.send(logits(model, batch).detach().numpy())


@pytest.mark.night
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
    trainer = engine.Trainer(model=tiny_model("bert"), args=args, train_dataset=tiny_rows(4))
    with pytest.raises(whet.WhetError, match="compiled"):
        pickle.dumps(trainer.model)
