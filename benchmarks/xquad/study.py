"""F1 on XQuAD over many seeds, in pairs: transformers' Trainer and whet on the same head and the same order of rows.

    python benchmarks/xquad/study.py --data FOLDER_WITH_XQUAD --arm transformers --seeds 42 1 2 3
    python benchmarks/xquad/study.py --data FOLDER_WITH_XQUAD --arm sampled --split second --precision fp32
    python benchmarks/xquad/study.py --table

Arms: `transformers` (its Trainer, each batch padded to its longest row, padding in the softmax of the loss), `none` and
`sampled` (`whet qa --padding_in_loss none|sampled`). Every arm trains MiniLM for five epochs, with batches of 12 rows
and a learning rate of 1e-4, in the format that is faster on the machine (`whet doctor` says which), and is judged by
`whet qa --do_eval` in fp32. A seed stands for the same new head and the same order of rows in every arm, so arms are
compared seed by seed, where they trained in the same format.

Splits: `first` tests on dev.json (articles 3, 7, 11 ... of XQuAD), `second` on articles 1, 5, 9 ... of train.json and
dev.json together, `few` on dev.json after training on 300 of the questions, spread evenly. Each run is kept in
study.json as it ends; runs that are there are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import facts
from run import MODEL, run_transformers, whet_qa

RESULTS = Path(__file__).with_name("study.json")
SEEDS = (42, *range(1, 16))
EPOCHS = 5
PAIRS = (("none", "transformers"), ("sampled", "transformers"), ("sampled", "none"))
TEST_ARTICLES = {"first": 3, "second": 1, "few": 3}
"""Which articles of XQuAD a split tests on: those whose number leaves this rest when divided by 4."""
FEW_QUESTIONS = 300
"""Training questions of the split `few`."""
# Two-sided 95 % quantiles of Student's t by degrees of freedom, 1 to 15.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)

Runs = dict[int, dict[str, Any]]


def articles(data: Path) -> list[Any]:
    """Return XQuAD's articles in their own order: every fourth is in dev.json."""
    train, dev = (iter(json.loads((data / f"{name}.json").read_text("utf-8"))["data"]) for name in ("train", "dev"))
    found = []
    for number in range(10**6):
        article = next(dev if number % 4 == TEST_ARTICLES["first"] else train, None)
        if article is None:
            break
        found.append(article)
    return found


def write_split(data: Path, split: str, folder: Path) -> Path:
    """Write train.json and dev.json of the split; return their folder."""
    parts: dict[str, list[Any]] = {"train": [], "dev": []}
    for number, article in enumerate(articles(data)):
        parts["dev" if number % 4 == TEST_ARTICLES[split] else "train"].append(article)
    if split == "few":
        parts["train"] = thinned(parts["train"], FEW_QUESTIONS)
    folder.mkdir()
    for name, part in parts.items():
        (folder / f"{name}.json").write_text(json.dumps({"version": "1.1", "data": part}), "utf-8")
    return folder


def thinned(found: list[Any], n_questions: int) -> list[Any]:
    """Return the articles with `n_questions` of their questions, spread evenly over all."""
    n_all = sum(len(paragraph["qas"]) for article in found for paragraph in article["paragraphs"])
    kept = {n_all * n // n_questions for n in range(n_questions)}
    number = count()
    return [
        article | {"paragraphs": [
            paragraph | {"qas": [question for question in paragraph["qas"] if next(number) in kept]}
            for paragraph in article["paragraphs"]
        ]}
        for article in found
    ]  # fmt: skip


def transformers_arm(data: Path, seed: int, folder: Path, precision: str) -> dict[str, Any]:
    """Train with transformers' own Trainer, by the attention that is a tenth faster with dropout on a CPU."""
    half = ("--bf16",) if precision == "bf16" else ()
    return run_transformers(data, seed, EPOCHS, folder, more=(*half, "--attention", "eager"))


def whet_arm(padding: str) -> Callable[[Path, int, Path, str], dict[str, Any]]:
    """Return the arm that trains through `whet qa` with padding in the loss as named."""

    def run(data: Path, seed: int, folder: Path, precision: str) -> dict[str, Any]:
        trained = [
            *("--train_file", str(data / "train.json"), "--do_train", "--per_device_train_batch_size", "12"),
            *("--learning_rate", "1e-4", "--num_train_epochs", str(EPOCHS), "--save_strategy", "no"),
            *("--logging_steps", "25", "--seed", str(seed), "--padding_in_loss", padding, "--precision", precision),
        ]
        found = whet_qa(data, MODEL, folder / "model", *trained)
        return found | whet_qa(data, folder / "model", folder / "eval", "--precision", "fp32")

    return run


ARMS = {"transformers": transformers_arm, "none": whet_arm("none"), "sampled": whet_arm("sampled")}


def runs_of(split: str, arm: str) -> Runs:
    """Return the runs on file by seed."""
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    return {int(seed): found for seed, found in results.get(split, {}).get(arm, {}).items()}


def record(split: str, arm: str, seed: int, precision: str, found: dict[str, Any]) -> None:
    """Add one run to study.json; several processes may do so at once."""
    kept = {"precision": precision} | {
        name: found[name] for name in ("eval_f1", "eval_exact_match", "train_loss", "train_runtime")
    }
    with FileLock(RESULTS.with_suffix(".lock")):
        results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
        results.setdefault(split, {}).setdefault(arm, {})[str(seed)] = kept | {"machine": facts()}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def interval(differences: list[float]) -> tuple[float, float]:
    """Return the mean of paired differences and the half width of its 95 % interval (Student's t)."""
    n = len(differences)
    half = T95[n - 2] * statistics.stdev(differences) / n**0.5 if n > 1 else float("nan")
    return statistics.mean(differences), half


def is_pair(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Return whether two runs of a seed may be compared: both are on file and trained in the same format."""
    return one is not None and other is not None and one["precision"] == other["precision"]


def table(split: str) -> list[str]:
    """Return the split's lines of Markdown: F1 by seed, means, and differences in pairs."""
    runs = {arm: runs_of(split, arm) for arm in ARMS}
    seeds = sorted({seed for found in runs.values() for seed in found}, key=lambda seed: (seed != SEEDS[0], seed))
    lines = [f"| F1, split {split} | " + " | ".join(map(str, seeds)) + " | mean |", "|---" * (len(seeds) + 2) + "|"]
    for arm, found in runs.items():
        if found:
            scores = [f"{found[seed]['eval_f1']:.1f}" if seed in found else "" for seed in seeds]
            mean = statistics.mean(one["eval_f1"] for one in found.values())
            lines.append(f"| {arm} | " + " | ".join(scores) + f" | {mean:.1f} |")
    for one, other in PAIRS:
        both = [seed for seed in seeds if is_pair(runs[one].get(seed), runs[other].get(seed))]
        if both:
            mean, half = interval([runs[one][seed]["eval_f1"] - runs[other][seed]["eval_f1"] for seed in both])
            lines.append(f"\n{one} - {other}: {mean:+.2f} +- {half:.2f} points of F1 ({len(both)} pairs, 95 %)")
    return lines


def main() -> None:
    """Run the seeds that are missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder that holds train.json and dev.json of XQuAD")
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--split", choices=TEST_ARTICLES, default="first")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="format that all arms train in")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--table", action="store_true", help="print what is on file, train nothing")
    options = parser.parse_args()
    if options.table:
        print("\n".join(line for split in TEST_ARTICLES for line in [*table(split), ""]))
        return
    if options.data is None or options.arm is None:
        parser.error("--data and --arm are needed to train")
    for seed in options.seeds:
        if seed in runs_of(options.split, options.arm):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            data = write_split(options.data, options.split, Path(temporary) / "data")
            found = ARMS[options.arm](data, seed, Path(temporary), options.precision)
            record(options.split, options.arm, seed, options.precision, found)


if __name__ == "__main__":
    main()
