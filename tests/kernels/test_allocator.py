"""The allocator keeps freed memory: steps after the first ones take no new pages from the system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.true_start

# Takes and frees as a training step does: blocks of some megabytes, far above glibc's own threshold for giving back.
PROGRAM = """
import logging, resource, sys
logging.basicConfig(stream=sys.stderr, level=logging.INFO)
from whet.kernels.allocator import keep_freed_memory
print(keep_freed_memory())
import torch
def step():
    kept = [torch.ones(n << 18) for n in (5, 40, 9, 17)]
    return sum(float(block[0]) for block in kept)
for _ in range(3): step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5): step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES_A_STEP = (5 + 40 + 9 + 17) * (1 << 18) * 4 // 4096


def faults(**environment: str) -> tuple[bool, int]:
    """Return whether the allocator was told, and the page faults of five steps."""
    env = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "WHET_KEEP_MEMORY")}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env | environment, capture_output=True, text=True, check=True
    )
    told, count = found.stdout.split()
    return told == "True", int(count)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own settings")
def test_steps_fault_no_new_pages() -> None:
    told, count = faults()
    if not told:
        pytest.skip("this C library is not glibc")
    told_not, count_not = faults(WHET_KEEP_MEMORY="0")
    assert not told_not
    # Without it at least the large blocks come back to be faulted in anew, at every step; with huge pages of the
    # system's own choice that is one fault for 512 pages.
    assert count < PAGES_A_STEP / 512
    assert count_not > count


def test_other_allocators_are_left_unchanged() -> None:
    told, _ = faults(LD_PRELOAD="libtcmalloc-that-is-not-there.so")  # the loader warns, and goes on
    assert not told
