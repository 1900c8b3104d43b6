"""A reward model with TRL: the right answer to a question gets a higher score than another one."""

import csv
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

import whet

DATA = Path(__file__).parent / "data"


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = whet.optimize(AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=1))
answers = {row["label"]: row["answer"] for row in rows("answers.csv")}


def ids(question: str, answer: str) -> list[int]:
    return tokenizer(question, answer, truncation=True)["input_ids"]


# TRL's own preparation adds an end token, which encoders do not have; so the rows come tokenised.
pairs = Dataset.from_list(
    [
        {"chosen_ids": ids(row["text"], answers[row["label"]]), "rejected_ids": ids(row["text"], answer)}
        for row in rows("requests.csv")
        for label, answer in answers.items()
        if label != row["label"]
    ]
)

with tempfile.TemporaryDirectory() as folder:
    args = RewardConfig(
        folder, num_train_epochs=1, per_device_train_batch_size=8, learning_rate=5e-5, logging_steps=4, bf16=False,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = RewardTrainer(model=model, args=args, train_dataset=pairs, processing_class=tokenizer)
    trainer.train()

accuracy = [entry["accuracy"] for entry in trainer.state.log_history if "accuracy" in entry]
print(f"share of pairs in the right order, last steps: {accuracy[-1]:.2f}")
