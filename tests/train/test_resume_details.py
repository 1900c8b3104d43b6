"""What a resumed run refuses to change, as its user reads it; what the evaluations decide is compared as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import assert_same_weights, span_rows, tiny_bert, toy_rows, toy_trainer, weights_of
from transformers import BertForSequenceClassification, TrainerCallback

import engine
from whet.errors import ConfigError

_SAVED = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 1}


def _first(folder: Path, **changes: Any) -> None:
    toy_trainer(folder, max_steps=2, **(_SAVED | changes)).train()


def _resumed(folder: Path, **changes: Any) -> Any:
    trainer = toy_trainer(folder, max_steps=4, **(_SAVED | changes))
    trainer.train(resume_from_checkpoint=True)
    return trainer


def _refusal(folder: Path, **changes: Any) -> Any:
    with pytest.raises(ConfigError, match="cannot resume with other settings") as caught:
        _resumed(folder, **changes)
    return caught.value.problems[0]


@pytest.mark.parametrize("kind", ["reduce_lr_on_plateau", "greedy"])
@pytest.mark.parametrize(
    "changed",
    [{"eval_steps": 2}, {"eval_delay": 1}, {"metric_for_best_model": "runtime"}, {"greater_is_better": True}],
    ids=str,
)  # fmt: skip
def test_evaluations_that_move_the_rate_are_compared(tmp_path: Path, kind: str, changed: dict[str, Any]) -> None:
    _first(tmp_path, lr_scheduler_type=kind)
    (name,) = changed
    assert name in _refusal(tmp_path, lr_scheduler_type=kind, **changed).what
    _resumed(tmp_path, lr_scheduler_type=kind, **changed, resume_allow_changes=[name, *(["greater_is_better"])])


def test_the_evaluation_set_that_moves_the_rate_is_compared(tmp_path: Path) -> None:
    _first(tmp_path, lr_scheduler_type="reduce_lr_on_plateau")
    other = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_dataset": toy_rows(5)}
    assert "evaluation_data.rows: 6 in the checkpoint -> 5 now" in _refusal(tmp_path, **other).got
    _resumed(tmp_path, **other, resume_allow_changes=["evaluation_data"])


_OTHER_OPTIONS = [
    ("sgd", "momentum=0.9", "momentum=0.5", {"momentum": 0.5}),
    ("sgd", None, "momentum=0.9,nesterov=true", {"momentum": 0.9, "nesterov": True}),  # its state is empty before
    ("rmsprop", "eps=1e-6", "eps=1e-4,alpha=0.9", {"eps": 1e-4, "alpha": 0.9}),
    ("adafactor", "beta1=0.9", "beta1=0.5,clip_threshold=2.0", {"beta1": 0.5, "clip_threshold": 2.0}),
    ("muon", "momentum=0.9", "momentum=0.5", {"momentum": 0.5}),
]


@pytest.mark.parametrize(("optim", "first", "second", "wanted"), _OTHER_OPTIONS, ids=str)
def test_options_of_the_optimizer_that_are_allowed_to_change_do(
    tmp_path: Path, optim: str, first: str | None, second: str, wanted: dict[str, Any]
) -> None:
    _first(tmp_path, optim=optim, optim_args=first)
    found = _resumed(tmp_path, optim=optim, optim_args=second, resume_allow_changes=["optim_args"])
    assert found.state.global_step == 4
    groups = [group for group in found.optimizer.param_groups if wanted.keys() <= group.keys()]
    assert groups
    assert all(group[name] == value for group in groups for name, value in wanted.items())


_OTHER_STATES = [
    ("sgd", "momentum=0.9", None, "momentum_buffer of .*: torch.float32 .* in the checkpoint -> nothing now"),
    ("rmsprop", None, "momentum=0.9", "momentum_buffer of .*: nothing in the checkpoint"),
    ("adafactor", None, "beta1=0.9", "exp_avg of .*: nothing in the checkpoint"),
    ("adafactor", "beta1=0.9", None, "exp_avg of .* in the checkpoint -> nothing now"),
    ("adamw_anyprecision", None, "momentum_dtype=bfloat16", r"exp_avg of .*: torch.float32 .* -> torch.bfloat16"),
    ("adamw_anyprecision", None, "use_kahan_summation=true", "compensation of .*: nothing in the checkpoint"),
]


@pytest.mark.parametrize(("optim", "first", "second", "difference"), _OTHER_STATES, ids=str)
def test_options_with_another_state_are_refused_though_allowed(
    tmp_path: Path, optim: str, first: str | None, second: str | None, difference: str
) -> None:
    _first(tmp_path, optim=optim, optim_args=first)
    with pytest.raises(ConfigError, match=f"(?s)these optim_args cannot change.*{difference}") as caught:
        _resumed(tmp_path, optim=optim, optim_args=second, resume_allow_changes=["optim_args"])
    assert "use the --optim_args of the checkpoint" in caught.value.problems[0].fix


def test_evaluations_may_change_where_nothing_follows_them(tmp_path: Path) -> None:
    _first(tmp_path)
    assert _resumed(tmp_path, eval_steps=2, eval_dataset=toy_rows(5)).state.global_step == 4


def test_the_best_by_another_metric_is_no_measure(tmp_path: Path) -> None:
    """With greater_is_better turned round, nothing could be better than the first run's best loss."""
    best = {"load_best_model_at_end": True, "save_steps": 1, "metric_for_best_model": "loss"}
    _first(tmp_path, **best)
    turned = best | {"greater_is_better": True}
    assert "greater_is_better: false in the checkpoint -> true now" in _refusal(tmp_path, **turned).got
    trainer = _resumed(tmp_path, **turned, resume_allow_changes=["greater_is_better"])
    assert trainer.state.best_global_step in (3, 4)


def test_details_name_what_the_user_set(tmp_path: Path) -> None:
    _first(tmp_path)
    told = _refusal(tmp_path, seed=7, learning_rate=3e-3, lr_scheduler_kwargs={}, max_grad_norm=0.5, weight_decay=0.1,
                    adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-7, label_smoothing_factor=0.0)  # fmt: skip
    names = ("seed", "learning_rate", "lr_scheduler_kwargs", "max_grad_norm", "weight_decay", "adam_beta1",
             "adam_beta2", "adam_epsilon")  # fmt: skip
    assert all(name in told.what for name in names), "what is cut from got is named there"
    assert "data_seed" not in f"{told.what}{told.got}", "it was never set: the order follows seed"
    assert "lr_scheduler_kwargs: not set in the checkpoint -> {} now" in str(told.got)
    assert _resumed(tmp_path, seed=7, resume_allow_changes=["seed"]).state.global_step == 4


def test_a_seed_of_the_order_that_is_set_is_compared(tmp_path: Path) -> None:
    _first(tmp_path, data_seed=5)
    told = _refusal(tmp_path)
    assert "data_seed: 5 in the checkpoint -> 42 now (the order of the rows; without it, seed)" in told.got
    assert _resumed(tmp_path, data_seed=5).state.global_step == 4


def test_rows_of_a_step_say_what_they_are_made_of(tmp_path: Path) -> None:
    _first(tmp_path)
    told = _refusal(tmp_path, gradient_accumulation_steps=2)
    assert (
        "4 in the checkpoint -> 8 now (per_device_train_batch_size times gradient_accumulation_steps times ranks)"
        in told.got
    )


def test_padding_is_one_difference(tmp_path: Path) -> None:
    args = {"max_steps": 2, "save_steps": 1, "use_cpu": True, "per_device_train_batch_size": 4}
    engine.Trainer(tiny_bert(), engine.TrainingArguments(str(tmp_path), **args), train_dataset=span_rows()).train()
    changed = engine.TrainingArguments(str(tmp_path), padding_in_loss="sampled", **(args | {"max_steps": 3}))
    with pytest.raises(ConfigError, match="other settings: padding_in_loss, data") as caught:
        engine.Trainer(tiny_bert(), changed, train_dataset=span_rows()).train(resume_from_checkpoint=True)
    assert "per_device_train_batch_size" not in str(caught.value)


def test_run_that_is_shorter_than_its_checkpoint_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    toy_trainer(tmp_path, max_steps=4, **_SAVED).train()
    trainer = toy_trainer(tmp_path, max_steps=4, **_SAVED)
    trainer.train(resume_from_checkpoint=True)
    assert "nothing is trained" not in caplog.text  # the same command again
    trainer = toy_trainer(tmp_path, max_steps=2, **_SAVED)
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-4 is of step 4, and this run ends after step 2: nothing is trained" in caplog.text
    assert trainer.state.global_step == 4


def _labelled_rows(n: int = 12) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"][:6], "labels": index % 3} for index, row in enumerate(span_rows(n))]


def _classifying(folder: Path, model: Any = None, **changes: Any) -> Any:
    made = tiny_bert(BertForSequenceClassification, num_labels=3) if model is None else model
    rows = {"train_dataset": _labelled_rows(), "eval_dataset": _labelled_rows(4)}
    return toy_trainer(folder, model=made, max_steps=4, save_strategy="steps", save_steps=2, **(rows | changes))


def _stopped(folder: Path, *before: str, **changes: Any) -> Any:
    """A run that ends with an error after its second step; `before` it, these are called."""

    class Stop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2 and not self.stopped:
                self.stopped = True
                raise KeyboardInterrupt

        stopped = False

    trainer = _classifying(folder, callbacks=[Stop()], **changes)
    for name in before:
        getattr(trainer, name)(_labelled_rows(4))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    return trainer


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights of the run that was not stopped."""
    trainer = _classifying(tmp_path_factory.mktemp("unbroken"))
    trainer.train()
    return weights_of(trainer.model)


@pytest.mark.each_value
@pytest.mark.parametrize("kernel", ["same", "same model", "new"])
@pytest.mark.parametrize("before", [(), ("evaluate",), ("predict",)], ids=str)
def test_run_continues_in_the_same_notebook_and_in_a_new_one(
    tmp_path: Path, unbroken: Any, kernel: str, before: tuple[str, ...]
) -> None:
    """transformers' forward writes problem_type into the configuration; that is no change of the user's."""
    trainer = _stopped(tmp_path, *before)
    if kernel != "same":
        trainer = _classifying(tmp_path, trainer.model if kernel == "same model" else None)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    assert_same_weights(trainer.model, unbroken)
    assert trainer.model.config.problem_type == "single_label_classification"


def test_what_a_forward_inferred_is_continued_and_another_choice_is_refused(tmp_path: Path) -> None:
    """Scores of one column are a regression; the user then asks for classes."""
    rows = [{**row, "labels": float(row["labels"])} for row in _labelled_rows()]
    data = {"train_dataset": rows, "eval_dataset": rows[:4]}
    first = _stopped(tmp_path, model=tiny_bert(BertForSequenceClassification, num_labels=1), **data)
    assert first.model.config.problem_type == "regression"
    other = tiny_bert(BertForSequenceClassification, num_labels=1, problem_type="multi_label_classification")
    with pytest.raises(ConfigError, match=r"problem_type: regression in the checkpoint -> multi_label") as refused:
        _classifying(tmp_path, other, **data).train(resume_from_checkpoint=True)
    assert "model" in refused.value.problems[0].what


def test_settings_that_leave_the_loss_as_it_is_may_change(tmp_path: Path, unbroken: Any) -> None:
    """A notebook switches these for a look at the model between two trainings."""
    trainer = _stopped(tmp_path)
    trainer.model.config.use_cache = not trainer.model.config.use_cache
    trainer.model.config.output_hidden_states = False
    trainer.train(resume_from_checkpoint=True)
    assert_same_weights(trainer.model, unbroken)
