"""A run in bf16 follows the fp32 one within 1 % over 100 steps, with dropout on and the same masks.

1 % tells right from wrong here: another dropout seed moves single losses by more than 100 %, and weights that are kept
in bf16 instead of fp32 (no master copy) by more than 70 %, 20 % on average. Rounding the products moves them by 0.6 %.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import SqueezeBertConfig, SqueezeBertForQuestionAnswering, TrainerCallback

import engine
from tiny import arguments, losses, padded, plain_torch, tiny_model, tiny_rows, weights_of
from whet.kernels.library import library
from whet.models.loading.load import ModelSource, load_qa_model, load_tokenizer
from whet.tasks.qa.arguments import QaArguments
from whet.tasks.qa.splits import cut, read_split

N_STEPS = 100
WITHIN = 0.01


class RoundedWeights(TrainerCallback):
    """What training without a master copy does: after each step, the weights are rounded to bf16."""

    def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())


def _padded_job() -> tuple[nn.Module, Any]:
    """Return a model of a family that whet runs padded, with torch's own dropout, and rows for it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = SqueezeBertConfig(
        vocab_size=200, max_position_embeddings=80, initializer_range=0.1, embedding_size=32, **sizes
    )
    columns = padded(list(tiny_rows(96, "roberta")), pad_id=1)
    rows = [{name: column[row] for name, column in columns.items()} for row in range(96)]
    return SqueezeBertForQuestionAnswering(config), rows


def _run(folder: Path, family: str, precision: str, *callbacks: TrainerCallback, **changes: Any) -> engine.Trainer:
    usual = {"max_steps": N_STEPS, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "seed": 5, "data_seed": 5}
    model, rows = _padded_job() if family == "squeezebert" else (tiny_model(family, dropout=0.1), tiny_rows(96, family))
    args = arguments(folder, **(usual | {"precision": precision} | changes))
    trainer = engine.Trainer(model=model, args=args, train_dataset=rows, callbacks=list(callbacks))
    assert trainer.objective.packed == (family != "squeezebert")
    trainer.train()
    return trainer


def _gaps(found: engine.Trainer, wanted: engine.Trainer) -> list[float]:
    assert len(losses(found)) == N_STEPS
    return [abs(a - b) / b for a, b in zip(losses(found), losses(wanted), strict=True)]


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> engine.Trainer:
    """The run that the others are held against."""
    return _run(tmp_path_factory.mktemp("fp32"), "bert", "fp32")


def _assert_follows(bf16: engine.Trainer, fp32: engine.Trainer) -> None:
    assert 0.0 < max(_gaps(bf16, fp32)) < WITHIN
    assert losses(bf16)[-1] < losses(bf16)[0] / 3
    assert {value.dtype for value in weights_of(bf16.model).values() if value.is_floating_point()} == {torch.float32}


@pytest.mark.slow
def test_bf16_curve_of_fused_operators_follows_fp32(tmp_path: Path, fp32: engine.Trainer) -> None:
    if library() is None:
        pytest.skip("the native operators are not built here (python -m whet.kernels.build)")
    _assert_follows(_run(tmp_path, "bert", "bf16"), fp32)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_hidden_states_between_blocks_are_bf16(tmp_path: Path, precision: str, dtype: torch.dtype) -> None:
    """bf16 keeps half of the bytes for backward."""
    model, seen = tiny_model("bert", dropout=0.1), set[torch.dtype]()
    model.bert.encoder.layer[1].register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].dtype))
    args = arguments(tmp_path, precision=precision, max_steps=2)
    engine.Trainer(model=model, args=args, train_dataset=tiny_rows(96, "bert")).train()
    assert seen == {dtype}


@pytest.mark.night
@pytest.mark.slow
def test_bf16_curve_in_plain_torch_follows_fp32(tmp_path: Path, fp32: engine.Trainer) -> None:
    with plain_torch():
        _assert_follows(_run(tmp_path, "bert", "bf16"), fp32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["albert", *(pytest.param(family, marks=pytest.mark.night) for family in ("distilbert", "roberta"))]
)
def test_bf16_curve_of_other_families_follows_fp32(tmp_path: Path, family: str) -> None:
    _assert_follows(*(_run(tmp_path, family, precision) for precision in ("bf16", "fp32")))


@pytest.mark.slow
def test_bf16_curve_of_padded_models_follows_fp32(tmp_path: Path) -> None:
    _assert_follows(*(_run(tmp_path, "squeezebert", precision) for precision in ("bf16", "fp32")))


@pytest.mark.slow
def test_bf16_weights_would_break_the_bound(tmp_path: Path, fp32: engine.Trainer) -> None:
    for other in (_run(tmp_path, "bert", "fp32", seed=6), _run(tmp_path, "bert", "fp32", RoundedWeights())):
        gaps = _gaps(other, fp32)
        assert max(gaps) > 20 * WITHIN
        assert sum(gaps) / len(gaps) > 2 * WITHIN


@pytest.mark.gate
@pytest.mark.slow
def test_bf16_curve_of_a_pretrained_encoder_follows_fp32(
    minilm_dir: Path, xquad_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 steps of 4 windows of at most 48 tokens."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    qa = QaArguments(
        model_name_or_path=str(minilm_dir), train_file=str(xquad_dir / "train.json"), max_train_samples=100,
        max_seq_length=48, doc_stride=16,
    )  # fmt: skip
    source = ModelSource(model=str(minilm_dir))
    rows = cut(read_split(qa, "train"), load_tokenizer(source), qa, with_labels=True).rows
    runs = []
    for precision in ("fp32", "bf16"):
        torch.manual_seed(0)
        args = arguments(tmp_path, precision=precision, max_steps=N_STEPS, learning_rate=5e-5, warmup_steps=10)
        runs.append(engine.Trainer(model=load_qa_model(source), args=args, train_dataset=rows))
        runs[-1].train()
    assert 0.0 < max(_gaps(runs[1], runs[0])) < WITHIN
