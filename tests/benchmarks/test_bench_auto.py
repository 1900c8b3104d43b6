"""The comparison of `--auto` with settings by hand: what it keeps of a run that ended early."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from text_tasks import save_encoder, topic_rows, words, write_csv
from whet.cli.main import run
from whet.errors import EXIT_STOPPED_AND_SAVED
from whet.watch.guard import MemoryGuard

_PLAN = Path(__file__).resolve().parents[2] / "benchmarks" / "plan"


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, which imports others of its folder."""
    monkeypatch.syspath_prepend(str(_PLAN))
    spec = spec_from_file_location("bench_auto", _PLAN / "auto.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_auto", module)  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def test_a_run_that_the_guard_ends_keeps_the_reason(
    auto: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(range(1000))
    monkeypatch.setattr(MemoryGuard, "shortage", lambda _: "3 MiB left" if next(looks) > 4 else None)
    save_encoder(tmp_path / "model")
    rows = write_csv(tmp_path / "rows.csv", topic_rows())
    given = words("classify", tmp_path / "model", tmp_path / "out", "--do_train", train_file=rows, max_steps=9)
    assert run(given) == EXIT_STOPPED_AND_SAVED
    out, err = capsys.readouterr()
    for said in (out + err, err + out):  # standard output to a file may come last
        assert auto.why(said.strip()).startswith("stopped, as memory runs out (3 MiB left")


def test_a_run_that_is_refused_keeps_the_reason(auto: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words("classify", tmp_path / "model", tmp_path / "out", "--do_train", max_steps=0.5)) == 78
    assert "max_steps" in auto.why(capsys.readouterr().err.strip())
