"""A worker that trains sentence embeddings by sentence-transformers' own trainer, or as `whet embed` does.

It takes a step each time it is asked. Both sides have the same model, pairs, seed and sampler, so the same batches.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))
from gate import Gate
from protocol import Channel

SEED, WARMUP = 42, 0.1
SIDES = ("library", "whet_fp32", "whet_auto")


def library_trainer(model: Path, data: Path, folder: Path, steps: int, batch: int) -> Any:
    """Return the library's trainer with its defaults, fp32 and torch's fused AdamW, over the pairs of a SQuAD file."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    transformers.set_seed(SEED)
    encoder = SentenceTransformer(str(model), device="cpu")
    args = SentenceTransformerTrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=batch, learning_rate=2e-5, seed=SEED,
        warmup_steps=WARMUP, batch_sampler="no_duplicates", logging_steps=1, save_strategy="no", report_to="none",
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_dict(pairs_of(data).columns())
    loss = MultipleNegativesRankingLoss(encoder)
    return SentenceTransformerTrainer(model=encoder, args=args, train_dataset=rows, loss=loss)


def whet_trainer(model: Path, data: Path, folder: Path, steps: int, batch: int, precision: str) -> Any:
    """Return the trainer of `whet embed`, with its settings for the same run."""
    from whet.config.arguments import TrainingArguments
    from whet.tasks.embed.arguments import EmbedArguments
    from whet.tasks.embed.job import prepare_embed

    transformers.set_seed(SEED)
    job = EmbedArguments(model_name_or_path=str(model), train_file=str(data))
    args = TrainingArguments(
        output_dir=str(folder), do_train=True, max_steps=steps, per_device_train_batch_size=batch, learning_rate=2e-5,
        seed=SEED, warmup_ratio=WARMUP, logging_steps=1, save_strategy="no", use_cpu=True, precision=precision,
    )  # fmt: skip
    trainer = prepare_embed(job, args, {"train": pairs_of(data)}).trainer
    print(trainer.choose_products(), file=sys.stderr)
    return trainer


def pairs_of(data: Path) -> Any:
    """Return the questions of a SQuAD file with their contexts, as `whet embed` reads them."""
    from whet.tasks.embed.arguments import EmbedArguments
    from whet.tasks.embed.pairs import read_pairs

    return read_pairs(data, EmbedArguments(model_name_or_path="m", train_file=str(data)))


def main() -> None:
    """Take a step for each request, until the request to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES, required=True)
    for name in ("model", "data", "folder"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    options, channel = parser.parse_args(), Channel()
    common = (options.model, options.data, options.folder, options.steps, options.batch)
    own = options.side != "library"
    trainer = whet_trainer(*common, options.side.removeprefix("whet_")) if own else library_trainer(*common)

    def about() -> dict[str, Any]:
        return {"n_threads": torch.get_num_threads(), "products": getattr(trainer, "products", "fp32")}

    trainer.add_callback(Gate(channel, about, lambda _: None, lambda _: {}))
    trainer.train()


if __name__ == "__main__":
    main()
