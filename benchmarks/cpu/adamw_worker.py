"""A worker that measures AdamW over a model's parameters, whet's and torch's, against copies in the same process."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from flops import encoder_of
from protocol import Channel
from torch import Tensor

from whet.kernels.adamw import AdamWStep, AdamWTensors
from whet.kernels.library import library

BYTES_PER_PARAMETER = 28
"""Read: parameter, gradient and two moments. Written: parameter and two moments. Four bytes each."""
COPIED = 2**26
"""Numbers that the copy moves (256 MiB to 256 MiB): far more than any cache holds."""


def shapes_of(config_path: Path) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of a BERT of this configuration."""
    config = json.loads(config_path.read_text())
    encoder = encoder_of(config)
    d, f = encoder.width, encoder.inner
    layer = [(d, d), (d,)] * 4 + [(f, d), (f,), (d, f), (d,)] + [(d,)] * 4
    tables = [(config["vocab_size"], d), (config["max_position_embeddings"], d), (2, d), (d,), (d,)]
    return [*tables, *layer * encoder.n_layers, (encoder.n_outputs, d), (encoder.n_outputs,)]


def whet_update(shapes: list[tuple[int, ...]]) -> Callable[[], None]:
    """Return whet's native update of all parameters."""
    params, grads, first, second = (filled(shapes) for _ in range(4))
    tensors, rates = AdamWTensors(params, first, second), [(1e-5, 0.01)] * len(shapes)
    step = AdamWStep(0.9, 0.999, 1e-8, 1)
    return lambda: tensors.update(grads, rates, step)


def torch_update(shapes: list[tuple[int, ...]]) -> Callable[[], None]:
    """Return the update of torch's fused AdamW."""
    params = [tensor.requires_grad_() for tensor in filled(shapes)]
    for param, grad in zip(params, filled(shapes), strict=True):
        param.grad = grad
    optimizer = torch.optim.AdamW(params, lr=1e-5, fused=True)
    return lambda: optimizer.step() and None


def filled(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Return small positive tensors of these shapes."""
    return [torch.rand(shape) * 0.01 + 0.001 for shape in shapes]


def seconds(run: Callable[[], object]) -> float:
    """Return how long it takes."""
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def main() -> None:
    """Measure for each request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--copied", type=int, default=COPIED)
    options, channel = parser.parse_args(), Channel()
    shapes = shapes_of(options.config)
    n = sum(torch.Size(shape).numel() for shape in shapes)
    source, target = torch.rand(options.copied), torch.zeros(options.copied)
    runs = {"whet": whet_update(shapes), "torch": torch_update(shapes), "copy": lambda: target.copy_(source)}
    moved = {"whet": BYTES_PER_PARAMETER * n, "torch": BYTES_PER_PARAMETER * n, "copy": 8 * options.copied}
    for run in runs.values():  # touches every page
        run()
    channel.answer(n_parameters=n, native=library() is not None, n_threads=torch.get_num_threads())
    while channel.read()["do"] != "stop":
        channel.answer(bytes_per_s={name: moved[name] / seconds(run) for name, run in runs.items()})


if __name__ == "__main__":
    main()
