"""What scripts for transformers' Trainer do on the first afternoon: constructor arguments, methods and attributes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from override_runs import Smoothed, class_rows, losses, ours, pad, theirs, token_rows
from tiny_runs import assert_same_weights, entries, tiny_bert, weights_of
from torch import nn
from transformers import (
    BertForSequenceClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    ProgressCallback,
    TrainerCallback,
)
from transformers.trainer_utils import speed_metrics

import engine
import whet
from tiny_decoders import tiny_decoder
from tiny_decoders import token_rows as decoder_rows
from whet.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer(encoder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(encoder)


def classifier(**changes: Any) -> Any:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
    return tiny_bert(BertForSequenceClassification, **(still | changes))


def texts(tokenizer: Any, n: int = 12) -> datasets.Dataset:
    """As the course does it: batched tokenisation, text columns left in."""
    words = ["where", "is", "the", "river", "and", "a", "town", "of", "old"]
    raw = {
        "text": [" ".join(words[: 2 + i % 7]) for i in range(n)],
        "idx": list(range(n)),
        "label": [i % 3 for i in range(n)],
    }
    return datasets.Dataset.from_dict(raw).map(lambda rows: tokenizer(rows["text"]), batched=True)


def test_the_courses_example_trains_as_in_transformers(tmp_path: Path, tokenizer: Any) -> None:
    rows = texts(tokenizer)
    found = []
    for base, args in ((engine.Trainer, ours(tmp_path / "a")), (transformers.Trainer, theirs(tmp_path / "b"))):
        model = classifier(vocab_size=len(tokenizer))
        collate = DataCollatorWithPadding(tokenizer)
        trainer = base(
            model, args, train_dataset=rows, eval_dataset=rows, data_collator=collate, processing_class=tokenizer
        )
        trainer.train()
        found.append([*losses(trainer), trainer.evaluate()["eval_loss"]])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_the_courses_example_with_a_collator_of_ones_own(tmp_path: Path, tokenizer: Any) -> None:
    """It sees the columns of the model, as transformers' does; one that asks for another column gets it."""
    seen: list[list[str]] = []

    def collate(rows: list[dict[str, Any]]) -> Any:
        seen.append(sorted(rows[0]))
        assert [row["text"] for row in rows]
        return tokenizer.pad([dict(row) for row in rows], return_tensors="pt")

    rows = texts(tokenizer).rename_column("label", "labels")
    engine.Trainer(classifier(vocab_size=len(tokenizer)), ours(tmp_path), collate, rows).train()
    assert "text" not in seen[0]
    assert "input_ids" in seen[0]


def test_a_padding_collator_lets_a_question_answering_model_run_packed(tmp_path: Path, tokenizer: Any) -> None:
    from tiny_runs import span_rows

    collate = DataCollatorWithPadding(tokenizer)
    given = engine.Trainer(tiny_bert(), ours(tmp_path / "a"), collate, span_rows())
    plain = engine.Trainer(tiny_bert(), ours(tmp_path / "b"), None, span_rows())
    given.train()
    plain.train()
    assert given.objective.packed
    assert_same_weights(given.model, plain.model)


def test_tokenizer_is_the_older_name_of_processing_class(tmp_path: Path, tokenizer: Any) -> None:
    trainer = engine.Trainer(Smoothed(), ours(tmp_path), tokenizer=tokenizer)
    assert trainer.tokenizer is trainer.processing_class is tokenizer
    trainer.save_model()
    assert (tmp_path / "tokenizer.json").exists()
    with pytest.raises(ConfigError, match="contradict"):
        engine.Trainer(Smoothed(), ours(tmp_path), tokenizer=tokenizer, processing_class=object())


def test_positional_arguments_are_those_of_transformers(tmp_path: Path) -> None:
    init = lambda: Smoothed()  # noqa: E731
    trainer = engine.Trainer(
        None, ours(tmp_path), None, class_rows(), class_rows(), None, init, None, lambda _: {"one": 1}
    )
    assert trainer.evaluate()["eval_one"] == 1


def test_model_init_gives_each_training_a_new_model(tmp_path: Path) -> None:
    def new(trial: Any = None) -> nn.Module:
        model = Smoothed()
        nn.init.normal_(model.head.weight)  # the seed of the run decides
        return model

    trainer = engine.Trainer(model_init=new, args=ours(tmp_path), train_dataset=class_rows())
    first = trainer.model
    trainer.train()
    once = weights_of(trainer.model)
    trainer.train()
    assert first is not trainer.model
    assert_same_weights(trainer.model, once)
    other = transformers.Trainer(model_init=new, args=theirs(tmp_path / "b"), train_dataset=class_rows())
    other.train()
    for name, tensor in weights_of(other.model).items():
        torch.testing.assert_close(once[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "Trainer needs a model"),
        ({"model": "bert-base-uncased"}, "model is not a torch module"),
        ({"model": Smoothed(), "model_init": Smoothed}, "exclude each other"),
        ({"model_init": lambda: None}, "model_init returned no model"),
        ({"model_init": lambda a, b: None}, "model_init has too many parameters"),
        ({"model_init": Smoothed, "optimizers": (torch.optim.SGD(Smoothed().parameters()), None)}, "exclude"),
        ({"model": Smoothed(), "data_collator": 7}, "data_collator is not a function"),
        ({"model": Smoothed(), "args": {"eval_strategy": "epoch"}}, "no data set to evaluate on"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_go_together_are_refused(tmp_path: Path, given: dict[str, Any], says: str) -> None:
    args = ours(tmp_path, **given.pop("args", {}))
    with pytest.raises(ConfigError, match=says):
        engine.Trainer(args=args, **given)


def test_several_evaluation_sets_have_names(tmp_path: Path) -> None:
    sets = {"a": class_rows(5), "b": class_rows(8)}
    args = {"eval_strategy": "epoch", "num_train_epochs": 2, "metric_for_best_model": "eval_b_loss"}
    trainer = engine.Trainer(Smoothed(), ours(tmp_path, **args), train_dataset=class_rows(), eval_dataset=sets)
    trainer.train()
    metrics = trainer.evaluate()
    for name, rows in sets.items():
        assert metrics[f"eval_{name}_loss"] == pytest.approx(trainer.evaluate(rows)["eval_loss"], rel=1e-6)
    assert len(entries(trainer, "eval_a_loss")) == 3
    assert trainer.state.best_metric == entries(trainer, "eval_b_loss")[1][1]
    assert "test_b_loss" in trainer.evaluate({"b": class_rows(3)}, metric_key_prefix="test")
    with pytest.raises(ConfigError, match="no set of this name"):
        trainer.evaluate("c")


def test_compute_loss_func_gets_outputs_labels_and_their_count(tmp_path: Path) -> None:
    counts: list[int] = []

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        counts.append(int(num_items_in_batch))
        return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    args = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    found = []
    for base, made in ((engine.Trainer, ours), (transformers.Trainer, theirs)):
        folder = tmp_path / base.__module__
        trainer = base(Smoothed(), made(folder, **args), train_dataset=class_rows(), compute_loss_func=loss)
        trainer.train()
        found.append(losses(trainer))
    assert counts[: len(counts) // 2] == [6, 6, 6, 6, 6, 6, 2]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_predictions_pass_through_preprocess_logits_for_metrics(tmp_path: Path) -> None:
    seen: list[Any] = []

    def judge(prediction: Any) -> dict[str, Any]:
        seen.append(prediction.predictions)
        return {"right": (prediction.predictions == prediction.label_ids).mean(), "array": np.float32(0.5)}

    rows, best = class_rows(), lambda logits, labels: logits.argmax(-1)
    trainer = engine.Trainer(
        Smoothed(), ours(tmp_path), eval_dataset=rows, compute_metrics=judge, preprocess_logits_for_metrics=best
    )
    metrics = trainer.evaluate()
    assert seen[0].shape == (14,)
    assert type(metrics["eval_array"]) is float
    trainer.save_metrics("eval", metrics)
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_array"] == 0.5


def test_ignored_outputs_are_left_out_of_predictions(tmp_path: Path) -> None:
    class Two(Smoothed):
        def forward(self, x: Any, labels: Any = None) -> Any:
            return super().forward(x, labels) | {"other": x}

    trainer = engine.Trainer(Two(), ours(tmp_path))
    assert len(trainer.predict(class_rows(3)).predictions) == 2
    assert trainer.predict(class_rows(3), ignore_keys=["other"]).predictions.shape == (3, 3)
    assert trainer.predict([{"x": row["x"]} for row in class_rows(3)]).label_ids is None


def test_callbacks_are_added_found_and_taken_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Counts(TrainerCallback):
        n = 0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.n += 1

    trainer = engine.Trainer(Smoothed(), ours(tmp_path), train_dataset=class_rows())
    kept = Counts()
    trainer.add_callback(kept)
    trainer.add_callback(Counts)
    assert trainer.pop_callback(Counts) is kept
    trainer.remove_callback(Counts)
    assert trainer.pop_callback(Counts) is None
    trainer.remove_callback(Counts)  # as in transformers, a class that is not there is no error
    with pytest.raises(ConfigError, match="not one of this Trainer's"):
        trainer.remove_callback(kept)
    trainer.add_callback(kept)
    trainer.remove_callback(ProgressCallback)
    trainer.train()
    assert kept.n == 4
    assert capsys.readouterr().out == ""


def test_callbacks_are_told_what_transformers_tells_them(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Looks(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            seen.update(known)

        def on_prediction_step(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            seen["eval_dataloader"] = known["eval_dataloader"]

    rows = class_rows()
    trainer = engine.Trainer(
        Smoothed(), ours(tmp_path, eval_strategy="epoch"), train_dataset=rows, eval_dataset=rows, callbacks=[Looks]
    )
    trainer.train()
    assert {"model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader"} <= seen.keys()
    assert len(seen["train_dataloader"]) == 4
    assert [len(batch["labels"]) for batch in seen["eval_dataloader"]] == [8, 6]


def test_loaders_give_the_batches_of_the_training(tmp_path: Path) -> None:
    seen: list[Any] = []

    def collate(rows: Any) -> Any:
        seen.append([int(row["labels"]) for row in rows])
        return {name: torch.stack([row[name] for row in rows]) for name in ("x", "labels")}

    rows = [row | {"labels": torch.tensor(i)} for i, row in enumerate(class_rows(14))]
    for row in rows:
        row["labels"] = row["labels"] % 3
    args = ours(tmp_path, train_sampling_strategy="random", num_train_epochs=2)
    trainer = engine.Trainer(Smoothed(), args, collate, rows, rows[:3])
    loader = trainer.get_train_dataloader()
    wanted = [batch["labels"].tolist() for _ in range(2) for batch in loader]
    seen.clear()
    trainer.train()
    assert seen == wanted
    assert trainer.num_examples(loader) == 14
    assert [len(batch["x"]) for batch in trainer.get_eval_dataloader()] == [3]
    assert [len(batch["x"]) for batch in trainer.get_test_dataloader(rows)] == [8, 6]


def test_metrics_and_state_are_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = engine.Trainer(Smoothed(), ours(tmp_path), train_dataset=class_rows(), eval_dataset=class_rows(5))
    metrics = trainer.train().metrics
    capsys.readouterr()
    trainer.log_metrics("train", metrics)
    shown = capsys.readouterr().out
    assert "***** train metrics *****" in shown
    assert "train_loss" in shown
    assert trainer.metrics_format({"train_runtime": 61.5, "a": 0.123456}) == {
        "train_runtime": "0:01:01.50",
        "a": 0.1235,
    }
    trainer.save_metrics("train", metrics)
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_state()
    assert {"train_loss", "eval_loss"} <= json.loads((tmp_path / "all_results.json").read_text()).keys()
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 4


def test_small_questions_are_answered(tmp_path: Path) -> None:
    trainer = engine.Trainer(classifier(), ours(tmp_path), pad, token_rows())
    with pytest.raises(ConfigError, match="needs an optimizer"):
        trainer.get_learning_rates()
    trainer.train()
    assert trainer.is_world_process_zero()
    assert trainer.is_local_process_zero()
    assert trainer.model_wrapped is trainer.model
    assert trainer.callback_handler.lr_scheduler is trainer.lr_scheduler
    assert trainer.control is trainer.callback_handler.control
    assert trainer.accelerator.unwrap_model(trainer.model) is trainer.model
    assert not hasattr(trainer.accelerator, "fsdp_plugin")
    with pytest.raises(ConfigError, match="no fsdp_plugin"):
        trainer.accelerator.fsdp_plugin  # noqa: B018
    assert trainer.get_total_train_batch_size(trainer.args) == 4
    assert trainer.get_num_trainable_parameters() == sum(p.numel() for p in trainer.model.parameters())
    assert len(trainer.get_learning_rates()) == len(trainer.get_optimizer_group()) == 2
    other = transformers.Trainer(classifier(), theirs(tmp_path / "b"), pad, token_rows())
    assert sorted(trainer.get_decay_parameter_names(trainer.model)) == sorted(
        other.get_decay_parameter_names(other.model)
    )
    batch = pad(token_rows(3))
    assert trainer.floating_point_ops(batch) == other.floating_point_ops(batch)
    kind, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    assert kind(trainer.model.parameters(), **options).param_groups[0]["lr"] == 1e-2
    trainer.end()


class QuestionAnsweringTrainer(engine.Trainer):
    """As transformers' trainer_qa.py: evaluate with post-processing around the evaluation loop."""

    def __init__(self, *args: Any, eval_examples: Any = None, post_process_function: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eval_examples, self.post_process_function = eval_examples, post_process_function

    def evaluate(
        self,
        eval_dataset: Any = None,
        eval_examples: Any = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        eval_dataloader = self.get_eval_dataloader(eval_dataset)
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        start_time = time.time()
        try:
            output = self.evaluation_loop(
                eval_dataloader, description="Evaluation",
                prediction_loss_only=True if compute_metrics is None else None,
                ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix,
            )  # fmt: skip
        finally:
            self.compute_metrics = compute_metrics
        output.metrics.update(speed_metrics(metric_key_prefix, start_time, num_samples=output.num_samples))
        preds = self.post_process_function(self.eval_examples, eval_dataset, output.predictions)
        metrics = {f"{metric_key_prefix}_{k}": v for k, v in self.compute_metrics(preds).items()} | output.metrics
        if self.args.should_log:
            self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def test_a_question_answering_trainer_of_the_examples_works(tmp_path: Path) -> None:
    from tiny_runs import span_rows

    rows = span_rows()
    trainer = QuestionAnsweringTrainer(
        tiny_bert(), ours(tmp_path, eval_strategy="epoch"), train_dataset=rows, eval_dataset=rows, eval_examples=rows,
        post_process_function=lambda examples, features, predictions: (len(examples), predictions),
        compute_metrics=lambda given: {"f1": 50.0, "n": given[0], "width": given[1][0].shape[1]},
    )  # fmt: skip
    trainer.train()
    assert trainer.objective.packed
    (entry,) = [entry for entry in trainer.state.log_history if "eval_f1" in entry]
    assert (entry["eval_n"], entry["eval_width"]) == (12, max(len(row["input_ids"]) for row in rows))
    assert {"eval_loss", "eval_samples_per_second"} <= entry.keys()


def test_what_is_not_there_is_refused_with_the_way(tmp_path: Path) -> None:
    trainer = engine.Trainer(Smoothed(), ours(tmp_path))
    for name in ("create_accelerator_and_postprocess", "set_initial_training_values"):
        with pytest.raises(ConfigError, match=rf"(?s)no {name}.*fix: "):
            getattr(trainer, name)()
    with pytest.raises(ConfigError, match="no data set to train"):
        trainer.get_train_dataloader()
    with pytest.raises(whet.DataError, match="training set is empty"):
        trainer.train()


def test_gradients_of_a_training_step_are_those_of_the_model(tmp_path: Path) -> None:
    """A script that runs the step itself gets a loss and gradients."""
    trainer = engine.Trainer(Smoothed(), ours(tmp_path), train_dataset=class_rows())
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.training_step(trainer.model, batch)
    with trainer.compute_loss_context_manager():
        again, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert loss == again.detach()
    assert trainer.model.head.weight.grad is not None
    found, logits, labels = trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
    assert found == loss
    assert torch.equal(logits, outputs["logits"].detach())
    assert torch.equal(labels, batch["labels"])


@pytest.mark.filterwarnings("ignore:Using .DataCollatorWithFlattening:UserWarning")  # asks for flash kernels
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("by_user", [False, True], ids=["own loss", "compute_loss"])
@pytest.mark.parametrize(
    ("more", "ours_alone", "shared"),
    [
        ({}, {}, {}),
        ({"return_flash_attn_kwargs": True, "return_seq_idx": True}, {}, {}),
        ({}, {"attn_implementation": "eager"}, {}),
        ({}, {}, {"gradient_checkpointing": True}),
    ],
    ids=["positions", "named", "eager", "checkpointing"],
)
def test_sequences_end_to_end_train_as_in_transformers(
    tmp_path: Path, more: dict[str, bool], ours_alone: dict[str, Any], shared: dict[str, Any], by_user: bool
) -> None:
    """DataCollatorWithFlattening with a model whose configuration has a cache, which both Trainers leave out."""
    rows, found = decoder_rows(12), []
    shared = {"per_device_eval_batch_size": 12} | shared
    for base, args in (
        (engine.Trainer, ours(tmp_path / "a", **shared, **ours_alone)),
        (transformers.Trainer, theirs(tmp_path / "b", **shared)),
    ):
        model, collate = tiny_decoder("llama"), DataCollatorWithFlattening(**more)
        made: Any = _with_loss(base) if by_user else base
        trainer = made(model, args, collate, rows, rows)
        trainer.train()
        found.append([*losses(trainer), trainer.evaluate()["eval_loss"]])
        assert model.config.use_cache is (base is engine.Trainer)
    assert found[0] == pytest.approx(found[1], rel=1e-5)  # float32 rounding; rows that see each other are 1e-3 off


def _with_loss(base: Any) -> Any:
    class WithLoss(base):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            out = model(**inputs)
            return (out.loss, out) if return_outputs else out.loss

    return WithLoss
