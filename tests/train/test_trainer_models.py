"""Any module that returns a loss trains, on rows of any kind, and as a loop written by hand would train it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tiny_runs import FORMS, Toy, arguments, assert_same_weights, entries, tiny_bert, toy_rows, toy_trainer, weights_of
from torch import nn
from transformers import BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, default_data_collator

import engine
from whet.errors import ConfigError, DataError

Rows = list[dict[str, Any]]


class MapStyle(torch.utils.data.Dataset):
    """A data set as torch describes it."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def _of_datasets(rows: Rows) -> datasets.Dataset:
    plain = {"x": [row["x"].tolist() for row in rows], "labels": [row["labels"].item() for row in rows]}
    return datasets.Dataset.from_dict(plain)


FORMS_OF_DATA: dict[str, Callable[[Rows], Any]] = {
    "torch": MapStyle,
    "datasets": _of_datasets,
    "datasets with tensors": lambda rows: _of_datasets(rows).with_format("torch"),
    "tuple": tuple,
}


def by_hand(
    rows: Rows, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer], rate: Callable[[int], float]
) -> Toy:
    """The textbook's loop: 4 rows a step, gradient norm at most 1, learning rate `rate(step)`."""
    model = Toy()
    optimizer = optimizer_of(model)
    for step in range(len(rows) // 4):
        batch = rows[4 * step : 4 * step + 4]
        inputs = {name: torch.stack([row[name] for row in batch]) for name in ("x", "labels")}
        optimizer.param_groups[0]["lr"] = rate(step)
        model(**inputs)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_close(found: nn.Module, wanted: nn.Module) -> None:
    """Equal weights. whet multiplies and divides the mean loss by the count of rows: float32 rounding, no more."""
    for (name, first), second in zip(weights_of(found).items(), weights_of(wanted).values(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


def test_a_run_is_the_loop_written_by_hand(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6)
    trainer.train()
    wanted = by_hand(
        toy_rows(),
        lambda model: torch.optim.AdamW(model.parameters(), betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0),
        lambda step: 1e-2 * (1 - step / 3),
    )
    assert_close(trainer.model, wanted)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_the_loss_may_come_in_any_form(tmp_path: Path, form: str) -> None:
    trainer = toy_trainer(tmp_path, model=Toy(form))
    wanted = toy_trainer(tmp_path)
    assert trainer.train().training_loss == wanted.train().training_loss
    assert_same_weights(trainer.model, wanted.model)


@pytest.mark.parametrize("form", sorted(FORMS_OF_DATA))
def test_the_rows_may_come_in_any_form(tmp_path: Path, form: str) -> None:
    trainer = toy_trainer(tmp_path, train_dataset=FORMS_OF_DATA[form](toy_rows()))
    trainer.train()
    wanted = toy_trainer(tmp_path)
    wanted.train()
    assert_same_weights(trainer.model, wanted.model)


def test_columns_that_the_model_does_not_read_are_left_out(tmp_path: Path) -> None:
    rows = _of_datasets(toy_rows())
    rows = rows.add_column("number", list(range(12))).add_column("text", ["word"] * 12)
    trainer = toy_trainer(tmp_path, train_dataset=rows)
    trainer.train()
    wanted = toy_trainer(tmp_path)
    wanted.train()
    assert_same_weights(trainer.model, wanted.model)


def test_a_collator_of_the_users_own_makes_the_batches(tmp_path: Path) -> None:
    seen: list[int] = []

    def doubled(rows: Rows) -> dict[str, Any]:
        seen.append(len(rows))
        return {
            "x": torch.stack([2 * row["x"] for row in rows]),
            "labels": torch.stack([row["labels"] for row in rows]),
        }

    trainer = toy_trainer(tmp_path, train_dataset=toy_rows(10), data_collator=doubled)
    trainer.train()
    assert seen == [4, 4, 2]
    twice = [{"x": 2 * row["x"], "labels": row["labels"]} for row in toy_rows(10)]
    wanted = toy_trainer(tmp_path, train_dataset=twice)
    wanted.train()
    assert_same_weights(trainer.model, wanted.model)


def test_accumulated_batches_train_as_one_large_batch(tmp_path: Path) -> None:
    """The last step of each epoch holds 2 rows, of 4 and of 2 + 2: a mean of means would weigh them otherwise."""
    parts = toy_trainer(
        tmp_path, train_dataset=toy_rows(11), per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    parts.train()
    whole = toy_trainer(tmp_path, train_dataset=toy_rows(11))
    whole.train()
    assert parts.state.global_step == whole.state.global_step == 3
    assert_close(parts.model, whole.model)


def test_accumulated_batches_of_next_words_train_as_one_large_batch(tmp_path: Path) -> None:
    """A causal model predicts each token from those before it: the first label of a row is no target."""
    rows = []
    for i, ids in enumerate(torch.randint(5, 50, (8, 10), generator=torch.Generator().manual_seed(1))):
        hidden = torch.arange(10) < 6 if i % 4 == 0 else torch.arange(10) > i
        rows.append({"input_ids": ids, "labels": ids.masked_fill(hidden, -100)})
    losses = []
    for size in (4, 2, 1):
        torch.manual_seed(0)
        sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **still))
        trainer = toy_trainer(
            tmp_path, model=model, train_dataset=rows, data_collator=default_data_collator, logging_steps=1,
            per_device_train_batch_size=size, gradient_accumulation_steps=4 // size,
        )  # fmt: skip
        trainer.train()
        losses.append([loss for _, loss in entries(trainer, "loss")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # float32, other order of sums
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_a_head_with_a_padding_collator_learns(tmp_path: Path) -> None:
    """The label of a row says whether its first token is 7; the rows differ in length."""

    def padded(rows: Rows) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
        return {
            "input_ids": ids,
            "attention_mask": (ids > 0).long(),
            "labels": torch.tensor([r["label"] for r in rows]),
        }

    rows = [{"input_ids": [7 if i % 2 else 8, *range(9, 9 + i % 5)], "label": i % 2} for i in range(16)]
    trainer = engine.Trainer(
        model=tiny_bert(BertForSequenceClassification, num_labels=2),
        args=arguments(tmp_path, num_train_epochs=8, logging_steps=1, lr_scheduler_type="constant"),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=padded,
        compute_metrics=lambda judged: {"right": float((judged.predictions.argmax(-1) == judged.label_ids).mean())},
    )
    trainer.train()
    losses = [loss for _, loss in entries(trainer, "loss")]
    assert losses[-1] < 0.1 < 0.5 < losses[0]
    assert trainer.evaluate()["eval_right"] == 1.0


def test_a_model_without_a_loss_is_refused(tmp_path: Path) -> None:
    class Silent(Toy):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return {"logits": x + labels[:, None]}

    with pytest.raises(ConfigError, match=r"(?s)returned no loss.*got: dict.*why: .*fix: "):
        toy_trainer(tmp_path, model=Silent()).train()


@pytest.mark.parametrize("rows", [None, []])
def test_training_on_nothing_is_refused(tmp_path: Path, rows: Rows | None) -> None:
    with pytest.raises(DataError, match="the training set is empty"):
        toy_trainer(tmp_path, train_dataset=rows).train()


def test_frozen_weights_stay(tmp_path: Path) -> None:
    model = Toy()
    model.hidden.requires_grad_(requires_grad=False)
    before = weights_of(model)
    toy_trainer(tmp_path, model=model).train()
    assert torch.equal(model.hidden.weight, before["hidden.weight"])
    assert not torch.equal(model.head.weight, before["head.weight"])


def test_a_model_that_is_frozen_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to train"):
        toy_trainer(tmp_path, model=Toy().requires_grad_(requires_grad=False)).train()


def test_an_optimizer_of_the_users_own_gets_the_usual_schedule(tmp_path: Path) -> None:
    model = Toy()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = toy_trainer(tmp_path, model=model, optimizers=(sgd, None))
    trainer.train()
    wanted = by_hand(toy_rows(), lambda m: torch.optim.SGD(m.parameters(), lr=0.05), lambda step: 0.05 * (1 - step / 3))
    assert_close(model, wanted)


def test_an_optimizer_and_a_schedule_of_the_users_own(tmp_path: Path) -> None:
    model = Toy()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    halves = torch.optim.lr_scheduler.StepLR(sgd, step_size=1, gamma=0.5)
    trainer = toy_trainer(tmp_path, model=model, optimizers=(sgd, halves), logging_steps=1)
    trainer.train()
    wanted = by_hand(toy_rows(), lambda m: torch.optim.SGD(m.parameters(), lr=0.05), lambda step: 0.05 * 0.5**step)
    assert_close(model, wanted)
    assert [rate for _, rate in entries(trainer, "learning_rate")] == [0.05, 0.025, 0.0125]


def test_a_second_run_of_a_trainer_trains_on(tmp_path: Path) -> None:
    """The schedule starts anew, as in transformers: the second run does not train at the rate where the first ended."""
    trainer = toy_trainer(tmp_path, logging_steps=1)
    trainer.train()
    first, between = entries(trainer, "learning_rate"), weights_of(trainer.model)
    trainer.train()
    assert entries(trainer, "learning_rate")[-3:] == first
    assert not torch.equal(trainer.model.head.weight, between["head.weight"])


def test_callbacks_may_be_none(tmp_path: Path) -> None:
    """As in transformers, where None is the default."""
    trainer = toy_trainer(tmp_path, callbacks=None)
    assert trainer.train().global_step == 3


def test_a_span_model_with_a_collator_of_the_users_own_uses_the_models_loss(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6 + i, 7, 8], "start_positions": 1, "end_positions": 2} for i in range(8)]
    model = tiny_bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    trainer = toy_trainer(
        tmp_path, model=model, train_dataset=rows, eval_dataset=rows, data_collator=default_data_collator
    )
    trainer.train()
    model.eval()
    with torch.no_grad():
        wanted = model(**default_data_collator(rows)).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)  # float32, other order of sums
