"""What a forked trial does: train, be killed, go on. Called by name in the fork server; every run is in one folder."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

import engine
from tiny import arguments, tiny_model, tiny_rows
from whet.engine.loop import TrainingLoop
from whet.errors import WhetError

OUT = "out"
N_STEPS, SAVE_STEPS = 24, 3
_ROWS = tiny_rows(30)  # 8 steps an epoch, the last of them short
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "unfused": {"optim": "adamw_torch", "weight_decay": 0.1},
    "async": {"save_async": True},
    "rotated": {"save_total_limit": 2},
    "odd logs": {"logging_steps": 5},
    "cosine": {"lr_scheduler_type": "cosine"},
    "workers": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
    "frozen": {"max_grad_norm": 0.0},
    "few samples": {
        "weight_averaging_start": 0.3,
        "layerwise_lr_decay": 0.8,
        "reinit_layers": 1,
        "span_loss": "compound",
    },
}
"""Kinds of run; the gate takes them in turn."""
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


def trainer(config: str = "plain", model: Any = None, rows: Any = None, **changes: Any) -> engine.Trainer:
    """Return a trainer of a tiny BERT with dropout that saves every third step into `out`, below the working folder."""
    usual = {"max_steps": N_STEPS, "save_strategy": "steps", "save_steps": SAVE_STEPS}
    if model is None:
        model = tiny_model("bert", dropout=0.1, hidden_size=16, intermediate_size=32)
    if config == "frozen":
        model.base_model.embeddings.requires_grad_(False)
    return engine.Trainer(
        model=model,
        args=arguments(Path(OUT), **(usual | CONFIGS[config] | changes)),
        train_dataset=_ROWS if rows is None else rows,
    )


def train(folder: str, config: str = "plain", asked: str | None = None, die: int = 0) -> int:
    """Train in the folder; die by SIGKILL at the disk event of this number inside a save (0: not at all)."""
    os.chdir(folder)
    if die:
        _die_inside_a_save(die)
    return _exit_code(lambda: trainer(config).train(resume_from_checkpoint=asked))


class _Dies(TrainerCallback):
    """Kills its process by SIGKILL after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_with(folder: str, optim: str, asked: str | None = None, die: int = 0) -> int:
    """Train 6 steps with this optimizer, saving every second; die by SIGKILL after step `die` (0: not at all)."""
    os.chdir(folder)
    model = tiny_model("bert", dropout=0.1, hidden_size=64, intermediate_size=128)  # some weights fill 8-bit blocks

    def run() -> None:
        made = trainer(model=model, max_steps=6, save_steps=2, optim=optim)
        made.events.callbacks.append(_Dies(die))
        made.train(resume_from_checkpoint=asked)

    return _exit_code(run)


def save_once(folder: str, *, how: str = "plain", limit_bytes: int = 0, ready: str = "", go: str = "") -> int:
    """Save step 2 into a folder that holds step 1, once `go` exists; write what was said to `said.json`."""
    loop = PREPARED[how]
    os.chdir(folder)
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)  # let a tracer that is not our parent look on
    if ready:
        Path(ready).touch()
        while not os.access(go, os.F_OK):  # by a system call that no save uses: a fault at its first stat is not ours
            time.sleep(0.001)
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    return _exit_code(lambda: loop.saver.save(2, better=False))


PREPARED: dict[str, TrainingLoop] = {}
"""Runs after their second step with the first saved, ready to save the second."""


def prepare(folder: Path) -> None:
    """Fill `PREPARED` and leave each one's output folder in `folder`/how; done once, before any fork."""
    for how, changes in _WAYS.items():
        place = folder / how
        place.mkdir(parents=True)
        os.chdir(place)
        loop = trainer(max_steps=3, save_steps=1, **changes).new_loop()
        loop.start(None)
        loop.take_step()  # saves the first
        if how == REPLACED:
            loop.take_step()  # and a second, with other weights than the one that will take its place
        _without_saving(loop)
        PREPARED[how] = loop
    warm = folder / "warm"
    shutil.copytree(folder / "plain", warm)
    os.chdir(warm)
    PREPARED["plain"].saver.save(2, better=False)  # loads what is loaded late
    PREPARED["plain"].saver.folders = PREPARED["plain"].saver.folders[:1]


REPLACED = "replaced"
"""The way to save in which step 2 is there already, as after going on from an earlier checkpoint than the newest."""
_WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "rotated": {"save_total_limit": 1}, "continue": {"save_error_policy": "continue"}, REPLACED: {},
}  # fmt: skip


def _without_saving(loop: TrainingLoop) -> None:
    due, loop.saver.due = loop.saver.due, lambda *_, **__: False
    loop.take_step()
    loop.saver.due = due


def _exit_code(work: Callable[[], Any]) -> int:
    try:
        work()
    except WhetError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        Path("said.json").write_text(json.dumps(str(error)), "utf-8")
        return error.exit_code
    return 0


def _die_inside_a_save(event: int) -> None:
    """Kill this process at one of the audited events that touch a checkpoint being written or removed."""
    left = event

    def watch(name: str, given: tuple[Any, ...]) -> None:
        nonlocal left
        if name.split(".")[0] in ("open", "os", "shutil") and any(".checkpoint-" in str(part) for part in given):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def whole(folder: str, config: str = "plain") -> int:
    """Run without a fault; write to `facts.json` how many events `die` can name, and the processor time it took."""
    os.chdir(folder)
    events = 0

    def watch(name: str, given: tuple[Any, ...]) -> None:
        nonlocal events
        if name.split(".")[0] in ("open", "os", "shutil"):
            events += any(".checkpoint-" in str(part) for part in given)

    sys.addaudithook(watch)
    began_s = time.process_time()
    trainer(config).train()
    facts = {"events": events, "busy_s": time.process_time() - began_s}
    Path("facts.json").write_text(json.dumps(facts), "utf-8")
    return 0
