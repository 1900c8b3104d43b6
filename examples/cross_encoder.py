"""A reranker with sentence-transformers: does an answer fit a question."""

import csv
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

import whet

DATA = Path(__file__).parent / "data"


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


answers = rows("answers.csv")
pairs = Dataset.from_list(
    [
        {"query": request["text"], "passage": answer["answer"], "label": float(request["label"] == answer["label"])}
        for request in rows("requests.csv")
        for answer in answers
    ]
)

model = whet.optimize(CrossEncoder(sys.argv[1], num_labels=1, device="cpu"))

with tempfile.TemporaryDirectory() as folder:
    args = CrossEncoderTrainingArguments(
        folder, num_train_epochs=1, per_device_train_batch_size=8, learning_rate=5e-5,
        logging_steps=8, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = CrossEncoderTrainer(model=model, args=args, train_dataset=pairs, loss=BinaryCrossEntropyLoss(model))
    trainer.train()

question = "Can I bring my book back on Sunday?"
ranked = model.rank(question, [row["answer"] for row in answers], return_documents=True)
print(question, "->", ranked[0]["text"])
