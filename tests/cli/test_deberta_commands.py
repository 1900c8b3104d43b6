"""Each command trains a DeBERTa v3 as it comes from the hub, with its own tokenizer: packed, in fp32 and in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification, DebertaV2Model, DebertaV2Tokenizer

from text_tasks import load, topic_rows, words, write_lines
from whet.cli.main import run

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
precisions = pytest.mark.parametrize("precision", ["fp32", "bf16"])


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new encoder with the settings of microsoft/deberta-v3-base, but small, and a Unigram tokenizer."""
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    texts = [row["text"] for row in topic_rows()]
    raw.train_from_iterator(
        texts, trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="[UNK]", show_progress=False)
    )
    scores = [(piece, 0.0 if piece in SPECIAL else -3.0 - n / 100) for n, piece in enumerate(_pieces(raw))]
    tokenizer = DebertaV2Tokenizer(vocab=scores, model_max_length=64)
    torch.manual_seed(0)
    config = DebertaV2Config(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, max_relative_positions=-1, position_buckets=16, pos_att_type="p2c|c2p",
        relative_attention=True, share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False,
        type_vocab_size=0, layer_norm_eps=1e-7, pooler_dropout=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("deberta")
    DebertaV2Model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _pieces(tokenizer: Tokenizer) -> list[str]:
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def trained(command: str, encoder: Path, folder: Path, rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Return the results of a run that learns the rows by heart."""
    file = write_lines(folder / "rows.jsonl", rows)
    files = {"train_file": file, "validation_file": file}
    line = words(command, encoder, folder / "out", "--do_train", "--do_eval", **files, **options)
    assert run(line) == 0
    return load(folder / "out", "all_results.json")


@pytest.mark.slow
@precisions
def test_classify_learns_topics_without_padding(encoder: Path, tmp_path: Path, precision: str) -> None:
    found = trained("classify", encoder, tmp_path, topic_rows(), num_train_epochs=120, precision=precision)
    assert found["eval_accuracy"] == 1.0
    assert found["train_padding_avoided"] > 0.05
    model = DebertaV2ForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.position_buckets == 16
    assert model.deberta.encoder.rel_embeddings.weight.shape == (32, 32)


@pytest.mark.slow
@precisions
def test_tag_learns_words_without_padding(encoder: Path, tmp_path: Path, precision: str) -> None:
    tokens = [row["text"].split() for row in topic_rows()]
    rows = [{"tokens": one, "tags": ["DET" if token in ("the", "a") else "X" for token in one]} for one in tokens]
    found = trained("tag", encoder, tmp_path, rows, num_train_epochs=40, precision=precision)
    assert found["eval_accuracy"] == 1.0
    assert found["train_padding_avoided"] > 0.05


@pytest.mark.slow
@precisions
def test_qa_finds_words_without_padding(encoder: Path, tmp_path: Path, precision: str) -> None:
    rows = []
    for n, row in enumerate(topic_rows()):
        last = row["text"].split()[-1]
        answers = {"text": [last], "answer_start": [row["text"].rindex(last)]}
        rows.append({"id": str(n), "question": "the last?", "context": row["text"], "answers": answers})
    options = {"doc_stride": 8, "num_train_epochs": 60, "precision": precision}
    found = trained("qa", encoder, tmp_path, rows, **options)
    assert found["eval_exact_match"] > 60.0
    assert found["train_padding_avoided"] > 0.05
