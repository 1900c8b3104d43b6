"""Direct preference optimization with TRL: a language model learns to prefer the right answer to another one."""

import csv
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import whet

DATA = Path(__file__).parent / "data"


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


answers = {row["label"]: row["answer"] for row in rows("answers.csv")}
others = dict(zip(answers, [*list(answers)[1:], next(iter(answers))], strict=True))
pairs = [
    {"prompt": row["text"], "chosen": f" {answers[row['label']]}", "rejected": f" {answers[others[row['label']]]}"}
    for row in rows("requests.csv")
]

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model.config.use_cache = False
whet.optimize(model)

with tempfile.TemporaryDirectory() as folder:
    args = DPOConfig(
        folder, num_train_epochs=1, per_device_train_batch_size=8, learning_rate=1e-3, max_length=64, logging_steps=2,
        save_strategy="no", report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = DPOTrainer(
        model=model, args=args, train_dataset=Dataset.from_list(pairs),
        processing_class=AutoTokenizer.from_pretrained(sys.argv[1]),
    )  # fmt: skip
    trainer.train()

accuracy = [entry["rewards/accuracies"] for entry in trainer.state.log_history if "rewards/accuracies" in entry]
print(f"share of pairs in the right order, last steps: {accuracy[-1]:.2f}")
