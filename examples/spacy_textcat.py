"""A spaCy pipeline with a transformer of spacy-curated-transformers that learns the topic of a question."""

import csv
import random
import sys
from pathlib import Path

import spacy
from spacy.training import Example
from spacy.util import load_model_from_config, minibatch
from thinc.api import Config
from transformers import AutoConfig

import whet

# What `spacy init config` writes for a BERT model, with the sizes of the encoder that is loaded.
CONFIG = """
[nlp]
lang = "en"
pipeline = ["transformer", "textcat"]
[components]
[components.transformer]
factory = "curated_transformer"
[components.transformer.model]
@architectures = "spacy-curated-transformers.BertTransformer.v1"
vocab_size = {vocab_size}
hidden_width = {hidden_size}
num_hidden_layers = {num_hidden_layers}
num_attention_heads = {num_attention_heads}
intermediate_width = {intermediate_size}
max_position_embeddings = {max_position_embeddings}
model_max_length = {max_position_embeddings}
[components.transformer.model.piece_encoder]
@architectures = "spacy-curated-transformers.BertWordpieceEncoder.v1"
[components.transformer.model.with_spans]
@architectures = "spacy-curated-transformers.WithStridedSpans.v1"
stride = 48
window = 64
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
width = {hidden_size}
pooling = {{"@layers": "reduce_mean.v1"}}
[initialize]
[initialize.components]
[initialize.components.transformer]
[initialize.components.transformer.encoder_loader]
@model_loaders = "spacy-curated-transformers.HFTransformerEncoderLoader.v1"
name = "{encoder}"
[initialize.components.transformer.piecer_loader]
@model_loaders = "spacy-curated-transformers.HFPieceEncoderLoader.v1"
name = "{encoder}"
"""

with (Path(__file__).parent / "data" / "requests.csv").open(newline="", encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
topics = sorted({row["label"] for row in rows})
sizes = AutoConfig.from_pretrained(sys.argv[1]).to_dict()
nlp = load_model_from_config(Config().from_str(CONFIG.format(encoder=sys.argv[1], **sizes)), auto_fill=True)
examples = [
    Example.from_dict(nlp.make_doc(row["text"]), {"cats": {topic: float(topic == row["label"]) for topic in topics}})
    for row in rows
]
spacy.util.fix_random_seed(0)
optimizer = nlp.initialize(lambda: examples[:32])
optimizer.learn_rate = 2e-4
whet.optimize(nlp)

for _ in range(4):
    for batch in minibatch(random.sample(examples[:32], 32), size=8):
        nlp.update(batch, sgd=optimizer)

cats = [nlp(row["text"]).cats for row in rows[32:]]
right = sum(max(found, key=found.__getitem__) == row["label"] for found, row in zip(cats, rows[32:], strict=True))
print(f"{right} of {len(cats)} questions get the right topic")
