"""One replica group of torchft, of one rank, that trains an optimized model.

    python torchft_job.py NUMBER LIGHTHOUSE N_STEPS

It prints a line of JSON for each step.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torchft  # pyright: ignore[reportMissingImports]
from jobs_of_loops import padded
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import whet
from tiny import tiny_model, tiny_rows

N_ROWS = 8


def train(number: int, lighthouse: str, n_steps: int) -> None:
    """Train until all groups together have taken `n_steps`."""
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
    wrapped, optimizer = torchft.DistributedDataParallel(manager, model), torchft.Optimizer(manager, own)
    while (step := manager.current_step()) < n_steps:
        optimizer.zero_grad()  # agrees on the groups of this step
        step, n_groups, place = manager.current_step(), manager.num_participants(), manager.participating_rank()
        share = slice(place * N_ROWS // n_groups, (place + 1) * N_ROWS // n_groups)
        rows = {name: one[share] for name, one in padded(tiny_rows(N_ROWS, seed=step % 4)).items()}
        loss = wrapped(**rows).loss
        loss.backward()
        optimizer.step()
        print(json.dumps({"step": step, "groups": n_groups, "loss": float(loss.detach())}), flush=True)
    held = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    print(json.dumps({"digest": hashlib.sha256(held).hexdigest()}), flush=True)
    manager.shutdown(wait=False)
    os._exit(0)


if __name__ == "__main__":
    train(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
