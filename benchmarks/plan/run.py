"""What `whet plan` forecasts, next to what the run then takes: the memory at its peak, and the time of a step.

    python benchmarks/plan/run.py                      # 24 configurations, 7 of two ranks: 15 minutes on two cores
    python benchmarks/plan/run.py --only LoRA+fp32     # those whose names contain one of these

The models have random weights and a vocabulary of made-up words, so that nothing is downloaded. Each forecast and each
run has a process of its own. The peak is that of the complete process, as the system counts it (ru_maxrss): loading,
training and saving. The step is the mean of all but the first, which also waits for its memory, by run.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from made_up import BERT_BASE, LLAMA, MINILM, VOCABULARY, word, write_model

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HERE / "benchmarks"))
RESULTS = Path(__file__).with_name("results.json")
N_STEPS = {"small": 16, "bert": 6, "llama": 5}
N_ROWS = 400
MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "small": ("bert", MINILM), "bert": ("bert", BERT_BASE), "llama": ("llama", LLAMA)
}  # fmt: skip
"""MiniLM's, BERT base's and SmolLM2 135M's sizes."""


@dataclass(frozen=True)
class Configuration:
    """One run: a model, rows of a length, and options."""

    name: str
    model: str
    rows: int
    length: int
    options: tuple[str, ...] = ("--bf16",)
    ranks: int = 1
    """Processes on this machine; `rows` are those of one."""


CHECKPOINTING = ("--gradient_checkpointing", "true")
SELECTIVE = (*CHECKPOINTING, "--checkpointing_policy", "selective")
CONFIGURATIONS = (
    Configuration("small, fp32, 16 x 128", "small", 16, 128, ("--precision", "fp32")),
    Configuration("small, bf16, 16 x 128", "small", 16, 128),
    Configuration("small, bf16, 64 x 128", "small", 64, 128),
    Configuration("small, bf16, 8 x 512", "small", 8, 512),
    Configuration("small, bf16, 32 x 512", "small", 32, 512),
    Configuration("small, bf16, 32 x 512, blocks", "small", 32, 512, ("--bf16", *CHECKPOINTING)),
    Configuration("small, bf16, 32 x 512, selective", "small", 32, 512, ("--bf16", *SELECTIVE)),
    Configuration(
        "small, bf16, 64 x 128, accumulated", "small", 16, 128, ("--bf16", "--gradient_accumulation_steps", "4")
    ),
    Configuration("bert, fp32, 8 x 128", "bert", 8, 128, ("--precision", "fp32")),
    Configuration("bert, bf16, 8 x 128", "bert", 8, 128),
    Configuration("bert, bf16, 8 x 256", "bert", 8, 256),
    Configuration("bert, fp32, 8 x 256", "bert", 8, 256, ("--precision", "fp32")),
    Configuration("bert, bf16, 8 x 256, blocks", "bert", 8, 256, ("--bf16", *CHECKPOINTING)),
    Configuration("bert, bf16, 8 x 128, 8-bit states", "bert", 8, 128, ("--bf16", "--optim", "adamw_whet_8bit")),
    Configuration("bert, bf16, 8 x 128, Adafactor", "bert", 8, 128, ("--bf16", "--optim", "adafactor")),
    Configuration(
        "bert, bf16, 8 x 128, in backward",
        "bert",
        8,
        128,
        ("--bf16", "--optimizer_in_backward", "true", "--max_grad_norm", "0"),
    ),
    Configuration("bert, bf16, 8 x 256, LoRA", "bert", 8, 256, ("--bf16", "--lora_r", "8")),
    Configuration("bert, bf16, 8 x 256, 6 frozen", "bert", 8, 256, ("--bf16", "--freeze_layers", "6")),
    Configuration("llama, bf16, 4 x 256", "llama", 4, 256),
    Configuration("llama, bf16, 4 x 512", "llama", 4, 512),
    Configuration("llama, fp32, 4 x 256", "llama", 4, 256, ("--precision", "fp32")),
    Configuration("llama, bf16, 4 x 512, blocks", "llama", 4, 512, ("--bf16", *CHECKPOINTING)),
    Configuration("llama, bf16, 4 x 512, LoRA", "llama", 4, 512, ("--bf16", "--lora_r", "16")),
    Configuration("llama, bf16, 4 x 256, 8-bit states", "llama", 4, 256, ("--bf16", "--optim", "adamw_whet_8bit")),
)
RANKS = (
    Configuration("small, bf16, 2 ranks of 16 x 128", "small", 16, 128, ranks=2),
    Configuration("bert, bf16, 2 ranks of 4 x 128", "bert", 4, 128, ranks=2),
    *(
        Configuration(f"bert, bf16, 2 ranks, ZeRO {n}", "bert", 4, 128, ("--bf16", "--zero_stage", str(n)), ranks=2)
        for n in (1, 2, 3)
    ),
    Configuration("llama, bf16, 2 ranks of 2 x 256", "llama", 2, 256, ranks=2),
    Configuration("llama, bf16, 2 ranks, ZeRO 3", "llama", 2, 256, ("--bf16", "--zero_stage", "3"), ranks=2),
)
"""Each rank with half of the cores. The peak is that of the rank that holds the most."""


@dataclass(frozen=True)
class Line:
    """Forecast and measurement of one configuration."""

    name: str
    forecast_bytes: int
    measured_bytes: int
    parts: dict[str, int]
    forecast_s: float
    measured_s: float
    """Of a step."""
    plan_s: float
    """What the forecast took, from the command to its end."""

    @property
    def ratio(self) -> float:
        """Forecast over measured memory."""
        return self.forecast_bytes / self.measured_bytes

    @property
    def ratio_s(self) -> float:
        """Forecast over measured time."""
        return self.forecast_s / self.measured_s


def make_models(folder: Path, names: Sequence[str]) -> None:
    """Write the models."""
    for name in names:
        kind, sizes = MODELS[name]
        auto = "AutoModelForCausalLM" if kind == "llama" else "AutoModelForSequenceClassification"
        write_model(folder / name, kind, sizes, auto, n_positions=2048)


def write_rows(path: Path, length: int, *, causal: bool) -> None:
    """Write texts of random words, from half of the length to all of it; two labels for an encoder."""
    numbers = random.Random(length)

    def text() -> str:
        n_words = numbers.randint(length // 2, length - 2)
        return " ".join(word(numbers.randrange(VOCABULARY - 5)) for _ in range(n_words))

    rows = ({"text": text()} | ({} if causal else {"label": "ab"[n % 2]}) for n in range(N_ROWS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def command(one: Configuration, folder: Path) -> list[str]:
    """Return the options of the configuration's run, after the name of its task."""
    causal = MODELS[one.model][0] == "llama"
    data = folder / f"{'lm' if causal else 'classify'}-{one.length}.jsonl"
    if not data.exists():
        write_rows(data, one.length, causal=causal)
    length = (
        ["--max_length", str(one.length), "--packing", "false"] if causal else ["--max_seq_length", str(one.length)]
    )
    return [
        "lm" if causal else "classify", "--model_name_or_path", str(folder / one.model), "--train_file", str(data),
        *length, "--per_device_train_batch_size", str(one.rows), "--max_steps", str(N_STEPS[one.model]), "--use_cpu",
        "--logging_steps", "1",
        "--output_dir", str(folder / "out"), "--overwrite_output_dir", *one.options,
    ]  # fmt: skip


def step_s(record: Path) -> float:
    """Return the mean time of the steps after the first of the last run in this record."""
    lines = [json.loads(line) for line in record.read_text("utf-8").splitlines()]
    last = max(n for n, line in enumerate(lines) if line["event"] == "begin")
    steps = [line["seconds"] for line in lines[last:] if line["event"] == "step"][1:]
    return sum(one.get(part, 0.0) for one in steps for part in ("data", "forward_backward", "update")) / len(steps)


def measured(one: Configuration, folder: Path) -> Line:
    """Return what is forecast for the configuration, and what its run takes."""
    whet = [sys.executable, "-m", "whet"]
    words = command(one, folder)
    begin_s = time.perf_counter()
    among = ["--ranks", str(one.ranks)] if one.ranks > 1 else []
    planned = subprocess.run([*whet, "plan", *words, *among, "--json"], capture_output=True, text=True, check=False)
    plan_s = time.perf_counter() - begin_s
    if planned.returncode:
        raise SystemExit(f"{one.name}: {planned.stderr}")
    forecast = json.loads(planned.stdout)
    start = [*whet, "launch", "--nproc_per_node", str(one.ranks), "--"] if one.ranks > 1 else whet
    with (folder / "output.txt").open("w") as output:
        run = subprocess.Popen([*start, words[0], "--do_train", *words[1:]], stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(run.pid, 0)
    if status:
        raise SystemExit(f"{one.name}: {(folder / 'output.txt').read_text()}")
    return Line(
        name=one.name,
        forecast_bytes=forecast["memory"]["peak_bytes"],
        measured_bytes=usage.ru_maxrss * 1024,
        parts=forecast["memory"]["parts"],
        forecast_s=forecast["time"]["step_s"],
        measured_s=step_s(folder / "out" / "run.jsonl"),
        plan_s=plan_s,
    )


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the results as lines of text."""
    heads = (("memory", 10), ("measured", 10), ("ratio", 7), ("step", 9), ("measured", 10), ("ratio", 7), ("plan", 7))
    yield f"{'configuration':<38}" + "".join(f"{head:>{width}}" for head, width in heads)
    for one in lines:
        yield (
            f"{one.name:<38}{one.forecast_bytes / 1e6:>7,.0f} MB{one.measured_bytes / 1e6:>7,.0f} MB{one.ratio:>7.2f}"
            f"{one.forecast_s:>7.2f} s{one.measured_s:>8.2f} s{one.ratio_s:>7.2f}{one.plan_s:>5.1f} s"
        )
    near = sum(abs(one.ratio - 1) <= 0.1 for one in lines)
    low = min((one.ratio for one in lines), default=1.0)
    yield f"memory: {near} of {len(lines)} within 10 %; the lowest forecast is {low:.2f} of what was measured"
    yield f"time of a step: {sum(abs(one.ratio_s - 1) <= 0.15 for one in lines)} of {len(lines)} within 15 %"


def main() -> None:
    """Measure the configurations, print the table, and store it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="parts of names, with + between them")
    parser.add_argument("--folder", type=Path, help="keep the models here")
    asked = parser.parse_args()
    chosen = [
        one
        for one in (*CONFIGURATIONS, *RANKS)
        if not asked.only or any(part in one.name for part in asked.only.split("+"))
    ]
    with tempfile.TemporaryDirectory(prefix="whet-bench-plan-") as made:
        folder = asked.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        missing = [name for name in dict.fromkeys(one.model for one in chosen) if not (folder / name).exists()]
        if missing:
            make = (
                f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import run, pathlib; "
                f"run.make_models(pathlib.Path({str(folder)!r}), {missing!r})"
            )
            subprocess.run([sys.executable, "-c", make], check=True)  # in a process that takes its memory with it
        lines: list[Line] = []
        for one in chosen:
            lines.append(measured(one, folder))
            print(list(table(lines))[len(lines)], flush=True)
            (folder / "lines.json").write_text(json.dumps([asdict(one) for one in lines]))
    print("\n".join(table(lines)))
    if not asked.only:
        import machine

        RESULTS.write_text(
            json.dumps({"machine": machine.facts(), "runs": [asdict(one) for one in lines]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
