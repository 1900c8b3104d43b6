"""`whet bundle`: this installation, a model and the guide in one file, for machines without a network.

The wheels are those of the packages that whet needs here, at the versions that are installed here: what is installed
there is what was tried here. So the other machine needs the same kind of processor and the same Python. Its script
checks every file, makes an environment and installs without asking any index.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from whet import json_output, system
from whet.console import amount, plural
from whet.errors import ConfigError, OutputError, StorageError
from whet.optional import extra
from whet.version import DISTRIBUTION, __version__
from whet.watch import printing

_GUIDE = ("docs", "skills", "llms.txt", "README.md")
"""What a source tree has of the guide; a wheel has none of it."""
_NOT_OF_THE_HUB = ["*.bin", "*.py", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.ckpt", "openvino/*"]
"""Pickles and code, which whet does not read, and weights for other runtimes."""
_FREE = 1.1
"""Free bytes for each byte of the files, while they are put into the archive."""


def run_bundle(file: str, model: str | None, extras: Sequence[str]) -> int:
    """Write the bundle and show what is in it."""
    output = Path(file).absolute()
    if os.path.lexists(output):
        fix = "name another file, or remove it"
        raise OutputError(what="the file exists", got=str(output), why="a bundle replaces nothing", fix=fix)
    packages = needed(extras)
    json_output.add_outputs(bundle=output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
            root = Path(scratch) / f"whet-{__version__}"
            own = collect_model(model, root / "models")
            printing.show_wrapped(f"wheels: {plural(len(packages) + 2, 'package')} at the versions installed here")
            collect_wheels(packages, root / "wheels")
            left_out = collect_guide(root)
            write_script(root, own)
            write_sums(root)
            size = pack(root, output)
    except OSError as error:
        raise StorageError(
            what=f"the bundle cannot be written to {output}",
            got=str(error),
            why="it is written completely or not at all",
            fix=f"make room in {output.parent}, or name a file on another disk",
        ) from error  # fmt: skip
    json_output.add(packages=packages, left_out=left_out)
    if left_out:
        printing.show_wrapped(f"left out: {', '.join(left_out)}, which only a source tree of whet has")
    printing.show_wrapped(f"{output}: {amount(size)}. There: tar xf {output.name}; sh {root.name}/install.sh")
    return 0


def needed(extras: Sequence[str]) -> dict[str, str]:
    """Return name and version of every installed package that whet and these extras need, without whet itself.

    Raises ConfigError naming extras that are unknown, and packages that are not installed.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    known = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    if odd := [name for name in extras if name not in known]:
        raise ConfigError(
            what="whet has no such extra",
            got=", ".join(odd),
            why="extras are optional parts of whet that need packages",
            fix=f"choose from {', '.join(known)}",
        )  # fmt: skip
    found: dict[str, str] = {}
    missing: dict[str, str] = {}
    waiting = [(DISTRIBUTION, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, of = waiting.pop()
        if (name, of) in seen:
            continue
        seen.add((name, of))
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker and not any(requirement.marker.evaluate({"extra": one}) for one in of or {""}):
                continue
            package = canonicalize_name(requirement.name)
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                missing[package] = name
                continue
            waiting.append((package, frozenset(requirement.extras)))
    found.pop(DISTRIBUTION, None)
    if missing:
        odd = ", ".join(f"{package} (for {name})" for package, name in missing.items())
        fix = f"run: pip install {extra(','.join(extras))}" if extras else f"run: pip install {DISTRIBUTION}"
        raise ConfigError(what="packages are missing here", got=odd, why="a bundle is what is installed here", fix=fix)
    return dict(sorted(found.items()))


def collect_wheels(packages: Mapping[str, str], folder: Path) -> None:
    """Get the wheels of these packages, of pip and of whet, by pip and its settings."""
    words = ["wheel", "-q", "--no-deps", "-w", str(folder)]
    exact = [f"{name}=={version}" for name, version in packages.items()]
    try:
        pip = [f"pip=={metadata.version('pip')}"]
    except metadata.PackageNotFoundError:
        raise ConfigError(
            what="pip is not installed here", got=sys.prefix, why="pip gets the wheels, and goes into the bundle",
            fix="run: python -m ensurepip, or uv pip install pip",
        ) from None  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="whet-bundle-") as scratch:  # no name of a package is taken for a folder
        for names in (exact, pip, [_source() or f"{DISTRIBUTION}=={__version__}"]):
            done = subprocess.run(  # noqa: S603 - pip, with names of packages
                [sys.executable, "-m", "pip", *words, *names], cwd=scratch, capture_output=True, text=True, check=False
            )
            if done.returncode:
                said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-3:])
                raise ConfigError(
                    what="pip cannot get the wheels",
                    got=said,
                    why="a bundle holds the wheel of every package",
                    fix="set the index that the packages came from, such as PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS; "
                    "torch for CPUs: https://download.pytorch.org/whl/cpu",
                )  # fmt: skip


def _source() -> str | None:
    """Return the folder that whet was installed from; None if it came from an index."""
    text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    url = json.loads(text).get("url", "") if text else ""
    return url.removeprefix("file://") if url.startswith("file://") else None


def collect_model(name: str | None, folder: Path) -> str | None:
    """Copy the model's files, and return the name of its folder; None if there is no model."""
    if name is None:
        return None
    from whet.models.loading.hub import hub_problem, missing_folder

    flag = "--model_name_or_path"
    if problem := missing_folder(name, flag) or hub_problem(name, flag, "model"):
        raise ConfigError.of([problem])
    own = Path(name).resolve().name
    if Path(name).is_dir():
        shutil.copytree(name, folder / own, ignore=shutil.ignore_patterns("checkpoint-*", "__pycache__", ".*"))
        return own
    from huggingface_hub import snapshot_download

    snapshot_download(name, local_dir=folder / own, ignore_patterns=_NOT_OF_THE_HUB)
    shutil.rmtree(folder / own / ".cache", ignore_errors=True)
    return own


def collect_guide(root: Path) -> list[str]:
    """Copy docs and skills of the source tree, and return the names of what is not there."""
    tree = Path(__file__).parents[3]
    there = [name for name in _GUIDE if (tree / "pyproject.toml").exists() and (tree / name).exists()]
    for name in there:
        source, place = tree / name, root / name
        if source.is_dir():
            shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            shutil.copyfile(source, place)
    return [name for name in _GUIDE if name not in there]


_SCRIPT = Path(__file__).with_name("bundle_install.sh")


def write_script(root: Path, model: str | None) -> None:
    """Write the script that installs."""
    values = {
        "VERSION": __version__, "PYTHON": ".".join(map(str, sys.version_info[:2])), "MACHINE": platform.machine(),
        "MODEL": f"; the model: $here/models/{model}" if model else "",
    }  # fmt: skip
    text = _SCRIPT.read_text("utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    (root / "install.sh").write_text(text, "utf-8")


def write_sums(root: Path) -> None:
    """Write the SHA-256 of every file, as sha256sum reads them."""
    lines = []
    for path in _files(root):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.relative_to(root).as_posix()}\n")
    (root / "SHA256SUMS").write_text("".join(lines), "utf-8")


def pack(root: Path, output: Path) -> int:
    """Write the archive, all or nothing, and return its bytes; the same files give the same archive."""
    free, size = shutil.disk_usage(output.parent).free, sum(path.stat().st_size for path in _files(root))
    if free < _FREE * size:
        raise OSError(28, f"the archive needs {amount(_FREE * size)}, and {amount(free)} are free")
    staged = root.parent / output.name
    with tarfile.open(staged, "w") as archive:
        for path in _files(root):
            entry = archive.gettarinfo(path, path.relative_to(root.parent).as_posix())
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname, entry.mode = 0, 0, 0, "", "", 0o644
            with path.open("rb") as file:
                archive.addfile(entry, file)
    system.fsync(staged)
    system.rename(staged, output)
    return output.stat().st_size


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())
