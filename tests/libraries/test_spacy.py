"""`whet.optimize` inside spaCy: pipelines of curated-transformers, and thinc around a transformers model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_encoders import WORDS, sentences
from torch import Tensor, nn
from transformers import AutoModel

import whet
from whet.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("default")  # those of these libraries are not whet's
spacy = pytest.importorskip("spacy", reason="needs spacy: make test-libraries installs it")
pytest.importorskip("spacy_curated_transformers", reason="needs spacy-curated-transformers")
from spacy.training import Example  # noqa: E402
from thinc.api import Adam, ArgsKwargs, Config, PyTorchWrapper_v2, fix_random_seed  # noqa: E402

N_STEPS = 50
CURVE_TOLERANCE = 1e-4
"""Of 50 optimizer steps: sums run in another order without padding."""
_CONFIG = """
[nlp]
lang = "en"
pipeline = ["transformer", "textcat"]
[components]
[components.transformer]
factory = "curated_transformer"
all_layer_outputs = {layers}
[components.transformer.model]
@architectures = "spacy-curated-transformers.{kind}Transformer.v1"
vocab_size = 60
hidden_width = 32
num_hidden_layers = 2
num_attention_heads = 4
intermediate_width = 64
attention_probs_dropout_prob = {dropout}
hidden_dropout_prob = {dropout}
max_position_embeddings = 80
model_max_length = 64
{more}
[components.transformer.model.piece_encoder]
@architectures = "spacy-curated-transformers.BertWordpieceEncoder.v1"
[components.transformer.model.with_spans]
@architectures = "spacy-curated-transformers.WithStridedSpans.v1"
stride = 24
window = 32
[components.textcat]
factory = "textcat"
[components.textcat.model]
@architectures = "spacy.TextCatReduce.v1"
exclusive_classes = true
use_reduce_first = false
use_reduce_last = false
use_reduce_max = false
use_reduce_mean = true
[components.textcat.model.tok2vec]
@architectures = "spacy-curated-transformers.LastTransformerLayerListener.v1"
width = 32
pooling = {{"@layers": "reduce_mean.v1"}}
[initialize]
[initialize.components]
[initialize.components.transformer]
[initialize.components.transformer.piecer_loader]
@model_loaders = "spacy-curated-transformers.WordpieceLoader.v1"
path = "{vocabulary}"
"""
_MORE = {"Bert": "", "Roberta": "padding_idx = 1", "Xlmr": "", "Albert": "embedding_width = 16"}


def pipeline(folder: Path, kind: str = "Bert", *, dropout: float = 0.0, layers: str = "false", after: str = "") -> Any:
    """Return a new pipeline of a tiny transformer and a text classifier, the same each time."""
    from spacy.util import load_model_from_config

    vocabulary = folder / "vocabulary.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    special = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"] if kind in ("Roberta", "Xlmr") else special
    vocabulary.write_text("\n".join([*special, *dict.fromkeys(WORDS)]), "utf-8")
    text = _CONFIG.format(kind=kind, dropout=dropout, layers=layers, more=_MORE[kind], vocabulary=vocabulary)
    fix_random_seed(1)
    nlp = load_model_from_config(Config().from_str(f"{text}\n{after}"), auto_fill=True)
    fix_random_seed(1)
    nlp.initialize(lambda: examples(nlp, 10))
    return nlp


def examples(nlp: Any, n_examples: int) -> list[Any]:
    texts = sentences(n_examples, 1)
    return [
        Example.from_dict(nlp.make_doc(text), {"cats": {"A": float(n % 2), "B": float(n % 2 == 0)}})
        for n, text in enumerate(texts)
    ]


def curve(nlp: Any, n_steps: int = N_STEPS) -> list[float]:
    """Return the loss of each of spaCy's own updates."""
    fix_random_seed(3)
    optimizer, rows, found = nlp.create_optimizer(), examples(nlp, 8 * n_steps), []
    optimizer.learn_rate = 1e-3
    for step in range(n_steps):
        losses: dict[str, float] = {}
        nlp.update(rows[8 * step : 8 * step + 8], sgd=optimizer, losses=losses, drop=0.0)
        found.append(float(np.sum(losses["textcat"])))
    return found


@pytest.mark.parametrize("kind", _MORE)
def test_spacy_training_has_the_same_curve(tmp_path: Path, kind: str) -> None:
    plain, nlp = curve(pipeline(tmp_path, kind)), pipeline(tmp_path, kind)
    assert whet.optimize(nlp) is nlp
    found = whet.changes(nlp)
    assert found is not None
    assert found.encoders == ("transformer.curated_encoder",)
    assert plain[0] != plain[-1]
    np.testing.assert_allclose(curve(nlp), plain, rtol=CURVE_TOLERANCE)


def test_spacy_pipeline_keeps_its_vectors_and_is_restored_exactly(tmp_path: Path) -> None:
    nlp, texts = pipeline(tmp_path, layers="true"), sentences(9, 4)

    def vectors() -> Iterator[Any]:
        for doc in nlp.pipe(texts, batch_size=4):
            for layer in doc._.trf_data.all_outputs:
                yield layer.dataXd

    before = list(vectors())
    whet.optimize(nlp.get_pipe("transformer"))
    for found, wanted in zip(vectors(), before, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    whet.restore(nlp)
    assert whet.changes(nlp) is None
    for found, wanted in zip(vectors(), before, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_spacy_training_with_dropout_can_be_repeated_and_saved(tmp_path: Path) -> None:
    one, other = (whet.optimize(pipeline(tmp_path, dropout=0.1)) for _ in range(2))
    assert curve(one, 5) == curve(other, 5)
    one.to_disk(tmp_path / "saved")
    loaded, text = spacy.load(tmp_path / "saved"), sentences(1, 9)[0]
    assert whet.changes(loaded) is None
    assert loaded(text).cats == pytest.approx(one(text).cats, abs=1e-5)


def test_optimize_computes_no_padding_of_spacy_batches(tmp_path: Path) -> None:
    """Seen by a hook: a product gets the tokens of all spans, and none of their padding."""
    nlp, shapes = whet.optimize(pipeline(tmp_path)), []
    encoder = nlp.get_pipe("transformer").model.get_ref("transformer").shims[0]._model.curated_encoder
    encoder.layers[0].ffn.register_forward_hook(lambda _, inputs, __: shapes.append(tuple(inputs[0].shape)))
    docs = list(nlp.pipe(sentences(6, 2)))
    n_pieces = sum(len(doc) + 2 for doc in docs)
    assert len(shapes) == 1
    assert shapes[0][0] == 1
    assert n_pieces <= shapes[0][1] < n_pieces + 64


def thinc_model(folder: Path, *, optimized: bool) -> Any:
    """Return thinc's wrapper of a transformers encoder: ids and mask in, hidden states out."""
    encoder = AutoModel.from_pretrained(folder)

    class States(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]

    def to_torch(_: Any, x: Any, __: bool) -> Any:
        return ArgsKwargs(args=tuple(torch.as_tensor(part) for part in x), kwargs={}), lambda grads: grads

    model = PyTorchWrapper_v2(States(), convert_inputs=to_torch)
    return whet.optimize(model) if optimized else model


def test_thinc_wrapper_of_a_transformers_encoder_trains_the_same(encoder_folder: Path) -> None:
    ids = np.random.default_rng(0).integers(5, 60, (6, 20))
    mask = (np.arange(20) < np.array([20, 3, 9, 14, 1, 7])[:, None]).astype(np.int64)
    found = []
    for optimized in (False, True):
        model, optimizer, losses = thinc_model(encoder_folder, optimized=optimized), Adam(1e-3), []
        for _ in range(N_STEPS):
            states, backprop = model.begin_update((ids, mask))
            losses.append(float((states**2).mean()))
            backprop(2 * states / states.size)
            model.finish_update(optimizer)
        found.append(losses)
    assert found[0][0] > found[0][-1]
    np.testing.assert_allclose(found[1], found[0], rtol=CURVE_TOLERANCE)


def test_callback_of_a_spacy_configuration_optimizes(tmp_path: Path) -> None:
    """As `spacy train --code` calls it: the callback runs at the end of nlp.initialize."""

    def callback() -> Any:
        return whet.optimize

    spacy.registry.callbacks.register("whet.optimize.v1", func=callback)
    nlp = pipeline(tmp_path, after='[initialize.after_init]\n@callbacks = "whet.optimize.v1"')
    assert whet.changes(nlp) is not None


def test_pipeline_without_a_transformer_is_refused(tmp_path: Path) -> None:
    nlp = spacy.blank("en")
    nlp.add_pipe("textcat")
    with pytest.raises(ConfigError, match=r"there is none in this object of spaCy"):
        whet.optimize(nlp)
    with pytest.raises(ConfigError, match=r"padding='none'"):
        whet.optimize(pipeline(tmp_path), padding="all")
