"""The loaders of a loop: what they draw from, and where they stand."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import IterableDataset, SequentialSampler

from whet.accelerator import between_ranks
from whet.accelerator.between_ranks import accelerate
from whet.accelerator.replay import place_of
from whet.errors import ConfigError
from whet.train.resume import schema
from whet.train.state import State


def give_generator(loader: Any) -> None:
    """Give a loader without a generator one of its own.

    A loader draws a number whenever it begins an epoch. From torch's own generator, that would shift the dropout masks
    of a run that resumes within an epoch.
    """
    if loader.generator is None:
        loader.generator = torch.Generator().manual_seed(torch.random.initial_seed() % 2**63)


def seed_of_order(loader: Any, asked: int | None, *, stateful: bool) -> int:
    """Return the seed of the order of rows: the one asked for, that of the loader's generator, or torch's on rank 0.

    accelerate takes each rank's own seed, and ranks that were seeded differently would deal out different orders.
    Raises ConfigError for loaders whose order would be lost.
    """
    if loader.batch_sampler is None and not isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            what="the loader has batch_size=None, and accelerate cannot prepare it",
            got=f"sampler {type(loader.sampler).__name__}",
            why="accelerate deals out the batches of a batch sampler; it would lose this sampler, or raise a TypeError",
            fix="give the sampler of batches as batch_sampler=, or a batch_size",
        )
    if stateful and loader.num_workers and not isinstance(loader.sampler, SequentialSampler):
        raise ConfigError(
            what="use_stateful_dataloader would resume with other rows",
            got=f"num_workers={loader.num_workers}, sampler {type(loader.sampler).__name__}",
            why="accelerate starts the workers before it gives the loader its order, and a resumed one has another",
            fix="leave use_stateful_dataloader out, and resume with set_epoch and skip_first_batches; or num_workers=0",
        )
    own = torch.random.initial_seed() if loader.generator is None else loader.generator.initial_seed()
    return between_ranks.of_first((own if asked is None else asked) % 2**63, schema.whole)


def _sampler_of(loader: Any) -> Any:
    """Return the sampler of a prepared loader that draws from a seed; None: it has none."""
    batches = getattr(loader, "batch_sampler", None)
    while batches is not None:
        sampler = getattr(batches, "sampler", None)
        if hasattr(sampler, "initial_seed"):
            return sampler
        batches = getattr(batches, "batch_sampler", None)
    return None


def state_of(loader: Any) -> State:
    """Return in which epoch a prepared loader is, the seed of its order and the state of its generator."""
    found: State = {"iteration": int(getattr(loader, "iteration", 0))}
    if (sampler := _sampler_of(loader)) is not None:
        found["seed"] = int(sampler.initial_seed)
    if (place := place_of(loader)) is not None:
        epoch, digest = place.first
        found["draws"] = {"seed": place.draws.seed, "epoch": epoch, "first": digest}
        found["order"] = place.order.state()
    if getattr(loader, "use_stateful_dataloader", False):
        found["position"] = loader.state_dict()
    generator = getattr(loader, "generator", None)
    return found if generator is None else found | {"generator": generator.get_state()}


def load_state(loader: Any, saved: State) -> None:
    """Restore what `state_of` returned."""
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(int(saved["iteration"]))
    if (sampler := _sampler_of(loader)) is not None and "seed" in saved:
        sampler.initial_seed = int(saved["seed"])
    if (place := place_of(loader)) is not None and "draws" in saved:
        place.order.load_state(saved["order"])
        place.draws.seed = int(saved["draws"]["seed"])
        if accelerate().PartialState().is_main_process:  # the checksum is of its batch
            place.first = (int(saved["draws"]["epoch"]), saved["draws"]["first"])
    if "position" in saved:
        loader.load_state_dict(saved["position"])
    generator = getattr(loader, "generator", None)
    if generator is not None and "generator" in saved:
        generator.set_state(saved["generator"])
