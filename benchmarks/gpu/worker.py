"""Trains one model on a GPU with transformers' Trainer or with whet's, and prints times, losses and memory as JSON.

The rows of every step are the same for all sides: sorted by length as transformers' `group_by_length` does, before any
side sees them. A side is timed in segments of steps, with the device waited for at the ends of a segment only.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_pt_utils import get_length_grouped_indices

Row = dict[str, list[int] | int]
SEED, SEGMENT = 42, 20
BEST: dict[str, Any] = {"bf16": True, "optim": "adamw_torch_fused", "logging_nan_inf_filter": False}
SIDES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "best": BEST,
    "best_compiled": BEST | {"torch_compile": True},
    "whet": BEST,
    "whet_compiled": BEST | {"torch_compile": True},
}
"""What each side's TrainingArguments have besides those that all have."""


@dataclass(frozen=True)
class Job:
    """A model of the size that people train, with random weights, and its rows."""

    head: str
    config: Callable[[], Any]
    rows: Callable[[Path, int], list[Row]]
    batch: int
    longest: int


def main() -> None:
    """Train, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--job", choices=JOBS, required=True)
    parser.add_argument("--data", type=Path, required=True, help="a file in SQuAD's form")
    parser.add_argument("--batch", type=int, default=0, help="rows of a step (default: the job's)")
    parser.add_argument("--segments", type=int, default=3)
    parser.add_argument("--warm", type=int, default=3 * SEGMENT, help="steps before the first segment")
    parser.add_argument("--dropout", type=float, default=None)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--profile", action="store_true", help="print where the time of some steps goes")
    options = parser.parse_args()
    trainer, timer = build(options)
    trainer.train()
    print(json.dumps(timer.found(trainer)), flush=True)


def build(options: argparse.Namespace) -> tuple[Any, Timer]:
    """Return the side's Trainer, and what times it."""
    job = JOBS[options.job]
    batch = options.batch or job.batch
    steps = options.warm + options.segments * SEGMENT
    rows = in_order(job.rows(options.data, job.longest), batch, steps)
    transformers.set_seed(SEED)
    config = job.config()
    if options.dropout is not None:
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            setattr(config, name, options.dropout)
    model = getattr(transformers, job.head).from_config(config)
    library: Any = transformers
    if options.side.startswith("whet"):
        import whet

        library = whet
    args = library.TrainingArguments(
        output_dir=options.folder, per_device_train_batch_size=batch, max_steps=steps, learning_rate=3e-5, seed=SEED,
        save_strategy="no", logging_steps=SEGMENT, report_to="none", disable_tqdm=True, dataloader_num_workers=2,
        train_sampling_strategy="sequential", **SIDES[options.side],
    )  # fmt: skip
    timer = Timer(options.warm, profile=options.profile)
    trainer = library.Trainer(model=model, args=args, train_dataset=rows, data_collator=padded, callbacks=[timer])
    return trainer, timer


class Timer(transformers.TrainerCallback):
    """Times segments of steps, after those that warm up."""

    def __init__(self, warm: int, *, profile: bool) -> None:
        self.warm, self.profile = warm, profile
        self.ends: list[float] = []
        self.losses: list[float] = []
        self.begun = time.perf_counter()
        self.first = 0.0
        self.profiler: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        step = state.global_step
        if step == 1:
            self._wait()
            self.first = time.perf_counter() - self.begun
        if step == self.warm - 8 and self.profile:
            self._wait()
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self.profiler = torch.profiler.profile(activities=activities)
            self.profiler.start()
        if step == self.warm - 5 and self.profiler is not None:
            self._wait()
            self.profiler.stop()
            for by in ("self_cuda_time_total", "self_cpu_time_total"):
                print(self.profiler.key_averages().table(sort_by=by, row_limit=28, max_name_column_width=60))
        if step == self.warm and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        if step >= self.warm and (step - self.warm) % SEGMENT == 0:
            self._wait()
            self.ends.append(time.perf_counter())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))

    @staticmethod
    def _wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def found(self, trainer: Any) -> dict[str, Any]:
        """Return what was measured."""
        seconds = [(end - begin) / SEGMENT for begin, end in zip(self.ends, self.ends[1:], strict=False)]
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return {
            "ms": [round(1000 * one, 3) for one in seconds],
            "losses": [round(one, 4) for one in self.losses],
            "peak_mb": round(peak / 1e6),
            "seconds_to_first_step": round(self.first, 1),
            "attention": trainer.model.config._attn_implementation,
        }


def in_order(rows: list[Row], batch: int, steps: int) -> list[Row]:
    """Return the rows of all steps, as many epochs as they take, each in batches of like lengths."""
    lengths = [len(row["input_ids"]) for row in rows]  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(SEED)
    found: list[Row] = []
    while len(found) < batch * steps:
        order = get_length_grouped_indices(lengths, batch, generator=generator)
        found += [rows[number] for number in order[: len(order) // batch * batch]]
    return found[: batch * steps]


def padded(batch: list[Row]) -> dict[str, torch.Tensor]:
    """Pad a batch to its longest row, or to a multiple of 8 as tensor cores like it."""
    longest = -(-max(len(row["input_ids"]) for row in batch) // 8) * 8  # pyright: ignore[reportArgumentType]
    found: dict[str, list[Any]] = {}
    for row in batch:
        for name, value in row.items():
            filler = -100 if name == "labels" else 0
            filled = [*value, *[filler] * (longest - len(value))] if isinstance(value, list) else value
            found.setdefault(name, []).append(filled)
    return {name: torch.tensor(values) for name, values in found.items()}


def texts(data: Path) -> Iterator[tuple[str, str, int]]:
    """Yield question, context and the answer's first character."""
    for article in json.loads(data.read_text("utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                if qa["answers"]:
                    yield qa["question"], paragraph["context"], qa["answers"][0]["answer_start"]


def tokenizer_of(data: Path, size: int) -> Any:
    """Return a WordPiece tokenizer made from the data: its lengths are those of BERT's within some per cent."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    made.train_from_iterator((text for question, context, _ in texts(data) for text in (question, context)), trainer)
    return made


def spans(data: Path, longest: int) -> list[Row]:
    """Return questions with the windows of their context: the rows of extractive question answering."""
    tokenizer = tokenizer_of(data, 8000)
    found: list[Row] = []
    for question, context, at in texts(data):
        first = [2, *tokenizer.encode(question).ids, 3]
        whole = tokenizer.encode(context)
        target = next((n for n, (begin, end) in enumerate(whole.offsets) if begin <= at < end), 0)
        room = longest - len(first) - 1
        for begin in range(0, max(1, len(whole.ids) - 128), room - 128):
            part = whole.ids[begin : begin + room]
            ids = [*first, *part, 3]
            inside = begin <= target < begin + len(part)
            place = len(first) + target - begin if inside else 0
            types = [0] * len(first) + [1] * (len(part) + 1)
            found.append(
                {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": types,
                 "start_positions": place, "end_positions": place}
            )  # fmt: skip
    return found


def pairs(data: Path, longest: int) -> list[Row]:
    """Return questions with their context (1) and with another one (0)."""
    tokenizer = tokenizer_of(data, 8000)
    given = list(texts(data))
    found: list[Row] = []
    for number, (question, context, _) in enumerate(given):
        for text, label in ((context, 1), (given[(number * 7919 + 61) % len(given)][1], 0)):
            both = [2, *tokenizer.encode(question).ids, 3, *tokenizer.encode(text).ids]
            ids = [*both[: longest - 1], 3]
            found.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": label})
    return found


def continuations(data: Path, longest: int) -> list[Row]:
    """Return contexts with one to six of their questions: texts for a language model."""
    tokenizer = tokenizer_of(data, 8000)
    by_context: dict[str, list[str]] = {}
    for question, context, _ in texts(data):
        by_context.setdefault(context, []).append(question)
    found: list[Row] = []
    for context, questions in by_context.items():
        for n in range(1, len(questions) + 1):
            ids = tokenizer.encode(" ".join([context, *questions[:n]])).ids[:longest]
            found.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids})
    return found


JOBS = {
    "bert-base": Job("AutoModelForQuestionAnswering", transformers.BertConfig, spans, 32, 384),
    "modernbert-base": Job("AutoModelForSequenceClassification", transformers.ModernBertConfig, pairs, 32, 512),
    "llama-100m": Job(
        "AutoModelForCausalLM",
        lambda: transformers.LlamaConfig(
            hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
            num_key_value_heads=12, vocab_size=32000, max_position_embeddings=2048,
        ),
        continuations, 32, 1024,
    ),
}  # fmt: skip

if __name__ == "__main__":
    main()
