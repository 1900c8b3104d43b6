"""What padding does to the loss: the first steps of one job by transformers' own Trainer, padded, and by whet.

    python benchmarks/xquad/losses.py --data FOLDER_WITH_XQUAD --steps 5

MiniLM with dropout off, fp32, rows in the order of the file. The last line but one is the peer's Trainer with the
logits of padding masked in its loss, all else untouched: whet's losses are those, but for rounding.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from peer import MODEL, Windows
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from whet.config import arguments as settings
from whet.engine.engine import Engine, RunSpec
from whet.tasks.qa.read import read_questions
from whet.tasks.qa.windows import WindowOptions, make_windows

LENGTH = 384
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-4, "per_device_train_batch_size": 4, "train_sampling_strategy": "sequential", "use_cpu": True,
    "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "seed": 42,
}  # fmt: skip


class Masked(Trainer):
    """The peer, with padding left out of its softmax."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        padding = inputs["attention_mask"] == 0
        output = model(**{name: value for name, value in inputs.items() if not name.endswith("_positions")})
        sides = ((output.start_logits, "start_positions"), (output.end_logits, "end_positions"))
        loss = [torch.nn.functional.cross_entropy(x.masked_fill(padding, -torch.inf), inputs[y]) for x, y in sides]
        return (loss[0] + loss[1]) / 2


def model() -> Any:
    """Return the pretrained encoder with the same new head each time, dropout off."""
    set_seed(42)
    config = AutoConfig.from_pretrained(MODEL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return AutoModelForQuestionAnswering.from_pretrained(MODEL, config=config)


def history(trainer: Any) -> list[float]:
    """Train; return the loss of each step."""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    """Print one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds train.json of XQuAD")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    questions = read_questions(options.data / "train.json")
    rows = make_windows(questions, tokenizer, WindowOptions(max_seq_length=LENGTH)).rows
    to_longest = DataCollatorWithPadding(tokenizer)
    to_length = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=LENGTH)
    ways = {
        f"transformers, padded to {LENGTH} (run_qa's default)": (Trainer, to_length),
        "transformers, padded to the longest row": (Trainer, to_longest),
        "the same, padding masked in the loss": (Masked, to_longest),
    }
    with tempfile.TemporaryDirectory() as folder:
        common = {"output_dir": folder, "max_steps": options.steps, **SETTINGS}
        found = {}
        for name, (kind, collator) in ways.items():
            args = TrainingArguments(**common, report_to="none")
            found[name] = history(kind(model=model(), args=args, train_dataset=Windows(rows), data_collator=collator))
        args = settings.TrainingArguments(**common, precision="fp32")
        found["whet"] = history(Engine(RunSpec(model=model(), args=args, train_dataset=rows)))
    for name, losses in found.items():
        print(f"| {name} |" + "".join(f" {loss:.4f} |" for loss in losses))


if __name__ == "__main__":
    main()
