"""Where blocks are compiled, a probe times what a step will take, not the compiler."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from timed_runs import measurable_model, trainer_of
from torch._dynamo.backends.registry import _BACKENDS, _COMPILER_FNS, register_backend

from tiny import tiny_model, tiny_rows

_BACKEND = "whet_test_takes_long"
_COMPILATION_S = 60.0
_PASS_S = 0.5

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class SlowCompiler:
    """A backend that takes a minute for each graph, by the clock that it is; any pass takes half a second."""

    def __init__(self) -> None:
        self.now_s, self.running = 0.0, False

    def __call__(self, module: Any, _: Any) -> Any:
        self.now_s += _COMPILATION_S
        return module.forward

    def clock(self) -> float:
        self.now_s += _PASS_S if self.running else 0.0
        self.running = not self.running
        return self.now_s


@pytest.fixture
def compiler() -> Iterator[SlowCompiler]:
    torch._dynamo.reset()
    one = SlowCompiler()
    register_backend(one, name=_BACKEND)
    yield one
    for names in (_BACKENDS, _COMPILER_FNS):
        names.pop(_BACKEND, None)


@pytest.mark.slow
def test_precision_auto_times_no_compilation(
    tmp_path: Path, compiler: SlowCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="whet")
    trainer = trainer_of(tmp_path, compiler.clock, torch_compile_backend=_BACKEND, max_steps=1)
    trainer.train()
    assert compiler.now_s > _COMPILATION_S  # it did compile
    (auto,) = [text for text in caplog.messages if "precision auto" in text]
    assert "fp32 0.5 s, bf16 0.5 s, least of 2" in auto
    (compared,) = [text for text in caplog.messages if "times the speed of plain code" in text]
    assert "1.00 times the speed of plain code here (0.5 s and 0.5 s" in compared


@pytest.mark.slow
def test_an_evaluation_times_no_compilation(
    tmp_path: Path, compiler: SlowCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="whet")
    model = tiny_model("bert", hidden_size=256, num_hidden_layers=4, intermediate_size=512)
    trainer = trainer_of(tmp_path, compiler.clock, model=model, torch_compile_backend=_BACKEND)
    trainer.evaluate(tiny_rows(48, lengths=(10, 20)))
    (auto,) = [text for text in caplog.messages if "precision auto" in text]
    assert "fp32 0.5 s, bf16 0.5 s, least of 2" in auto


def test_fp32_compilation_is_not_timed_as_a_pass(
    tmp_path: Path, compiler: SlowCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="whet")
    model = measurable_model()
    trainer_of(
        tmp_path, compiler.clock, model=model, precision="fp32", torch_compile_backend=_BACKEND, max_steps=1
    ).train()
    (compared,) = [text for text in caplog.messages if "times the speed of plain code" in text]
    assert "(0.5 s and 0.5 s" in compared
