"""Train with `whet.Trainer`, export to ONNX Runtime by `whet export`, and answer by the folder's own server."""

import csv
import json
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, set_seed

from whet import Trainer, TrainingArguments

with (Path(__file__).parent / "data" / "requests.csv").open(newline="", encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
names = sorted({row["label"] for row in rows})
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
examples = [tokenizer(row["text"]) | {"labels": names.index(row["label"])} for row in rows]

set_seed(0)
config = AutoConfig.from_pretrained(
    sys.argv[1], id2label=dict(enumerate(names)), label2id={name: n for n, name in enumerate(names)}
)
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], config=config)
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        f"{folder}/model", per_device_train_batch_size=8, num_train_epochs=3, learning_rate=1e-4, save_strategy="no",
        logging_steps=5, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=examples, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()

    command = [sys.executable, "-m", "whet", "export", f"{folder}/model", "--to", "onnx", "--json"]
    done = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    answer = runpy.run_path(done["outputs"]["server"])["answer"]
    question = "Can I bring my book back on Sunday?"
    off = done["export"]["outputs_fp32"]["largest_difference"]
    print(f"{question} -> {answer(question)['label']} (logits within {off:.0e} of torch's)")
