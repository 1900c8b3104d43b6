"""One replica group of torchft, of one rank, that trains an optimized model.

    python torchft_job.py NUMBER LIGHTHOUSE N_STEPS [dies|stays|rejoins FOLDER]

It prints a line of JSON for each step that was committed. Groups with a role meet in FOLDER: `stays` begins next to
`dies`, which ends without a trace after some common steps; `stays` takes some alone, then `rejoins` is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torchft  # pyright: ignore[reportMissingImports]
from jobs_of_loops import padded
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import whet
from tiny import tiny_model, tiny_rows

N_ROWS = 8
_COMMON, _ALONE = 4, 3
"""Steps that groups with a role take together before one dies, and that the other takes alone then."""
_LONGEST_S = 300.0


class Role:
    """What a group does besides training, and for which other groups it waits."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._n_common = self._n_alone = 0

    def wait_for_its_turn(self) -> None:
        """Wait, if this group comes back, until the other has taken its steps alone: a heartbeat would end these."""
        if self._name == "rejoins":
            self._wait("alone")

    def begin(self) -> None:
        """Say that this group is there: its Manager sends heartbeats from now on."""
        if self._name:
            (self._folder / self._name).touch()
        for other in {"stays": ["dies"], "dies": ["stays"]}.get(self._name, []):
            self._wait(other)

    def end_step(self, n_groups: int) -> None:
        """Count a committed step, and do what is due after it."""
        self._n_common += n_groups > 1
        self._n_alone += bool(self._n_common) and n_groups == 1
        if self._name == "dies" and self._n_common == _COMMON:
            os._exit(9)
        if self._name == "stays" and self._n_alone == _ALONE:
            self._n_alone += 1
            (self._folder / "alone").touch()
            self._wait("rejoins")

    def _wait(self, other: str) -> None:
        until = time.monotonic() + _LONGEST_S
        while not (self._folder / other).exists():
            assert time.monotonic() < until, f"{other} did not come"
            time.sleep(0.02)


def train(number: int, lighthouse: str, n_steps: int, role: Role) -> None:
    """Train until all groups together have taken `n_steps`."""
    role.wait_for_its_turn()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = tiny_model("bert", dropout=0.0)
    whet.optimize(model, padding="all")
    own = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        own.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=10)), load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": own.state_dict()}, min_replica_size=1,
        use_async_quorum=False, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        hostname="127.0.0.1", lighthouse_addr=lighthouse, replica_id=f"group{number}", timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(seconds=60),
    )  # fmt: skip
    role.begin()
    wrapped, optimizer = torchft.DistributedDataParallel(manager, model), torchft.Optimizer(manager, own)
    while manager.current_step() < n_steps:
        optimizer.zero_grad()  # agrees on the groups of this step
        step, n_groups, place = manager.current_step(), manager.num_participants(), manager.participating_rank()
        share = slice(place * N_ROWS // n_groups, (place + 1) * N_ROWS // n_groups)
        rows = {name: one[share] for name, one in padded(tiny_rows(N_ROWS, seed=step % 4)).items()}
        loss = wrapped(**rows).loss
        loss.backward()
        optimizer.step()
        if manager.current_step() > step:  # else a group was lost, and the step is taken again
            print(json.dumps({"step": step, "groups": n_groups, "loss": float(loss.detach())}), flush=True)
            role.end_step(n_groups)
    held = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    print(json.dumps({"digest": hashlib.sha256(held).hexdigest()}), flush=True)
    manager.shutdown(wait=False)
    os._exit(0)


if __name__ == "__main__":
    name, folder = sys.argv[4:] or ("", "")
    train(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Role(name, Path(folder)))
