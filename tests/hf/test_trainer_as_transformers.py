"""What scripts, callbacks and models rely on in transformers' Trainer holds in `whet.Trainer`."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hf_runs import arguments, classifier, forked, output, pad, rows, same
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForTokenClassification, EarlyStoppingCallback, TrainerCallback

import whet
from tiny import tiny_config
from tiny_decoders import tiny_decoder
from whet.errors import ConfigError
from whet.precision import compare

PEERS: dict[str, tuple[Any, Any]] = {
    "whet": (whet.Trainer, whet.TrainingArguments),
    "transformers": (transformers.Trainer, transformers.TrainingArguments),
}


def settings(kind: Any, folder: Path, **given: Any) -> Any:
    usual: dict[str, Any] = {
        "max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no", "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-3,
    }  # fmt: skip
    return kind(str(folder), **(usual | given))


class Odd(nn.Module):
    """A model with two label columns of its own names, and a number and a dict among its outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, gold: Tensor | None = None, weight: Tensor | None = None) -> dict[str, Any]:
        logits = self.layer(x)
        found: dict[str, Any] = {"logits": logits, "temperature": torch.tensor(2.0), "parts": {"first": logits[:, :1]}}
        if gold is None or weight is None:
            return found
        each = nn.functional.cross_entropy(logits, gold, reduction="none")
        return {"loss": (each * weight).mean()} | found


def odd_rows() -> list[dict[str, Any]]:
    numbers = np.random.default_rng(0)
    return [{"x": numbers.random(3, dtype=np.float32), "gold": i % 2, "weight": 1.0 + i} for i in range(12)]


def test_it_is_a_trainer_of_transformers(tmp_path: Path) -> None:
    trainer = whet.Trainer(classifier(), arguments(tmp_path), pad, rows())
    assert isinstance(trainer, transformers.Trainer)
    assert isinstance(trainer.args, transformers.TrainingArguments)
    assert whet.Trainer(classifier(), settings(transformers.TrainingArguments, tmp_path), pad, rows()).train()


def test_own_label_columns_are_evaluated_and_scalars_shift_nothing(tmp_path: Path) -> None:
    def seen(given: Any) -> dict[str, float]:
        gold, weight = given.label_ids
        return {"n_gold": float(len(gold)), "heaviest": float(np.max(weight))}

    found = {}
    for name, (trainer_of, arguments_of) in PEERS.items():
        args = settings(arguments_of, tmp_path / name, label_names=["gold", "weight"])
        trainer = trainer_of(Odd(), args, train_dataset=odd_rows(), eval_dataset=odd_rows(), compute_metrics=seen)
        trainer.train()
        metrics, predicted = trainer.evaluate(), trainer.predict(odd_rows())
        found[name] = metrics, predicted
    ours, theirs = found["whet"], found["transformers"]
    for key in ("eval_loss", "eval_n_gold", "eval_heaviest"):
        assert ours[0][key] == pytest.approx(theirs[0][key], rel=1e-5)
    assert ours[0]["eval_heaviest"] == 12.0
    left, right = (one[1].predictions for one in (ours, theirs))
    assert [np.shape(one) for one in _flat(left)] == [np.shape(one) for one in _flat(right)]
    assert all(np.allclose(one, other, atol=1e-5) for one, other in zip(_flat(left), _flat(right), strict=True))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for one in value for leaf in _flat(one)] if isinstance(value, list | tuple) else [value]


def test_model_that_returns_its_loss_if_asked_is_evaluated(tmp_path: Path) -> None:
    class Contrast(nn.Module):
        """As CLIP: no labels, and a loss for `return_loss`."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: Tensor, return_loss: bool = True) -> dict[str, Tensor]:
            states = self.layer(x)
            logits = states @ states.T
            loss = nn.functional.cross_entropy(logits, torch.arange(len(x)))
            return {"loss": loss, "logits": states} if return_loss else {"logits": states}

    given = [{"x": row["x"]} for row in odd_rows()]
    trainer = whet.Trainer(Contrast(), arguments(tmp_path, max_steps=2), train_dataset=given, eval_dataset=given)
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def test_micro_batch_without_targets_leaves_a_finite_step(tmp_path: Path) -> None:
    given = [
        {"input_ids": [5 + i, 6, 7], "attention_mask": [1, 1, 1], "labels": [-100] * 3 if i < 2 else [-100, 6, 7]}
        for i in range(4)
    ]

    def stack(few: Any) -> dict[str, Tensor]:
        return {name: torch.tensor([row[name] for row in few]) for name in few[0]}

    trainer = whet.Trainer(
        tiny_decoder("llama"),
        arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2,
                  train_sampling_strategy="sequential"),
        stack,
        given,
    )  # fmt: skip
    trainer.train()
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)


def test_optimizer_and_scheduler_of_ones_own_see_gradients(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Reads(torch.optim.lr_scheduler.LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            groups = self.optimizer.param_groups
            seen.append(any(one.grad is not None for group in groups for one in group["params"]))
            super().step(epoch)

    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    reads = Reads(optimizer, lambda step: 1.0)
    trainer = whet.Trainer(model, arguments(tmp_path, max_steps=2), pad, rows(), optimizers=(optimizer, reads))
    trainer.train()
    assert seen[-2:] == [True, True]


def test_tokenizer_of_the_collator_is_saved_with_a_checkpoint(tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]), "utf-8")
    collate = transformers.DataCollatorWithPadding(transformers.BertTokenizer(str(vocabulary)))
    whet.Trainer(classifier(), arguments(tmp_path / "out", max_steps=4), collate, rows()).train()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "checkpoint-4").pad_token_id == 0


def test_settings_may_be_extended_changed_and_copied(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Mine(whet.TrainingArguments):
        temperature: float = 1.0

    class Warm(whet.Trainer):
        def compute_loss(self, *more: Any, **named: Any) -> Any:
            seen.append(self.args.temperature)
            return super().compute_loss(*more, **named)

    seen: list[float] = []
    args = Mine(str(tmp_path), temperature=3.0, max_steps=1, report_to="none", disable_tqdm=True)
    args.temperature = 4.0
    Warm(classifier(), args, pad, rows()).train()
    assert seen == [4.0]
    assert dataclasses.replace(args, temperature=5.0).optim == "auto"
    parsed = transformers.HfArgumentParser(Mine).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--bf16", "--optim", "adamw_whet", "--temperature", "2"]
    )[0]
    assert (parsed.temperature, parsed.precision, parsed.optim) == (2.0, "bf16", "adamw_whet")
    assert json.loads(parsed.to_json_string())["optim"] == "adamw_whet"


def test_public_questions_have_transformers_answers(tmp_path: Path) -> None:
    trainer = whet.Trainer(classifier(), arguments(tmp_path), pad, rows())
    trainer.create_optimizer_and_scheduler(4)
    parameter = next(trainer.model.parameters())
    assert any(parameter is one for one in trainer.optimizer.param_groups[0]["params"])
    assert trainer.num_examples(trainer.get_train_dataloader()) == 20
    assert trainer.get_total_train_batch_size(trainer.args) == 4


def test_early_stopping_counts_on_after_a_resume(tmp_path: Path) -> None:
    class Worse(whet.Trainer):
        def evaluate(self, *more: Any, **named: Any) -> dict[str, float]:
            metrics = {"eval_loss": 1.0 + self.state.global_step}
            self.log(dict(metrics))
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    def make(**changes: Any) -> whet.Trainer:
        given: dict[str, Any] = {
            "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True,
            "restore_callback_states_from_checkpoint": True, "max_steps": 20,
        }  # fmt: skip
        stopping = EarlyStoppingCallback(early_stopping_patience=3)
        return Worse(classifier(), arguments(tmp_path, **(given | changes)), pad, rows(), rows(4), callbacks=[stopping])

    assert make().train().global_step == 8
    resumed = make()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert resumed.state.global_step == 8  # two evaluations without progress before, one after


def test_callbacks_decide_what_is_saved_and_when_an_epoch_ends(tmp_path: Path) -> None:
    class Decides(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if state.global_step == 4:
                control.should_save = False
            if state.global_step == 3:
                control.should_epoch_stop = True
            return control

    trainer = whet.Trainer(classifier(), arguments(tmp_path), pad, rows(), callbacks=[Decides()])
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-8"]
    weights = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    again = whet.Trainer(classifier(), arguments(tmp_path / "b"), pad, rows(), callbacks=[Decides()])
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert same(weights, dict(again.model.state_dict()))


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_losses_are_transformers_own(family: str, tmp_path: Path) -> None:
    """Without dropout, to the rounding of sums in another order over twelve steps."""
    losses = {}
    for name, (trainer_of, arguments_of) in PEERS.items():
        if family == "llama":
            model: Any = tiny_decoder("llama")
            given = [dict(row, labels=list(row["input_ids"])) for row in rows(labelled=False)]
        else:
            model = classifier(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.0)
            model.accepts_loss_kwargs = False  # else transformers adds up what this head has averaged
            given = rows()
        args = settings(arguments_of, tmp_path / name, max_steps=12, seed=7, gradient_accumulation_steps=2)
        trainer = trainer_of(model, args, _pad_labels if family == "llama" else pad, given)
        trainer.train()
        losses[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses["whet"] == pytest.approx(losses["transformers"], rel=1e-4)


def _pad_labels(few: Any) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in few)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.tensor([[*row[name], *[value] * (longest - len(row[name]))] for row in few])
        for name, value in fill.items()
    }


def of_tokens() -> Any:
    torch.manual_seed(0)
    return AutoModelForTokenClassification.from_config(tiny_config("bert"))


def pad_tokens(given: Any) -> dict[str, Tensor]:
    """Return a batch with a class for each token, and none for padding."""
    batch = pad(given)
    classes = (batch["input_ids"] >= 100).long()
    return batch | {"labels": classes.masked_fill(~batch["attention_mask"].bool(), -100)}


@pytest.mark.parametrize("task", ["classes", "tokens", "decoder"])
@pytest.mark.parametrize(("n_ranks", "n_micro"), [(1, 2), (1, 4), (2, 1), (2, 2)])
def test_split_of_a_step_leaves_its_loss(n_ranks: int, n_micro: int, task: str, tmp_path: Path) -> None:
    """The mean over all labels, with eight rows a step, and in an evaluation."""
    make, collate = {
        "classes": (lambda: classifier(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), pad),
        "tokens": (of_tokens, pad_tokens),
        "decoder": (lambda: tiny_decoder("llama"), pad_tokens),
    }[task]

    def train(folder: Path, n_ranks: int, n_micro: int) -> None:
        given = arguments(
            folder, per_device_train_batch_size=8 // n_ranks // n_micro, gradient_accumulation_steps=n_micro,
            max_steps=5, save_strategy="no", eval_strategy="steps", eval_steps=5,
            per_device_eval_batch_size=8 // n_ranks,
        )  # fmt: skip
        trainer = whet.Trainer(make(), given, collate, rows(24), rows(8))
        trainer.train()
        log = [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history[:-1]]
        (folder / "log.json").write_text(json.dumps(log))

    whole, split = tmp_path / "whole", tmp_path / "split"
    assert forked(lambda _: train(whole, 1, 1), whole) == [0], output(whole)
    assert forked(lambda _: train(split, n_ranks, n_micro), split, n_ranks) == [0] * n_ranks
    wanted = json.loads((whole / "log.json").read_text())
    assert len(wanted) == 6
    assert json.loads((split / "log.json").read_text()) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.skipif(
    not hasattr(transformers.Trainer, "loss_is_scaled_for_ga"), reason="this transformers does not know the attribute"
)
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_class_whose_loss_is_divided_later_has_the_gradient_of_all_labels(n_ranks: int, tmp_path: Path) -> None:
    """As `compute_loss` of transformers asks for: its loss is the mean of a micro-batch."""

    class Later(whet.Trainer):
        loss_is_scaled_for_ga = False

        def compute_loss(self, *given: Any, **named: Any) -> Any:
            return super().compute_loss(*given, **named)

    def train(kind: Any, folder: Path, n_micro: int, n_rows: int) -> None:
        model = classifier(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        args = arguments(
            folder, per_device_train_batch_size=n_rows, gradient_accumulation_steps=n_micro, max_steps=3,
            save_strategy="no", max_grad_norm=1e6,
        )  # fmt: skip
        trainer = kind(model, args, pad, rows(24))
        trainer.train()
        log = [entry[name] for entry in trainer.state.log_history[:-1] for name in ("loss", "grad_norm")]
        (folder / "log.json").write_text(json.dumps(log))

    whole, split = tmp_path / "whole", tmp_path / "split"
    assert forked(lambda _: train(whet.Trainer, whole, 1, 8), whole) == [0], output(whole)
    assert forked(lambda _: train(Later, split, 2, 4 // n_ranks), split, n_ranks) == [0] * n_ranks, output(split)
    wanted = json.loads((whole / "log.json").read_text())
    assert json.loads((split / "log.json").read_text()) == pytest.approx(wanted, rel=1e-4)


class OwnLoss(nn.Module):
    """A model around an encoder of transformers, with a loss of its own: a sum, and a term of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = AutoModel.from_config(tiny_config("bert", hidden_dropout_prob=0.0))
        self.out = nn.Linear(self.encoder.config.hidden_size, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        logits = self.out(self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0][:, 0])
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum") + logits.square().mean()
        return {"loss": loss, "logits": logits}


def test_the_loss_of_a_model_of_ones_own_is_not_divided_again(tmp_path: Path) -> None:
    found = []
    for name, (trainer_of, arguments_of) in PEERS.items():
        torch.manual_seed(0)
        model, args = OwnLoss(), settings(arguments_of, tmp_path / name, gradient_accumulation_steps=2)
        trainer = trainer_of(model, args, data_collator=pad, train_dataset=rows(16))
        trainer.train()
        found.append([row[key] for row in trainer.state.log_history[:-1] for key in ("loss", "grad_norm")])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


class Mean(nn.Module):
    """A model that averages all places of a row, and of its transposed states takes a maximum."""

    def __init__(self) -> None:
        super().__init__()
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.encoder = AutoModel.from_config(tiny_config("bert", **rates))
        self.out = nn.Linear(2 * self.encoder.config.hidden_size, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.out(torch.cat([states.mean(1), states.amax(1)], dim=1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_head_of_ones_own_may_read_padding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for name, (trainer_of, arguments_of) in PEERS.items():
        torch.manual_seed(0)
        args = settings(arguments_of, tmp_path / name, max_steps=12)
        with caplog.at_level("INFO", "whet"):
            trainer = trainer_of(Mean(), args, data_collator=pad, train_dataset=rows(48), eval_dataset=rows(16))
            trainer.train()
        log = [row[key] for row in trainer.state.log_history[:-1] for key in ("loss", "grad_norm")]
        found.append([*log, trainer.evaluate()["eval_loss"]])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert 'padding_in_loss="none" is faster' in caplog.text


def test_commands_settings_are_refused_with_the_way_on(tmp_path: Path) -> None:
    with pytest.raises(whet.ConfigError, match=r"zero_stage is a setting of whet's commands") as caught:
        whet.TrainingArguments(str(tmp_path), zero_stage=2, recipe="few_samples")
    assert "recipe" in str(caught.value)
    assert whet.TrainingArguments(str(tmp_path), zero_stage=None).output_dir == str(tmp_path)


def test_an_unknown_optimizer_is_told_whets_names(tmp_path: Path) -> None:
    with pytest.raises(whet.ConfigError, match="did you mean --optim adamw_whet") as caught:
        whet.TrainingArguments(str(tmp_path), optim="adamw_whe")
    assert "lion_32bit" in str(caught.value)


def test_older_names_mean_what_they_mean_today(tmp_path: Path) -> None:
    args = whet.TrainingArguments(
        str(tmp_path), no_cuda=True, evaluation_strategy="steps", eval_steps=3, group_by_length=True, warmup_ratio=0.1,
        per_gpu_train_batch_size=2, gradient_checkpointing=True, use_ipex=True, xpu_backend="ccl",
    )  # fmt: skip
    assert (args.use_cpu, args.eval_strategy, args.train_sampling_strategy) == (True, "steps", "group_by_length")
    assert (args.warmup_steps, args.per_device_train_batch_size, args.ddp_backend) == (0.1, 2, "gloo")
    assert args.gradient_checkpointing
    with pytest.raises(whet.ConfigError, match="evaluation_strategy"):
        whet.TrainingArguments(str(tmp_path), evaluation_strategy="steps", eval_strategy="no")
    with pytest.raises(whet.ConfigError, match="fp16_backend"):
        whet.TrainingArguments(str(tmp_path), fp16_backend="apex")


def test_older_names_lose_no_value_to_each_other(tmp_path: Path) -> None:
    """No warm-up steps leave the ratio, as in the releases that had it, and two settings of accelerate are two."""
    for given in ({"warmup_steps": 0, "warmup_ratio": 0.1}, {"warmup_ratio": 0.1, "warmup_steps": 0}):
        assert whet.TrainingArguments(str(tmp_path), **given).warmup_steps == 0.1
    assert whet.TrainingArguments(str(tmp_path), warmup_steps=7, warmup_ratio=0.1).warmup_steps == 7
    assert whet.TrainingArguments(str(tmp_path), warmup_steps=0, warmup_ratio=0.0).warmup_steps == 0
    both = whet.TrainingArguments(str(tmp_path), dispatch_batches=False, split_batches=True).accelerator_config
    assert (both.dispatch_batches, both.split_batches) == (False, True)
    with pytest.raises(whet.ConfigError, match="accelerator_config is given twice"):
        whet.TrainingArguments(str(tmp_path), split_batches=True, accelerator_config={"even_batches": False})
    with pytest.raises(whet.ConfigError, match="accelerator_config is given twice"):
        whet.TrainingArguments(str(tmp_path), accelerator_config="acc.json", split_batches=True)


def test_folder_of_tensorboard_is_that_of_one_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "of-the-environment"))
    for name, more in (("named", {"logging_dir": str(tmp_path / "events")}), ("other", {})):
        args = arguments(tmp_path / name, max_steps=1, save_strategy="no", report_to="tensorboard", **more)
        whet.Trainer(classifier(), args, pad, rows()).train()
    folders = {path.parent.name for path in tmp_path.rglob("events.out.*")}
    assert folders == {"events", "of-the-environment"}


@pytest.mark.each_value
@pytest.mark.parametrize(
    "optim", ["auto", "adamw_whet", "adamw_whet_8bit", "adamw_hf", "adamw_anyprecision", "muon", "adamw_torch", "sgd"]
)
def test_optimizers_train_and_resume(optim: str, tmp_path: Path) -> None:
    whole = whet.Trainer(classifier(), arguments(tmp_path, optim=optim), pad, rows())
    whole.train()
    resumed = whet.Trainer(classifier(), arguments(tmp_path / "b", optim=optim), pad, rows())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert same(dict(whole.model.state_dict()), dict(resumed.model.state_dict()))
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert np.mean(losses[-4:]) < np.mean(losses[:4]) + 0.05
    groups = whole.optimizer.param_groups
    assert {group["weight_decay"] for group in groups} == {0.0}


@pytest.mark.parametrize(("optim", "instead"), [("adamw_whet", "torch_fused"), ("adamw_whet_8bit", "bnb_8bit")])
def test_an_optimizer_of_native_operators_refuses_other_weights(optim: str, instead: str, tmp_path: Path) -> None:
    """As the commands do: of a format that they do not take, or on a GPU."""
    trainer = whet.Trainer(classifier().double(), arguments(tmp_path, optim=optim), pad, rows())
    with pytest.raises(ConfigError, match=rf"(?s){optim} cannot update these parameters.*--optim adamw_{instead}"):
        trainer.train()


def test_trainer_may_stand_in_transformers_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that says transformers.Trainer gets whet's once it is put there."""
    monkeypatch.setattr(transformers, "Trainer", whet.Trainer)
    trainer = transformers.Trainer(classifier(), arguments(tmp_path, optim="adamw_torch"), pad, rows())
    assert math.isfinite(trainer.train().training_loss)
    assert type(trainer.optimizer.optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("max_grad_norm", [0.05, 1e6])
def test_gradient_is_clipped_alike_whoever_reads_it(tmp_path: Path, max_grad_norm: float) -> None:
    """The optimizer clips as it reads the gradient; before a callback that may look, the gradient itself is clipped."""
    norms: list[float] = []

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, *given: Any, model: Any, **named: Any) -> None:
            norms.append(float(torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])))

    def trained(*callbacks: TrainerCallback) -> tuple[dict[str, Tensor], list[float]]:
        model = classifier()
        args = arguments(tmp_path, max_steps=4, logging_steps=1, max_grad_norm=max_grad_norm, optim="adamw_whet")
        trainer = whet.Trainer(model, args, pad, rows(), callbacks=list(callbacks))
        trainer.train()
        return model.state_dict(), [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]

    (alone, norms_alone), (watched, norms_watched) = trained(), trained(Looks())
    assert norms_alone == norms_watched
    assert norms == pytest.approx([min(one, max_grad_norm) for one in norms_watched], rel=1e-4)
    for name, weight in alone.items():
        assert torch.equal(weight, watched[name]), name


def test_loss_may_ask_for_the_gradient_of_the_words(tmp_path: Path) -> None:
    """As adversarial trainings do: a step by the gradient with respect to the table, then the loss again."""

    def losses(trainer_of: Any, arguments_of: Any) -> list[float]:
        class Adversarial(trainer_of):
            def training_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
                words = model.get_input_embeddings().weight
                (slope,) = torch.autograd.grad(model(**inputs).loss, words)
                with torch.no_grad():
                    words.add_(slope / slope.norm())
                loss = super().training_step(model, inputs, *given, **named)
                with torch.no_grad():
                    words.sub_(slope / slope.norm())
                return loss

        args = settings(arguments_of, tmp_path, optim="adamw_torch", train_sampling_strategy="sequential")
        model = classifier()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        trainer = Adversarial(model, args, pad, rows())
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert losses(*PEERS["whet"]) == pytest.approx(losses(*PEERS["transformers"]), rel=1e-4)  # printed to 4 digits


@pytest.mark.parametrize("n_rows", [2, 8])
def test_noise_of_embeddings_is_as_large_as_in_a_padded_batch(tmp_path: Path, n_rows: int) -> None:
    """NEFTune divides by the length that it sees; without padding, a batch is one long row."""

    def largest(trainer_of: Any, arguments_of: Any) -> list[float]:
        seen: list[float] = []

        class Measures(TrainerCallback):
            def on_train_begin(self, *given: Any, model: Any, **named: Any) -> None:
                def look(table: Any, ids: Any, noisy: Tensor) -> None:
                    seen.append(float((noisy - nn.functional.embedding(ids[0], table.weight)).detach().abs().max()))

                model.get_input_embeddings().register_forward_hook(look)

        args = settings(
            arguments_of, tmp_path, neftune_noise_alpha=5.0, per_device_train_batch_size=n_rows, max_steps=3,
            train_sampling_strategy="sequential",
        )  # fmt: skip
        trainer_of(classifier(), args, pad, rows(), callbacks=[Measures()]).train()
        return seen

    ours, theirs = largest(*PEERS["whet"]), largest(*PEERS["transformers"])
    # The largest of hundreds of uniform draws is near the amplitude, which transformers draws for padding, too.
    assert ours == pytest.approx(theirs, rel=0.05)


@pytest.mark.parametrize("watched", [False, True])
def test_padding_without_labels_is_not_computed_for_the_loss(tmp_path: Path, watched: bool) -> None:
    """The losses are transformers'; whoever looks at the logits gets those of padding as well."""
    torch.manual_seed(0)
    config = tiny_config("bert", dropout=0.0)
    given = [
        {"input_ids": [5 + i] * n, "attention_mask": [1] * n, "labels": [i % 2] * n}
        for i, n in enumerate((3, 9, 4, 12, 5, 6, 12, 2))
    ]

    def collate(few: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        fill, longest = {"input_ids": 0, "attention_mask": 0, "labels": -100}, max(len(one["labels"]) for one in few)
        return {
            name: torch.tensor([one[name] + [value] * (longest - len(one[name])) for one in few])
            for name, value in fill.items()
        }

    losses: dict[str, list[float]] = {}
    seen: list[int] = []
    for name, (trainer_of, arguments_of) in PEERS.items():
        torch.manual_seed(0)
        model = transformers.BertForTokenClassification(config)
        args = settings(arguments_of, tmp_path, max_steps=2, train_sampling_strategy="sequential", optim="adamw_torch")
        trainer = trainer_of(model, args, collate, given)
        if name == "whet":
            if watched:
                model.classifier.register_forward_hook(lambda *_: None)
            model.bert.encoder.layer[0].register_forward_hook(lambda _, __, out: seen.append(out.shape[1]))
        trainer.train()
        losses[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses["whet"] == pytest.approx(losses["transformers"], rel=1e-4)  # printed to 4 digits
    n_tokens = [3 + 9 + 4 + 12, 5 + 6 + 12 + 2]
    assert (seen == n_tokens) is not watched
    assert all(found >= n for found, n in zip(seen, n_tokens, strict=True))


def test_a_sampler_that_this_transformers_lacks_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before 5.17 transformers takes the word, and shuffles."""
    from transformers import trainer_pt_utils

    monkeypatch.delattr(trainer_pt_utils, "BatchRebalanceSampler", raising=False)
    with pytest.raises(ConfigError, match=r"(?s)no batch_rebalance.*transformers>=5\.17"):
        whet.TrainingArguments(str(tmp_path), train_sampling_strategy="batch_rebalance")


@pytest.mark.parametrize("weighs", ["nothing", "by the rate"])
def test_precision_auto_tries_the_loss_of_the_training(
    weighs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its labels are none of the model's own loss, or it cannot run before the training: then that runs in fp32."""
    monkeypatch.setattr(compare, "LEAST_FLOP", 0.0)

    class Own(whet.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            labels = inputs.pop("labels") - 7
            loss = nn.functional.cross_entropy(model(**inputs).logits, labels)
            return loss if weighs == "nothing" else loss * self.lr_scheduler.get_last_lr()[0]

    data = [row | {"labels": row["labels"] + 7} for row in rows()]
    args = arguments(tmp_path, precision="auto", max_steps=2, save_strategy="no", use_cpu=True)
    trainer = Own(classifier(), args, pad, data)
    with caplog.at_level(logging.INFO, logger="whet"):
        trainer.train()
    assert trainer.state.global_step == 2
    said = "times the speed of fp32" if weighs == "nothing" else "a batch could not be tried: AttributeError"
    assert any(said in text for text in caplog.messages)


@pytest.mark.parametrize(("name", "why"), [("small", "too small"), ("own", "none that whet"), ("stream", "a stream")])
def test_precision_auto_says_why_it_measures_nothing(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(rows())

    if name != "small":
        monkeypatch.setattr(compare, "LEAST_FLOP", 0.0)
    own: dict[str, Any] = {"label_names": ["gold", "weight"]} if name == "own" else {}
    args = arguments(tmp_path, precision="auto", max_steps=1, save_strategy="no", use_cpu=True, **own)
    data: Any = {"small": rows(), "own": odd_rows(), "stream": Stream()}[name]
    trainer = whet.Trainer(Odd(), args, None, data) if name == "own" else whet.Trainer(classifier(), args, pad, data)
    with caplog.at_level(logging.INFO, logger="whet"):
        trainer.train()
    assert any(text.startswith("precision auto: fp32; ") and why in text for text in caplog.messages)


@pytest.mark.parametrize(("most", "tried"), [(2, [4, 2]), (0, [4, 2, 1])])
def test_precision_auto_tries_rows_that_fit_into_memory(
    most: int, tried: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """fp32 has memory for `most` rows, and bf16 for all."""
    monkeypatch.setattr(compare, "LEAST_FLOP", 0.0)
    monkeypatch.setattr(compare, "MARGIN", 0.0)  # whatever this processor takes longer for
    seen: list[tuple[str, int]] = []

    def take(_: Any, given: tuple[torch.Tensor]) -> None:
        name, n_rows = "bf16" if torch.is_autocast_enabled("cpu") else "fp32", len(given[0])
        seen.append((name, n_rows))
        if name == "fp32" and n_rows > most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    args = arguments(tmp_path, precision="auto", max_steps=2, save_strategy="no", use_cpu=True)
    trainer = whet.Trainer(model := classifier(), args, pad, rows())
    model.classifier.register_forward_pre_hook(take)
    with caplog.at_level(logging.INFO, logger="whet"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert seen[: len(tried)] == [("fp32", n_rows) for n_rows in tried]
    assert seen[-1] == ("bf16", 4)
    said = "bf16 runs at" if most else "there is no memory for one row in fp32"
    assert any(text.startswith(f"precision auto: bf16; {said}") for text in caplog.messages)


def test_precision_auto_leaves_no_trace_of_soft_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "LEAST_FLOP", 0.0)
    seen: list[Any] = []

    class Look(TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
            seen.append(model.config.problem_type)

    data = [row | {"labels": [0.25, 0.75]} for row in rows()]
    args = arguments(tmp_path, precision="auto", max_steps=1, save_strategy="no", use_cpu=True)
    whet.Trainer(classifier(), args, pad, data, callbacks=[Look()]).train()
    assert seen == [None]
