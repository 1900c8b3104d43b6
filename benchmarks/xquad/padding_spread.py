"""How far single batches are from the loss over all padding, with the padding tokens that `sampled` computes.

    python benchmarks/xquad/padding_spread.py --data FOLDER_WITH_XQUAD

The untouched model computes the logits of every padding token of XQuAD windows once; those of one padding token do not
depend on the others. The losses of batches follow: over all padding, and over the tokens that whet chooses, or the
middles of the stretches. For eight new heads on MiniLM, and for trained ones, with rows padded to 384 and to the
longest of their batch. Dropout is off.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peer import MODEL
from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoTokenizer, set_seed

from whet.config import arguments as settings
from whet.data import padding
from whet.data.padding import Padding
from whet.engine.engine import Engine, RunSpec
from whet.tasks.qa.read import read_questions
from whet.tasks.qa.windows import WindowOptions, make_windows

LENGTH, N_HEADS = 384, 8
BATCHES = (4, 8, 12, 16)


def new_model(seed: int) -> Any:
    """Return MiniLM with a new head and without dropout."""
    set_seed(seed)
    config = AutoConfig.from_pretrained(MODEL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return AutoModelForQuestionAnswering.from_pretrained(MODEL, config=config)


def trained(rows: Any, tokenizer: Any, n_steps: int) -> Any:
    """Return an untouched model with the weights of a short training whose loss counts padding."""
    model = new_model(42)
    with tempfile.TemporaryDirectory() as folder:
        args = settings.TrainingArguments(
            output_dir=folder, max_steps=n_steps, per_device_train_batch_size=12, learning_rate=1e-4, use_cpu=True,
            padding_in_loss="sampled", save_strategy="no", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        Engine(RunSpec(model=model, args=args, train_dataset=rows, processing_class=tokenizer)).train()
    untouched = AutoModelForQuestionAnswering.from_config(model.config, attn_implementation="sdpa")
    untouched.load_state_dict(model.state_dict())
    return untouched


@torch.no_grad()
def logits_of(model: Any, heads: list[Any], taken: Any) -> np.ndarray:
    """Return the logits (rows, LENGTH, 2, heads) of rows padded to LENGTH."""
    found, model = [], model.eval()
    for row in taken:
        n_tokens = len(row["input_ids"])
        columns = {name: torch.zeros(1, LENGTH, dtype=torch.long) for name in ("input_ids", "token_type_ids")}
        for name, column in columns.items():
            column[0, :n_tokens] = torch.tensor(list(row[name]))
        mask = (torch.arange(LENGTH) < n_tokens)[None]
        states = model.bert(**columns, attention_mask=mask.long()).last_hidden_state[0]
        found.append(torch.stack([head(states) for head in heads], -1))
    return torch.stack(found).double().numpy()


def logsumexp(logits: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the log of the weighted sum over places (places, 2, heads)."""
    return np.log((np.exp(logits) * sizes[:, None, None]).sum(0))


def batch_gaps(logits: np.ndarray, taken: list[Any], n_rows: int, length: int | None) -> tuple[np.ndarray, float]:
    """Return the relative gaps of all batches' losses, and the share of tokens that are computed padding."""
    choice, gaps, n_computed, n_real = Padding("sampled", length), [], 0, 0
    for first in range(0, len(taken) - n_rows + 1, n_rows):
        batch = taken[first : first + n_rows]
        lengths = np.array([len(row["input_ids"]) for row in batch])
        widths = choice.lengths(lengths, n_rows)
        samples = choice.sample(lengths, widths)
        ends = np.cumsum(samples.counts)
        exact, near = np.zeros(logits.shape[-1]), np.zeros(logits.shape[-1])
        for i, row in enumerate(batch):
            own, answers = logits[first + i], [row["start_positions"], row["end_positions"]]
            part = slice(ends[i] - samples.counts[i], ends[i])
            places = np.append(np.arange(lengths[i]), samples.columns[part])
            sizes = np.append(np.ones(lengths[i]), samples.sizes[part])
            wanted = own[answers, [0, 1]]
            exact += (logsumexp(own[: widths[i]], np.ones(widths[i])) - wanted).sum(0)
            near += (logsumexp(own[places], sizes) - wanted).sum(0)
        gaps.append(near / exact - 1)
        n_computed, n_real = n_computed + int(samples.counts.sum()), n_real + int(lengths.sum())
    return np.concatenate(gaps), n_computed / n_real


def show(name: str, logits: np.ndarray, taken: list[Any]) -> None:
    """Print a table row for each batch size, length and choice."""
    usual = padding.SPREAD
    for length in (LENGTH, None):
        for n_rows in BATCHES:
            for spread in (0.0, usual):
                padding.SPREAD = spread
                gaps, cost = batch_gaps(logits, taken, n_rows, length)
                sizes = 100 * np.abs(gaps)
                figures = [100 * gaps.mean(), np.median(sizes), np.quantile(sizes, 0.95), sizes.max()]
                words = [name, str(length or "longest"), str(n_rows), "middles" if spread == 0 else "whet"]
                print(
                    f"| {' | '.join(words)} | {' | '.join(f'{one:+.3f}' for one in figures)} | {cost:.2%} |", flush=True
                )
    padding.SPREAD = usual


def main() -> None:
    """Print the table for new heads and for trained ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds train.json of XQuAD")
    parser.add_argument("--rows", type=int, default=480)
    parser.add_argument("--steps", type=int, nargs="*", default=[60, 225], help="of training before a comparison")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    questions = read_questions(options.data / "train.json")
    rows = make_windows(questions, tokenizer, WindowOptions(max_seq_length=LENGTH)).rows
    taken = [rows[int(i)] for i in np.random.RandomState(0).permutation(len(rows))[: options.rows]]
    print("| head | padded to | rows | tokens | mean % | median of sizes % | 95 % | largest | more tokens |")
    heads = [new_model(seed).qa_outputs for seed in range(N_HEADS)]
    show(f"{N_HEADS} new", logits_of(new_model(0), heads, taken), taken)
    for n_steps in options.steps:
        model = trained(rows, tokenizer, n_steps)
        show(f"after {n_steps} steps", logits_of(model, [model.qa_outputs], taken), taken)


if __name__ == "__main__":
    main()
