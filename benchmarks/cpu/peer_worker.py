"""A worker that trains or predicts with transformers' own Trainer; run in an environment that need not hold whet.

The options are those of the guides' question answering script and of its Trainer; see PEERS. Rows come from a file that
whet's windows were written to (tests hold them equal to those of the guides' script).
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from gate import Gate
from protocol import Channel
from safetensors.numpy import load_file
from sampling import spread
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, DataCollatorWithPadding, default_data_collator

MAX_LENGTH = 384
SEED = 42


@dataclass(frozen=True)
class Peer:
    """How a peer is run."""

    padded: bool
    """Rows are stored padded to 384, as the guides' script does by default."""
    options: dict[str, Any]
    """What its TrainingArguments get in addition to the guides' command."""
    optimize: bool = False
    """Whether the model goes through whet.optimize first."""


_BEST = {"optim": "adamw_torch_fused", "train_sampling_strategy": "group_by_length"}
PEERS = {
    "guides_bf16": Peer(padded=True, options={"bf16": True}),
    "guides_fp32": Peer(padded=True, options={}),
    "best_fp32": Peer(padded=False, options=_BEST),
    "best_bf16": Peer(padded=False, options=_BEST | {"bf16": True}),
    "optimize_fp32": Peer(padded=True, options={}, optimize=True),
}


def dataset_of(path: str, tokenizer: Any, *, padded: bool) -> datasets.Dataset:
    """Return the rows as the guides hold them: an Arrow table of lists, with the number of each row."""
    arrays = load_file(path)
    starts = arrays["row_starts"]
    names = [name for name in tokenizer.model_input_names if f"token.{name}" in arrays]
    columns = {name: np.split(arrays[f"token.{name}"], starts[1:-1]) for name in names}
    columns["attention_mask"] = [np.ones_like(row) for row in columns["input_ids"]]
    if padded:
        fill = {"input_ids": tokenizer.pad_token_id}
        for name, rows in columns.items():
            value = fill.get(name, 0)
            columns[name] = [np.pad(row, (0, MAX_LENGTH - len(row)), constant_values=value) for row in rows]
    labels = {name[4:]: arrays[name] for name in arrays if name.startswith("row.")}
    return datasets.Dataset.from_dict(columns | labels | {"row": np.arange(len(starts) - 1)})


class Collate:
    """The peer's own collator; notes which rows, how many tokens and how many places each batch has."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate
        self.batches: deque[dict[str, Any]] = deque()

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        rows = [feature.pop("row") for feature in features]
        batch = self.collate(features)
        tokens = int(batch["attention_mask"].sum())
        self.batches.append({"rows": rows, "n_tokens": tokens, "n_places": batch["input_ids"].numel()})
        return batch


class PeerTrainer(transformers.Trainer):
    """transformers' Trainer, which takes a sample of an epoch's steps instead of all."""

    n_steps = 1

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        size = self.args.per_device_train_batch_size
        if self.args.train_sampling_strategy != "group_by_length":
            order = torch.randperm(len(self.train_dataset), generator=torch.Generator().manual_seed(SEED)).tolist()
            return order[: (self.n_steps + 2) * size]
        order = list(super()._get_train_sampler(train_dataset))
        batches = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
        return [row for batch in spread(batches, self._n_tokens(), self.n_steps) for row in batch]

    def _n_tokens(self) -> list[int]:
        return [sum(mask) for mask in self.train_dataset["attention_mask"]]


def build(options: argparse.Namespace, peer: Peer) -> tuple[PeerTrainer, Collate]:
    """Return the Trainer of the peer, and its collator."""
    transformers.set_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForQuestionAnswering.from_pretrained(options.model, attn_implementation="sdpa")
    if peer.optimize:
        import whet

        whet.optimize(model)
    collate = Collate(default_data_collator if peer.padded else DataCollatorWithPadding(tokenizer))
    args = transformers.TrainingArguments(
        output_dir=options.folder, per_device_train_batch_size=options.batch, learning_rate=3e-5, seed=SEED,
        max_steps=100_000, save_strategy="no", logging_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, remove_unused_columns=False, **peer.options,
    )  # fmt: skip
    trainer = PeerTrainer(
        model=model, args=args, data_collator=collate, processing_class=tokenizer,
        train_dataset=dataset_of(options.rows, tokenizer, padded=peer.padded),
    )  # fmt: skip
    trainer.n_steps = options.steps
    return trainer, collate


class Losses:
    """The loss of each step: transformers adds them up, and without logs never resets the sum."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.sum = 0.0

    def last(self) -> float:
        """Return the loss of the last step."""
        before, self.sum = self.sum, float(self.trainer._tr_loss)
        return self.sum - before


def train(trainer: PeerTrainer, collate: Collate, channel: Channel, ready: dict[str, Any]) -> None:
    """Take a step for each request."""
    losses = Losses(trainer)

    def facts(_: dict[str, Any]) -> dict[str, Any]:
        return collate.batches.popleft() | {"loss": losses.last()}

    trainer.add_callback(Gate(channel, lambda: ready, lambda _: None, facts))
    trainer.train()


def predict(trainer: PeerTrainer, channel: Channel, ready: dict[str, Any]) -> None:
    """Predict the rows of each command."""
    channel.answer(**ready)
    while (command := channel.read())["do"] != "stop":
        rows = trainer.train_dataset.select(command["rows"])
        started_s = time.perf_counter()
        logits = trainer.predict(rows).predictions
        channel.answer(seconds=time.perf_counter() - started_s, start_logit_sum=float(logits[0][:, 0].sum()))


def main() -> None:
    """Serve requests until the request to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--steps", type=int, default=1, help="how many steps will be asked for")
    parser.add_argument("--mode", choices=("train", "predict"), default="train")
    options, channel = parser.parse_args(), Channel()
    trainer, collate = build(options, PEERS[options.peer])
    versions = {module.__name__: module.__version__ for module in (torch, transformers, datasets)}
    ready = {"n_threads": torch.get_num_threads(), "versions": versions}
    ready["attention"] = trainer.model.config._attn_implementation
    ready["optim"] = str(trainer.args.optim)
    if options.mode == "train":
        train(trainer, collate, channel, ready)
    else:
        predict(trainer, channel, ready)


if __name__ == "__main__":
    main()
