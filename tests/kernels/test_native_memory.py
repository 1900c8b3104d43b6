"""What the long-row operators hold: attention nothing of T x T, the loss of a vocabulary never (N, V) twice.

Peaks are those of a process of its own (VmHWM), above what it held before the operator ran.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from native_support import need_native

need_native()
HERE = Path(__file__).parent
_MIB = 2**20

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")

_MEASURE = """
import re, sys, torch
from pathlib import Path
from native_support import position_of
from whet.kernels import packed_attention as fused_attention
from whet.kernels import cross_entropy as fused_loss
from whet.kernels.attention_spec import AttentionSpec, Relative
from whet.kernels.batch_position import Drop

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def attention(n_tokens):
    position = position_of([n_tokens])
    x = torch.randn(n_tokens, 3, 1, 64, requires_grad=True)
    spec = AttentionSpec(position.cu_seqlens, 0.125, False, Drop(0.1, position, 5))
    grad = torch.ones(n_tokens, 1, 64)
    return lambda: fused_attention.attend_joined(x, spec).backward(grad)

def attention_by_distance(n_tokens):
    x, tables = torch.randn(n_tokens, 3, 1, 64, requires_grad=True), torch.randn(2, 512, 1, 64, requires_grad=True)
    places = torch.arange(2 * n_tokens - 1, dtype=torch.int32).clamp(n_tokens - 256, n_tokens + 255) - (n_tokens - 256)
    spec = AttentionSpec(position_of([n_tokens]).cu_seqlens, 0.125)
    grad = torch.ones(n_tokens, 1, 64)
    return lambda: fused_attention.attend_joined(x, spec, Relative(tables[0], tables[1], places)).backward(grad)

def cross_entropy(n_tokens):
    hidden = torch.randn(n_tokens, 32, requires_grad=True)
    weight = torch.randn(30000, 32, requires_grad=True)
    labels = torch.randint(0, 30000, (n_tokens,))
    return lambda: fused_loss.linear_cross_entropy(hidden, weight, labels).backward()

def measured(operator, n_tokens):
    run = operator(n_tokens)
    held = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run()
    return status("VmHWM") - held

torch.set_num_threads(2)
operator, n_tokens = globals()[sys.argv[1]], int(sys.argv[2])
operator(64)()  # what torch and the library set up once
print(measured(operator, n_tokens))
"""


_SHORT = """
import resource
torch.set_num_threads(2)
attention_by_distance(64)()
run = attention_by_distance(65536)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + 40 * 2**20,) * 2)
run()
"""


def test_an_operator_without_memory_for_its_tables_says_so() -> None:
    """The output of 16 MiB has room, and the packed tables of 64 MiB have not."""
    program = _MEASURE.partition("def measured")[0] + _SHORT
    done = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGABRT
    assert "whet: no memory for" in done.stderr


def peak_mib(operator: str, n_tokens: int) -> float:
    """Return the peak of a forward and backward pass above what the process held, in MiB."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, operator, str(n_tokens)],
        cwd=HERE, env=dict(os.environ), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout) / _MIB


def test_attention_over_8192_tokens_stores_no_square_matrix() -> None:
    """One head: the square of probabilities alone would be 256 MiB; q, k, v, output and their gradients are 14."""
    n_tokens = 8192
    assert peak_mib("attention", n_tokens) < 0.125 * 4 * n_tokens**2 / _MIB


def test_attention_by_distance_has_memory_linear_in_the_tokens() -> None:
    """Tables by distance, both terms, and their gradients."""
    assert peak_mib("attention_by_distance", 8192) < 4 * 1.5 * max(peak_mib("attention_by_distance", 2048), 4.0)


@pytest.mark.night
@pytest.mark.slow
def test_attention_memory_is_linear_in_the_tokens() -> None:
    """Four times the tokens: at most about four times the memory, where a square would be sixteen times as large."""
    assert peak_mib("attention", 16384) < 4 * 1.5 * max(peak_mib("attention", 4096), 4.0)


def test_vocabulary_loss_never_stores_all_logits() -> None:
    """The logits of 8,000 tokens are 916 MiB; a few chunks of 32 MiB and both gradients stay far below."""
    n_tokens, n_words = 8000, 30000
    assert peak_mib("cross_entropy", n_tokens) < 0.4 * 4 * n_tokens * n_words / _MIB
