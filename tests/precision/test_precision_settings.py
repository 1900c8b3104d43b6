"""precision, bf16, fp16 and tf32: one meaning, whichever name is used, and an error where they cannot be honoured."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from engine import TrainingArguments
from whet import ConfigError
from whet.precision import device, policy

_CPU = torch.device("cpu")


def _three(**given: Any) -> tuple[Any, ...]:
    args = TrainingArguments(**given)
    assert TrainingArguments(**json.loads(args.to_json_string())) == args
    return args.precision, args.bf16, args.fp16


def test_names_of_one_precision_agree() -> None:
    assert _three() == ("auto", None, None)
    assert _three(bf16=True) == _three(precision="bf16") == _three(bf16=True, fp16=False) == ("bf16", True, False)
    assert _three(fp16=True) == _three(precision="fp16") == _three(precision="fp16", bf16=False)
    assert _three(fp16=True) == ("fp16", False, True)
    assert _three(precision="fp32") == _three(bf16=False) == _three(bf16=False, fp16=False) == ("fp32", False, False)
    assert _three(fp16=False) == ("auto", None, False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bf16": True, "fp16": True}, "bf16 and fp16 are both asked for"),
        ({"precision": "fp32", "bf16": True}, "precision and bf16 contradict each other"),
        ({"precision": "fp16", "bf16": True}, "precision and bf16 contradict each other"),
        ({"precision": "bf16", "bf16": False}, "precision and bf16 contradict each other"),
        ({"precision": "fp16", "fp16": False}, "precision and fp16 contradict each other"),
        ({"precision": "bf16", "fp16": True}, "precision and fp16 contradict each other"),
        ({"tf32": True, "use_cpu": True}, "tf32 is asked for on the CPU"),
        ({"precision": "int4"}, "precision does not fit"),
    ],
)
def test_precision_contradictions_are_errors(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainingArguments(**given)


def test_precision_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(precision="fp32", bf16=True, fp16=True, tf32=True, use_cpu=True)
    assert [problem.what for problem in caught.value.problems] == [
        "bf16 and fp16 are both asked for",
        "precision and bf16 contradict each other",
        "precision and fp16 contradict each other",
        "tf32 is asked for on the CPU",
    ]


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("half_precision_backend", "use --bf16 or --fp16: both run through torch's own autocast"),
        ("fp16_backend", "use --fp16: it runs through torch's own autocast"),
        ("fp16_opt_level", "use --fp16, which equals apex's level O1"),
        ("bf16_full_eval", "use --bf16, which evaluation computes in too"),
        ("fp16_full_eval", "use --fp16, which evaluation computes in too"),
    ],
)
def test_other_precision_switches_are_refused_with_a_fix(name: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"does not honour {name}") as caught:
        TrainingArguments(**{name: True})
    assert fix in caught.value.problems[0].fix


def test_tf32_on_is_refused_on_a_cpu() -> None:
    policy.build(TrainingArguments(tf32=False, use_cpu=True), _CPU)
    with pytest.raises(ConfigError, match=r"(?s)tf32 is asked for, and this device.*got: the CPU.*leave --tf32 out"):
        policy.build(TrainingArguments(tf32=True), _CPU)


def test_fp16_is_refused_without_mixed_precision() -> None:
    with pytest.raises(ConfigError, match="fp16 is asked for, and torch has no mixed precision on this device"):
        device.require("fp16", None, torch.device("meta"))


def test_bf16_is_refused_on_a_gpu_without_it() -> None:
    with pytest.raises(ConfigError) as caught:
        device.require("bf16", True, torch.device("meta"))
    assert [problem.what.split(",")[0] for problem in caught.value.problems] == [
        "bf16 is asked for",
        "tf32 is asked for",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("wanted", [True, False])
def test_tf32_changes_what_a_gpu_computes(wanted: bool) -> None:
    on_gpu = torch.device("cuda", 0)
    if torch.cuda.get_device_properties(on_gpu).major < 8:
        pytest.skip("this GPU has no TF32")
    policy.build(TrainingArguments(tf32=wanted), on_gpu)
    a, b = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact, found = a @ b, (a.float().to(on_gpu) @ b.float().to(on_gpu)).cpu().double()
    error = float((found - exact).norm() / exact.norm())
    assert device.uses_tf32(on_gpu) == wanted
    assert (error > 1e-4) == wanted  # 11 bits a factor: 3e-4; 24 bits: 1e-7
    device.set_tf32(False, on_gpu)
