"""An adapter of peft with `whet.Trainer`: the model's own weights stay, and a few thousand more are learnt."""

import csv
import sys
import tempfile
from pathlib import Path

from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

from whet import Trainer, TrainingArguments

with (Path(__file__).parent / "data" / "requests.csv").open(newline="", encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
names = sorted({row["label"] for row in rows})
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
examples = [tokenizer(row["text"]) | {"labels": names.index(row["label"])} for row in rows]

set_seed(0)
base = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=len(names))
lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_alpha=8, target_modules=["query", "value"])
model = get_peft_model(base, lora)
n_trained, n_all = model.get_nb_trainable_parameters()

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder, per_device_train_batch_size=8, num_train_epochs=3, learning_rate=1e-3, save_strategy="no",
        logging_steps=5, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=examples, processing_class=tokenizer)
    loss = trainer.train().training_loss
    trainer.save_model(folder)  # the adapter alone, and the head
    saved = sorted(path.name for path in Path(folder).glob("adapter_*"))
print(f"{', '.join(saved)}: {n_trained:,} of {n_all:,} weights, mean loss {loss:.3f}")
