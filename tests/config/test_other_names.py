"""Names from other places: what became of them, and that none of transformers' fields is overlooked."""

import dataclasses
import re
from typing import Any

import pytest
import transformers

from engine import TrainingArguments
from whet import ConfigError
from whet.config.aliases import ALIASES, NOT_HONOURED, NOT_HONOURED_OLD, REFUSED, SEEN_IN
from whet.config.optimizer_names import names
from whet.config.settings import options_of

_THEIRS = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
_OURS = set(options_of(TrainingArguments))


def _on(name: str) -> bool:
    """Return a value that asks for something."""
    return True not in REFUSED[name].off


def test_every_field_of_the_installed_transformers_is_known() -> None:
    assert _THEIRS - _OURS - set(ALIASES) - set(REFUSED) == set()


def test_list_of_refused_names_has_no_other_names() -> None:
    if not transformers.__version__.startswith(SEEN_IN):
        pytest.skip(f"the list was made from transformers {SEEN_IN}; installed is {transformers.__version__}")
    assert _THEIRS - _OURS - set(ALIASES) == set(NOT_HONOURED)
    assert not set(NOT_HONOURED_OLD) & _THEIRS


def test_no_name_is_both_accepted_and_refused() -> None:
    assert set(REFUSED) & (_OURS | set(ALIASES)) == set()
    assert set(ALIASES) & _OURS == set()


@pytest.mark.parametrize("name", sorted(_THEIRS))
def test_field_of_transformers_is_honoured_translated_or_refused_with_an_alternative(name: str) -> None:
    """The walk over the fields of the installed release; a refused name is so with any value but its off one."""
    if name in _OURS:
        assert name in TrainingArguments().to_dict()
    elif name in ALIASES:
        assert ALIASES[name].to in _OURS or ALIASES[name].note
    else:
        with pytest.raises(ConfigError) as caught:
            TrainingArguments(**{name: _on(name)})
        assert caught.value.problems[0].fix == f"leave {name} out; {NOT_HONOURED[name].instead}"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_field_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"whet does not honour {name}") as caught:
        TrainingArguments(**{name: _on(name)})
    assert caught.value.problems[0].fix == f"leave {name} out; {REFUSED[name].instead}"


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, one in REFUSED.items() for value in one.off])
def test_off_value_of_a_refused_field_is_accepted_silently(
    name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert TrainingArguments(**{name: list(value) if isinstance(value, tuple) else value}) == TrainingArguments()
    assert not caplog.messages


def test_off_values_are_the_defaults_of_transformers() -> None:
    theirs = {field.name: field for field in dataclasses.fields(transformers.TrainingArguments)}
    others = {
        name
        for name in set(REFUSED) & _THEIRS
        if REFUSED[name].off
        and not _passes(name, theirs[name].default_factory() if _is_made(theirs[name]) else theirs[name].default)
    }
    assert others == set()


def _is_made(field: Any) -> bool:
    return field.default_factory is not dataclasses.MISSING


def _passes(name: str, value: object) -> bool:
    try:
        return TrainingArguments(**{name: value}) == TrainingArguments()
    except ConfigError:
        return False


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_alternatives_of_refused_names_exist(name: str) -> None:
    """One sentence, whose flags are whet's, with values that they take."""
    hint = REFUSED[name].instead
    assert 20 <= len(hint) <= 130
    assert hint[-1] not in ".;,"
    flags = re.findall(r"--(\w+)(?: (\w+)\b)?", hint)
    assert {flag for flag, _ in flags} <= _OURS
    assert name not in [flag for flag, _ in flags]
    assert all(value in names() for flag, value in flags if flag == "optim")


_OLD_VALUES = {
    "no_cuda": (True, {"use_cpu": True}),
    "evaluation_strategy": ("epoch", {"eval_strategy": "epoch", "do_eval": True}),
    "evaluate_during_training": (True, {"eval_strategy": "steps", "do_eval": True, "eval_steps": 500}),
    "per_gpu_train_batch_size": (3, {"per_device_train_batch_size": 3}),
    "per_gpu_eval_batch_size": (3, {"per_device_eval_batch_size": 3}),
    "activation_checkpointing": (True, {"gradient_checkpointing": True}),
    "activation_checkpointing_kwargs": ({}, {"gradient_checkpointing_kwargs": {}}),
    "group_by_length": (True, {"train_sampling_strategy": "group_by_length"}),
    "include_inputs_for_metrics": (True, {"include_for_metrics": ["inputs"]}),
    "use_ipex": (True, {}),
    "xpu_backend": ("ccl", {"ddp_backend": "gloo"}),
    "logging_nan_inf_filter": (True, {}),
    "torchdynamo": ("aot_eager", {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
}


_QUIET = sorted(name for name, alias in ALIASES.items() if alias.quiet)
_ANY_VALUE: dict[Any, tuple[Any, ...]] = {
    bool: (True, False),
    bool | None: (True, None),
    int | None: (3, None),
    int: (7,),
}


@pytest.mark.parametrize("name", _QUIET)
def test_field_without_effect_is_accepted_silently(name: str, caplog: pytest.LogCaptureFixture) -> None:
    for value in _ANY_VALUE.get(ALIASES[name].kind, ("warning",)):
        assert TrainingArguments(**{name: value}) == TrainingArguments()
    assert not caplog.messages
    assert ALIASES[name].to is None
    assert len(ALIASES[name].note) > 20


@pytest.mark.parametrize("name", sorted(set(ALIASES) - set(_QUIET)))
def test_older_name_is_translated_by_the_table(name: str) -> None:
    value, changed = _OLD_VALUES[name]
    args = TrainingArguments(**{name: value})
    usual = TrainingArguments()
    assert {key: new for key, new in args.to_dict().items() if new != usual.to_dict()[key]} == changed


def test_older_name_that_was_off_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert TrainingArguments(use_ipex=False, xpu_backend=None, group_by_length=False) == TrainingArguments()
    assert not caplog.records


def test_group_by_length_false_contradicts_no_other_order() -> None:
    args = TrainingArguments(group_by_length=False, train_sampling_strategy="sequential")
    assert args.train_sampling_strategy == "sequential"


@pytest.mark.parametrize("order", [("no_cuda", "use_cpu"), ("use_cpu", "no_cuda")])
def test_two_names_of_one_field_must_agree(order: tuple[str, str]) -> None:
    assert TrainingArguments(**dict.fromkeys(order, True)).use_cpu
    with pytest.raises(ConfigError, match=f"{order[0]} and {order[1]} contradict each other"):
        TrainingArguments(**dict(zip(order, (True, False), strict=True)))


def test_wrong_type_error_names_the_older_name() -> None:
    with pytest.raises(ConfigError, match="no_cuda does not fit"):
        TrainingArguments(no_cuda="perhaps")
