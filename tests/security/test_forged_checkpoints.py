"""Checkpoints whose manifest checks out and whose content lies: refused in a sentence, fast, before a step is taken."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Trainer, TrainingArguments
from tiny import tiny_model
from whet.errors import WhetError
from whet.hardware.memory import peak_bytes
from whet.store import manifest

pytestmark = pytest.mark.reliability
_MOST_S, _MOST_MIB = 5.0, 200
_ROWS = [{"input_ids": [2, 5 + i, 6, 7, 3], "start_positions": 1, "end_positions": 2} for i in range(8)]
Spoil = Callable[[Path], object]


def _json(file: str, *way: Any, value: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / file
        content = json.loads(path.read_text("utf-8"))
        place = content
        for name in way[:-1]:
            place = place[name]
        place[way[-1]] = value
        path.write_text(json.dumps(content), "utf-8")

    return spoil


def _tensors(file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file, metadata={"format": "pt"})

    return spoil


def _replaced(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    return _tensors("optimizer.safetensors", lambda t: t.__setitem__(name, make(t[name])))


def _added(name: str) -> Spoil:
    return _tensors("optimizer.safetensors", lambda tensors: tensors.__setitem__(name, torch.ones(2)))


def _in_state(name: str, tensor: torch.Tensor) -> Spoil:
    """Give the first parameter one more tensor, in both files."""

    def spoil(folder: Path) -> None:
        place = f"{_FIRST}.{name}"
        _json(_RUN, "optimizer", "state", _FIRST.removeprefix("state."), name, value={"$tensor": place})(folder)
        _tensors("optimizer.safetensors", lambda tensors: tensors.__setitem__(place, tensor))(folder)

    return spoil


def _without_first(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(f"{_FIRST}.")]:
        del tensors[name]


def _group(name: str, *, value: Any) -> Spoil:
    """Change a setting of the optimizer's first group."""
    return _json("state.json", "optimizer", "param_groups", 0, name, value=value)


_STATE, _RUN = "trainer_state.json", "state.json"
_FIRST = "state.bert.embeddings.word_embeddings.weight"
"""How the names of the first parameter's moments begin."""
FORGED: dict[str, Spoil] = {
    **{f"step {value!r}": _json(_STATE, "global_step", value=value)
       for value in (None, "x", -1, 1, 10**12, 10**30, float("nan"), [], True)},
    **{f"history {value!r}": _json(_STATE, "log_history", value=value) for value in ("x", -1, {}, [1])},
    **{f"flops {value!r}": _json(_STATE, "total_flos", value=value) for value in (None, "x", float("nan"), [])},
    "best metric": _json(_STATE, "best_metric", value=[]),
    **{f"losses {value!r}": _json(_RUN, "meter", "loss_total", value=value) for value in (None, "x", float("inf"), {})},
    **{f"number of losses {value!r}": _json(_RUN, "meter", "n_losses", value=value)
       for value in (-1, "x", 10**30, 0.5)},
    **{f"left out {value!r}": _json(_RUN, "loader", "n_left_out", value=value)
       for value in (None, -1, [], float("nan"))},
    "pending": _json(_RUN, "edges", "pending", value="x"),
    "checkpoints elsewhere": _json(_RUN, "checkpoints", "names", value=[["../../x"]]),
    "precision": _json(_RUN, "precision", value=[]),
    **{f"eps {value!r}": _group("eps", value=value) for value in (None, "x", [1, 2], {})
       if value is not None},
    **{f"betas {value!r}": _group("betas", value=value) for value in ("x", -1, [], {}, [0.9])},
    "weight decay": _group("weight_decay", value=[]),
    **{f"rate {value!r}": _group("lr", value=value)
       for value in (-1.0, 1e30, float("nan"), float("inf"))},
    **{f"weight decay {value!r}": _group("weight_decay", value=value)
       for value in (-0.1, 1e30, float("nan"))},
    **{f"betas {value!r}": _group("betas", value=value) for value in ([-1.0, 0.9], [0.9, 7.0])},
    "eps negative": _group("eps", value=-1e-8),
    **{f"step of the optimizer {value!r}": _replaced(f"{_FIRST}.step", lambda _, value=value: torch.tensor(value))
       for value in (float("nan"), -1.0, 0.5, 1e30, [1.0, 2.0])},
    "moment in float64": _replaced(f"{_FIRST}.exp_avg", lambda old: old.double()),
    "weights as whole numbers": _tensors("model.safetensors", lambda t: t.update(
        {name: one.to(torch.int64) for name, one in t.items() if name.endswith("dense.weight")})),
    "rate": _group("lr", value="x"),
    "moment of no parameter": _added("state.nobody.exp_avg"),
    "a name in a name": _added("exp_avg"),
    "a name in 3,000 parts": _added("state." + "a." * 3000 + "x"),
    "state of no parameter": _json(_RUN, "optimizer", "state", "nobody", value={"step": 2}),
    "group of other parameters": _group("params", value=["nobody"]),
    "groups": _json(_RUN, "optimizer", "param_groups", value=[]),
    "reference to no tensor": _json(_RUN, "optimizer", "state", "nobody", value={"exp_avg": {"$tensor": "x"}}),
    "part with another name": _json(_RUN, "../../x", value={}),
    "callbacks": _json(_RUN, "callbacks", "exported", value=[["x"]]),
    "schedule": _json(_RUN, "schedule", value=[]),
    "losses before": _json(_RUN, "spikes", "losses", value=["x"]),
    "moment of another shape": _replaced(f"{_FIRST}.exp_avg", lambda _: torch.ones(3)),
    "moment of whole numbers": _replaced(f"{_FIRST}.exp_avg", lambda old: torch.ones(old.shape, dtype=torch.int8)),
    "a tensor too many": _in_state("other", torch.ones(2)),
    "a tensor of another optimizer": _in_state("momentum_buffer", torch.ones(2)),
    "a tensor that nobody names": _added(f"{_FIRST}.exp_avg.more"),
    "step of whole numbers that wraps": _replaced(f"{_FIRST}.step", lambda _: torch.tensor(2, dtype=torch.int8)),
    "second moment of codes": _replaced(f"{_FIRST}.exp_avg_sq", lambda old: torch.ones(old.shape, dtype=torch.uint8)),
    "moment of truth values": _replaced(f"{_FIRST}.exp_avg", lambda old: torch.ones(old.shape, dtype=torch.bool)),
    "moment of complex numbers": _replaced(
        f"{_FIRST}.exp_avg", lambda old: torch.ones(old.shape, dtype=torch.complex64)),
    "a number too many": _json(_RUN, "optimizer", "state", _FIRST.removeprefix("state."), "other", value=1),
    "moment not finite": _replaced(f"{_FIRST}.exp_avg_sq", lambda old: torch.full(old.shape, torch.nan)),
    "no state for one parameter": _tensors("optimizer.safetensors", _without_first),
    "weights not finite": _tensors("model.safetensors", lambda t: next(iter(t.values())).fill_(torch.nan)),
    "weights missing": _tensors("model.safetensors", lambda t: t.pop(next(iter(t)))),
    "nested too deep": lambda folder: (folder / _STATE).write_text("[" * 100_000, "utf-8"),
    "empty": lambda folder: (folder / _RUN).write_text("", "utf-8"),
    "a list": lambda folder: (folder / _RUN).write_text("[1]", "utf-8"),
}  # fmt: skip


def _train(output_dir: Path, resume: Path | None = None) -> float:
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(output_dir), use_cpu=True, max_steps=4, save_steps=2, per_device_train_batch_size=2,
        precision="fp32", optim="adamw_torch", log_level="error",
    )  # fmt: skip
    trainer = Trainer(model=tiny_model("bert"), args=args, train_dataset=_ROWS)
    return trainer.train(resume_from_checkpoint=None if resume is None else str(resume)).training_loss


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 2, as a run has written it."""
    folder = tmp_path_factory.mktemp("good")
    _train(folder)
    return folder / "checkpoint-2"


def _forged(good: Path, folder: Path, spoil: Spoil) -> Path:
    """Copy the checkpoint, change it, and seal it again as whet would."""
    made = folder / good.name
    shutil.copytree(good, made)
    facts = manifest.facts_of(made) or {}
    (made / manifest.MANIFEST).unlink()
    spoil(made)
    manifest.seal(
        made, 2, {name: value for name, value in facts.items() if name not in ("format_version", "step", "content")}
    )
    return made


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_checkpoint_is_refused(kind: str, good: Path, tmp_path: Path) -> None:
    forged = _forged(good, tmp_path, FORGED[kind])
    assert manifest.problems_of(forged, 2) == [], "the seal is right"
    began_s, before = time.process_time(), peak_bytes() or 0
    with pytest.raises(WhetError) as caught:
        _train(tmp_path, forged)
    assert time.process_time() - began_s < _MOST_S
    assert ((peak_bytes() or 0) - before) < _MOST_MIB << 20
    assert str(forged) in str(caught.value) or "not finite" in str(caught.value)
    assert caught.value.problems[0].fix


def test_the_checkpoint_that_is_forged_is_good(good: Path, tmp_path: Path) -> None:
    assert _train(tmp_path, _forged(good, tmp_path, lambda folder: None)) > 0
