"""What is installed with whet is what the design names, at the versions without known holes; the rest is optional."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

pytestmark = pytest.mark.reliability
_PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
_DESIGN = {"torch", "transformers", "tokenizers", "datasets", "safetensors", "peft", "jsonargparse", "rich", "psutil",
           "filelock", "xxhash", "accelerate", "matplotlib"}  # fmt: skip
_COME_WITH_THEM = {"numpy", "pyyaml", "pyarrow", "huggingface-hub", "jinja2", "markupsafe", "packaging"}
"""Imported by name, and needed by those of the design anyhow: torch, jsonargparse, datasets, transformers."""
_OPTIONAL = {"argcomplete", "bitsandbytes", "torchao", "tensorboard", "wandb", "mlflow", "optuna",
             "trackio", "seqeval", "sentence-transformers", "onnx", "onnxscript", "onnxruntime", "openvino",
             "nncf"}  # fmt: skip
_FLOORS = {"torch": "2.11", "safetensors": "0.8", "transformers": "5.16", "sentencepiece": "0.2.1"}


def _name(requirement: Requirement) -> str:
    return re.sub(r"[-_.]+", "-", requirement.name).lower()


def _floor(requirement: Requirement) -> Version:
    return max(Version(one.version) for one in requirement.specifier if one.operator in (">=", "==", "~="))


_IMAGE = Path(__file__).resolve().parents[2] / "docker" / "requirements.txt"
_CORE = {_name(one): one for one in map(Requirement, _PROJECT["dependencies"])}
_EXTRAS = {
    extra: {_name(one): one for one in map(Requirement, words)}
    for extra, words in _PROJECT["optional-dependencies"].items()
}


def test_no_more_is_installed_than_the_design_names() -> None:
    odd = _CORE.keys() - _DESIGN - _COME_WITH_THEM
    print(f"\nruntime dependencies: {len(_CORE)}, beyond the design: {len(odd)}")
    assert odd == set()


def test_what_is_optional_stands_behind_an_extra() -> None:
    assert _CORE.keys() & _OPTIONAL == set()
    for extra, packages in _EXTRAS.items():
        if extra != "dev":
            assert packages.keys() <= _OPTIONAL | _DESIGN | {"whet"}, extra


def test_no_version_with_a_known_hole_is_allowed() -> None:
    everything = [*_CORE.items(), *(pair for packages in _EXTRAS.values() for pair in packages.items())]
    low = [f"{one}" for name, one in everything if name in _FLOORS and _floor(one) < Version(_FLOORS[name])]
    assert low == []
    assert {"torch", "safetensors", "transformers"} <= _CORE.keys()
    assert all(any(one.operator == ">=" for one in requirement.specifier) for requirement in _CORE.values())


def test_the_image_has_all_that_whet_needs_and_nothing_older() -> None:
    lines = [line for line in _IMAGE.read_text("utf-8").splitlines() if not line.startswith("#")]
    pins = {_name(one): next(iter(one.specifier)).version for one in map(Requirement, lines)}
    needed = {**_CORE, **_EXTRAS["peft"], **_EXTRAS["tag"]}
    wanted = {name: one for name, one in needed.items() if one.marker is None or one.marker.evaluate()}
    assert wanted.keys() - pins.keys() == {"torch"}  # which the Dockerfile itself installs, from an index for CPUs
    assert [one for name, one in wanted.items() if name in pins and pins[name] not in one.specifier] == []
    for name in pins:
        assert Distribution.from_name(name), (
            f"{name} is pinned, and not installed where these tests run: make image-pins"
        )
