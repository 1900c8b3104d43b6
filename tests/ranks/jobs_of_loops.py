"""What ranks do in a training loop of their own."""

from __future__ import annotations

import hashlib
from typing import Any

import accelerate
import numpy as np
import torch

import whet
from tiny import tiny_model, tiny_rows


def own_loop(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train with a loop of one's own, through torch's DistributedDataParallel or accelerate, as `job` says."""
    model, losses = tiny_model("bert"), []
    if job["optimized"]:
        whet.optimize(model, padding="all")  # the softmax over padding too, as transformers computes it
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if job["by"] == "accelerate":
        accelerator = accelerate.Accelerator(cpu=True)
        wrapped, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    else:
        torch.distributed.init_process_group("gloo")
        wrapped, backward = torch.nn.parallel.DistributedDataParallel(model), torch.Tensor.backward
    for step in range(4):
        own = tiny_rows(8, seed=step).take(range(rank, 8, 2))
        inputs = padded(own)
        loss = wrapped(**inputs).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    held = [one.detach() for one in model.parameters()]
    return {"losses": losses, "weights": [one.flatten()[:: max(one.numel() // 7, 1)].tolist() for one in held],
            "digest": hashlib.sha256(b"".join(one.numpy().tobytes() for one in held)).hexdigest()}  # fmt: skip


def padded(rows: Any) -> dict[str, torch.Tensor]:
    """Return the rows as tensors (B, T), padded to the longest."""
    lengths = rows.lengths
    longest = int(lengths.max())
    found = {name: np.zeros((len(rows), longest), dtype=np.int64) for name in (*rows.tokens, "attention_mask")}
    for n, (first, last) in enumerate(zip(rows.cu_seqlens[:-1], rows.cu_seqlens[1:], strict=True)):
        for name, column in rows.tokens.items():
            found[name][n, : last - first] = column[first:last]
        found["attention_mask"][n, : last - first] = 1
    return {name: torch.from_numpy(one) for name, one in (found | dict(rows.labels)).items()}
