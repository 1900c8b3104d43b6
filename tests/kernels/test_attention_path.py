"""Which code computes packed attention on a GPU, by a table; no GPU is needed to choose."""

from __future__ import annotations

import logging

import pytest
import torch

from whet import ConfigError
from whet.kernels import gpu_attention
from whet.kernels.gpu_attention import Call, Have, choose
from whet.log import logger

NOTHING, TORCH, PACKAGE, BOTH = Have(), Have(torch=True), Have(package=True), Have(torch=True, package=True)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FLASH = "flash_attention_2"


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("kernel", "dropping", "have", "path"),
    [
        ("auto", False, TORCH, "torch"),
        ("auto", True, TORCH, "torch"),
        ("auto", True, BOTH, "torch"),
        ("auto", True, PACKAGE, "package"),
        ("auto", False, NOTHING, "padded"),
        ("auto", True, NOTHING, "padded"),
        ("whet", False, TORCH, "torch"),
        ("whet", False, PACKAGE, "package"),
        ("whet", False, NOTHING, "padded"),
        ("whet", True, BOTH, "padded"),
        (FLASH, False, TORCH, "torch"),
        (FLASH, True, TORCH, "torch"),
        (FLASH, True, PACKAGE, "package"),
        (FLASH, False, BOTH, "package"),
    ],
)
def test_half_precision_runs_flash_kernels(kernel, dropping, have, path, dtype):
    assert choose(kernel, Call(dtype, 64, dropping), have) == path


@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize("kernel", ["auto", "whet"])
@pytest.mark.parametrize(("dtype", "width"), [(FP32, 64), (FP64, 64), (BF16, 20), (BF16, 264), (FP16, 7)])
def test_unsupported_inputs_run_padded(kernel, dropping, dtype, width):
    assert choose(kernel, Call(dtype, width, dropping), BOTH) == "padded"


@pytest.mark.parametrize("width", [8, 32, 64, 96, 256])
def test_head_widths_of_flash_kernels_are_accepted(width):
    assert choose("auto", Call(BF16, width, dropping=True), TORCH) == "torch"


@pytest.mark.parametrize(
    ("call", "have"),
    [
        (Call(FP32, 64, dropping=False), BOTH),
        (Call(BF16, 20, dropping=False), BOTH),
        (Call(BF16, 64, dropping=False), NOTHING),
    ],
)
def test_flash_requested_by_name_is_flash_or_an_error(call, have):
    with pytest.raises(ConfigError, match="flash_attention_2 cannot compute this model's attention"):
        choose(FLASH, call, have)


def test_cpu_has_no_flash_kernels():
    assert gpu_attention.have(torch.device("cpu")) == NOTHING


@pytest.mark.parametrize(
    ("capability", "cuda", "built", "installed", "wanted"),
    [
        ((8, 0), "13.0", True, False, TORCH),
        ((9, 0), "13.0", True, True, BOTH),
        ((8, 6), "13.0", False, True, PACKAGE),
        ((7, 5), "13.0", True, True, NOTHING),
        ((9, 4), None, True, True, NOTHING),  # AMD's: torch has other kernels for these, with another generator
    ],
)
def test_gpu_kernels_depend_on_torch_and_packages(monkeypatch, capability, cuda, built, installed, wanted):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    assert gpu_attention.have.__wrapped__(torch.device("cuda", 0)) == wanted


def test_log_names_each_attention_path_and_its_masks_once(caplog):
    gpu_attention.tell.cache_clear()
    with caplog.at_level(logging.INFO, logger.name):
        for _ in range(3):
            gpu_attention.tell("torch", dropping=True)
            gpu_attention.tell("torch", dropping=False)
            gpu_attention.tell("padded", dropping=False)
    assert len(caplog.messages) == 3
    assert "draw their own dropout masks" in caplog.messages[0]
    assert "--attn_implementation whet" in caplog.messages[0]
    assert "masks" not in caplog.messages[1]
