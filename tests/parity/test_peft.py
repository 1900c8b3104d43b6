"""LoRA by peft: the losses of transformers' Trainer on the same model, and every weight of the adapter learns."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from padded_peers import HAS_ACCELERATE
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

import engine
import whet
from tiny import FAMILIES, Pad, arguments, lora_targets, losses, masked_loss, operators, tiny_model, tiny_rows

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.skipif(not HAS_ACCELERATE, reason="transformers' Trainer needs accelerate"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks for it
]
__all__ = ["operators"]

TOLERANCE = 1e-5
"""Relative, of a loss: fp32 sums in another order. An adapter that is not used moves the losses by more than 1e-2."""
N_STEPS, N_ROWS = 5, 20
KINDS: dict[str, dict[str, Any]] = {"lora": {}, "dora": {"use_dora": True}, "rslora": {"use_rslora": True}}
TASKS = {"answers": "QUESTION_ANS", "classes": "SEQ_CLS", "tokens": "TOKEN_CLS"}
_HEADS = {"classes": AutoModelForSequenceClassification, "tokens": AutoModelForTokenClassification}
_RUN: dict[str, Any] = {"max_steps": N_STEPS, "learning_rate": 5e-3, "warmup_steps": 0}


def rows_of(task: str, family: str) -> Any:
    rows = tiny_rows(N_ROWS, family)
    if task == "answers":
        return rows
    numbers = np.random.default_rng(2)
    found = [{name: value for name, value in rows[n].items() if "position" not in name} for n in range(N_ROWS)]
    for row in found:
        row["labels"] = int(numbers.integers(3)) if task == "classes" else [int(t) % 3 for t in row["input_ids"]]
    return found


class PadLabels(Pad):
    """Pads rows of token labels by -100."""

    def __call__(self, rows: Any) -> dict[str, Tensor]:
        batch = super().__call__(rows)
        if batch.get("labels", torch.zeros(1)).dim() > 1:
            batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
        return batch


def model_of(family: str, task: str = "answers", dropout: float = 0.0, **lora: Any) -> Any:
    """Return the family's tiny model with LoRA on two of its projections, or where `lora` says."""
    model = tiny_model(family, dropout=dropout)
    if task != "answers":
        torch.manual_seed(0)
        model.config.num_labels = 3
        model.config.classifier_dropout_prob = model.config.seq_classif_dropout = 0.0
        model = _HEADS[task].from_config(model.config)
    torch.manual_seed(1)
    given = {"target_modules": lora_targets(family), "r": 4, "init_lora_weights": "gaussian"} | lora
    return peft.get_peft_model(model, peft.LoraConfig(task_type=TASKS[task], **given))


class _Theirs(transformers.Trainer):
    """transformers' Trainer; the loss of answers leaves padding out of its softmax, as whet's does."""

    def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
        return masked_loss(model, inputs) if "start_positions" in inputs else model(**inputs).loss


def by_transformers(model: Any, rows: Any, folder: Path) -> list[float]:
    args = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, per_device_train_batch_size=4, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, remove_unused_columns=False, **_RUN,
    )  # fmt: skip
    collator = PadLabels(getattr(model.config, "pad_token_id", 0))
    trainer = _Theirs(model=model, args=args, train_dataset=rows, data_collator=collator)
    trainer.train()
    return losses(trainer)


def by_whet(model: Any, rows: Any, folder: Path) -> list[float]:
    args = arguments(folder, precision="fp32", **_RUN)
    task_is_answers = hasattr(rows, "labels")
    collator = None if task_is_answers else PadLabels(model.config.pad_token_id)
    trainer = engine.Trainer(model=model, args=args, train_dataset=rows, data_collator=collator)
    assert trainer.objective.packed
    trainer.train()
    return losses(trainer)


def in_their_loop(model: Any, rows: Any, folder: Path) -> list[float]:
    return by_transformers(whet.optimize(model), rows, folder)


def in_their_loop_by_base(model: Any, rows: Any, folder: Path) -> list[float]:
    whet.optimize(model.get_base_model())
    return by_transformers(model, rows, folder)


WAYS = {"engine": by_whet, "optimize": in_their_loop, "optimize the base": in_their_loop_by_base}


@cache
def _wanted(family: str, task: str, kind: str) -> list[float]:
    """Return the losses of transformers' own Trainer, which every way of whet is compared with."""
    with tempfile.TemporaryDirectory() as folder:
        return by_transformers(model_of(family, task, **KINDS[kind]), rows_of(task, family), Path(folder))


def assert_same(way: str, family: str, task: str, folder: Path, **lora: Any) -> None:
    rows, model = rows_of(task, family), model_of(family, task, **lora)
    kind = next((name for name, given in KINDS.items() if given == lora), None)
    if kind is None:
        wanted = by_transformers(model_of(family, task, **lora), rows, folder)
    else:
        wanted = _wanted(family, task, kind)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    found = WAYS[way](model, rows, folder)
    assert len(found) == N_STEPS
    assert found == pytest.approx(wanted, rel=TOLERANCE)
    moved = {name: not torch.equal(value, before[name]) for name, value in model.named_parameters()}
    assert moved == {name: value.requires_grad for name, value in model.named_parameters()}


@pytest.mark.each_value
@pytest.mark.parametrize("way", ["engine", "optimize"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_has_the_losses_of_transformers_trainer(way: str, family: str, tmp_path: Path) -> None:
    assert_same(way, family, "answers", tmp_path)


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("operators")
def test_every_kind_of_lora_has_the_losses_of_transformers_trainer(
    family: str, way: str, kind: str, task: str, tmp_path: Path
) -> None:
    assert_same(way, family, task, tmp_path, **KINDS[kind])


@pytest.mark.each_value
@pytest.mark.parametrize("family", ["bert", "distilbert", "albert"])
@pytest.mark.parametrize("lora", [
    {"target_modules": "all-linear", "exclude_modules": ["qa_outputs"]},
    {"modules_to_save": ["LayerNorm", "sa_layer_norm"]},
    {"trainable_token_indices": [15, 20, 30]},
    {"target_modules": ["word_embeddings", "query", "q_lin"]},
    {"bias": "all"},
], ids=lambda lora: ",".join(lora))  # fmt: skip
def test_adapters_elsewhere_have_the_losses_of_transformers_trainer(family: str, lora: Any, tmp_path: Path) -> None:
    assert_same("engine", family, "answers", tmp_path, **lora)


PREFIX = {"num_virtual_tokens": 3, "task_type": "QUESTION_ANS"}
OTHERS = {
    "ia3": lambda: peft.IA3Config(
        task_type="QUESTION_ANS", target_modules=["key", "value"], feedforward_modules=[], init_ia3_weights=True
    ),
    "prefix tuning": lambda: peft.PrefixTuningConfig(**PREFIX),
    "prompt tuning": lambda: peft.PromptTuningConfig(**PREFIX),
    "p-tuning": lambda: peft.PromptEncoderConfig(**PREFIX, encoder_hidden_size=8),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_methods_of_peft_are_right_or_refused(kind: str, tmp_path: Path) -> None:
    """Methods that put tokens of their own before a row train with padding, and whet.optimize refuses them."""

    def model() -> Any:
        plain = tiny_model("bert")
        torch.manual_seed(1)
        return peft.get_peft_model(plain, OTHERS[kind]())

    rows = [rows_of("answers", "bert")[n] for n in range(N_ROWS)]
    _require_it_runs(model(), _own_loss_pad(rows))
    args = arguments(tmp_path, precision="fp32", **_RUN)
    trainer = engine.Trainer(model=model(), args=args, train_dataset=rows, data_collator=_own_loss_pad)
    trainer.train()
    theirs = transformers.Trainer(
        model=model(),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=4, logging_steps=1, save_strategy="no",
            report_to="none", disable_tqdm=True, remove_unused_columns=False, **_RUN,
        ),
        train_dataset=rows,
        data_collator=_own_loss_pad,
    )  # fmt: skip
    theirs.train()
    assert losses(trainer) == pytest.approx(losses(theirs), rel=TOLERANCE)
    if kind == "ia3":
        assert whet.optimize(model()) is not None
        return
    assert not engine.Trainer(model=model(), args=args, train_dataset=rows).objective.packed
    with pytest.raises(whet.WhetError, match="tokens of its own before each row"):
        whet.optimize(model())


def _require_it_runs(model: Any, batch: dict[str, Tensor]) -> None:
    """Skip the test where peft cannot call this model itself: 0.21 looks for an argument that 5.24 renamed."""
    try:
        model(**batch)
    except ValueError as problem:
        pytest.skip(f"transformers {transformers.__version__} and peft {peft.__version__}: {problem}")


def _own_loss_pad(rows: Any) -> dict[str, Tensor]:
    batch = Pad(0)(rows)
    return {name: value for name, value in batch.items() if name != "token_type_ids"}


@pytest.mark.filterwarnings("ignore:Already unmerged:UserWarning")  # of the layers that this adapter is not in
def test_an_adapter_that_comes_goes_and_is_merged_later_counts(tmp_path: Path) -> None:
    """After whet.optimize: the results are those of the same model without whet, at every stage."""
    batch = {name: value for name, value in Pad(0)([tiny_rows(3)[n] for n in range(3)]).items() if "pos" not in name}
    real = batch["attention_mask"].bool()

    def stages(model: Any) -> list[Tensor]:
        found = [model(**batch)]
        wrapped = peft.get_peft_model(model, _gaussian(["query", "value"]))
        found.append(model(**batch))
        wrapped.add_adapter("other", _gaussian(["key", "dense"]))
        wrapped.set_adapter("other")
        found.append(model(**batch))
        with wrapped.disable_adapter():
            found.append(model(**batch))
        wrapped.merge_adapter()
        found.append(model(**batch))
        wrapped.unmerge_adapter()
        found.append(model(**batch))
        found.append(wrapped.unload()(**batch))
        return [output.start_logits[real] for output in found]

    torch.manual_seed(3)
    wanted = stages(tiny_model("bert").eval())
    torch.manual_seed(3)
    optimized = whet.optimize(tiny_model("bert").eval())
    for number, (found, exact) in enumerate(zip(stages(optimized), wanted, strict=True)):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5, msg=f"stage {number}")
    assert not torch.allclose(wanted[1], wanted[0])
    assert not torch.allclose(wanted[2], wanted[1])
    assert not whet.changes(optimized).called


def _gaussian(targets: list[str]) -> Any:
    """LoRA that changes the results before any training."""
    return peft.LoraConfig(target_modules=targets, r=4, lora_alpha=64, init_lora_weights=False)


def test_what_is_not_fused_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = whet.changes(whet.optimize(model_of("bert")))
    assert plain is not None
    assert not plain.called  # plain pairs are part of the product
    model = whet.optimize(model_of("bert", use_dora=True))
    changes = whet.changes(model)
    assert changes is not None
    names = [f"bert.encoder.layer.{n}.attention.self.{name}" for n in range(2) for name in ("query", "value")]
    assert changes.called == dict.fromkeys(names, "is a Linear of peft")
    assert "not in query, value (4: is a Linear of peft)" in str(changes)
    model.get_base_model().bert.embeddings.LayerNorm.register_forward_hook(lambda *_: None)
    assert whet.changes(model).called["bert.embeddings.LayerNorm"] == "has hooks"
    assert whet.changes(whet.restore(model)) is None


def _two_adapters(model: Any) -> None:
    config = peft.LoraConfig(task_type="QUESTION_ANS", target_modules=["query"], r=2, init_lora_weights=False)
    model.add_adapter("second", config)
    _layer(model).set_adapter(["default", "second"])


def _hook(model: Any) -> None:
    _layer(model).register_forward_hook(lambda _, __, found: found * 1.5)


def _hook_of_the_pair(model: Any) -> None:
    _layer(model).lora_A["default"].register_forward_hook(lambda _, __, found: found * 1.5)


def _own_forward(model: Any) -> None:
    _layer(model).forward = lambda x: 0 * x


def _disabled(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def _layer(model: Any) -> Any:
    return model.get_base_model().bert.encoder.layer[0].attention.self.query


@pytest.mark.parametrize("change", [_two_adapters, _hook, _hook_of_the_pair, _own_forward, _disabled])
def test_a_pair_that_is_more_than_its_class_is_called(change: Any) -> None:
    """What comes after whet.optimize counts in the next pass."""
    torch.manual_seed(7)
    model, exact = (model_of("bert", init_lora_weights=False).eval() for _ in range(2))
    exact.load_state_dict(model.state_dict())
    whet.optimize(model)
    batch, results = Pad()(tiny_rows(6, "bert")), []
    for one in (exact, model):
        torch.manual_seed(8)
        before = one(**batch).start_logits[batch["attention_mask"].bool()]
        change(one)
        after = one(**batch).start_logits[batch["attention_mask"].bool()]
        assert not torch.allclose(before, after)
        results.append((before, after))
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)  # fp32 sums in another order


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resumed_run_of_an_adapter_is_bitwise_the_same(asynchronous: bool, tmp_path: Path) -> None:
    def run(folder: Path, **changes: Any) -> tuple[list[float], dict[str, Tensor]]:
        given = {"save_strategy": "steps", "save_steps": 2, "save_async": asynchronous, "precision": "fp32"} | _RUN
        model = model_of("bert", dropout=0.1, lora_dropout=0.2)
        args = arguments(folder, **(given | changes))
        trainer = engine.Trainer(model=model, args=args, train_dataset=rows_of("answers", "bert"))
        trainer.train()
        trainer.save_model()
        return losses(trainer), {name: value.detach().clone() for name, value in model.named_parameters()}

    whole, weights = run(tmp_path / "whole", max_steps=4)
    run(tmp_path / "stopped", max_steps=4)
    for checkpoint in sorted((tmp_path / "stopped").glob("checkpoint-*4")):
        shutil.rmtree(checkpoint)
    again, resumed = run(tmp_path / "stopped", max_steps=4, resume_from_checkpoint="auto")
    assert again == whole
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)
    written = {path.name for path in (tmp_path / "whole").iterdir() if path.is_file()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= written
    assert "model.safetensors" not in written
    loaded = peft.PeftModel.from_pretrained(tiny_model("bert"), tmp_path / "whole")
    for name, value in loaded.named_parameters():
        assert torch.equal(value, weights[name]), name


def test_weights_that_no_save_would_keep_are_refused(tmp_path: Path) -> None:
    model = model_of("bert")
    model.get_base_model().bert.embeddings.word_embeddings.weight.requires_grad_(True)
    args = arguments(tmp_path, save_strategy="steps", max_steps=1)
    trainer = engine.Trainer(model=model, args=args, train_dataset=rows_of("answers", "bert"))
    with pytest.raises(whet.WhetError, match="word_embeddings") as caught:
        trainer.train()
    assert "modules_to_save" in str(caught.value)


def test_lora_dropout_is_a_site_of_its_own() -> None:
    """Its masks depend on the place of a token, not on padding; and each layer's differs."""
    model = whet.optimize(model_of("bert", lora_dropout=0.5, init_lora_weights=False).train())
    batch = Pad(0)([tiny_rows(3)[n] for n in range(3)])
    wide = Pad(0, 60)([tiny_rows(3)[n] for n in range(3)])
    results = []
    for one in (batch, wide):
        torch.manual_seed(5)
        inputs = {name: value for name, value in one.items() if "positions" not in name}
        results.append(model(**inputs).start_logits[one["attention_mask"].bool()])
    torch.testing.assert_close(*results)
    assert not torch.allclose(results[0], model.eval()(**inputs).start_logits[wide["attention_mask"].bool()])
