"""The rows R1, R4, R6, R9 and R13 of docs/reliability.md for transformers' own Trainer.

    python benchmarks/reliability/peer.py
    python benchmarks/reliability/peer.py --kills 60 --damages 600 --signals 30

A tiny BERT with dropout, 24 steps, a checkpoint every third; the settings are the best it has (peer_trials.BEST). What
its documentation promises: `enable_jit_checkpoint` saves after SIGTERM, `resume_from_checkpoint` resumes. Damage, odd
time stamps and bitwise equality after a kill are not promised; NaN losses are shown in the log on request. Writes
peer.json in this folder, from which report.py fills the table's last column;
a row is written as it ends, and with --only the other rows stay.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import peer_trials as trials
import torch
import transformers
from safetensors.torch import load_file
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from usage import cpu_s

RESULTS = Path(__file__).with_name("peer.json")
_LAST = f"checkpoint-{trials.N_STEPS}"
_WEIGHTS, _OPTIMIZER = "model.safetensors", "optimizer.pt"
_SHARED = {"training_args.bin"}


def same(first: Path, second: Path) -> bool:
    """Return whether weights and optimizer state of two checkpoints are the same in every bit."""
    if not all((folder / name).exists() for folder in (first, second) for name in (_WEIGHTS, _OPTIMIZER)):
        return False
    pairs = [(load_file(one / _WEIGHTS), _moments(one)) for one in (first, second)]
    (weights, moments), (other_weights, other_moments) = pairs
    alike = all(torch.equal(weights[name], other_weights[name]) for name in weights)
    return alike and all(torch.equal(a, b) for a, b in zip(moments, other_moments, strict=True))


def _moments(folder: Path) -> list[torch.Tensor]:
    state = torch.load(folder / _OPTIMIZER, weights_only=True)["state"]
    return [value for _, kept in sorted(state.items()) for _, value in sorted(kept.items())]


def kills(place: Path, n: int, chance: random.Random) -> list[str]:
    """R1: SIGKILL at a random moment, resume, compare."""
    whole, log = place / "whole", place / "log"
    child, busy_s = trials.fork(lambda: trials.go_on(whole), log), 0.0
    while (now_s := cpu_s(child)) is not None:
        busy_s = now_s
        time.sleep(0.002)
    assert trials.wait(child) == 0, log.read_text("utf-8")
    found: Counter[str] = Counter()
    for index in range(n):
        folder = place / f"{index}"
        began_s = trials_begin_s(busy_s)
        moment_s = chance.uniform(began_s, 0.9 * busy_s)
        child = trials.fork(lambda to=folder: trials.go_on(to), log)
        while (used_s := cpu_s(child)) is not None and used_s < moment_s:
            time.sleep(0.0005)
        if used_s is not None:
            os.kill(child, signal.SIGKILL)
        found["killed"] += trials.wait(child) == -signal.SIGKILL
        code = trials.wait(trials.fork(lambda to=folder: trials.go_on(to), log))
        found["error on resume" if code else "same" if same(folder / _LAST, whole / _LAST) else "different"] += 1
    return [f"bitwise the same: {found['same']}/{n} ({found['error on resume']} could not resume, "
            f"{found['different']} ended with other weights; {found['killed']} were killed in time)"]  # fmt: skip


def trials_begin_s(busy_s: float) -> float:
    """Return the processor time before which a run has hardly begun."""
    return 0.1 * busy_s


def _damage(folder: Path, kind: str, chance: random.Random) -> None:
    files = sorted(path for path in folder.iterdir() if path.name not in _SHARED)
    path = folder / chance.choice([_WEIGHTS, _OPTIMIZER]) if kind == "a flipped bit" else chance.choice(files)
    data = bytearray(path.read_bytes())
    if kind == "a missing file":
        return path.unlink()
    if kind == "a flipped bit":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data if kind == "a flipped bit" else data[: chance.randrange(len(data))])
    return None


def damages(place: Path, n: int, chance: random.Random) -> list[str]:
    """R4: one file of the newest of two checkpoints is damaged; is it noticed, and is the other one used?"""
    saved, log, said, n_before = place / "saved", place / "log", [], 0
    assert trials.wait(trials.fork(lambda: trials.go_on(saved, max_steps=2, save_steps=1), log)) == 0
    for kind in ("a flipped bit", "a cut file", "a missing file"):
        found: Counter[str] = Counter()
        for _ in range(n // 3):
            shutil.rmtree(place / "run", ignore_errors=True)
            log.unlink()
            shutil.copytree(saved, place / "run")
            _damage(place / "run" / "checkpoint-2", kind, chance)
            work = trials.fork(lambda: trials.go_on(place / "run", max_steps=3, save_steps=10), log)
            code = trials.wait(work)
            found["error" if code else _BEGAN_AT[log.read_text("utf-8").count("{'loss'")]] += 1
        counts = ", ".join(f"{how} {found[how]}/{n // 3}" for how in ("error", *_BEGAN_AT.values()) if found[how])
        said.append(f"{kind}: {counts}")
        n_before += found[_BEGAN_AT[2]]
    return [*said, f"the checkpoint before it used: {n_before}/{n // 3 * 3}"]


_BEGAN_AT = {1: "trained on from it", 2: "trained on from the one before", 3: "started from the beginning"}
"""Steps that a run of three did after it was given a checkpoint of the second -> where it began."""


def signals(place: Path, n: int, chance: random.Random) -> list[str]:
    """R6: SIGTERM in a run of many short steps."""
    n_saved, n_resumed, codes = 0, 0, Counter()
    for index in range(n):
        folder, log = place / f"{index}", place / f"log-{index}"
        long = {"max_steps": 2000, "save_steps": 1900, "callbacks": [trials.Slow()]}
        child = trials.fork(lambda to=folder, given=long: trials.go_on(to, **given), log)
        while "'loss'" not in (log.read_text("utf-8") if log.exists() else ""):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 1))
        os.kill(child, signal.SIGTERM)
        codes[trials.wait(child)] += 1
        found = get_last_checkpoint(str(folder))
        steps = len(re.findall(r"'loss'", log.read_text("utf-8")))
        n_saved += found is not None and int(found.rpartition("-")[2]) >= steps - 1
        again = trials.fork(lambda to=folder, m=steps + 1: trials.go_on(to, max_steps=m), place / "log")
        n_resumed += found is not None and trials.wait(again) == 0
    shown = ", ".join(f"{code} ({times} times)" for code, times in sorted(codes.items()))
    return [f"SIGTERM saved, no step lost: {n_saved}/{n}", f"resumed from it: {n_resumed}/{n}", f"exit code {shown}",
            "SIGINT and SIGUSR1 are not promised, and not tried"]  # fmt: skip


def non_finite(place: Path) -> list[str]:
    """R9: the loss of step 12 of 20 is NaN."""
    said = []
    for shown, kept in (("default settings", True), ("logging_nan_inf_filter=False", False)):
        seen = trials.NanAt(12)
        run = trials.trainer(place / f"{kept}", [seen], max_steps=20, logging_nan_inf_filter=kept)
        run.train()
        logged = [entry["loss"] for entry in run.state.log_history if entry.get("step") == 12 and "loss" in entry]
        weights = load_file(place / f"{kept}" / "checkpoint-12" / _WEIGHTS).values()
        bad = not all(bool(tensor.isfinite().all()) for tensor in weights)
        ended = "ended" if len(seen.finite) < 20 else "went on"
        said.append(
            f"{shown}: the NaN step was {'not ' if seen.finite[12] else ''}applied, the log says loss {logged[0]}, "
            f"the checkpoint of the step holds {'NaN' if bad else 'numbers'}, the run {ended}"
        )
    return said


def clocks(place: Path, n: int, chance: random.Random) -> list[str]:
    """R13: folders of checkpoints with time stamps in another order; as the Trainer itself calls the two functions."""
    n_found = n_kept = 0
    for index in range(n):
        folder, steps = place / f"{index}", sorted(chance.sample(range(1, 10**6), 5))
        times_s = chance.sample([time.time() + 86400.0 * day for day in range(-5, 0)], 5)
        for step, at_s in zip(steps, times_s, strict=True):
            (folder / f"checkpoint-{step}").mkdir(parents=True)
            os.utime(folder / f"checkpoint-{step}", (at_s, at_s))
        newest = f"checkpoint-{steps[-1]}"
        n_found += Path(get_last_checkpoint(str(folder)) or "").name == newest
        rotate_checkpoints(output_dir=str(folder), save_total_limit=1, use_mtime=True)
        n_kept += (folder / newest).exists()
    return [f"newest found: {n_found}/{n}", f"newest kept by the rotation: {n_kept}/{n}"]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, n in (("kills", 10), ("damages", 60), ("signals", 6), ("clocks", 20)):
        parser.add_argument(f"--{name}", type=int, default=n)
    parser.add_argument("--only", nargs="+", choices=["R13", "R1", "R4", "R6", "R9"], metavar="ROW", help="some rows")
    given = parser.parse_args()
    torch.set_num_threads(1)
    work: dict[str, Any] = {
        "R13": lambda place: clocks(place, given.clocks, random.Random(13)),
        "R1": lambda place: kills(place, given.kills, random.Random(1)),
        "R4": lambda place: damages(place, given.damages, random.Random(4)),
        "R6": lambda place: signals(place, given.signals, random.Random(6)),
        "R9": non_finite,
    }
    rows = json.loads(RESULTS.read_text("utf-8"))["rows"] if given.only and RESULTS.exists() else {}
    for name, measure in work.items():
        if given.only and name not in given.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = measure(Path(folder))
        print(name, *rows[name], sep="\n    ", flush=True)
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        at = datetime.now(UTC).isoformat(timespec="minutes")
        RESULTS.write_text(json.dumps({"rows": rows, "versions": versions, "at": at}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
