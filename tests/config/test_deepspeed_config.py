"""DeepSpeed's configuration is compared with the arguments, and nothing in it is left out in silence."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import engine
import whet
from whet.config import deepspeed
from whet.config.command_line import load
from whet.config.rules.sharing import stage_of_run
from whet.optional import is_installed
from whet.tasks.qa.task import QA as COMMAND

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
    "schedule": ({"scheduler": {"type": "OneCycle"}}, "scheduler.type is OneCycle, and whet reads WarmupLR"),
    "schedule's rate": (
        {
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0}},
            "optimizer": {"type": "AdamW", "params": {"lr": 2.0}},
        },
        "scheduler.params.warmup_max_lr is 1.0, and learning_rate gives 5e-05",
    ),
    "schedule's shape": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}},
        "warmup_type is log",
    ),
    "schedule's end": (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}},
        "total_num_steps is 9, and",
    ),
    "schedule's key": (
        {"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": "auto"}}},
        "scheduler.params.total_num_steps is not known",
    ),
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
        engine.TrainingArguments(deepspeed=config, **_USUAL)


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
        engine.TrainingArguments(deepspeed=config, **_USUAL)


_WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
_SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "WarmupLR": (_WARMUP, {"lr_scheduler_type": "constant_with_warmup"}),
    "WarmupDecayLR": (_WARMUP | {"total_num_steps": "auto"}, {"lr_scheduler_type": "linear"}),
    "WarmupCosineLR": (
        {"total_num_steps": "auto", "warmup_num_steps": 5, "cos_min_ratio": 0.1},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 5},
    ),
}


@pytest.mark.parametrize("kind", _SCHEDULES)
def test_deepspeed_schedule_is_that_of_the_run(kind: str) -> None:
    params, expected = _SCHEDULES[kind]
    config = _FULL | {"scheduler": {"type": kind, "params": params}}
    args = engine.TrainingArguments(deepspeed=config, **_USUAL)
    assert {name: getattr(args, name) for name in expected} == expected
    assert args.learning_rate == engine.TrainingArguments().learning_rate
    assert f"lr_scheduler_type {expected['lr_scheduler_type']}" in deepspeed.described(args)
    assert "scheduler" not in deepspeed.engine_config(args, 64)  # the schedule is whet's own
    other: dict[str, Any] = {"lr_scheduler_type": "polynomial"}
    with pytest.raises(whet.ConfigError, match=f"scheduler.type is {kind}, and lr_scheduler_type is polynomial"):
        engine.TrainingArguments(deepspeed=config, **_USUAL, **other)


def test_deepspeed_schedule_has_the_numbers_of_its_file() -> None:
    params = {"warmup_max_lr": 3e-4, "warmup_num_steps": 7, "warmup_type": "linear", "total_num_steps": 50}
    config = _FULL | {"scheduler": {"type": "WarmupDecayLR", "params": params}}
    args = engine.TrainingArguments(deepspeed=config, max_steps=50, **_USUAL)
    assert (args.learning_rate, args.warmup_steps) == (3e-4, 7)


@pytest.mark.parametrize(
    ("change", "way"),
    [
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, 'write "cpu" as the device'),
        ({"scheduler": {"type": "OneCycle"}}, "WarmupLR or WarmupDecayLR or WarmupCosineLR as scheduler.type"),
        ({"amp": {"enabled": True}}, "remove the other keys"),
    ],
)
def test_deepspeed_is_not_to_be_installed_for_what_it_does_not_change(change: dict[str, Any], way: str) -> None:
    with pytest.raises(whet.ConfigError) as caught:
        engine.TrainingArguments(deepspeed=_FULL | change, **_USUAL)
    (problem,) = caught.value.problems
    assert way in problem.fix
    assert "pip install" not in problem.fix


_TYPES: dict[str, Any] = {
    "zero_optimization.stage": True, "gradient_accumulation_steps": True, "train_micro_batch_size_per_gpu": 4.5,
    "gradient_clipping": True, "bf16.enabled": 0, "fp16.enabled": 0, "fp16.loss_scale": "0", "steps_per_print": -1,
    "zero_optimization.overlap_comm": 0, "zero_optimization.reduce_bucket_size": "5e8",
    "zero_optimization.sub_group_size": float("inf"), "wall_clock_breakdown": "false",
    "communication_data_type": "half", "gradient_predivide_factor": False,
    "zero_optimization.offload_param.pin_memory": 1, "zero_optimization.offload_optimizer.device": None,
}  # fmt: skip
"""Path -> a value of a type that the key does not take; in Python some of them are equal to one that it takes."""


@pytest.mark.parametrize("has_engine", [False, True])
@pytest.mark.parametrize("path", _TYPES)
def test_deepspeed_value_is_taken_by_its_type_of_json(
    path: str, has_engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed, "is_installed", lambda _: has_engine)
    usual = {"precision": "fp32", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    config = _with(_FULL | {"zero_optimization": {"stage": 1}}, path, _TYPES[path])
    with pytest.raises(whet.ConfigError, match=rf"{path} is .*, and ") as caught:
        engine.TrainingArguments(deepspeed=config, **usual)
    assert str(caught.value).count(f"{path} is ") == 1


_NEED_ENGINE: dict[str, Any] = {
    "communication_data_type": "fp16", "prescale_gradients": True, "gradient_predivide_factor": 2.0,
    "wall_clock_breakdown": True, "dump_state": True, "disable_allgather": True,
    "zero_optimization.load_from_fp32_weights": False, "zero_optimization.ignore_unused_parameters": False,
}  # fmt: skip


@pytest.mark.parametrize("path", _NEED_ENGINE)
def test_deepspeed_key_that_its_engine_alone_honours_is_refused_without_it(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _with(_FULL, path, _NEED_ENGINE[path])
    monkeypatch.setattr(deepspeed, "is_installed", lambda _: True)
    engine.TrainingArguments(deepspeed=config, **_USUAL)
    monkeypatch.setattr(deepspeed, "is_installed", lambda _: False)
    with pytest.raises(whet.ConfigError, match=rf"(?s){path} is .*, and without DeepSpeed it is .*pip install"):
        engine.TrainingArguments(deepspeed=config, **_USUAL)


def test_every_known_deepspeed_key_is_compared_refused_or_named_as_a_setting_of_the_engine() -> None:
    """A new key has to be in one of these."""
    sizes = {"train_batch_size", *deepspeed.SIZES, "gradient_clipping"}
    compared = sizes | {"zero_optimization.stage", *(f"zero_optimization.{name}" for name in deepspeed.OFFLOADS)}
    known = {**deepspeed.OF_ENGINE, **{f"zero_optimization.{name}": key for name, key in deepspeed.OF_ZERO.items()}}
    honoured = {path for path, key in known.items() if key.same is not None}
    config = {**dict.fromkeys(deepspeed.OF_ENGINE, 1), "zero_optimization": dict.fromkeys(deepspeed.OF_ZERO, 1)}
    tunes = set(deepspeed.tunes_engine(config))
    assert tunes | honoured | compared == {*known, *sizes}
    assert not tunes & honoured
    assert set(_NEED_ENGINE) | {"zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"} == honoured


def test_deepspeed_number_format_of_the_exchange_agrees_with_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "is_installed", lambda _: False)
    config = _FULL | {"zero_optimization": {"stage": 1}}
    for hook, name in {"none": "fp32", "bf16": "bfp16", "fp16": "fp16"}.items():
        engine.TrainingArguments(deepspeed=config | {"communication_data_type": name}, **_USUAL, ddp_comm_hook=hook)
        other = "fp32" if name != "fp32" else "fp16"
        with pytest.raises(whet.ConfigError, match=f"communication_data_type is '{other}'"):
            engine.TrainingArguments(
                deepspeed=config | {"communication_data_type": other}, **_USUAL, ddp_comm_hook=hook
            )


@pytest.mark.parametrize("name", ["zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"])
def test_deepspeed_key_that_whet_sets_itself_is_not_overwritten_in_silence(name: str) -> None:
    same = deepspeed.OF_ENGINE[name].same
    engine.TrainingArguments(deepspeed=_FULL | {name: same}, **_USUAL)
    with pytest.raises(whet.ConfigError, match=f"{name} is {not same}, and the optimizer is whet's"):
        engine.TrainingArguments(deepspeed=_FULL | {name: not same}, **_USUAL)


def test_deepspeed_offload_to_a_cpu_is_where_a_cpu_has_everything() -> None:
    config = _with(_FULL, "zero_optimization.offload_param.device", "cpu")
    args = engine.TrainingArguments(deepspeed=config, use_cpu=True, **_USUAL)
    assert "offload_param" not in deepspeed.engine_config(args, hidden_size=32)["zero_optimization"]


@pytest.mark.parametrize("has_engine", [False, True])
@pytest.mark.parametrize(
    "given", [{"zero_stage": 0}, {"zero_stage": 1}, {"fsdp": "shard_grad_op"}, {"fsdp": "full_shard"}], ids=str
)
def test_settings_of_the_stage_next_to_deepspeed_agree_or_are_refused(
    given: dict[str, Any], has_engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed, "is_installed", lambda _: has_engine)
    with pytest.raises(whet.ConfigError, match=rf"{next(iter(given))} .* does not go with deepspeed"):
        engine.TrainingArguments(deepspeed=_FULL, **_USUAL, **given)
    engine.TrainingArguments(deepspeed=_FULL, **_USUAL, zero_stage=2)


def _with(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy of the configuration with this value; sections on the way are made."""
    made = copy.deepcopy(config)
    part, (*parents, name) = made, path.split(".")
    for parent in parents:
        part = part.setdefault(parent, {})
    part[name] = value
    return made


_DDP: dict[str, Any] = {
    "ddp_comm_hook": "bf16", "ddp_bucket_cap_mb": 8, "ddp_find_unused_parameters": True, "ddp_backend": "gloo",
    "ddp_timeout": 60,
}  # fmt: skip
_ENGINE_HONOURS = {"ddp_backend", "ddp_timeout"}
"""The engine exchanges through the process group that whet has opened."""


def test_settings_of_the_exchange_are_honoured_or_refused_with_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new ddp setting has to be listed here."""
    monkeypatch.setattr(deepspeed, "is_installed", lambda _: True)
    assert {one.name for one in fields(engine.TrainingArguments) if one.name.startswith("ddp_")} == set(_DDP)
    for stage in (1, 2, 3):
        config = _FULL | {"zero_optimization": {"stage": stage}}
        for name, value in _DDP.items():
            if name in _ENGINE_HONOURS:
                engine.TrainingArguments(deepspeed=config, **_USUAL, **{name: value})
                continue
            with pytest.raises(whet.ConfigError, match=rf"{name}.* does not go with deepspeed"):
                engine.TrainingArguments(deepspeed=config, **_USUAL, **{name: value})


def test_ddp_settings_hold_where_whet_carries_out_the_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "is_installed", lambda _: False)
    config = _FULL | {"zero_optimization": {"stage": 1}}
    assert engine.TrainingArguments(deepspeed=config, **_USUAL, ddp_bucket_cap_mb=8).ddp_bucket_cap_mb == 8


def test_deepspeed_config_takes_auto_from_the_arguments(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(_FULL), "utf-8")
    for given in (str(file), _FULL):
        args = engine.TrainingArguments(deepspeed=given, **_USUAL)
        config = deepspeed.engine_config(args, hidden_size=32)
        assert config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1024, "overlap_comm": False}
        assert config["gradient_clipping"] == args.max_grad_norm


@pytest.mark.skipif(is_installed("deepspeed"), reason="shows what happens without DeepSpeed")
def test_deepspeed_config_is_carried_out_by_whet_without_deepspeed() -> None:
    assert stage_of_run(engine.TrainingArguments(deepspeed=_FULL, **_USUAL)) == 2


@pytest.mark.parametrize("case", _REFUSED)
def test_deepspeed_config_that_whet_cannot_honour_is_refused_by_its_path(case: str) -> None:
    changes, words = _REFUSED[case]
    with pytest.raises(whet.ConfigError) as caught:
        engine.TrainingArguments(deepspeed=_FULL | changes, **_USUAL, max_grad_norm=1.0, learning_rate=5e-5)
    assert words in str(caught.value)


_TAKEN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "sizes": (
        {"train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": 3}, {},
        {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 3},
    ),
    "all rows": (
        {"train_batch_size": 12}, {}, {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1},
    ),
    "all rows of given steps": (
        {"train_batch_size": 12}, {"gradient_accumulation_steps": 3}, {"per_device_train_batch_size": 4},
    ),
    "steps from the rest": (
        {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}, {},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6},
    ),
    "clipping": ({"gradient_clipping": 0.3}, {}, {"max_grad_norm": 0.3}),
    "bf16": ({"bf16": {"enabled": True}}, {}, {"precision": "bf16", "bf16": True}),
    "no format": ({}, {}, {"precision": "fp32"}),
    "the format of the arguments": ({"bf16": {"enabled": "auto"}}, {"bf16": True}, {"precision": "bf16"}),
    "optimizer": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}}},
        {}, {"learning_rate": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6, "weight_decay": 0.1},
    ),
    "auto": ({"gradient_clipping": "auto", "train_batch_size": "auto"}, {"max_grad_norm": 0.7}, {"max_grad_norm": 0.7}),
}  # fmt: skip
"""Case -> configuration, arguments given, arguments found."""


@pytest.mark.parametrize("case", _TAKEN)
def test_arguments_that_are_not_given_take_deepspeeds_values(case: str, tmp_path: Path) -> None:
    config, given, expected = _TAKEN[case]
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, **config}), "utf-8")
    args = engine.TrainingArguments(deepspeed=str(file), **given)
    assert {name: getattr(args, name) for name in expected} == expected
    assert engine.TrainingArguments(**args.to_dict()) == args


@pytest.mark.parametrize(
    ("config", "given", "words"),
    [
        ({"train_micro_batch_size_per_gpu": 6}, {"per_device_train_batch_size": 8}, "_batch_size gives 8"),
        ({"train_batch_size": 10}, {"gradient_accumulation_steps": 4}, "train_batch_size is 10"),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, {}, "train_batch_size is 10"),
        ({"gradient_clipping": 0.3}, {"max_grad_norm": 1.0}, "max_grad_norm gives 1.0"),
        ({"bf16": {"enabled": True}}, {"precision": "fp32"}, "bf16.enabled is True"),
        ({"bf16": {"enabled": True}}, {"bf16": False}, "bf16.enabled is True"),
        ({"bf16": {"enabled": False}}, {"bf16": True}, "bf16.enabled is False"),
        ({"fp16": {"enabled": True}}, {}, "whet runs DeepSpeed in fp32 and bf16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, "fp16.enabled is true"),
    ],
)  # fmt: skip
def test_arguments_that_are_given_stand_against_deepspeeds_values(
    config: dict[str, Any], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(whet.ConfigError) as caught:
        engine.TrainingArguments(deepspeed={"zero_optimization": {"stage": 2}, **config}, **given)
    assert words in str(caught.value)


def test_the_flags_of_a_command_stand_and_the_others_take_deepspeeds_values(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5, "train_batch_size": 6}', "utf-8")
    words = ["--model_name_or_path", "m", "--train_file", "t.json", "--do_train", "--output_dir", str(tmp_path / "out")]
    loaded = load(COMMAND, [*words, "--deepspeed", str(file), "--gradient_accumulation_steps", "2"])
    args = next(one for one in loaded.settings if isinstance(one, engine.TrainingArguments))
    assert (args.per_device_train_batch_size, args.max_grad_norm, args.precision) == (3, 0.5, "fp32")
    assert deepspeed.described(args) == ["ds.json: stage 2", "max_grad_norm 0.5", "precision fp32"]


_UNREADABLE = {"{": "is no JSON", "[]": "holds no object", '{"aio": {}, "aio": {}}': "given twice"}


@pytest.mark.parametrize(("text", "words"), _UNREADABLE.items())
def test_deepspeed_file_that_cannot_be_read_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(text, "utf-8")
    with pytest.raises(whet.ConfigError, match=words) as caught:
        engine.TrainingArguments(deepspeed=str(file), **_USUAL)
    assert "or the file" in caught.value.problems[0].fix


def test_deepspeed_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(whet.ConfigError, match="ds_config"):
        engine.TrainingArguments(deepspeed=str(tmp_path / "ds_config.json"), **_USUAL)
