"""The time of a step that `whet plan` forecasts, next to the time that it takes: 24 configurations of three models.

    OMP_NUM_THREADS=1 python benchmarks/plan/step_times.py --clock processor

Models are drawn at random. A training takes a few steps, of which the first does not count. Rates are measured first,
by the same clock. On a busy machine one thread is measured by its processor time, and still shares caches and memory
with others: before and after each training a pass of a small encoder is timed, and compared with one at the time of the
rates. `same moment` is the median error of the steps with the forecast multiplied by how much slower that pass is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertForQuestionAnswering, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine

from whet.config.arguments import TrainingArguments
from whet.data.store import RowStore
from whet.engine.engine import Engine, RunSpec
from whet.plan import anatomy, rates, seconds
from whet.tasks.lm.job import collate

VOCABULARY = {"minilm": 30522, "bert-base": 30522, "qwen3-small": 50000}
LENGTHS = {"short": (16, 64), "middle": (64, 192), "long": (128, 384)}


@dataclass(frozen=True)
class Case:
    """One training."""

    model: str
    rows: int
    lengths: str
    settings: dict[str, Any] = field(default_factory=dict)
    lora: bool = False

    @property
    def name(self) -> str:
        """The case in words."""
        more = [f"{name}={value}" for name, value in self.settings.items()] + (["lora"] if self.lora else [])
        return " ".join([self.model, f"{self.rows} {self.lengths} rows", *more])


def cases(models: list[str]) -> Iterator[Case]:
    """Yield the configurations."""
    for model in models:
        yield Case(model, 8, "short", {"precision": "fp32"})
        yield Case(model, 32, "short", {"precision": "fp32"})
        yield Case(model, 8, "long", {"precision": "fp32"})
        yield Case(model, 12, "middle", {"precision": "bf16"})
        yield Case(model, 8, "middle", {"precision": "fp32", "gradient_checkpointing": True})
        yield Case(model, 8, "middle", {"precision": "fp32", "optim": "adamw_whet_8bit"})
        yield Case(model, 4, "middle", {"precision": "fp32", "optim": "adafactor", "gradient_accumulation_steps": 2})
        yield Case(model, 8, "middle", {"precision": "fp32"}, lora=True)


def make_model(case: Case) -> Any:
    """Return a new model."""
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY[case.model], "max_position_embeddings": 512}
    if case.model == "qwen3-small":
        model: Any = Qwen3ForCausalLM(
            Qwen3Config(
                **size, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
                num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
            )
        )  # fmt: skip
    else:
        width, n_layers = {"minilm": (384, 6), "bert-base": (768, 12)}[case.model]
        shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": n_layers}
        model = BertForQuestionAnswering(BertConfig(**size, **shape, num_attention_heads=12))
    if not case.lora:
        return model
    from peft import LoraConfig, get_peft_model

    task = "CAUSAL_LM" if case.model == "qwen3-small" else "QUESTION_ANS"
    return get_peft_model(model, LoraConfig(task_type=task, r=8, lora_alpha=16))


def make_rows(case: Case, n_rows: int) -> RowStore:
    """Return rows of random tokens, whose words are as rare as in a text."""
    numbers = np.random.default_rng(0)
    shortest, longest = LENGTHS[case.lengths]
    lengths = numbers.integers(shortest, longest + 1, n_rows)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.minimum(numbers.zipf(1.2, starts[-1]) + 10, VOCABULARY[case.model] - 1).astype(np.int64)
    if case.model == "qwen3-small":
        return RowStore(cu_seqlens=starts, tokens={"input_ids": ids, "labels": ids})
    first = np.zeros(n_rows, dtype=np.int64)
    tokens = {"input_ids": ids, "token_type_ids": np.zeros_like(ids)}
    return RowStore(cu_seqlens=starts, tokens=tokens, labels={"start_positions": first, "end_positions": first + 1})


class Steps(TrainerCallback):
    """Notes how long each step took."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.seconds, self._began_s = clock, list[float](), 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note the beginning."""
        self._began_s = self.clock()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the end."""
        self.seconds.append(self.clock() - self._began_s)


def workload(loop: Any, n_steps: int) -> anatomy.Workload:
    """Return what the steps of a training compute."""

    def of(batch: Any) -> anatomy.MicroBatch:
        lengths = np.diff(batch.cu_seqlens.numpy())
        labels = batch.inputs.get("labels")
        n_targets = batch.n_computed if labels is None else int((labels[:, 1:] >= 0).sum())
        return anatomy.MicroBatch(lengths, batch.n_computed, n_targets)

    steps = tuple(tuple(of(batch) for batch in loop.loader.take(step)) for step in range(n_steps))
    return anatomy.Workload(
        n_steps=n_steps, n_rows=len(loop.run.train_dataset), steps=steps, heaviest=steps[0]
    )  # fmt: skip


class Reference:
    """A pass of a small encoder that shows how fast the machine is at a moment."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.model = clock, rates._ProbeModel("encoder", 384, 3, clock)
        self.batch = self.model.batch(8)
        self.first = self.seconds()

    def seconds(self) -> float:
        """Return the median time of a few passes."""
        return statistics.median(sum(self.model.times(self.batch, "fp32")) for _ in range(7))

    def slower(self) -> float:
        """Return how many times as long a pass takes as at first."""
        return self.seconds() / self.first


def run(case: Case, known: rates.Rates, reference: Reference, n_steps: int) -> dict[str, Any]:
    """Return what was forecast and measured."""
    steps = Steps(reference.clock)
    with tempfile.TemporaryDirectory() as folder:
        given = {"per_device_train_batch_size": case.rows, "max_steps": n_steps, "save_strategy": "no",
                 "logging_strategy": "no", "use_cpu": True, "disable_tqdm": True, "report_to": "none"}  # fmt: skip
        args = TrainingArguments(folder, **given, **case.settings)
        n_rows = n_steps * args.train_rows_per_step
        spec = RunSpec(
            model=make_model(case), args=args, train_dataset=make_rows(case, n_rows), callbacks=[steps],
            data_collator=collate if case.model == "qwen3-small" else None,
        )  # fmt: skip
        engine = Engine(spec)
        loop = engine.new_loop()
        work = workload(loop, n_steps)
        loop.loader.close()
        found = anatomy.of_model(engine.model, args)
        work = replace(work, steps=work.steps[1:])
        said = seconds.forecast(known, found, work)
        each = [seconds.forecast(known, found, replace(work, steps=(step,))).step_s for step in work.steps]
        slower = reference.slower()
        engine.train()
        slower = (slower + reference.slower()) / 2
    measured = statistics.mean(steps.seconds[1:])
    ratios = [forecast / took for forecast, took in zip(each, steps.seconds[1:], strict=True)]
    return {
        "case": case.name, "forecast_s": said.step_s, "measured_s": measured, "slower": slower,
        "error": said.step_s / measured - 1, "same_moment": statistics.median(ratios) * slower - 1,
        "parts": dict(said.step), "error_frac": said.error_frac, "steps": steps.seconds,
    }  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(VOCABULARY))
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rates", type=Path, help="JSON file with rates that were measured before, or is written")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    clock = time.process_time if options.clock == "processor" else time.perf_counter
    reference = Reference(clock)
    if options.rates is not None and options.rates.exists():
        known = rates.from_json(json.loads(options.rates.read_text()))
    else:
        known = rates.measure(clock=options.clock)
        reference.first = (reference.first + reference.seconds()) / 2
        if options.rates is not None:
            options.rates.write_text(json.dumps(rates.as_json(known)))
    print(f"rates: {known.took_s:.1f} s, noise {known.noise:.1%}, load {known.load}", flush=True)
    results = []
    for case in cases(options.models):
        found = run(case, known, reference, options.steps)
        results.append(found)
        print(
            f"{found['case']}: {found['forecast_s']:.3f} s forecast, {found['measured_s']:.3f} s measured, "
            f"{found['error']:+.0%}, same moment {found['same_moment']:+.0%}",
            flush=True,
        )
    for name in ("error", "same_moment"):
        within = sum(abs(found[name]) <= 0.15 for found in results)
        print(f"{name}: {within} of {len(results)} within 15 %")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine.facts(), "clock": options.clock, "results": results}))


if __name__ == "__main__":
    main()
