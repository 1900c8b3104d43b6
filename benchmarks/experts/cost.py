"""What experts cost: training steps of a dense decoder and of sparse ones, and single layers of experts.

    python benchmarks/experts/cost.py --rounds 7

One process, a Llama of about 60 million weights (random: they change no time), packed rows of 32 to 1,024 tokens, the
same rows for everybody in a round, complete optimizer steps with AdamW; alternating, so that a busy moment meets all
alike. Then one layer of experts of Qwen3-MoE's kind, forward and backward, in each implementation that transformers has
and in whet's. Prints medians with their spread and the ratios of the rounds, and writes results.json in this folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from whet.config import arguments as settings
from whet.engine.engine import Engine, RunSpec
from whet.engine.loop import TrainingLoop
from whet.methods import grouped_experts
from whet.models.experts.settings import ExpertSettings
from whet.models.experts.upcycle import upcycle
from whet.tasks.lm.job import collate

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from machine import facts  # noqa: E402

RESULTS = Path(__file__).with_name("results.json")
LARGEST_RATIO = 1.3
"""What top-1 of 8 may cost, compared with the dense model."""
SPARSE = {"top-1 of 8": ExpertSettings(experts=8), "top-2 of 8": ExpertSettings(experts=8, top_k=2)}
VOCABULARY = 32_000
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def dense_model() -> Any:
    """Return the dense decoder, the same each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows_of(n_rows: int) -> list[dict[str, Any]]:
    """Return rows of random tokens, all of them learnt."""
    numbers = np.random.default_rng(0)
    lengths = np.exp(numbers.uniform(np.log(32), np.log(1024), n_rows)).astype(int)
    made = [numbers.integers(10, VOCABULARY, int(length)).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in made]


def loop_of(folder: Path, model: Any, rows: list[dict[str, Any]], n_rows: int, precision: Any) -> TrainingLoop:
    """Return a run of the model before its first step."""
    args = settings.TrainingArguments(
        str(folder), use_cpu=True, precision=precision, per_device_train_batch_size=n_rows, num_train_epochs=1000,
        save_strategy="no", logging_steps=1, disable_tqdm=True, log_level="error",
    )  # fmt: skip
    loop = Engine(RunSpec(model=model, args=args, train_dataset=rows, data_collator=collate)).new_loop()
    loop.start(None)
    return loop


def measured(work: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return the seconds of each in each round by this clock; the first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, one in work.items():
            started_s = clock()
            one()
            if number:
                found[name].append(clock() - started_s)
    return found


def report(title: str, found: dict[str, list[float]], base: str) -> dict[str, Any]:
    """Print and return medians, spreads and the median ratio of the rounds."""
    print(title)
    result = {}
    for name, took in found.items():
        ratio = statistics.median(one / other for one, other in zip(took, found[base], strict=True))
        low, middle, high = min(took), statistics.median(took), max(took)
        print(f"  {name:<22} {middle * 1e3:9.1f} ms  ({low * 1e3:.1f} to {high * 1e3:.1f})  {ratio:.3f} x {base}")
        result[name] = {"seconds": took, "ratio": ratio}
    return result


def steps(asked: argparse.Namespace, precision: str) -> dict[str, Any]:
    """Compare complete steps of the dense model and of sparse ones."""
    rounds, n_rows = asked.rounds, asked.rows
    rows = rows_of(64 * n_rows)
    models = {"dense": dense_model()} | {name: upcycle(dense_model(), one) for name, one in SPARSE.items()}
    with tempfile.TemporaryDirectory() as folder:
        loops = {name: loop_of(Path(folder), model, rows, n_rows, precision) for name, model in models.items()}
        found = measured({name: loop.take_step for name, loop in loops.items()}, rounds, CLOCKS[asked.clock])
        tokens = loops["dense"].meter.n_tokens // (rounds + 1)
        loads = [entry for entry in loops["top-1 of 8"].trainer.state.log_history if "moe_load_max" in entry]
    title = f"a step of {n_rows} rows, about {tokens:,} tokens, {precision}, {torch.get_num_threads()} threads"
    result = report(title, found, "dense")
    print(f"  busiest expert of top-1: {loads[0]['moe_load_max']:.2f}, then {loads[-1]['moe_load_max']:.2f} x even")
    return {"tokens": tokens, "runs": result, "load_max": loads[-1]["moe_load_max"]}


def layers(asked: argparse.Namespace, n_tokens: int) -> dict[str, Any]:
    """Compare the implementations of one layer of experts."""
    grouped_experts.register()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=512, moe_intermediate_size=384, num_experts=16, num_experts_per_tok=2)
    experts = Qwen3MoeExperts(config)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, 0, 0.02)
    x = torch.randn(n_tokens, 512, requires_grad=True)
    weights, chosen = torch.randn(n_tokens, 16).softmax(-1).topk(2)

    def both(name: str) -> Callable[[], object]:
        def run() -> None:
            config._experts_implementation = name
            experts(x, chosen, weights).sum().backward()

        return run

    work = {name: both(name) for name in (grouped_experts.NAME, "grouped_mm", "eager")}
    title = f"16 experts, top-2, {n_tokens:,} tokens, forward and backward, fp32"
    return report(title, measured(work, asked.rounds, CLOCKS[asked.clock]), grouped_experts.NAME)


def main() -> int:
    """Measure, write the results, and return 1 if top-1 of 8 costs more than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: time of the processor, on a busy machine")
    asked = parser.parse_args()
    found: dict[str, Any] = {one: steps(asked, one) for one in asked.precisions}
    found |= {"clock": asked.clock, "layer": layers(asked, 4096)}
    RESULTS.write_text(json.dumps({"machine": facts(), **found}, indent=1) + "\n", "utf-8")
    ratios = {one: found[one]["runs"]["top-1 of 8"]["ratio"] for one in asked.precisions}
    print(f"top-1 of 8: {', '.join(f'{ratio:.3f} in {one}' for one, ratio in ratios.items())}; at most {LARGEST_RATIO}")
    return int(min(ratios.values()) > LARGEST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
