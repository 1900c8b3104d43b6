"""Which libraries are preloaded: those that are installed, for this processor, and verified in the running process."""

from __future__ import annotations

import ctypes.util
import platform
import shutil
from pathlib import Path

import pytest

import whet
from whet.launch import start


def a_library(path: Path) -> Path:
    """Put a real shared library there, under another name."""
    source = next(Path("/").glob("lib*/*linux-gnu/libm.so.6"), None) or next(Path("/lib64").glob("libm.so.6"))
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, path)
    return path


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("tcmalloc", "libtcmalloc.so.4"), ("tcmalloc", "libtcmalloc_minimal.so.4.5.9"), ("tcmalloc", "libtcmalloc.so"),
        ("jemalloc", "libjemalloc.so.2"), ("intel", "libiomp5.so"),
    ],
)  # fmt: skip
def test_a_library_is_found_under_every_name_of_its_packages(name: str, file: str, tmp_path: Path) -> None:
    """Runtime packages have the file with its version alone; the name without one is in packages for developers."""
    there = a_library(tmp_path / file)
    assert start.find_library(name, [tmp_path]) == there


def test_other_files_of_these_names_are_no_libraries(tmp_path: Path) -> None:
    (tmp_path / "libjemalloc.so.2").write_text("INPUT(libjemalloc.so.2)")
    (tmp_path / "libjemalloc.so.2.debug").write_bytes(b"\x7fELF")
    (tmp_path / "libtcmalloc.so.4").mkdir()
    assert start.find_library("jemalloc", [tmp_path]) is None
    assert start.find_library("tcmalloc", [tmp_path]) is None


def test_a_library_for_another_processor_is_passed_over(tmp_path: Path) -> None:
    other = bytearray(a_library(tmp_path / "libjemalloc.so.2").read_bytes())
    other[18:20] = (183 if platform.machine() == "x86_64" else 62).to_bytes(2, "little")
    (tmp_path / "libjemalloc.so.2").write_bytes(other)
    assert start.find_library("jemalloc", [tmp_path]) is None


def test_the_environments_own_library_comes_before_the_systems(tmp_path: Path) -> None:
    own = a_library(tmp_path / "conda" / "lib" / "libtcmalloc.so.4")
    found = start.choose_libraries("tcmalloc", "default", {"CONDA_PREFIX": str(tmp_path / "conda")})
    assert found.paths == (own,)


def test_the_order_is_allocator_then_openmp(tmp_path: Path) -> None:
    allocator = a_library(tmp_path / "lib" / "libjemalloc.so.2")
    openmp = a_library(tmp_path / "lib" / "libiomp5.so")
    found = start.choose_libraries("jemalloc", "intel", {"CONDA_PREFIX": str(tmp_path)})
    assert found.paths == (allocator, openmp)
    assert start.choose_libraries("default", "default").paths == ()


@pytest.mark.parametrize(
    ("asked", "added", "stays", "gives_way"),
    [
        ("jemalloc", "libjemalloc.so.2", "libother.so", "libtcmalloc.so gives way to --memory_allocator jemalloc"),
        ("default", None, "libother.so", "libtcmalloc.so gives way to --memory_allocator default"),
        ("tcmalloc", "libtcmalloc.so.4", "libother.so", "libtcmalloc.so gives way to --memory_allocator tcmalloc"),
        ("auto", None, "libtcmalloc.so libother.so", ""),
    ],
)
def test_allocator_that_the_user_preloads_gives_way_to_the_option_alone(
    asked: start.Allocator, added: str | None, stays: str, gives_way: str, tmp_path: Path
) -> None:
    """As in the image of whet, which preloads one: the first allocator in LD_PRELOAD is the one that serves."""
    for name in ("libjemalloc.so.2", "libtcmalloc.so.4"):
        a_library(tmp_path / "lib" / name)
    given = {"CONDA_PREFIX": str(tmp_path), "LD_PRELOAD": "/opt/libtcmalloc.so:/opt/libother.so"}
    found = start.choose_libraries(asked, "default", given)
    assert [Path(one).name for one in found.every] == [*stays.split(), *([added] if added else [])]
    assert [note.partition("/opt/")[2] for note in found.notes] == ([gives_way] if gives_way else [])


def test_library_that_the_user_preloads_and_the_option_names_is_loaded_once(tmp_path: Path) -> None:
    own = a_library(tmp_path / "lib" / "libiomp5.so")
    given = {"CONDA_PREFIX": str(tmp_path), "LD_PRELOAD": str(own)}
    named = start.choose_libraries("default", "intel", given)
    assert (named.every, named.notes) == ((str(own),), ())
    assert start.choose_libraries("default", "auto", given).every == (str(own),)
    assert start.choose_libraries("default", "default", given).every == ()


@pytest.mark.skipif(ctypes.util.find_library("iomp5") is not None, reason="this machine has libiomp5")
def test_a_library_that_is_asked_for_and_missing_is_refused(tmp_path: Path) -> None:
    if start.choose_libraries("default", "auto").openmp is not None:
        pytest.skip("this environment has libiomp5")
    with pytest.raises(whet.WhetError, match=r"(?s)libiomp5.so is not on this machine.*pip install intel-openmp"):
        start.choose_libraries("default", "intel")
