"""How long `whet qa` takes from the command to its first optimizer step: this checkout and another one, by turns.

    git worktree add ../before COMMIT   # and install it into ../before/.venv
    python benchmarks/start.py --data FOLDER_WITH_XQUAD --model FOLDER_OF_MINILM --other ../before

Each command trains on 24 questions in a new folder, with a new cache, and ends when it has logged its first step.
Processor time is that of the process and its children; other work on the machine moves it less than the wall clock.
The process takes both times itself, as it writes the line: a reader that has to wait for a core would be late.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

WATCH = """
import io, os, sys, time

class Output(io.TextIOWrapper):
    def write(self, text):
        if text.startswith("{") and '"loss"' in text:
            self.flush()
            line = f"{text.rstrip()[:-1]}, \\"processor_s\\": {sum(os.times()[:4])}, \\"time_s\\": {time.time()}}}"
            os.write(1, (line + chr(10)).encode())
            os._exit(0)
        return super().write(text)

sys.stdout = Output(sys.stdout.detach(), encoding="utf-8", write_through=True)
"""
"""Imported by the process before all else: ends it at the first step's line, which gets the times."""
HERE = Path(__file__).resolve().parents[1]
N_QUESTIONS = 24


@dataclass(frozen=True)
class Start:
    """What a command took until its first step."""

    wall_s: float
    processor_s: float
    loss: float


def some_questions(train: Path, n_questions: int) -> dict[str, object]:
    """Return the first questions of a file in SQuAD's format, with their contexts."""
    left, articles = n_questions, []
    for article in json.loads(train.read_text("utf-8"))["data"]:
        paragraphs = []
        for paragraph in article["paragraphs"]:
            questions = paragraph["qas"][:left]
            left -= len(questions)
            if questions:
                paragraphs.append(paragraph | {"qas": questions})
        if paragraphs:
            articles.append(article | {"paragraphs": paragraphs})
    return {"version": "1.1", "data": articles}


def command(checkout: Path, options: argparse.Namespace, train: Path, out: Path) -> list[str]:
    """Return the command line of a training, run by the checkout's own environment."""
    return [
        str(checkout / ".venv" / "bin" / "whet"), "qa", "--model_name_or_path", str(options.model), "--train_file",
        str(train), "--do_train", "--use_cpu", "--precision", options.precision, "--per_device_train_batch_size", "12",
        "--max_steps", "100", "--logging_steps", "1", "--log_format", "json", "--output_dir", str(out),
    ]  # fmt: skip


def first_step(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Start:
    """Run a command until it logs its first step, and ends."""
    (folder / "watch").mkdir()
    (folder / "watch" / "sitecustomize.py").write_text(WATCH, "utf-8")
    begin_s = time.time()
    done = subprocess.run(
        words, capture_output=True, text=True, env={**environment, "PYTHONPATH": str(folder / "watch")}, check=False
    )
    line = next((line for line in done.stdout.splitlines() if '"processor_s"' in line), None)
    if line is None:
        raise RuntimeError(f"no first step: {done.stderr[-2000:]}")
    found = json.loads(line)
    return Start(found["time_s"] - begin_s, found["processor_s"], found["loss"])


def main() -> None:
    """Print the medians and the spread of each checkout, and the ratio of each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.json of XQuAD")
    parser.add_argument("--model", type=Path, required=True, help="folder of the encoder")
    parser.add_argument("--other", type=Path, required=True, help="another checkout, with its .venv")
    parser.add_argument("--precision", default="auto", help="auto, the default of whet, times two formats first")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    checkouts = {"here": HERE, "other": options.other.resolve()}
    found: dict[str, list[Start]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory() as temporary:
        train = Path(temporary) / "train.json"
        train.write_text(json.dumps(some_questions(options.data / "train.json", N_QUESTIONS)), "utf-8")
        for number in range(options.rounds + 1):  # the first round fills the page cache and compiles to bytecode
            for name in list(checkouts)[:: 1 if number % 2 else -1]:
                folder = Path(tempfile.mkdtemp(dir=temporary))
                environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
                environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed whet has its bytecode
                words = command(checkouts[name], options, train, folder / "out")
                start = first_step(words, folder, environment)
                found[name] += [start] if number else []
    for name, starts in found.items():
        _show(f"{name}, processor", [start.processor_s for start in starts])
        _show(f"{name}, wall", [start.wall_s for start in starts])
        print(f"{name}, loss of the first step: {starts[0].loss:.4f}")
    for clock in ("processor_s", "wall_s"):
        pairs = zip(found["here"], found["other"], strict=True)
        ratios = [getattr(here, clock) / getattr(other, clock) for here, other in pairs]
        print(f"here / other, {clock}: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def _show(what: str, seconds: Sequence[float]) -> None:
    print(f"{what}: {median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} rounds)")


if __name__ == "__main__":
    main()
