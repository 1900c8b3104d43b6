"""Run the kernel tests on emulated aarch64 with the wheel from dist/: `make test-aarch64`.

    python tools/wheels/aarch64.py
    python tools/wheels/aarch64.py tests/kernels/test_native_norm.py -x

The first run makes .venv-aarch64: Debian's arm64 Python, downloaded by apt and unpacked without root, and the packages
that whet needs, installed by pip for that platform. Every process runs under QEMU's user-mode emulation, the tests' own
subprocesses too: the environment's `python` is a script that starts the emulator.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from steps import ROOT, fail, run

FOLDER = ROOT / ".venv-aarch64"
DEBS = FOLDER / "debian"
EMULATOR = "qemu-aarch64-static"
TORCH = "torch==2.10.0"
"""The last release whose aarch64 wheel on the default index needs no CUDA libraries."""
NEEDED_BY_TORCH = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
TESTS = (
    "tests/kernels",
    # these count the memory of the process, and that includes the emulator's
    "--ignore=tests/kernels/test_native_memory.py",
    "--deselect=tests/kernels/test_allocator.py::test_steps_fault_no_new_pages",
    # WHET_ISA chooses among the instruction sets of x86-64; aarch64 has one
    "-k not instruction_set and not (rounded_as_torch_rounds and (v3 or v4 or baseline))",
)


def main(words: Sequence[str]) -> int:
    """Return the exit code of pytest, run on these words or on all kernel tests."""
    emulator = shutil.which(EMULATOR)
    if emulator is None or shutil.which("apt-get") is None:
        fail("aarch64 cannot be emulated here", "it needs Debian and its emulator", "apt-get install qemu-user-static")
    wheels = list((ROOT / "dist").glob("whet_train-*_aarch64.whl"))
    if not wheels:
        fail("there is no aarch64 wheel in dist/", "the tests run on it", "run make wheel")
    if not (FOLDER / ".made").exists():
        make_environment(emulator)
    pip_install("--no-deps", "--upgrade", str(wheels[0]))
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(FOLDER / "bin" / "python"), "-m", "pytest", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0"]
    return subprocess.run([*command, *(words or TESTS)], env=env, cwd=ROOT, check=False).returncode


def make_environment(emulator: str) -> None:
    """Fill .venv-aarch64: a Python, a script that runs it, and the packages. Takes about a minute."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    DEBS.mkdir(parents=True)
    for package in download_python():
        run(["dpkg-deb", "--extract", str(package), str(DEBS)])
    python = DEBS / "usr" / "bin" / f"python{debian_python()}"
    (FOLDER / "bin").mkdir()
    (FOLDER / "pyvenv.cfg").write_text(f"home = {python.parent}\ninclude-system-site-packages = false\n", "utf-8")
    script = FOLDER / "bin" / "python"
    script.write_text(f'#!/bin/sh\nexec {emulator} -0 "$0" -L "{DEBS}" "{python}" "$@"\n', "utf-8")
    script.chmod(0o755)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    others = [need for need in project["dependencies"] if not need.startswith("torch")]
    pip_install("--no-deps", TORCH)
    pip_install(*others, *NEEDED_BY_TORCH, f"pytest=={version('pytest')}", f"hypothesis=={version('hypothesis')}")
    (FOLDER / ".made").touch()


def download_python() -> list[Path]:
    """Return the packages of Debian's arm64 Python, with all that they depend on. Leaves the system's apt alone."""
    state = FOLDER / "apt"
    for name in ("lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True)
    (state / "status").touch()
    options = {
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "", "Debug::NoLocking": "1",
        "Dir::State": state, "Dir::State::status": state / "status", "Dir::Cache": state,
    }  # fmt: skip
    command = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    run([*command, "update"])
    run([*command, "install", "--yes", "--no-install-recommends", "--download-only", "python3", "libstdc++6"])
    return sorted((state / "archives").glob("*.deb"))


def debian_python() -> str:
    """Return the version of the unpacked Python, such as 3.11."""
    (name,) = (path.name for path in (DEBS / "usr" / "bin").iterdir() if re.fullmatch(r"python3\.\d+", path.name))
    return name.removeprefix("python")


def pip_install(*words: str) -> None:
    """Install packages for aarch64, by this machine's pip."""
    python = debian_python()
    target = FOLDER / "lib" / f"python{python}" / "site-packages"
    options = ["--target", str(target), "--python-version", python, "--only-binary=:all:", "--no-compile", "--quiet"]
    platforms = [f"--platform={name}" for name in PLATFORMS]
    run([sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *options, *platforms, *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
