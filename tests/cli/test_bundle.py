"""`whet bundle`: one file with everything, which installs and trains where there is no network."""

from __future__ import annotations

import ensurepip
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
import torch
from huggingface_hub import constants
from tiny_qa import save_encoder

import hub_server
import text_tasks
from hub_cache import cached
from text_tasks import topic_rows, words, write_csv
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, ConfigError, OutputError
from whet.jobs import bundle


def test_packages_are_those_that_pip_finds_needed() -> None:
    found = bundle.needed([])
    assert {"torch", "transformers", "safetensors", "typing-extensions", "markupsafe"} <= found.keys()
    assert "whet-train" not in found
    assert "tensorboard" not in found, "of an extra that is not asked for"
    assert "tensorboard" in bundle.needed(["tensorboard"])
    assert all(metadata.version(name) == version for name, version in found.items())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "no file is named"),
        (["out.tar", "--extras", "embed,speed"], "got: speed"),
        (["out.tar", "--model_name_or_path", "a/b/c"], "no such folder"),
        (["there.tar"], "the file exists"),
    ],
)
def test_what_cannot_be_is_refused_before_any_download(
    line: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bundle, "collect_wheels", lambda *_: pytest.fail("a download"))
    (tmp_path / "there.tar").write_text("mine", "utf-8")
    code = run(["bundle", *line])
    assert code in (78, OutputError.exit_code)
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.tar"]
    assert (tmp_path / "there.tar").read_text("utf-8") == "mine"


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """A bundle of one small file, which is written twice."""
    root = tmp_path / "whet-1"
    (root / "wheels").mkdir(parents=True)
    (root / "wheels" / "a.whl").write_text("a", "utf-8")
    bundle.write_script(root, "tiny", "base")
    bundle.write_sums(root)
    sizes = [bundle.pack(root, tmp_path / name) for name in ("one.tar", "two.tar")]
    assert sizes[0] == sizes[1]
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
    with tarfile.open(tmp_path / "one.tar") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    return tmp_path / "there" / "whet-1"


def _run_script(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    line = ["sh", str(folder / "install.sh"), str(folder.parent / "venv")]
    return subprocess.run(line, env=os.environ | variables, capture_output=True, text=True, check=False)


def test_a_damaged_file_ends_the_installation(unpacked: Path) -> None:
    (unpacked / "wheels" / "a.whl").write_text("b", "utf-8")
    done = _run_script(unpacked, PYTHON=sys.executable)
    assert done.returncode != 0
    assert "wheels/a.whl" in done.stdout + done.stderr
    assert not (unpacked.parent / "venv").exists()


def test_another_python_is_named(unpacked: Path) -> None:
    other = unpacked.parent / "python4"
    other.write_text("#!/bin/sh\necho '4.0 abacus'\n", "utf-8")
    other.chmod(0o755)
    done = _run_script(unpacked, PYTHON=str(other))
    assert done.returncode == 1
    wanted = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {platform.machine()}"
    assert f"these wheels are for {wanted}, and {other} is 4.0 abacus" in done.stderr
    assert not (unpacked.parent / "venv").exists()


_SHORT_OF_CUDA = "raise ImportError('libcudart.so.12: cannot open shared object file')"


def _write_wheel(folder: Path, name: str, files: Mapping[str, str]) -> None:
    files = {**files, "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "RECORD": "",
             "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}  # fmt: skip
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file if file.endswith(".py") else f"{name}-1.0.dist-info/{file}", text)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "exit_code"), [("", 0), (_SHORT_OF_CUDA, 1)])
def test_an_installation_ends_well_if_torch_can_be_imported(code: str, exit_code: int, tmp_path: Path) -> None:
    root = tmp_path / "whet-1"
    (root / "wheels").mkdir(parents=True)
    folders = [Path(ensurepip.__file__).parent / "_bundled", Path("/usr/share/python-wheels")]
    pips = [wheel for folder in folders for wheel in folder.glob("pip-*.whl")]
    if not pips:
        pytest.skip("this Python has no wheel of pip")
    shutil.copy(pips[0], root / "wheels")
    _write_wheel(root / "wheels", "torch", {"torch.py": code})
    commands = "[console_scripts]\nwhet = small_whet:main\n"
    _write_wheel(root / "wheels", "whet_train", {"small_whet.py": "main = int", "entry_points.txt": commands})
    bundle.write_script(root)
    bundle.write_sums(root)
    done = _run_script(root, PYTHON=sys.executable, PYTHONPATH="")
    assert done.returncode == exit_code, done.stderr
    assert ("whet --help" in done.stdout) == (not code)
    assert all((said in done.stderr) == bool(code) for said in ("libcudart.so.12", "error: torch cannot be imported"))


def _printed(script: str, here: Path) -> str:
    """What the last lines of the script print, which follow the installation."""
    lines = script.partition('whet" --version\n')[2]
    done = subprocess.run(["sh", "-euc", f"here={here} target={here}/venv\n{lines}"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode("utf-8")


@pytest.mark.parametrize("name", ["tiny", "a b", "$(touch ran)", "`touch ran`", 'say "x"; touch ran', "it's", "@BASE@"])
def test_names_of_folders_are_printed_and_not_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bundle.write_script(tmp_path, name)
    alone = _printed((tmp_path / "install.sh").read_text("utf-8"), tmp_path)
    assert alone == f"run: {tmp_path}/venv/bin/whet --help; the model: {tmp_path}/models/{name}\n"
    bundle.write_script(tmp_path, "out", name)
    both = _printed((tmp_path / "install.sh").read_text("utf-8"), tmp_path)
    assert both.endswith(f"models/out, with --base_model_name_or_path {tmp_path}/models/{name}\n")
    bundle.write_script(tmp_path)
    assert _printed((tmp_path / "install.sh").read_text("utf-8"), tmp_path).endswith("whet --help\n")
    assert [path.name for path in tmp_path.iterdir()] == ["install.sh"]


def test_sums_of_files_with_odd_names_are_checked(tmp_path: Path) -> None:
    for name in ("a b", "new\nline", "back\\slash"):
        (tmp_path / name).write_text("content", "utf-8")
    bundle.write_sums(tmp_path)
    check = ["sha256sum", "--quiet", "--check", "SHA256SUMS"]
    assert subprocess.run(check, cwd=tmp_path, check=False).returncode == 0
    (tmp_path / "new\nline").write_text("other", "utf-8")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 1


# ---- models ----


@pytest.fixture
def unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make a bundle without wheels, in an empty cache of the hub; return the folder that it unpacks to."""
    monkeypatch.setattr(bundle, "collect_wheels", lambda *_: None)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def unpacked(*words: object) -> Path:
        file = tmp_path / f"{len([*tmp_path.glob('*.tar')])}.tar"
        assert run(["bundle", str(file), *map(str, words)]) == 0
        with tarfile.open(file) as archive:
            archive.extractall(tmp_path / file.stem, filter="data")
        return next((tmp_path / file.stem).glob("whet-*/"))

    return unpacked


def test_an_adapter_takes_the_model_under_it_along(
    unpack: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was unpacked predicts when the folders of the training are gone; a checkpoint has what lies around it."""
    pytest.importorskip("peft")
    text_tasks.save_encoder(tmp_path / "encoder")
    file = write_csv(tmp_path / "rows.csv", [{"said": row["text"], "label": row["label"]} for row in topic_rows()])
    line = words("classify", tmp_path / "encoder", tmp_path / "out", "--do_train", train_file=file, lora_r=2,
                 max_steps=2, text_column_names="said", save_strategy="steps", save_steps=2)  # fmt: skip
    assert run(line) == 0
    (tmp_path / "out" / "checkpoint-2" / "whet_task.json").unlink()  # as a trainer of another library leaves it
    predict = ["--file", str(file), "--output", str(tmp_path / "found.jsonl")]
    assert run(["predict", str(tmp_path / "out"), *predict]) == 0
    wanted = (tmp_path / "found.jsonl").read_bytes()
    root = unpack("--model_name_or_path", tmp_path / "out", "--extras", "peft")
    base = ["--base_model_name_or_path", str(root / "models" / "encoder")]
    assert sorted(path.name for path in (root / "models").iterdir()) == ["encoder", "out"]
    of_step = unpack("--model_name_or_path", tmp_path / "out" / "checkpoint-2", "--extras", "peft")
    (tmp_path / "encoder").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "out")
    for model in (root / "models" / "out", of_step / "models" / "checkpoint-2"):
        assert run(["predict", str(model), *predict, *base]) == 0
        assert (tmp_path / "found.jsonl").read_bytes() == wanted
    said = _printed((root / "install.sh").read_text("utf-8"), root)
    assert f"models/out, with --base_model_name_or_path {root}/models/encoder" in said

    adapter = ["--model_name_or_path", str(root / "models" / "out")]
    capsys.readouterr()
    for line, said in (
        (adapter, "add it: --extras peft"),
        ([*adapter, "--extras", "peft"], "the model of the adapter is not where it was"),
        (["--model_name_or_path", str(tmp_path / "moved"), *base], "base_model_name_or_path would change nothing"),
        (base, "base_model_name_or_path would change nothing without model_name_or_path"),
    ):
        assert run(["bundle", str(tmp_path / "refused.tar"), *line]) == EXIT_BAD_CONFIG
        assert said in capsys.readouterr().err
    unpack(*adapter, "--extras", "peft", "--base_model_name_or_path", tmp_path / "moved")


def test_a_model_of_the_hub_comes_from_its_cache_without_pickles(
    unpack: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_encoder(tmp_path / "tiny")
    (tmp_path / "tiny" / "pytorch_model.bin").write_bytes(b"a pickle")
    cached(tmp_path / "tiny", tmp_path / "cache", "me/tiny")
    (copy,) = (unpack("--model_name_or_path", "me/tiny") / "models").iterdir()
    assert copy.name == "tiny"
    assert not (copy / "pytorch_model.bin").exists()
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in copy.iterdir()}
    assert not any(path.is_symlink() for path in copy.iterdir())


@pytest.mark.parametrize(
    ("files", "extras", "said"),
    [
        (["pytorch_model.bin"], "", "the model has no weights that whet reads"),
        (["model.onnx", "export.json"], "onnx", "the model on the hub is an export"),
    ],
)
def test_what_would_not_run_there_is_refused(
    files: list[str], extras: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(bundle, "collect_wheels", lambda *_: pytest.fail("a download"))
    monkeypatch.setattr(bundle, "needed", lambda *_: {})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    about = {"whet": {"head": "AutoModelForQuestionAnswering", "format": "onnx", "inputs": ["input_ids"]}}
    (tmp_path / "model").mkdir()
    for name in ("config.json", *files):
        (tmp_path / "model" / name).write_text(json.dumps(about), "utf-8")
    cached(tmp_path / "model", tmp_path / "cache", "me/model")
    line = ["bundle", str(tmp_path / "refused.tar"), "--extras", extras, "--model_name_or_path"]
    assert run([*line, "me/model"]) == EXIT_BAD_CONFIG
    assert said in capsys.readouterr().err
    if "export.json" in files:
        assert run([*line[:2], "--model_name_or_path", str(tmp_path / "model")]) == EXIT_BAD_CONFIG
        assert "add it: --extras onnx" in capsys.readouterr().err
    assert not (tmp_path / "refused.tar").exists()


def test_a_model_of_another_library_needs_its_extra(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_encoder(tmp_path / "embedder")
    (tmp_path / "embedder" / "modules.json").write_text("[]", "utf-8")
    line = ["bundle", str(tmp_path / "refused.tar"), "--model_name_or_path", str(tmp_path / "embedder")]
    assert run(line) == EXIT_BAD_CONFIG
    assert "add it: --extras embed" in capsys.readouterr().err


def test_a_name_that_the_hub_does_not_have_is_no_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with hub_server.taken_for_the_hub(monkeypatch):
        assert run(["bundle", str(tmp_path / "o.tar"), "--model_name_or_path", "me/typo"]) == EXIT_BAD_CONFIG
    said = " ".join(capsys.readouterr().err.split())
    assert "the model cannot be loaded" in said
    assert "got: me/typo" in said
    assert "--model_name_or_path takes a folder" in said
    assert "make room" not in said


# ---- packages ----

BACKEND = """
import zipfile

ABOUT = {"METADATA": "Metadata-Version: 2.1\\nName: {NAME}\\nVersion: 1.0\\n{NEEDS}", "RECORD": "",
         "WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"}

def build_wheel(folder, *_):
    with zipfile.ZipFile(f"{folder}/{NAME}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write("code.txt")
        for name, text in ABOUT.items():
            wheel.writestr(f"{NAME}-1.0.dist-info/{name}", text)
    return "{NAME}-1.0-py3-none-any.whl"
"""


def _project(folder: Path, name: str, code: str, *needs: str) -> Path:
    """Write a package that builds without any other one."""
    folder.mkdir(exist_ok=True)
    build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    for file, text in {
        "pyproject.toml": build,
        "backend.py": BACKEND.replace("{NAME}", name).replace(
            "{NEEDS}", "".join(f"Requires-Dist: {one}\\n" for one in needs)
        ),
        "code.txt": code,
    }.items():
        (folder / file).write_text(text, "utf-8")
    return folder


def _repository(folder: Path, name: str) -> dict[str, Any]:
    """Make a repository of two commits; return what pip records of the first."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    commits = []
    for code in ("commit", "later"):
        _project(folder, name, code)
        for line in (["init", "-q"], ["add", "."], ["commit", "-qm", code]):
            subprocess.run([*git, *line], cwd=folder, check=True)
        done = subprocess.run([*git, "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True)
        commits.append(done.stdout.strip())
    return {"url": folder.as_uri(), "vcs_info": {"vcs": "git", "commit_id": commits[0]}}


def _install(site: Path, name: str, direct: Mapping[str, Any], version: str = "1.0") -> None:
    """Leave what an installer leaves of a package."""
    about = site / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
    if direct:
        (about / "direct_url.json").write_text(json.dumps(direct), "utf-8")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_code_of_a_package_is_that_which_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index has other code of the same versions. It is named from this folder, which has modules of its own."""
    (tmp_path / "wheels").mkdir()
    packages = ("of_index", "of_folder", "of_commit")
    for name in packages:
        monkeypatch.chdir(_project(tmp_path / f"{name}_of_index", name, "index"))
        runpy.run_path("backend.py")["build_wheel"]("../wheels")
    folder = _project(tmp_path / "a folder%20", "of_folder", "folder")
    directs = [{}, {"url": folder.as_uri(), "dir_info": {}}, _repository(tmp_path / "repository", "of_commit")]
    for name, direct in zip(packages, directs, strict=True):
        _install(tmp_path / "site", name, direct)
    (tmp_path / "pip").mkdir()
    (tmp_path / "of_index==1.0").mkdir()
    (tmp_path / "json.py").write_text("raise SystemExit('of this folder')", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", "wheels")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wanted, gone = bundle.requirements(packages)
    assert not gone
    bundle.collect_wheels(wanted, tmp_path / "found")
    for name in packages:
        with zipfile.ZipFile(tmp_path / "found" / f"{name}-1.0-py3-none-any.whl") as opened:
            assert opened.read("code.txt").decode() == name.removeprefix("of_")


def test_a_package_whose_folder_is_gone_is_a_release(
    unpack: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So are all packages of conda, which name a folder of the machine that built them."""
    of_conda = "file:///croot/odd_1700000000000/work"
    _install(tmp_path / "site", "odd", {"url": of_conda, "dir_info": {}})
    _install(tmp_path / "site", "edited", {"url": (tmp_path / "gone away").as_uri(), "dir_info": {"editable": True}})
    _install(tmp_path / "site", "safetensors", {"url": of_conda, "dir_info": {}})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    wanted, gone = bundle.requirements(["odd", "edited"])
    assert wanted == ["odd==1.0", "edited==1.0"]
    assert gone == {"odd": of_conda.removeprefix("file://"), "edited": f"{tmp_path}/gone away"}
    capsys.readouterr()
    unpack("--json")
    assert json.loads(capsys.readouterr().out)["as_releases"] == ["safetensors"]


@pytest.mark.parametrize("version", ["2.9.1", "2.9.1.post103"])
def test_torch_of_conda_is_replaced_by_a_build_with_the_same_devices(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = {"url": "file:///croot/libtorch_1700000000000/work", "dir_info": {}}
    _install(tmp_path, "torch", direct, version)
    monkeypatch.syspath_prepend(str(tmp_path))
    for cuda, build in ((None, "+cpu" if sys.platform == "linux" else ""), ("12.8", "")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert bundle.requirements(["torch"])[0] == [f"torch==2.9.1{build}"]


def test_wheels_that_need_more_than_the_bundle_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's torch for Linux needs packages of NVIDIA, of which the metadata of conda's torch say nothing."""
    (tmp_path / "wheels").mkdir()
    projects = {
        "needy": ["there[more]>=1", "gpu_parts; python_version >= '3'", "never; extra == 'all'"],
        "there": ["further; extra == 'more'"], "gpu_parts": [], "further": [],
    }  # fmt: skip
    for name, needs in projects.items():
        monkeypatch.chdir(_project(tmp_path / name, name, "code", *needs))
        runpy.run_path("backend.py")["build_wheel"]("../wheels")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError) as refused:
        bundle.collect_wheels(["needy==1.0", "there==1.0"], tmp_path / "short")
    assert all(one in str(refused.value) for one in ("gpu-parts (for needy)", "further (for there)"))
    assert "pip install --force-reinstall needy==1.0 there==1.0" in str(refused.value)
    bundle.collect_wheels([f"{name}==1.0" for name in projects], tmp_path / "complete")


def test_whet_whose_folder_is_gone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "whet_train", {"url": (tmp_path / "gone").as_uri(), "dir_info": {}})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"(?s)whet was installed from .*{tmp_path}/gone"):
        bundle.requirements(["torch", "whet-train"])


class _Proxy(BaseHTTPRequestHandler):
    """Refuses every host, and remembers which were asked for."""

    asked: ClassVar[list[str]] = []

    def do_CONNECT(self) -> None:
        self.asked.append(self.path)
        self.send_error(503)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.slow
def test_a_build_of_torchs_index_is_asked_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    own = {"CONFIG_FILE": os.devnull, "PROXY": f"http://127.0.0.1:{server.server_port}", "RETRIES": "0"}
    for name, value in own.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    for index in (None, "https://127.0.0.2/simple"):
        _Proxy.asked.clear()
        if index is not None:
            monkeypatch.setenv("PIP_INDEX_URL", index)
        with pytest.raises(ConfigError, match=r"(?s)pip cannot get the wheels.*PIP_EXTRA_INDEX_URL.*whl/cpu"):
            bundle.collect_wheels(["torch==2.13.0+cpu"], tmp_path / "wheels")
        assert (f"{urlsplit(bundle.TORCH_FOR_CPUS).hostname}:443" in _Proxy.asked) == (index is None)
    server.shutdown()
    server.server_close()


@pytest.mark.gate
@pytest.mark.true_start
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare, which takes the network away")
def test_a_bundle_installs_and_trains_without_a_network(tmp_path: Path) -> None:
    """The real wheels: some 400 MB, and two minutes."""
    save_encoder(tmp_path / "tiny")
    line = [sys.executable, "-m", "whet", "bundle", "w.tar", "--model_name_or_path", "tiny", "--json"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["packages"]["torch"] == metadata.version("torch")
    (tmp_path / "there").mkdir()
    shutil.move(tmp_path / "w.tar", tmp_path / "there")
    with tarfile.open(tmp_path / "there" / "w.tar") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    (root,) = (tmp_path / "there").glob("whet-*/")
    alone = ["unshare", "--map-root-user", "--net"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    env |= {"PYTHON": sys.executable, "PATH": os.defpath}
    subprocess.run([*alone, "sh", str(root / "install.sh")], env=env, check=True, capture_output=True)
    write_csv(tmp_path / "rows.csv", topic_rows())
    model = ["--model_name_or_path", str(root / "models" / "tiny"), "--max_seq_length", "24"]
    train = ["classify", *model, "--train_file", "rows.csv", "--do_train", "--output_dir", "out", "--max_steps", "2"]
    done = subprocess.run(
        [*alone, str(root / "venv" / "bin" / "whet"), *train], env=env, cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()
