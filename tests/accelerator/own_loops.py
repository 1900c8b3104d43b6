"""A loop of a user's own in the words of accelerate; as a script, it prints its losses as the first rank sees them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import BertConfig, BertForSequenceClassification

import whet

N_ROWS = 38
"""Of these neither the batches nor the steps of two micro-batches divide evenly."""


@contextmanager
def fresh() -> Iterator[None]:
    """Forget the configuration that accelerate keeps for the process."""
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    yield
    for state in (AcceleratorState, GradientState):
        state._reset_state()


def made(kind: str, **settings: Any) -> Any:
    """Return accelerate's Accelerator, with the order of rows that whet's has, or whet's."""
    if kind == "whet":
        return whet.Accelerator(cpu=True, **settings)
    return Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True), **settings
    )  # fmt: skip


def tiny_bert(dropout: float = 0.0) -> Any:
    """Return a tiny classifier, the same each time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    return BertForSequenceClassification(BertConfig(**sizes, intermediate_size=64, **rates))


def collate(rows: Sequence[int]) -> dict[str, Tensor]:
    """Return the rows of these numbers, of different lengths, padded on the right."""
    made = [torch.randint(5, 100, (3 + 5 * n % 17,), generator=torch.Generator().manual_seed(n)) for n in rows]
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(made, batch_first=True),
        "attention_mask": torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in made], batch_first=True),
        "labels": torch.tensor([n % 2 for n in rows]),
    }


class Loop:
    """A loop over two epochs: micro-batches of 4 rows, clipping, a schedule, and the losses of all ranks."""

    def __init__(
        self, accelerator: Any, *, dropout: float = 0.0, seed: int = 3, rows: Any = None, sets_epoch: bool = True,
        **options: Any,
    ) -> None:  # fmt: skip
        self.accelerator, self.losses, self.sets_epoch = accelerator, [], sets_epoch
        torch.manual_seed(3)
        model = tiny_bert(dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(seed)
        usual = {"collate_fn": collate} | ({"shuffle": True} if rows is None else {})
        loader = DataLoader(range(N_ROWS) if rows is None else rows, 4, **(usual | options))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        self.model, self.optimizer, self.loader, self.schedule = accelerator.prepare(model, optimizer, loader, schedule)
        self.model.train()

    def epoch(self, number: int, *, first: int = 0, last: int | None = None) -> None:
        """Train on the batches from `first` on, and stop after `last`."""
        if self.sets_epoch:
            self.loader.set_epoch(number)
        batches = self.accelerator.skip_first_batches(self.loader, first) if first else self.loader
        for done, batch in enumerate(batches, start=first + 1):
            self.step(batch)
            if done == last:
                return

    def step(self, batch: Any) -> None:
        """Train on a micro-batch."""
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss = self.model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        self.losses.append(float(accelerator.gather(loss.detach()).mean()))

    def labels_seen(self) -> int:
        """Return how many labels the ranks gather in an epoch without training."""
        found = [self.accelerator.gather_for_metrics(batch["labels"]) for batch in self.loader]
        return sum(len(one) for one in found)


def losses_of(accelerator: Any, **options: Any) -> list[float]:
    """Return the losses of two epochs."""
    loop = Loop(accelerator, **options)
    for number in range(2):
        loop.epoch(number)
    return loop.losses


def main(kind: str, folder: str) -> None:
    """Train, save after the first epoch, and print what happened; with an existing folder, resume from it."""
    if kind == "whet":
        refuse_pickles()
    accelerator = made(kind, gradient_accumulation_steps=2)
    loop = Loop(accelerator)
    if Path(folder).is_dir():
        accelerator.load_state(folder)
    else:
        loop.epoch(0)
        if kind == "whet":
            accelerator.save_state(folder)
    loop.epoch(1)
    facts = {"losses": loop.losses, "labels": loop.labels_seen(), "ranks": accelerator.num_processes}
    accelerator.wait_for_everyone()
    accelerator.print(json.dumps(facts))


class Stream(IterableDataset):
    """Row numbers, which rank 0 reads for all ranks."""

    def __iter__(self) -> Iterator[int]:
        """Yield as many numbers as a loop has rows."""
        return iter(range(N_ROWS))


def exchanges(kind: str) -> None:
    """Print what the ranks read of a stream and gather of it: texts, tensors, numbers, and what cannot travel."""
    if kind == "whet":
        refuse_pickles()
    accelerator = made(kind)

    def rows(numbers: Sequence[int]) -> dict[str, Tensor]:
        return {"labels": torch.tensor(numbers), "halves": torch.tensor(numbers) / 2}

    found: dict[str, list[Any]] = {"labels": [], "texts": [], "pairs": []}
    for batch in accelerator.prepare(DataLoader(Stream(), 4, collate_fn=rows)):
        numbers = batch["labels"].tolist()
        found["labels"] += accelerator.gather_for_metrics(batch["labels"]).tolist()
        found["texts"] += accelerator.gather_for_metrics([f"row {number}" for number in numbers])
        pairs = [(number, batch["halves"][place]) for place, number in enumerate(numbers)]
        found["pairs"] += accelerator.gather_for_metrics(pairs, use_gather_object=True)
    found["pairs"] = [[number, float(half)] for number, half in found["pairs"]]
    accelerator.print(json.dumps(found))
    if kind == "whet":
        try:
            accelerator.gather_for_metrics([object()])
        except Exception as error:
            accelerator.print(json.dumps(f"{type(error).__name__}: {error}"))
    leave()


def refuse_pickles() -> None:
    """Let torch's object collectives fail in this process, whoever calls them."""
    torch.distributed.distributed_c10d._unpickler = None  # pyright: ignore


def leave() -> None:
    """End the group of this rank, whose threads may otherwise end the process with an abort."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    exchanges(sys.argv[2]) if sys.argv[1] == "exchanges" else main(*sys.argv[1:])
    leave()
