"""`whet.optimize` inside sentence-transformers: the same embeddings, and the same training, without padding."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from tiny_encoders import sentences

import whet
from whet.errors import ConfigError

pytest.importorskip("sentence_transformers", reason="needs sentence-transformers: make test-libraries installs it")
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder import losses as cross_encoder_losses
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import CNN, Pooling

TOLERANCE = 1e-5
"""Sums run in another order without padding: float32 rounding over a few layers."""
CURVE_TOLERANCE = 1e-4
"""Relative, of the losses of 50 optimizer steps."""
N_STEPS = 50


def embedder(folder: Path, pooling: str = "mean") -> SentenceTransformer:
    transformer = Transformer(str(folder))
    return SentenceTransformer(modules=[transformer, Pooling(32, pooling)], device="cpu")


def trained(model: SentenceTransformer, loss: Any, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the loss of each step, and the weights after them."""
    pairs = Dataset.from_dict({"anchor": sentences(120, 1), "positive": sentences(120, 2)})
    args = SentenceTransformerTrainingArguments(
        str(folder), max_steps=N_STEPS, per_device_train_batch_size=8, logging_steps=1, learning_rate=1e-3,
        save_strategy="no", report_to="none", disable_tqdm=True, seed=3, use_cpu=True,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=pairs, loss=loss(model))
    trainer.train()
    history = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return history, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_convolution_before_the_pooling_reads_padding_as_it_comes(encoder_folder: Path) -> None:
    """The library's CNN takes neighbours of a text's last token, which are padding: each of these is computed."""
    torch.manual_seed(0)
    parts = [Transformer(str(encoder_folder)), CNN(32, 8, [1, 3, 5]), Pooling(24, "mean")]
    model, texts = SentenceTransformer(modules=parts, device="cpu").eval(), sentences(20)
    wanted = model.encode(texts)
    whet.optimize(model)
    changes = whet.changes(model)
    assert changes is not None
    assert changes.padding == "all"
    np.testing.assert_allclose(model.encode(texts), wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
def test_sentence_transformer_keeps_its_embeddings(encoder_folder: Path, pooling: str) -> None:
    model, texts = embedder(encoder_folder, pooling), sentences(20)
    before = model.encode(texts)
    assert whet.optimize(model) is model
    found = whet.changes(model)
    assert found is not None
    assert found.encoders == ("0.model",)
    assert found.fused
    np.testing.assert_allclose(model.encode(texts), before, atol=TOLERANCE)
    whet.restore(model)
    assert whet.changes(model) is None
    np.testing.assert_array_equal(model.encode(texts), before)


def test_sentence_transformer_keeps_its_token_embeddings(encoder_folder: Path) -> None:
    model, texts = embedder(encoder_folder), sentences(6)
    before = model.encode(texts, output_value="token_embeddings")
    after = whet.optimize(model).encode(texts, output_value="token_embeddings")
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=0)


LOSSES = {
    "in-batch negatives": losses.MultipleNegativesRankingLoss,
    "cached": lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3),
    "cached, both directions": lambda model: losses.CachedMultipleNegativesRankingLoss(
        model, mini_batch_size=3, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_sentence_transformer_trainer_has_the_same_curve(encoder_folder: Path, tmp_path: Path, name: str) -> None:
    loss = LOSSES[name]
    plain, plain_weights = trained(embedder(encoder_folder), loss, tmp_path / "plain")
    curve, weights = trained(whet.optimize(embedder(encoder_folder)), loss, tmp_path / "whet")
    assert len(curve) == N_STEPS
    assert curve[0] != curve[-1]
    np.testing.assert_allclose(curve, plain, rtol=CURVE_TOLERANCE)
    for key, tensor in plain_weights.items():
        torch.testing.assert_close(weights[key], tensor, atol=1e-3, rtol=0)  # one step of Adam


def takes_few_tokens(model: SentenceTransformer) -> bool:
    """Return whether the last block leaves out tokens that pooling does not take."""
    features = model.preprocess(sentences(8))
    return type(model(features)["token_embeddings"]).__name__ == "LazyStates"


FEW_TOKENS = {
    "in-batch negatives": losses.MultipleNegativesRankingLoss,
    "cached": lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3),
    "matryoshka": lambda model: losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [32, 16, 8]),
    "all layers": lambda model: losses.AdaptiveLayerLoss(model, losses.MultipleNegativesRankingLoss(model)),
}


@pytest.mark.parametrize("pooling", ["cls", "lasttoken"])
@pytest.mark.parametrize("name", FEW_TOKENS)
def test_pooling_of_one_token_has_the_same_curve(encoder_folder: Path, tmp_path: Path, name: str, pooling: str) -> None:
    loss = FEW_TOKENS[name]
    plain, plain_weights = trained(embedder(encoder_folder, pooling), loss, tmp_path / "plain")
    model = whet.optimize(embedder(encoder_folder, pooling))
    curve, weights = trained(model, loss, tmp_path / "whet")
    assert curve[0] != curve[-1]
    np.testing.assert_allclose(curve, plain, rtol=CURVE_TOLERANCE)
    for key, tensor in plain_weights.items():
        if key.endswith("key.bias"):
            continue  # its gradient is 0 but for rounding, of which Adam takes the sign
        torch.testing.assert_close(weights[key], tensor, atol=1e-3, rtol=0)  # one step of Adam
    if name != "all layers":  # it has the model return the states of all layers, which runs with padding
        assert takes_few_tokens(model)


@pytest.mark.parametrize("output_value", ["token_embeddings", None])
def test_token_embeddings_of_pooling_by_one_token_are_all_there(encoder_folder: Path, output_value: Any) -> None:
    model, texts = embedder(encoder_folder, "cls"), sentences(6)
    before = model.encode(texts, output_value=output_value)
    whet.optimize(model)
    assert takes_few_tokens(model)
    after = model.encode(texts, output_value=output_value)
    for one, other in zip(before, after, strict=True):
        if output_value is None:
            real = one["attention_mask"].bool()
            one, other = one["token_embeddings"][real], other["token_embeddings"][real]
        assert type(other) is torch.Tensor
        torch.testing.assert_close(other, one, atol=TOLERANCE, rtol=0)


def test_prompts_that_pooling_leaves_out(encoder_folder: Path) -> None:
    """Without the prompt, the first token of the text is pooled: any token may be."""
    model, texts = embedder(encoder_folder, "cls"), sentences(6)
    for prompt in (None, "query of someone : "):
        model[1].include_prompt = prompt is None
        before = model.encode(texts, prompt=prompt)
        for kept in (True, False):
            model[1].include_prompt = kept
            whet.optimize(model)
            model[1].include_prompt = prompt is None
            np.testing.assert_allclose(model.encode(texts, prompt=prompt), before, atol=TOLERANCE)
            whet.restore(model)


def test_ranks_train_pooling_by_one_token(encoder_folder: Path, tmp_path: Path) -> None:
    """DistributedDataParallel looks at every tensor that a model returns."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for options in ({}, {"static_graph": True}):  # find_unused_parameters: fails for the untouched model too
            plain, model = embedder(encoder_folder, "cls"), whet.optimize(embedder(encoder_folder, "cls"))
            for one in (plain, model):
                one[0].model.pooler.requires_grad_(False)  # not a part of the loss, which DDP would wait for
            ranks = torch.nn.parallel.DistributedDataParallel(model, **options)
            for one, parallel in ((plain, plain), (model, ranks)):
                for _ in range(2):
                    features = one.preprocess(sentences(8))
                    parallel(features)["sentence_embedding"].square().sum().backward()
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                if one.grad is not None:
                    torch.testing.assert_close(other.grad, one.grad, atol=1e-4, rtol=1e-4)
    finally:
        torch.distributed.destroy_process_group()


def test_cached_loss_draws_the_same_masks_in_both_passes(dropout_folder: Path) -> None:
    """The cached loss runs each micro-batch twice, with the generator set back: other masks give other gradients."""
    model = whet.optimize(embedder(dropout_folder)).train()
    texts = [sentences(8, 1), sentences(8, 2)]

    def gradients(loss: Any) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(5)
        features = [model.preprocess(column) for column in texts]
        loss(features, None).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients(losses.MultipleNegativesRankingLoss(model))
    cached = gradients(losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=8))
    assert len(plain) == len(cached) > 10
    for one, other in zip(plain, cached, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=1e-4)


def test_saved_sentence_transformer_loads_without_whet(encoder_folder: Path, tmp_path: Path) -> None:
    model, texts = whet.optimize(embedder(encoder_folder)), sentences(5)
    model.save(str(tmp_path / "saved"))
    loaded = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert whet.changes(loaded) is None
    np.testing.assert_allclose(loaded.encode(texts), model.encode(texts), atol=TOLERANCE)


@pytest.mark.parametrize(
    "name", ["BinaryCrossEntropyLoss", "MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"]
)
def test_cross_encoder_trainer_has_the_same_curve(encoder_folder: Path, tmp_path: Path, name: str) -> None:
    def run(optimized: bool) -> list[float]:
        torch.manual_seed(0)
        model = CrossEncoder(str(encoder_folder), num_labels=1, device="cpu")
        if optimized:
            whet.optimize(model)
            assert whet.changes(model) is not None
        rows = {"query": sentences(120, 1), "text": sentences(120, 2)}
        if name == "BinaryCrossEntropyLoss":
            rows["label"] = [float(n % 3 == 0) for n in range(120)]
        args = CrossEncoderTrainingArguments(
            str(tmp_path / str(optimized)), max_steps=N_STEPS, per_device_train_batch_size=8, logging_steps=1,
            learning_rate=1e-3, save_strategy="no", report_to="none", disable_tqdm=True, seed=3, use_cpu=True,
        )  # fmt: skip
        options = {"mini_batch_size": 3} if name.startswith("Cached") else {}
        loss = getattr(cross_encoder_losses, name)(model, **options)
        trainer = CrossEncoderTrainer(model=model, args=args, train_dataset=Dataset.from_dict(rows), loss=loss)
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    plain, curve = run(False), run(True)
    assert len(curve) == N_STEPS
    assert curve[0] != curve[-1]
    np.testing.assert_allclose(curve, plain, rtol=CURVE_TOLERANCE)


def test_optimize_refuses_a_sentence_transformer_without_a_known_encoder(tmp_path: Path, encoder_folder: Path) -> None:
    from transformers import AutoTokenizer, OPTConfig, OPTModel

    folder = tmp_path / "opt"
    sizes = {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ffn_dim": 64,
    }
    OPTModel(OPTConfig(vocab_size=500, **sizes)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder_folder).save_pretrained(folder)
    with pytest.raises(ConfigError, match="OPTModel") as refused:
        whet.optimize(embedder(folder))
    assert "SentenceTransformer" in str(refused.value)


def pair_columns(model: SentenceTransformer, rows: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    """Return a batch of both texts, the columns of each behind its letter."""
    found = {}
    for text in "ab":
        features = model.preprocess([row[text] for row in rows])
        found |= {f"{text}_{name}": value for name, value in features.items() if torch.is_tensor(value)}
    return found


class InBatchNegatives:
    """Mixed into a Trainer: the second text of a row belongs to its first, those of other rows do not."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        columns = [{name[2:]: value for name, value in inputs.items() if name[0] == text} for text in "ab"]
        one, other = (model(features)["sentence_embedding"] for features in columns)
        return torch.nn.functional.cross_entropy(one @ other.T, torch.arange(len(one)))


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_trainer_trains_embeddings_without_padding(encoder_folder: Path, tmp_path: Path, pooling: str) -> None:
    """whet.Trainer against transformers' Trainer, both with a loss of the user's own."""
    rows = [{"a": one, "b": other} for one, other in zip(sentences(80, 1), sentences(80, 2), strict=True)]
    curves = []
    for library in (transformers, whet):
        model = embedder(encoder_folder, pooling)
        args = library.TrainingArguments(
            str(tmp_path / library.__name__), max_steps=10, per_device_train_batch_size=8, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
            learning_rate=1e-3, train_sampling_strategy="sequential",
        )  # fmt: skip
        kind: Any = type("Trained", (InBatchNegatives, library.Trainer), {})
        trainer = kind(model, args, data_collator=partial(pair_columns, model), train_dataset=rows)
        trainer.train()
        curves.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert whet.changes(model) is not None
    assert len(curves[0]) == 10
    np.testing.assert_allclose(curves[1], curves[0], rtol=CURVE_TOLERANCE)
