"""Small native layers run on the thread that calls them; large ones start others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from native_support import need_native

need_native()
pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
_SCRIPT = """
import os
import torch
from whet.kernels.activation import bias_act
from whet.kernels.norm import add_norm
from whet.kernels.norm import Norm

def run(rows, width=384):
    x = torch.randn(rows, width, requires_grad=True)
    norm = Norm(torch.ones(width, requires_grad=True), torch.zeros(width, requires_grad=True), 1e-5)
    y, _ = add_norm(x, x * 2, norm)
    bias_act(y, torch.zeros(width, requires_grad=True), "gelu").backward(torch.ones(rows, width))
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
torch.randn(4, 4, requires_grad=True).sum().backward()  # autograd may have a thread of its own
before = len(os.listdir("/proc/self/task"))
print(run(16) - before, run(4000) - before)
"""


def test_layers_of_few_rows_start_no_threads() -> None:
    """OpenMP makes its threads in the first loop that wants them, and keeps them."""
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    of_few, of_many = map(int, done.stdout.split())
    assert of_few == 0
    assert of_many == 2
