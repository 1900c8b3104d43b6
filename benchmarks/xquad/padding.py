"""How well a few padding tokens a row stand for all of them, and what they cost.

    python benchmarks/xquad/padding.py --data FOLDER_WITH_XQUAD

The loss of transformers' own model on padded batches of XQuAD, and whet's on packed ones with K padding tokens a row:
for MiniLM with a new head, and after some steps of training, with rows padded to 384 and to the longest of their batch.
Dropout is off. `gradient` is the norm of the difference over the norm of the gradient. Times are medians of steps that
take turns, each next to a step without padding tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peer import MODEL
from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoTokenizer, DataCollatorWithPadding, set_seed

from whet.config import arguments as settings
from whet.engine import step
from whet.engine.engine import Engine, RunSpec
from whet.precision.policy import Float32
from whet.tasks.qa.read import read_questions
from whet.tasks.qa.windows import WindowOptions, make_windows

LENGTH = 384
COUNTS = (1, 2, 4, 8)


def gradient(model: Any) -> torch.Tensor:
    """Return all gradients of the model as one vector, and forget them."""
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found.clone()


def transformers_loss(model: Any, batches: list[Any], tokenizer: Any, length: int | None) -> float:
    """Leave the gradients of the untouched model's mean loss over padded batches; return the loss."""
    kind = {"padding": "max_length", "max_length": length} if length else {"padding": True}
    collate, total = DataCollatorWithPadding(tokenizer, **kind), 0.0
    for batch in batches:
        loss = model(**collate(list(batch))).loss / len(batches)
        loss.backward()
        total += float(loss.detach())
    return total


def whet_loss(trainer: Any, parts: list[range], n_samples: int, length: int | None) -> float:
    """Leave the gradients of whet's loss with so many padding tokens a row, 0: all; return the loss."""
    objective = trainer.objective
    amount = "sampled" if n_samples else "all"
    objective.padding = replace(objective.padding, in_loss=amount, n_samples=n_samples, length=length)
    batches = [objective.batch(trainer.train_dataset, part, part.start) for part in parts]
    return float(step.ObjectiveGradients(objective=objective, precision=Float32(), seed=0)(batches, 0).total)


def compare(trainer: Any, tokenizer: Any, parts: list[range]) -> None:
    """Print how far whet's losses are from the untouched model's."""
    rows = trainer.train_dataset
    untouched = AutoModelForQuestionAnswering.from_config(trainer.model.config, attn_implementation="sdpa")
    untouched.load_state_dict(trainer.model.state_dict())
    for length in (LENGTH, None):
        wanted = transformers_loss(untouched, [rows.take(part) for part in parts], tokenizer, length)
        exact = gradient(untouched)
        print(f"padded to {length or 'the longest'}: loss of transformers {wanted:.5f}")
        for n_samples in (0, *COUNTS):
            found = whet_loss(trainer, parts, n_samples, length)
            gap = float((gradient(trainer.model) - exact).norm() / exact.norm())
            print(f"  {n_samples or 'all'}: loss {found / wanted - 1:+.4%}, gradient {gap:.3%}")


def cost(trainer: Any, parts: list[range], n_rounds: int) -> None:
    """Print how much longer forward and backward passes take with K padding tokens a row, rows padded to LENGTH."""
    seconds: dict[int, list[float]] = {n: [] for n in (0, *COUNTS)}
    objective = trainer.objective
    batches = {}
    for n in seconds:
        objective.padding = replace(objective.padding, in_loss="sampled" if n else "none", n_samples=n, length=LENGTH)
        batches[n] = [objective.batch(trainer.train_dataset, part, part.start) for part in parts]
    for _ in range(n_rounds):
        for n, its in batches.items():
            begin = time.process_time()
            step.ObjectiveGradients(objective=objective, precision=Float32(), seed=0)(its, 0)
            seconds[n].append(time.process_time() - begin)
    for n in COUNTS:
        ratio = statistics.median(a / b for a, b in zip(seconds[n], seconds[0], strict=True))
        tokens = sum(b.n_computed for b in batches[n]) / sum(b.n_computed for b in batches[0])
        print(f"  {n} padding tokens a row: {ratio - 1:+.2%} processor time, {tokens - 1:+.2%} tokens")


def main() -> None:
    """Compare at the start and after training; measure the cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds train.json of XQuAD")
    parser.add_argument("--steps", type=int, default=60, help="of training between the two comparisons")
    parser.add_argument("--batches", type=int, default=8, help="of 12 rows that are compared")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = make_windows(
        read_questions(options.data / "train.json"), tokenizer, WindowOptions(max_seq_length=LENGTH)
    ).rows
    config = AutoConfig.from_pretrained(MODEL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    set_seed(42)
    model = AutoModelForQuestionAnswering.from_pretrained(MODEL, config=config)
    with tempfile.TemporaryDirectory() as folder:
        args = settings.TrainingArguments(
            output_dir=folder, max_steps=options.steps, per_device_train_batch_size=12, learning_rate=1e-4,
            padding_in_loss="all", use_cpu=True, save_strategy="no", disable_tqdm=True, precision="fp32",
            logging_strategy="no",
        )  # fmt: skip
        trainer = Engine(RunSpec(model=model, args=args, train_dataset=rows, processing_class=tokenizer))
        parts = [range(at * 12, at * 12 + 12) for at in range(options.batches)]
        compare(trainer, tokenizer, parts)
        cost(trainer, parts[:2], options.rounds)
        trainer.train()
        print(f"after {options.steps} steps")
        compare(trainer, tokenizer, parts)


if __name__ == "__main__":
    main()
