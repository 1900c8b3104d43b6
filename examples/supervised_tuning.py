"""Supervised fine-tuning with TRL: a language model learns to answer; the questions are not learnt."""

import csv
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import whet

DATA = Path(__file__).parent / "data"


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


answers = {row["label"]: row["answer"] for row in rows("answers.csv")}
turns = [{"prompt": row["text"], "completion": f" {answers[row['label']]}"} for row in rows("requests.csv")]

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model.config.use_cache = False  # evaluations would run with their padding
whet.optimize(model)

with tempfile.TemporaryDirectory() as folder:
    args = SFTConfig(
        folder, num_train_epochs=2, per_device_train_batch_size=8, learning_rate=1e-3, completion_only_loss=True,
        max_length=64, logging_steps=4, save_strategy="no", report_to="none", use_cpu=True, bf16=False,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=Dataset.from_list(turns),
        processing_class=AutoTokenizer.from_pretrained(sys.argv[1]),
    )  # fmt: skip
    trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss at first {losses[0]:.3f}, at last {losses[-1]:.3f}")
