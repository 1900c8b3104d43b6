"""How fast language models train compared with transformers' Trainer, TRL's and llm.c, in one run.

    python benchmarks/lm/steps.py --peers .venv-peers/bin/python
    python benchmarks/lm/steps.py --models llama60m --against defaults trl_bf16 --rounds 3
    python benchmarks/lm/steps.py --models gpt2 --llm_c FOLDER
    python benchmarks/lm/steps.py --other CHECKOUT   # has whet become slower?
    python benchmarks/lm/steps.py --table

Rows have 32 to 1,024 random tokens. Each match starts one worker of the other library and whet's, and they take steps
by turns, after two that warm up, those with the most tokens: `defaults` pads rows in random order (fp32); `best_fp32`
and `best_bf16` have rows grouped by length and fused AdamW; `trl_*` is SFTTrainer with packing, whose blocks have other
rows, so tokens a second are compared; `lora` is whet with an adapter of rank 16 on all linear layers against whet
without. For GPT-2, FOLDER has the sources of llm.c, which trains 4 rows of 64 and of 256 tokens. `limit` is the time
that the matrix products alone take (benchmarks/cpu/flops.py says how they are counted; causal attention is half of it).
Results are kept as each match ends.

With `--other`, whet of another checkout, with its `.venv`, takes the steps on the rows of `defaults` instead; nothing
is kept. A ratio above 1 means that this checkout takes longer, or more memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))
import llm_c
from checkouts import OTHERS, WHETS, against_other, script_of
from decoders import DECODERS, SEED, Row, rows, save
from limit import limit_s
from machine import facts
from protocol import Worker

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
PEERS = ("defaults", "best_fp32", "best_bf16", "trl_fp32", "trl_bf16")
MATCHES = (*PEERS, "lora", "llm_c", "limit")
MUST = {
    "defaults": 3.0,
    "best_fp32": 1.5,
    "best_bf16": 1.5,
    "trl_fp32": 1.5,
    "trl_bf16": 1.5,
    "lora": 1.4,
    "llm_c": 5.0,
}
"""How many times the other side's tokens a second whet must train; for lora: its own without an adapter."""
LENGTHS = (64, 256)
"""Of the rows that llm.c trains."""
PAUSE_S = 0.2


@dataclass
class Bench:
    """The settings of a run."""

    folder: Path
    """Where models, rows and logs go; removed after the run."""
    peers: str
    n_threads: int
    rounds: int
    llm_c: Path | None
    other: Path | None
    """A checkout of whet to compare this one with."""

    def worker(self, side: str) -> list[str]:
        """Return the Python, the script and the name there of a side."""
        script = HERE / "lm_worker.py"
        if side in OTHERS and self.other is not None:
            return [*script_of(self.other, script), "--side", side.replace("other", "whet")]
        return [sys.executable if side.startswith("whet") else self.peers, str(script), "--side", side]

    def model(self, name: str) -> Path:
        """Return the folder of the model, made at the first call."""
        folder = self.folder / name
        if not folder.exists():
            save(name, folder)
        return folder


def rows_of(name: str, n_steps: int, *, grouped: bool) -> list[Row]:
    """Return the rows of the steps and of two more, which transformers makes ahead.

    The step with the most tokens comes first, and again: after it a worker's memory grows no more.
    """
    size = DECODERS[name].batch
    found = rows(size * (n_steps + 2))
    if grouped:
        import torch
        from transformers.trainer_pt_utils import get_length_grouped_indices

        lengths = [len(row["input_ids"]) for row in found]
        order = get_length_grouped_indices(lengths, size, generator=torch.Generator().manual_seed(SEED))
        found = [found[at] for at in order]
    steps = [found[at : at + size] for at in range(0, len(found), size)]
    largest = max(steps, key=lambda step: sum(len(row["input_ids"]) for row in step))
    return [*largest, *largest, *found]


def trained(bench: Bench, model: Path, batch: int, given: list[Row], sides: Sequence[str]) -> dict[str, Any]:
    """Return by side the seconds and tokens of its steps, its peak memory and what it says of itself."""
    file = bench.folder / "rows.json"
    file.write_text(json.dumps(given), "utf-8")
    found: dict[str, Any] = {side: {"seconds": [], "tokens": []} for side in sides}
    with ExitStack() as stack:
        workers = {side: stack.enter_context(_started(bench, side, model, batch, file)) for side in sides}
        for worker in workers.values():
            worker.ask("step")
        for number in range(bench.rounds):
            for side in list(sides)[:: 1 if number % 2 else -1]:
                time.sleep(PAUSE_S)
                answer = workers[side].ask("step")
                found[side]["seconds"].append(answer["seconds"])
                found[side]["tokens"].append(_tokens(answer, given, batch))
        for side, worker in workers.items():
            found[side] |= {"peak_bytes": worker.peak_bytes(), "ready": worker.ready}
    return found


def _tokens(answer: dict[str, Any], given: list[Row], batch: int) -> int:
    step = answer["step"]
    if answer["made"]:
        return answer["made"][step]
    return sum(len(row["input_ids"]) for row in given[step * batch : (step + 1) * batch])


def _started(bench: Bench, side: str, model: Path, batch: int, file: Path) -> Worker:
    """Start a side, wait until it is ready, and let it take the first of the two steps that warm up."""
    words = ["--model", model, "--rows", file, "--batch", batch, "--folder", bench.folder / side]
    command = [*bench.worker(side), *map(str, words)]
    own = side.startswith(("whet", "other"))
    return Worker(command, bench.folder / f"{side}.log", n_threads=bench.n_threads, with_whet=own).warm_up()


def match(bench: Bench, name: str, against: str) -> dict[str, Any]:
    """Return what the sides of one match did."""
    batch = DECODERS[name].batch
    if against == "lora":
        given = rows_of(name, bench.rounds, grouped=False)
        return trained(bench, bench.model(name), batch, given, ("whet_auto", "whet_lora"))
    if against == "limit":
        tokens = [len(row["input_ids"]) for row in rows(batch)]
        return {"tokens": sum(tokens)} | limit_s(bench.model(name), tokens, sys.executable, bench.n_threads)
    n_steps = (bench.rounds + 1) * 2 if against.startswith("trl") else bench.rounds
    given = rows_of(name, n_steps, grouped=against.startswith("best"))
    return trained(bench, bench.model(name), batch, given, (against, *WHETS))


def line_of_other(bench: Bench, name: str) -> str:
    """Return the seconds and the memory of this checkout over those of the other, in fp32 and in its own choice."""
    given = rows_of(name, bench.rounds, grouped=False)
    found = trained(bench, bench.model(name), DECODERS[name].batch, given, (*OTHERS, *WHETS))
    seconds, peaks = ({side: one[key] for side, one in found.items()} for key in ("seconds", "peak_bytes"))
    return f"{DECODERS[name].title}: {against_other(seconds, peaks)}"


def match_llm_c(bench: Bench, name: str, length: int) -> dict[str, Any]:
    """Return what whet and llm.c did with 4 rows of this length, llm.c before and after whet."""
    assert bench.llm_c is not None
    given = rows(llm_c.BATCH * (bench.rounds + 4))
    for row in given:
        row["input_ids"] = row["labels"] = (row["input_ids"] * length)[:length]
    runs = [llm_c.step_seconds(bench.llm_c, bench.folder, length, bench.rounds, bench.n_threads)]
    found = trained(bench, bench.model(name), llm_c.BATCH, given, WHETS)
    runs.append(llm_c.step_seconds(bench.llm_c, bench.folder, length, bench.rounds, bench.n_threads))
    seconds = [one for run in runs for one in run]
    return found | {"llm_c": {"seconds": seconds, "tokens": [llm_c.BATCH * length] * len(seconds)}}


def rate(side: dict[str, Any]) -> float:
    """Return the tokens a second of all steps together."""
    return sum(side["tokens"]) / sum(side["seconds"])


def lines_of(name: str, found: dict[str, Any]) -> list[str]:
    """Return the model's rows of the table."""
    lines = []
    for against, one in found.items():
        if against == "limit":
            continue
        key = against.partition(" ")[0]
        other, own = (one["whet_auto"], ["whet_lora"]) if key == "lora" else (one[key], list(WHETS))
        ratios = {side: rate(one[side]) / rate(other) for side in own}
        memory = [one[side].get("peak_bytes", 0) / other["peak_bytes"] if "peak_bytes" in other else 0 for side in own]
        cells = [f"{rate(other):,.0f}", *(f"{ratio:.2f}x" for ratio in ratios.values()), *[""] * (2 - len(own)),
                 f"{min(memory):.2f}" if any(memory) else "", f"{MUST[key]:g}x"]  # fmt: skip
        lines.append(f"| {DECODERS[name].title} | {against} | " + " | ".join(cells) + " |")
    if "limit" in found and "defaults" in found:
        for side in WHETS:
            kind = "bf16" if found["defaults"][side]["ready"].get("precision") == "bf16" else "fp32"
            if kind in found["limit"]:
                share = rate(found["defaults"][side]) * found["limit"][kind] / found["limit"]["tokens"]
                lines.append(
                    f"| {DECODERS[name].title} | share of the products' limit, {kind} | | {share:.0%} | | | 80 % |"
                )
    return lines


def table(results: dict[str, Any]) -> list[str]:
    """Return all results as a table in Markdown."""
    head = (
        "| model | against | its tokens/s | whet fp32 (or LoRA) | whet's own choice | memory, less of the two | must |"
    )
    return [
        head,
        "|---|---|---|---|---|---|---|",
        *(line for name, one in results.items() for line in lines_of(name, one)),
    ]


def options_of() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=".venv-peers/bin/python", help="Python of the peers' environment")
    parser.add_argument("--models", nargs="+", choices=DECODERS, default=[one for one in DECODERS if one != "gpt2"])
    parser.add_argument("--against", nargs="+", choices=MATCHES, default=[one for one in MATCHES if one != "llm_c"])
    parser.add_argument("--llm_c", type=Path, help="folder with train_gpt2.c and llmc/ of llm.c")
    parser.add_argument("--rounds", type=int, default=6, help="measured steps of each side, after two that warm up")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print what is on file, measure nothing")
    parser.add_argument("--other", type=Path, help="another checkout of whet, with its .venv, instead of the peers")
    return parser.parse_args()


def main() -> None:
    """Run the matches, keep each as it ends, print the table."""
    options = options_of()
    if options.other is not None:
        with tempfile.TemporaryDirectory(prefix="whet-bench-") as folder:
            bench = Bench(Path(folder), options.peers, options.threads, options.rounds, None, options.other)
            for name in options.models:
                print(line_of_other(bench, name), flush=True)
        return
    results = json.loads(options.output.read_text("utf-8")) if options.output.exists() else {}
    if not options.table:
        with tempfile.TemporaryDirectory(prefix="whet-bench-") as folder:
            bench = Bench(Path(folder), options.peers, options.threads, options.rounds, options.llm_c, None)
            for name in options.models:
                for key, found in _matches(bench, name, options.against):
                    results.setdefault(name, {})[key] = found | {"machine": facts()}
                    options.output.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
                    print(lines_of(name, {key: found})[:1] or key, flush=True)
    print("\n".join(table(results)))


def _matches(bench: Bench, name: str, against: Sequence[str]) -> Any:
    if name == "gpt2" and bench.llm_c is not None:
        for length in LENGTHS:
            yield f"llm_c {length}", match_llm_c(bench, name, length)
        return
    for one in against:
        if one != "llm_c":
            yield one, match(bench, name, one)


if __name__ == "__main__":
    main()
