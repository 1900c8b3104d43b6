"""What an optimizer's state weighs: said beforehand, and counted afterwards, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_runs import Layers, arguments, cases, take_steps
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from whet.config.optimizer_names import names
from whet.optim import registry

GB = 1e9
LLM = [
    (32_000, 3072),
    *[(3072, 3072), (3072, 3072), (3072, 3072), (3072, 3072), (3072, 8192), (8192, 3072), (3072,)] * 33,
]
"""The shapes of a model of 3 billion parameters."""


def memories(value: Any) -> dict[int, int]:
    """The memory of every tensor in the state: address -> bytes."""
    if isinstance(value, dict):
        return {address: size for one in value.values() for address, size in memories(one).items()}
    if is_traceable_wrapper_subclass(value):
        return memories({name: getattr(value, name) for name in value.__tensor_flatten__()[0]})
    if not isinstance(value, Tensor):
        return {}
    return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()}


VARIANTS = {
    "adamw_anyprecision": ["momentum_dtype=bfloat16,variance_dtype=bfloat16", "use_kahan_summation=true"],
    "adafactor": ["beta1=0.9"],
    "sgd": ["momentum=0.9"],
    "rmsprop": ["momentum=0.9,centered=true"],
    "adamw_bnb_8bit": ["min_8bit_size=100"],
}


def _every() -> list[Any]:
    """(optimizer, its options), with none and with those that cost memory; apex alone needs a GPU."""
    return [
        pytest.param(case.values[0], optim_args, marks=case.marks)
        for case in cases(name for name in names() if name != "adamw_apex_fused")
        for optim_args in [None, *VARIANTS.get(case.values[0], [])]
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("optim", "optim_args"), _every())
def test_state_bytes_equal_the_real_state(optim: str, optim_args: str | None, dtype: torch.dtype) -> None:
    model, args = Layers(dtype), arguments(optim, optim_args=optim_args)
    optimizer = registry.build(model, args)
    take_steps(model, optimizer, range(2))
    assert sum(memories(dict(optimizer.state)).values()) == registry.model_state_bytes(model, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_auto_state_bytes_equal_the_real_state(operators: None, dtype: torch.dtype) -> None:
    model, args = Layers(dtype), arguments("auto")
    optimizer = registry.build(model, args)
    take_steps(model, optimizer, range(2))
    taken = sum(memories(dict(optimizer.state)).values())
    assert taken == registry.model_state_bytes(model, args)
    assert taken == registry.state_bytes("auto", [tuple(p.shape) for p in model.parameters()], dtype=dtype)


def test_state_bytes_match_the_guides() -> None:
    """A model of 3 billion parameters: AdamW 24 GB, 8-bit AdamW 6 GB, Adafactor little."""
    n = sum(torch.Size(shape).numel() for shape in LLM)
    assert n == pytest.approx(3e9, rel=0.02)
    bytes_of = {optim: registry.state_bytes(optim, LLM) * 3e9 / n / GB for optim in names()}
    for optim in (
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_hf",
        "adamw_apex_fused",
        "adamw_whet",
        "adamw_anyprecision",
    ):
        assert bytes_of[optim] == pytest.approx(24.0, rel=1e-4), optim
    for optim in ("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "adamw_whet_8bit"):
        assert bytes_of[optim] == pytest.approx(6.0, rel=0.02), optim  # the scales of the blocks come on top
    assert bytes_of["adamw_torch_4bit"] == pytest.approx(3.0, rel=0.07)
    assert bytes_of["lion_32bit"] == pytest.approx(12.0, rel=1e-4)
    rows_and_columns = 4 * sum(sum(shape) for shape in LLM) * 3e9 / n / GB
    assert bytes_of["adafactor"] == pytest.approx(rows_and_columns)
    assert bytes_of["adafactor"] < 0.02


def test_no_state_of_adafactor_is_as_large_as_a_matrix() -> None:
    model = Layers()
    optimizer = registry.build(model, arguments("adafactor"))
    take_steps(model, optimizer, range(2))
    largest = max(t.numel() for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor))
    assert largest == 128  # the rows of the largest matrix, of 8192 numbers


def test_memory_of_an_adapter_is_that_of_the_guides() -> None:
    """A model of 7 billion parameters with 200 million in its adapter: 84 GB become 2.4 GB, 12 bytes for each.

    In bf16 these are two moments and the fp32 master; in fp32 two moments and the gradient.
    """
    for n, wanted in ((7_000_000_000, 84.0), (200_000_000, 2.4)):
        assert registry.state_bytes("adamw_whet", [(n,)], dtype=torch.bfloat16) / GB == pytest.approx(wanted)
        gradient = n * torch.float32.itemsize
        assert (registry.state_bytes("adamw_whet", [(n,)]) + gradient) / GB == pytest.approx(wanted)


def test_plug_in_has_no_state_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.config.rules.optimizer.plugged_in", lambda: {"mine": None})
    assert registry.model_state_bytes(Layers(), arguments("mine")) is None
