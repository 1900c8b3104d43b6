"""Sentence embeddings with sentence-transformers: a question and its answer come close to each other."""

import csv
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

import whet

DATA = Path(__file__).parent / "data"


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


answers = {row["label"]: row["answer"] for row in rows("answers.csv")}
pairs = Dataset.from_list([{"anchor": row["text"], "positive": answers[row["label"]]} for row in rows("requests.csv")])

model = whet.optimize(SentenceTransformer(sys.argv[1], device="cpu"))

with tempfile.TemporaryDirectory() as folder:
    args = SentenceTransformerTrainingArguments(
        folder, num_train_epochs=2, per_device_train_batch_size=4, learning_rate=5e-5,
        logging_steps=4, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=pairs, loss=loss)
    trainer.train()

question, wanted = "Can I bring my book back on Sunday?", list(answers.values())
scores = model.similarity(model.encode([question]), model.encode(wanted))[0]
print(question, "->", wanted[int(scores.argmax())])
