"""`whet bundle`: this installation, a model and the guide in one file, for machines without a network.

The wheels are those of the packages that whet needs here, at the versions that are installed here, from where they were
installed: what is installed there is what was tried here. So the other machine needs the same kind of processor and the
same Python. Its script checks every file, makes an environment and installs without asking any index. A model comes
with what it needs there: an adapter with the weights under it, a checkpoint with what lies around it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from email import message_from_bytes
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from whet import json_output, system
from whet.console import amount, plural
from whet.errors import ConfigError, OutputError, StorageError
from whet.optional import extra
from whet.version import DISTRIBUTION, __version__
from whet.watch import printing

_GUIDE = ("docs", "skills", "llms.txt", "README.md")
"""What a source tree has of the guide; a wheel has none of it."""
_NOT_OF_THE_HUB = ["*.bin", "*.py", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.ckpt", "openvino*"]
"""Pickles and code, which whet does not read, and weights for other runtimes."""
_FREE = 1.1
"""Free bytes for each byte of the files, while they are put into the archive."""


def run_bundle(
    file: str, model: str | None, base: str | None, extras: Sequence[str], is_of_library: Callable[[Path], bool]
) -> int:
    """Write the bundle and show what is in it.

    `is_of_library` returns whether a folder holds a model of sentence-transformers.
    """
    output = Path(file).absolute()
    if os.path.lexists(output):
        fix = "name another file, or remove it"
        raise OutputError(what="the file exists", got=str(output), why="a bundle replaces nothing", fix=fix)
    packages = needed(extras)
    wanted, gone = requirements([*packages, "pip", DISTRIBUTION])
    json_output.add_outputs(bundle=output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
            root = Path(scratch) / f"whet-{__version__}"
            names = [] if model is None else collect_model(model, base, root / "models", extras, is_of_library)
            printing.show_wrapped(f"wheels: {plural(len(wanted), 'package')} at the versions installed here")
            collect_wheels(wanted, root / "wheels", extras)
            left_out = collect_guide(root)
            write_script(root, *names)
            write_sums(root)
            size = pack(root, output)
    except OSError as error:
        raise StorageError(
            what=f"the bundle cannot be written to {output}",
            got=str(error),
            why="it is written completely or not at all",
            fix=f"make room in {output.parent}, or name a file on another disk",
        ) from error  # fmt: skip
    json_output.add(packages=packages, left_out=left_out, as_releases=[*gone])
    if gone:
        printing.show_wrapped(
            f"as releases of the index: {', '.join(gone)}, which were installed from places that are gone, such as "
            f"{next(iter(gone.values()))}; a release of the same version may be other code"
        )
    if left_out:
        printing.show_wrapped(f"left out: {', '.join(left_out)}, which only a source tree of whet has")
    printing.show_wrapped(f"{output}: {amount(size)}. There: tar xf {output.name}; sh {root.name}/install.sh")
    return 0


def needed(extras: Sequence[str]) -> dict[str, str]:
    """Return name and version of every installed package that whet and these extras need, without whet itself.

    Raises ConfigError naming extras that are unknown, and packages that are not installed.
    """
    known = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    if odd := [name for name in extras if name not in known]:
        raise ConfigError(
            what="whet has no such extra",
            got=", ".join(odd),
            why="extras are optional parts of whet that need packages",
            fix=f"choose from {', '.join(known)}",
        )  # fmt: skip
    found, missing = _walk({DISTRIBUTION: extras}, _needs_of_installed)
    if missing:
        fix = f"run: pip install {extra(','.join(extras))}" if extras else f"run: pip install {DISTRIBUTION}"
        raise ConfigError(
            what="packages are missing here",
            got=_with_reasons(missing),
            why="a bundle is what is installed here",
            fix=fix,
        )
    return {name: metadata.version(name) for name in sorted(found - {DISTRIBUTION})}


def _needs_of_installed(name: str) -> Sequence[str] | None:
    try:
        return metadata.requires(name) or ()
    except metadata.PackageNotFoundError:
        return None


def _walk(
    start: Mapping[str, Iterable[str]], needs: Callable[[str], Sequence[str] | None]
) -> tuple[set[str], dict[str, str]]:
    """Return the packages of `start` and those that they need, and those that are missing, with what needs them.

    `start` are names with their extras. `needs` returns the requirements of a package, None if it is missing.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: set[str] = set()
    missing: dict[str, str] = {}
    waiting = [(name, frozenset(extras), "") for name, extras in start.items()]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, of, needed_by = waiting.pop()
        if (name, of) in seen:
            continue
        seen.add((name, of))
        if (texts := needs(name)) is None:
            missing[name] = needed_by
            continue
        found.add(name)
        for text in texts:
            requirement = Requirement(text)
            if requirement.marker and not any(requirement.marker.evaluate({"extra": one}) for one in of or {""}):
                continue
            waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras), name))
    return found, missing


def _with_reasons(missing: Mapping[str, str]) -> str:
    return ", ".join(f"{package} (for {name})" for package, name in missing.items())


def requirements(packages: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return what pip gets the installed code of each package by: its version, or where it was installed from.

    With them come those packages whose folder or file is not there any more, and that place: all packages of conda
    name a folder of the machine that built them. pip gets them by their version (torch without CUDA in its build for
    CPUs), but for whet, which has no other code. Raises ConfigError for whet from such a place, and naming packages
    that are not installed.
    """
    found, gone, missing = [], {}, []
    for name in packages:
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        release, said = f"{name}=={package.version}", json.loads(package.read_text("direct_url.json") or "{}")
        url = said.get("url", "")
        parts = urlsplit(url)
        place = url2pathname(parts.path)
        if parts.scheme == "file" and not os.path.exists(place):  # noqa: PTH110 - Path.exists raises for some names
            gone[name], url, release = place, "", _release(name, package.version)
        found.append(_direct(url, said) if url else release)
    if missing:  # pip alone: the others were found
        raise ConfigError(
            what="pip is not installed here", got=sys.prefix, why="pip gets the wheels, and goes into the bundle",
            fix="run: python -m ensurepip, or uv pip install pip",
        )  # fmt: skip
    if DISTRIBUTION in gone:
        raise ConfigError(
            what="whet was installed from a place that is not there any more",
            got=gone[DISTRIBUTION],
            why="a bundle is the whet that is installed here, and a release of that version may be other code",
            fix=f"put it back, or install a release: pip install --force-reinstall --no-deps {DISTRIBUTION}",
        )
    return found, gone


def _release(name: str, version: str) -> str:
    """Return what pip gets a package by that another index built."""
    if name != "torch" or "+" in version:
        return f"{name}=={version}"
    import torch

    version = re.sub(r"\.post\d+$", "", version)  # conda-forge counts its builds in it
    has_gpus = torch.version.cuda is not None or torch.version.hip is not None
    # PyPI's wheel for Linux needs NVIDIA's packages, which are not here
    return f"torch=={version}" if has_gpus or not system.is_linux() else f"torch=={version}+cpu"


def _direct(url: str, said: Mapping[str, Any]) -> str:
    """Return the URL of what was installed, as pip takes it; `said` is the package's direct_url.json."""
    more = {}
    if (of := said.get("vcs_info")) is not None:
        url = f"{of['vcs']}+{url}@{of['commit_id']}"
    elif digest := said.get("archive_info", {}).get("hashes", {}).get("sha256"):
        more["sha256"] = digest
    if inside := said.get("subdirectory"):
        more["subdirectory"] = inside
    return url + ("#" + "&".join(f"{name}={value}" for name, value in more.items()) if more else "")


def collect_wheels(wanted: Sequence[str], folder: Path, extras: Sequence[str] = ()) -> None:
    """Get the wheels of these requirements by pip and its settings.

    Packages in a build for CPUs, such as 2.13.0+cpu, come from torch's own index, unless pip's settings name places.
    Raises ConfigError if a wheel, or one of whet's extras, needs a package that is not among them.
    """
    for_cpus = [one for one in wanted if "==" in one and one.endswith("+cpu")]
    if for_cpus and _PLACES.search(_pip("config", "list")):
        for_cpus = []
    others = [one for one in wanted if one not in for_cpus]
    for index, names in (([], others), (["--extra-index-url", TORCH_FOR_CPUS], for_cpus)):
        if names:
            _pip("wheel", "-q", "--no-deps", "-w", str(folder), *index, *names)
    _require_needs(folder, extras)


def _require_needs(folder: Path, extras: Sequence[str]) -> None:
    """Raise ConfigError if a wheel of the folder needs a package of which it has none."""
    from packaging.utils import canonicalize_name

    wheels: dict[str, Message] = {canonicalize_name(one["Name"]): one for one in map(_about, folder.glob("*.whl"))}
    start = {name: extras if name == DISTRIBUTION else () for name in wheels}
    _, missing = _walk(start, lambda name: wheels[name].get_all("Requires-Dist", ()) if name in wheels else None)
    if missing:
        others = " ".join(f"{name}=={wheels[name]['Version']}" for name in sorted({*missing.values()}))
        raise ConfigError(
            what="the bundle would lack packages that its wheels need",
            got=_with_reasons(missing),
            why="the wheels of an index can need more than the builds that are installed here, such as those of conda",
            fix=f"install these wheels here, with what they need: pip install --force-reinstall {others}; "
            f"torch for CPUs: pip install torch --index-url {TORCH_FOR_CPUS}",
        )


def _about(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (one for one in opened.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", one))
        return message_from_bytes(opened.read(name))


TORCH_FOR_CPUS = "https://download.pytorch.org/whl/cpu"
_PLACES = re.compile(r"^(global|wheel|:env:)\.(index-url|extra-index-url|find-links|no-index)=", re.MULTILINE)


def _pip(*words: str) -> str:
    """Return what pip prints; ConfigError if it fails."""
    done = subprocess.run(  # noqa: S603 - pip, with names of packages; -P: no file of this folder is taken for a module
        [sys.executable, "-P", "-m", "pip", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ConfigError(
            what="pip cannot get the wheels",
            got="\n".join((done.stderr or done.stdout).strip().splitlines()[-3:]),
            why="a bundle holds the wheel of every package",
            fix="set the index that the packages came from, such as PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS; "
            f"torch for CPUs: {TORCH_FOR_CPUS}",
        )
    return done.stdout


def collect_model(
    name: str, base: str | None, folder: Path, extras: Sequence[str], is_of_library: Callable[[Path], bool]
) -> tuple[str, str]:
    """Copy the model's files; return the names of its folder and of that of the model under it, '' if it is no adapter.

    `base` is the model that the adapter was trained on, None the one that it names. Raises ConfigError for a model that
    would not run there: without its weights, or without a part of whet.
    """
    from whet.jobs.predict.trained import NAME, export_of_hub
    from whet.models.loading.adapter import no_adapter, source_under
    from whet.models.loading.exported import about_folder
    from whet.models.loading.folder_check import ADAPTER, CONFIG, file_of_run, read_object

    here, own = _folder_of(name, "main", "--model_name_or_path"), Path(name).resolve().name
    about, is_adapter, by_library = about_folder(str(here)), (here / ADAPTER).is_file(), is_of_library(here)
    if about is not None and not Path(name).is_dir():
        raise export_of_hub(name, "--model_name_or_path")
    if base is not None and not is_adapter:
        raise no_adapter(name, base)
    if is_adapter and by_library:
        raise ConfigError(
            what="the adapter is one of sentence-transformers",
            got=name,
            why="that library looks for the model under it where the adapter says, and nowhere else",
            fix="merge it: model.transformers_model.merge_and_unload() of peft; then save it, and name that folder",
        )
    _require_extras(name, extras, {
        "an export": None if about is None else about["format"],
        "an adapter": "peft" if is_adapter else None,
        "a model of sentence-transformers": "embed" if by_library else None,
    })  # fmt: skip
    if about is None:
        _require_weights(here, name)
    _copy(here, folder / own)
    for left in (NAME, CONFIG):  # of a checkpoint they may lie in the folder around it
        if not (folder / own / left).exists() and (around := file_of_run(here, left)) is not None:
            shutil.copyfile(around, folder / own / left)
    if not is_adapter:
        return own, ""
    source = source_under(base, read_object(here / ADAPTER), here)
    under, its_own = _folder_of(source.model, source.revision, source.flag), Path(source.model).resolve().name
    its_own = f"{own}-base" if its_own == own else its_own
    _require_weights(under, source.model)
    _copy(under, folder / its_own)
    return own, its_own


def _folder_of(name: str, revision: str, flag: str) -> Path:
    """Return the folder of this name, or of what the hub has of it; raises ConfigError if there is neither."""
    from whet.models.loading.hub import hub_problem, is_cached, missing_folder, unreachable
    from whet.models.loading.load import not_loaded

    if problem := missing_folder(name, flag) or hub_problem(name, flag, "model"):
        raise ConfigError.of([problem])
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    is_alone = is_cached(name, "model") and unreachable() is not None
    try:
        return Path(
            snapshot_download(name, revision=revision, ignore_patterns=_NOT_OF_THE_HUB, local_files_only=is_alone)
        )
    except Exception as error:  # what the client and the network raise, of any type
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        raise not_loaded("model", name, error, flag) from error


def _copy(model: Path, place: Path) -> None:
    is_of_hub = model.parent.name == "snapshots"  # the cache may hold files that were not asked for
    ignored = _NOT_OF_THE_HUB if is_of_hub else ("checkpoint-*", "__pycache__")
    shutil.copytree(model, place, ignore=shutil.ignore_patterns(*ignored, ".*"))


def _require_extras(name: str, extras: Sequence[str], needs: Mapping[str, str | None]) -> None:
    """Raise ConfigError if an extra that the model needs is not among those that go with it."""
    if lost := {kind: part for kind, part in needs.items() if part is not None and part not in extras}:
        raise ConfigError(
            what="the bundle would lack a part of whet that the model needs",
            got=f"{name}: {' and '.join(lost)}",
            why="nothing is installed later where there is no network",
            fix=f"add it: --extras {','.join([*extras, *lost.values()])}",
        )


def _require_weights(model: Path, name: str) -> None:
    """Raise ConfigError for a model, also of sentence-transformers, whose folder holds no safetensors."""
    if not any(any(model.glob(one)) for one in ("*.safetensors", "[0-9]*_*/*.safetensors")):
        raise ConfigError(
            what="the model has no weights that whet reads",
            got=name,
            why="weights are read from files of safetensors, and no others go into a bundle",
            fix="save it once by save_pretrained of transformers, and name that folder",
        )


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


def write_script(root: Path, model: str = "", base: str = "") -> None:
    """Write the script that installs; `model` and `base` are names of folders that it prints, if they are not empty."""
    values = {
        "VERSION": __version__, "PYTHON": ".".join(map(str, sys.version_info[:2])), "MACHINE": platform.machine(),
        "MODEL": shlex.quote(model), "BASE": shlex.quote(base),
    }  # fmt: skip
    text = re.sub("@([A-Z]+)@", lambda found: values[found[1]], _SCRIPT.read_text("utf-8"))
    (root / "install.sh").write_text(text, "utf-8", errors="surrogateescape")


def write_sums(root: Path) -> None:
    """Write the SHA-256 of every file, as sha256sum reads them: of an odd name it escapes the letters."""
    lines = []
    for path in _files(root):
        name = path.relative_to(root).as_posix()
        escaped = name.replace("\\", "\\\\").replace("\n", "\\n")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{'' if escaped == name else chr(92)}{digest}  {escaped}\n")
    (root / "SHA256SUMS").write_text("".join(lines), "utf-8", errors="surrogateescape")


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
