"""A worker that trains an encoder with transformers' Trainer or with whet's, a step each time it is asked.

The rows of every step are given: a file with a list of batches, each a list of tokenised rows. So all sides take the
same steps. The sides of transformers run in an environment without whet.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))
from gate import Gate
from protocol import Channel

SEED = 42
SIDES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "best_fp32": {"optim": "adamw_torch_fused"},
    "best_bf16": {"optim": "adamw_torch_fused", "bf16": True},
    "whet_fp32": {"precision": "fp32"},
    "whet_auto": {"precision": "auto"},
}
"""What each side's TrainingArguments get besides those that all have."""
COLLATORS = {
    "AutoModelForSequenceClassification": transformers.DataCollatorWithPadding,
    "AutoModelForTokenClassification": transformers.DataCollatorForTokenClassification,
    "AutoModelForMaskedLM": transformers.DataCollatorForLanguageModeling,
}


def build(options: argparse.Namespace, batches: list[list[Any]]) -> Any:
    """Return the Trainer of the side."""
    transformers.set_seed(SEED)
    if options.side.startswith("whet"):
        import whet

        library: Any = whet
    else:
        library = transformers
    args = library.TrainingArguments(
        output_dir=options.folder, per_device_train_batch_size=len(batches[0]), learning_rate=3e-5, seed=SEED,
        max_steps=len(batches), save_strategy="no", logging_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, train_sampling_strategy="sequential", **SIDES[options.side],
    )  # fmt: skip
    model = getattr(transformers, options.head).from_pretrained(options.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    return library.Trainer(
        model=model, args=args, train_dataset=[row for batch in batches for row in batch],
        data_collator=COLLATORS[options.head](tokenizer), processing_class=tokenizer,
    )  # fmt: skip


def about(trainer: Any) -> dict[str, Any]:
    """Return what the benchmark should know of this process."""
    known = {"n_threads": torch.get_num_threads(), "attention": trainer.model.config._attn_implementation}
    if (whet := sys.modules.get("whet")) is not None:
        known["changes"] = str(whet.changes(trainer.model))
    return known


def main() -> None:
    """Take a step for each request, until the request to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--head", choices=COLLATORS, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batches", type=Path, required=True)
    parser.add_argument("--folder", required=True)
    options, channel = parser.parse_args(), Channel()
    trainer = build(options, json.loads(options.batches.read_text("utf-8")))
    trainer.add_callback(Gate(channel, lambda: about(trainer), lambda _: None, lambda _: {}))
    trainer.train()


if __name__ == "__main__":
    main()
