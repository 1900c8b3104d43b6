"""What a rank gets next to its cores: memory of its NUMA node, and variables of the OpenMP library that serves it."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from whet.hardware import cpu, topology
from whet.hardware.rank_plan import plan_ranks
from whet.launch.start import Preload, changed_variables

_POLICY = """
import ctypes, json, os
number = {"x86_64": 239, "aarch64": 236}[os.uname().machine]  # get_mempolicy
def policy():
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    failed = ctypes.CDLL(None).syscall(number, ctypes.byref(mode), mask, 64 * len(mask) + 1, None, 0)
    return None if failed else [mode.value, [n for n in range(1024) if mask[n // 64] >> n % 64 & 1]]
"""
_DEFAULT, _PREFERRED = 0, 1
"""MPOL_DEFAULT and MPOL_PREFERRED of linux/mempolicy.h."""


def _answer(words: list[str], folder: Path) -> object:
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _need_policies() -> None:
    if os.uname().machine not in ("x86_64", "aarch64"):
        pytest.skip("the numbers of the system calls are known for x86_64 and aarch64")
    own, mode = {"x86_64": 239, "aarch64": 236}[os.uname().machine], ctypes.c_int(-1)
    if ctypes.CDLL(None).syscall(own, ctypes.byref(mode), None, 0, None, 0):
        pytest.skip("this kernel, or its sandbox, has no memory policies")
    if mode.value != _DEFAULT:
        pytest.skip("the tests themselves run under a policy, such as numactl's, which all processes inherit")


@pytest.mark.slow
def test_rank_takes_memory_of_the_node_of_its_cores(tmp_path: Path) -> None:
    """Read by the rank itself: its guardian has set it, and whatever the rank starts inherits it."""
    _need_policies()
    (tmp_path / "train.py").write_text(_POLICY + "print(json.dumps(policy()))\n", "utf-8")
    words = ["-m", "whet", "launch", "--memory_allocator", "default", "--openmp", "default", "--nproc_per_node", "1"]
    own = topology.read(cpus=cpu.usable_cpus()).within(cpu.usable_cpus())
    (plan,) = plan_ranks(own, quota_cores=cpu.quota_cores(), n_ranks=1, kept_free=0)
    expected = [_PREFERRED, list(plan.nodes)] if len(plan.nodes) == 1 else [_DEFAULT, []]
    assert _answer([*words, "--", "train.py"], tmp_path) == expected


def test_memory_is_left_alone_where_one_node_cannot_be_preferred(tmp_path: Path) -> None:
    """Cores of two nodes; a node that this machine does not have, which the kernel refuses."""
    _need_policies()
    node = topology.read(cpus=cpu.usable_cpus()).within(cpu.usable_cpus()).nodes[0]
    code = "from whet.launch.rank import prefer_memory_of as prefer\n"
    code += "print(json.dumps([prefer([0, 1]), prefer([]), prefer([1000]), policy()]))"
    assert _answer(["-c", _POLICY + code], tmp_path) == [False, False, False, [_DEFAULT, []]]
    assert _answer(["-c", _POLICY + code.replace("1000", str(node))], tmp_path) == [
        False,
        False,
        True,
        [_PREFERRED, [node]],
    ]


def test_variables_of_intels_openmp_come_with_the_library_alone() -> None:
    """Without libiomp5 nothing reads them, and a reader of the log would take them for working."""
    own = topology.read(cpus=cpu.usable_cpus()).within(cpu.usable_cpus())
    (plan,) = plan_ranks(own, quota_cores=cpu.quota_cores(), n_ranks=1, kept_free=0)
    for preload in (Preload(), Preload(allocator=Path("/lib/libtcmalloc.so.4"))):
        without, _ = changed_variables({}, plan, preload, alone=False, interface="lo")
        assert not [name for name in without if name.startswith("KMP_")]
    intel = Preload(openmp=Path("/lib/libiomp5.so"))
    served, _ = changed_variables({}, plan, intel, alone=False, interface="lo")
    assert served["KMP_BLOCKTIME"] == "1"
    assert served["LD_PRELOAD"] == "/lib/libiomp5.so"
    kept, _ = changed_variables({"KMP_BLOCKTIME": "200"}, plan, intel, alone=False, interface="lo")
    assert kept["KMP_BLOCKTIME"] == "200"
