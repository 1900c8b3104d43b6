"""DeepSpeed's configuration is compared with the arguments, and nothing in it is left out in silence."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import whet
from whet.config import deepspeed
from whet.optional import is_installed

_USUAL: dict[str, Any] = {"precision": "fp32", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
_FULL: dict[str, Any] = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "steps_per_print": 100,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-8, "weight_decay": "auto"}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": False},
}  # fmt: skip
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"amp": {"enabled": True}}, "amp is not known"),
    "unknown key of ZeRO": (
        {"zero_optimization": {"stage": 1, "zero_hpz_partition_size": 2}},
        "zero_hpz_partition_size",
    ),
    "other batch": ({"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu is 8"),
    "other clipping": ({"gradient_clipping": 0.3}, "gradient_clipping is 0.3, and max_grad_norm gives 1.0"),
    "other rate": ({"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}, "optimizer.params.lr is 1.0"),
    "other optimizer": ({"optimizer": {"type": "Lamb"}}, "optimizer.type is Lamb"),
    "offload": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        "offload_param.device is nvme",
    ),
    "schedule": ({"scheduler": {"type": "WarmupLR"}}, "scheduler is not known"),
    "no section": ({"zero_optimization": 2}, "zero_optimization is no section"),
    "no stage": ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4"),
    "precision": ({"bf16": {"enabled": True}}, "bf16.enabled is True, and precision gives False"),
}


_SECTIONS = ("optimizer", "optimizer.params", "bf16", "fp16", "zero_optimization", "aio",
             "zero_optimization.offload_optimizer", "zero_optimization.offload_param")  # fmt: skip


@pytest.mark.parametrize("value", [None, [], ["a"], "auto", "cpu", 3, 0.5, True], ids=repr)
@pytest.mark.parametrize("section", _SECTIONS)
def test_deepspeed_section_that_is_no_object_is_refused_by_its_path(section: str, value: Any) -> None:
    config = copy.deepcopy(_FULL)
    *parents, name = section.split(".")
    part = config
    for parent in parents:
        part = part[parent]
    part[name] = value
    with pytest.raises(whet.ConfigError, match=rf"{section} is no section"):
        whet.TrainingArguments(deepspeed=config, **_USUAL)


@pytest.mark.parametrize("value", [None, [], {}, "two"], ids=repr)
@pytest.mark.parametrize("key", ["gradient_clipping", "train_batch_size", "optimizer.type", "zero_optimization.stage",
                                 "bf16.enabled", "optimizer.params.betas"])  # fmt: skip
def test_deepspeed_value_of_another_type_is_refused_by_its_path(key: str, value: Any) -> None:
    config = copy.deepcopy(_FULL)
    *parents, name = key.split(".")
    part = config
    for parent in parents:
        part = part[parent]
    part[name] = value
    with pytest.raises(whet.ConfigError, match=rf"{key} is "):
        whet.TrainingArguments(deepspeed=config, **_USUAL)


_DDP: dict[str, Any] = {
    "ddp_comm_hook": "bf16", "ddp_bucket_cap_mb": 8, "ddp_find_unused_parameters": False, "ddp_backend": "gloo",
    "ddp_timeout": 60,
}  # fmt: skip
_ENGINE_HONOURS = {"ddp_backend", "ddp_timeout"}
"""The engine exchanges through the process group that whet has opened."""


def test_settings_of_the_exchange_are_honoured_or_refused_with_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new ddp setting has to be listed here."""
    monkeypatch.setattr(deepspeed, "is_installed", lambda _: True)
    assert {one.name for one in fields(whet.TrainingArguments) if one.name.startswith("ddp_")} == set(_DDP)
    for stage in (1, 2, 3):
        config = _FULL | {"zero_optimization": {"stage": stage}}
        for name, value in _DDP.items():
            if name in _ENGINE_HONOURS:
                whet.TrainingArguments(deepspeed=config, **_USUAL, **{name: value})
                continue
            with pytest.raises(whet.ConfigError, match=rf"{name}.* does not go with deepspeed"):
                whet.TrainingArguments(deepspeed=config, **_USUAL, **{name: value})


def test_ddp_settings_hold_where_whet_carries_out_the_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "is_installed", lambda _: False)
    config = _FULL | {"zero_optimization": {"stage": 1}}
    assert whet.TrainingArguments(deepspeed=config, **_USUAL, ddp_bucket_cap_mb=8).ddp_bucket_cap_mb == 8


def test_deepspeed_config_takes_auto_from_the_arguments(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(_FULL), "utf-8")
    for given in (str(file), _FULL):
        args = whet.TrainingArguments(deepspeed=given, **_USUAL)
        config = deepspeed.engine_config(args, hidden_size=32)
        assert config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1024, "overlap_comm": False}
        assert config["gradient_clipping"] == args.max_grad_norm


@pytest.mark.skipif(is_installed("deepspeed"), reason="shows what happens without DeepSpeed")
def test_deepspeed_config_is_carried_out_by_whet_without_deepspeed() -> None:
    assert whet.TrainingArguments(deepspeed=_FULL, **_USUAL).zero_stage == 2


@pytest.mark.parametrize("case", _REFUSED)
def test_deepspeed_config_that_whet_cannot_honour_is_refused_by_its_path(case: str) -> None:
    changes, words = _REFUSED[case]
    with pytest.raises(whet.ConfigError) as caught:
        whet.TrainingArguments(deepspeed=_FULL | changes, **_USUAL)
    assert words in str(caught.value)


_UNREADABLE = {"{": "is no JSON", "[]": "holds no object", '{"aio": {}, "aio": {}}': "given twice"}


@pytest.mark.parametrize(("text", "words"), _UNREADABLE.items())
def test_deepspeed_file_that_cannot_be_read_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(text, "utf-8")
    with pytest.raises(whet.ConfigError, match=words) as caught:
        whet.TrainingArguments(deepspeed=str(file), **_USUAL)
    assert "or the file" in caught.value.problems[0].fix


def test_deepspeed_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(whet.ConfigError, match="ds_config"):
        whet.TrainingArguments(deepspeed=str(tmp_path / "ds_config.json"), **_USUAL)
