"""What `whet run` does to example scripts of transformers, sentence-transformers and TRL: their losses, their steps.

    make test-libraries   # makes the environment
    .venv-libraries/bin/python benchmarks/run/run.py --data FOLDER_WITH_DATA_SETS \
        --transformers FOLDER/examples/pytorch --sentence_transformers FOLDER/examples

The scripts are those of the libraries' repositories, unmodified, with the arguments of their guides; they load local
files (local_files.py). Those of sentence-transformers ask for the fp16 or bf16 of a GPU, and get fp32. Each runs with
WHET_RUN=off and on, by turns. Without dropout, the losses of each step are compared; with dropout 0.1, the median time
between the ends of two steps, from step 4 on, and the processor time, which tells more on a machine that is not idle.
results.json keeps all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import local_files
from local_files import CHAT, DECODER, ENCODER

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from machine import facts

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
N_TIMED_STEPS = 10
FIRST_TIMED = 3
"""Of the gaps between steps: those before have a step that `whet run` leaves unchanged, or the first one after it."""
_FILES = "--train_file {kind}_train.{ext} --validation_file {kind}_dev.{ext}"
_TRAINER = "--do_train --output_dir out --report_to none --save_strategy no --logging_steps 1 --use_cpu"
_QA = _FILES.format(kind="qa", ext="json") + " --max_seq_length 384 --doc_stride 128"
_CLASSES = _FILES.format(kind="classes", ext="json") + " --max_seq_length 128"
_TAGS = _FILES.format(kind="tags", ext="json")
_TEXTS = _FILES.format(kind="texts", ext="txt")
_CHOICES = _FILES.format(kind="choices", ext="json")
_LOOP = "--output_dir out --seed 42"
_LORA = "--use_peft --lora_dropout 0.0"
_CHATS = (
    f"--model_name_or_path {CHAT} --dtype float32 --per_device_train_batch_size 4 --bf16 False --use_cpu "
    "--output_dir out --report_to none --save_strategy no --logging_steps 1"
)
_SENTENCE_SCRIPTS = (
    ("sentence_transformer", "nli", "training_nli", "training_nli_v2", "training_nli_v3", "training_nli_angle"),
    ("sentence_transformer", "sts", "training_stsbenchmark", "training_stsbenchmark_continue_training"),
    ("sentence_transformer", "matryoshka", "matryoshka_nli", "matryoshka_nli_reduced_dim", "matryoshka_sts"),
    ("sentence_transformer", "matryoshka", "2d_matryoshka_sts"),
    ("sentence_transformer", "adaptive_layer", "adaptive_layer_sts"),
    ("sentence_transformer", "other", "training_batch_hard_trec", "training_multi_task", "training_wikipedia_sections"),
    ("cross_encoder", "sts", "training_stsbenchmark"),
    ("cross_encoder", "nli", "training_nli"),
    ("cross_encoder", "rerankers", "training_gooaq_cmnrl"),
    ("cross_encoder", "ms_marco", "training_ms_marco_bce", "training_ms_marco_lambda", "training_ms_marco_listnet"),
    ("cross_encoder", "ms_marco", "training_ms_marco_ranknet"),
    ("sparse_encoder", "nli", "train_splade_nli"),
    ("sparse_encoder", "sts", "train_splade_stsbenchmark"),
    ("sparse_encoder", "quora_duplicate_questions", "training_splade_quora"),
)
"""Kind of model, folder and names of scripts of sentence-transformers."""


@dataclass(frozen=True)
class Job:
    """A script with its arguments."""

    name: str
    library: str
    script: str
    words: str


def _of_transformers(folder: str, script: str, words: str, model: str = ENCODER) -> Job:
    own = _LOOP if script.endswith("_no_trainer") else _TRAINER
    path = f"{folder}/{script}.py"
    return Job(script, "transformers", path, f"--model_name_or_path {model} {words} {own}")


JOBS = (
    _of_transformers("question-answering", "run_qa", f"{_QA} --per_device_train_batch_size 12 --learning_rate 3e-5"),
    _of_transformers(
        "question-answering", "run_qa_no_trainer",
        f"{_QA} --per_device_train_batch_size 12 --learning_rate 3e-5 --pad_to_max_length",
    ),
    _of_transformers(
        "text-classification", "run_classification",
        f"{_CLASSES} --per_device_train_batch_size 32 --learning_rate 2e-5 --text_column_names text",
    ),
    _of_transformers("text-classification", "run_glue", f"{_CLASSES} --per_device_train_batch_size 32"),
    _of_transformers(
        "text-classification", "run_glue_no_trainer",
        _CLASSES.replace("seq_", "") + " --per_device_train_batch_size 32 --pad_to_max_length",
    ),
    _of_transformers("token-classification", "run_ner", _TAGS),
    _of_transformers("token-classification", "run_ner_no_trainer", f"{_TAGS} --pad_to_max_length"),
    _of_transformers(
        "language-modeling", "run_clm", f"{_TEXTS} --per_device_train_batch_size 4 --block_size 256", DECODER
    ),
    _of_transformers(
        "language-modeling", "run_clm_no_trainer", f"{_TEXTS} --per_device_train_batch_size 4 --block_size 256", DECODER
    ),
    _of_transformers(
        "language-modeling", "run_mlm",
        f"{_TEXTS} --per_device_train_batch_size 8 --line_by_line --pad_to_max_length --max_seq_length 512",
    ),
    _of_transformers(
        "language-modeling", "run_mlm_no_trainer",
        f"{_TEXTS} --per_device_train_batch_size 8 --line_by_line True --pad_to_max_length --max_seq_length 512",
    ),
    _of_transformers(
        "multiple-choice", "run_swag",
        f"{_CHOICES} --per_device_train_batch_size 4 --learning_rate 5e-5 --max_seq_length 256 --pad_to_max_length",
    ),
    _of_transformers(
        "multiple-choice", "run_swag_no_trainer",
        f"{_CHOICES} --per_device_train_batch_size 4 --max_seq_length 256 --pad_to_max_length",
    ),
    *(
        Job(f"{kind}/{name}", "sentence-transformers",
            f"{kind}/training/{folder}/{name}.py", "")
        for kind, folder, *names in _SENTENCE_SCRIPTS for name in names
    ),
    Job("trl sft", "trl", "-m trl.scripts.sft", f"--dataset_name chats {_CHATS}"),
    Job("trl sft packing", "trl", "-m trl.scripts.sft", f"--dataset_name chats {_CHATS} --packing --max_length 256"),
    Job("trl sft lora", "trl", "-m trl.scripts.sft", f"--dataset_name chats {_CHATS} {_LORA}"),
    Job("trl dpo", "trl", "-m trl.scripts.dpo", f"--dataset_name preferences {_CHATS}"),
    Job("trl dpo lora", "trl", "-m trl.scripts.dpo", f"--dataset_name preferences {_CHATS} {_LORA}"),
)  # fmt: skip


def once(job: Job, script: str, folder: Path, *, whet: bool, n_steps: int, threads: int | None) -> dict[str, Any]:
    """Run the script in the folder; return its losses, the times of its steps, and the lines of `whet run`."""
    clock = folder / "clock.json"
    clock.unlink(missing_ok=True)
    paths = [str(HERE / "clock"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(paths),
        "STEP_CLOCK": str(clock), "STEP_CLOCK_STEPS": str(n_steps), "WHET_RUN": "on" if whet else "off",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "STEP_CLOCK_FP32": "1" if job.library == "sentence-transformers" else "",
        "STEP_CLOCK_TPU": "1" if job.name.endswith("lm_no_trainer") else "",
    }  # fmt: skip
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    words = [sys.executable, "-m", "whet", "run", *script.split(), *job.words.split()]
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode or not clock.exists():
        return {"failed": done.stderr.strip().splitlines()[-20:]}
    found = json.loads(clock.read_text("utf-8"))
    ends = {name: found.pop(f"{name}_ends_s") for name in ("step", "processor")}
    said = [line for line in done.stderr.splitlines() if line.startswith("whet run: ")][1:]
    return found | {f"{name}_s": [b - a for a, b in pairwise(one)] for name, one in ends.items()} | {"said": said}


def measured(job: Job, script: str, folders: dict[str, Path], asked: argparse.Namespace) -> dict[str, Any]:
    """Return what the runs of a script gave, without and with whet by turns."""
    found: dict[str, Any] = {}
    for kind in ("losses", *["speed"] * asked.rounds):
        n_steps = asked.steps if kind == "losses" else N_TIMED_STEPS
        for side in ("off", "on"):
            one = once(
                job, script, folders[kind], whet=side == "on", n_steps=n_steps, threads=asked.threads
            )  # fmt: skip
            found.setdefault(kind, {}).setdefault(side, []).append(one)
            if "failed" in one:
                return {"failed": one["failed"], "side": side}
    return found


def row(job: Job, found: dict[str, Any]) -> str:
    """Return the line of the table about a script."""
    if "failed" in found:
        own = [line for line in found["failed"] if not line.startswith("whet run: ")]
        return f"| {job.name} | fails with WHET_RUN={found['side']}: {own[-1] if own else ''} | | |"
    off, on = (found["losses"][side][0]["losses"] for side in ("off", "on"))
    same = any("nothing was changed" in line for line in found["losses"]["on"][0]["said"])
    gap = max(abs(a - b) / abs(a) for a, b in zip(off, on, strict=True))
    cells = [_compared(found, name) for name in ("step_s", "processor_s")] if "speed" in found else ["", ""]
    return f"| {job.name} | {' | '.join(cells)} | {gap:.1e}{' (nothing was changed)' if same else ''} |"


def _compared(found: dict[str, Any], name: str) -> str:
    """Return the medians of all rounds, without and with whet, and their ratio with its range."""
    pairs = zip(found["speed"]["off"], found["speed"]["on"], strict=True)
    medians = [[statistics.median(one[name][FIRST_TIMED:]) for one in pair] for pair in pairs]
    ratios = [a / b for a, b in medians]
    plain, changed = (statistics.median(one) for one in zip(*medians, strict=True))
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{plain:.3f} to {changed:.3f}: {statistics.median(ratios):.2f}{spread}"


def main() -> None:
    """Run each script and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds xquad, banking77 and ud_ewt")
    parser.add_argument("--transformers", type=Path, required=True, help="examples/pytorch of its repository")
    parser.add_argument("--sentence_transformers", type=Path, required=True, help="examples of its repository")
    parser.add_argument("--jobs", nargs="+", choices=[job.name for job in JOBS], default=[job.name for job in JOBS])
    parser.add_argument("--rounds", type=int, default=2, help="0: the losses alone")
    parser.add_argument("--steps", type=int, default=8, help="of the runs whose losses are compared")
    parser.add_argument("--kept", type=Path, help="folder for the files that scripts load, kept for the next call")
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS of both sides; default: theirs")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {"jobs": {}}
    print("| script | s a step, without to with: ratio | s of processor time | largest difference of a loss |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="bench-run-") as temporary:
        home = asked.kept or Path(temporary)
        folders = {"losses": home / "without", "speed": home / "with"}
        for kind, rate in (("losses", 0.0), ("speed", 0.1)):
            if not folders[kind].exists():
                local_files.write(folders[kind], asked.data, dropout=rate)
        for job in sorted((one for one in JOBS if one.name in asked.jobs), key=lambda one: asked.jobs.index(one.name)):
            folder = vars(asked).get(job.library.replace("-", "_"))  # TRL installs its scripts
            script = job.script if folder is None else str((folder / job.script).resolve())
            found = measured(job, script, folders, asked)
            print(row(job, found), flush=True)
            if asked.rounds:
                results["jobs"][job.name] = found
                results["machine"] = {**facts(), "threads": asked.threads}
                RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
