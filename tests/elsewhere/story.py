"""What a user does with whet on one machine, in one process; prints a JSON object: `python story.py FOLDER MODEL DATA`.

With `interrupted`, Ctrl-C stops the training of the command line after three steps, and the same command resumes it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import pkgutil
import signal
import socket
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers

import whet
from whet import system
from whet.cli.main import main
from whet.watch import lock

_ROWS = 12
_NO_PROCESS = (1 << 22) + 1
"""Linux gives no process a higher number than 2^22."""


def whet_command(*words: Any) -> tuple[int, str]:
    """Return the exit code of a command of whet, and what it printed."""
    said = StringIO()
    with redirect_stdout(said):
        try:
            main([str(word) for word in words])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, said.getvalue()


def refusal(*words: Any) -> str:
    """Return what is wrong with a command."""
    _, said = whet_command(words[0], "--json", *words[1:])
    return json.loads(said.splitlines()[-1])["error"]["what"]


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def train(folder: Path, model: Path, data: Path, *more: str) -> int:
    """Train a classifier by the command line."""
    return whet_command(
        "classify", "--model_name_or_path", model, "--train_file", data, "--validation_file", data, "--do_train",
        "--do_eval", "--max_seq_length", 32, "--per_device_train_batch_size", 6, "--learning_rate", 3e-3, "--use_cpu",
        "true", "--max_steps", 8, "--save_steps", 2, "--save_total_limit", 2, "--logging_steps", 1, "--output_dir",
        folder, *more,
    )[0]  # fmt: skip


def interrupt_after(n_steps: int) -> None:
    """Press Ctrl-C once so many steps are done."""
    from whet.engine.loop import TrainingLoop

    taken, take_step = [], TrainingLoop.take_step

    def interrupted(loop: Any) -> Any:
        found = take_step(loop)
        taken.append(None)
        if len(taken) == n_steps:
            signal.raise_signal(signal.SIGINT)
        return found

    TrainingLoop.take_step = interrupted  # type: ignore[method-assign]


def rows(model: Path) -> list[dict[str, Any]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    texts = ["the boat lay in the harbour", "bread came out of the oven", "weeds grew by the fence"] * (_ROWS // 3)
    return [{**tokenizer(text), "labels": n % 3} for n, text in enumerate(texts)]


def classifier(model: Path) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=3)


def by_trainer(folder: Path, model: Path) -> str:
    """Train by whet.Trainer, with a checkpoint."""
    args = whet.TrainingArguments(
        output_dir=str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=6, use_cpu=True,
        report_to="none", learning_rate=3e-3, disable_tqdm=True,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    trainer = whet.Trainer(
        model=classifier(model), args=args, train_dataset=rows(model), processing_class=tokenizer,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    return digest(folder)


def in_own_loop(model: Path) -> str:
    """Train in a loop of one's own by whet.optimize."""
    found = classifier(model)
    optimizer = torch.optim.AdamW(found.parameters(), lr=3e-3)
    found = whet.optimize(found)
    collate = transformers.DataCollatorWithPadding(transformers.AutoTokenizer.from_pretrained(model))
    found.train()
    for step in range(4):
        batch = collate(rows(model)[step : step + 6])
        found(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    values = torch.cat([one.detach().flatten() for one in found.parameters()])
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def locks(folder: Path) -> list[Any]:
    """Lock a folder; return whether its holder is known, whether another open file gets the lock, and what is left."""
    with lock.locked(folder):
        known = lock.holder(folder) == (os.getpid(), socket.gethostname())
        handle = os.open(folder / lock.LOCK_NAME, os.O_RDWR)
        try:
            system.lock(handle)
            second = True
        except OSError as error:
            second = error.errno not in system.LOCKED
        finally:
            os.close(handle)
    return [known, second, (folder / lock.LOCK_NAME).exists(), lock.holder(folder)]


def unimportable() -> list[str]:
    """Return the modules of whet that this system cannot import, optional packages aside."""
    found = []
    for one in pkgutil.walk_packages(whet.__path__, "whet."):
        if one.name.endswith(("__main__", "._native")) or ".site." in one.name:
            continue
        try:
            importlib.import_module(one.name)
        except whet.WhetError:
            continue
        except Exception as error:
            found.append(f"{one.name}: {type(error).__name__}: {error}")
    return found


def story(folder: Path, model: Path, data: Path, *, interrupted: bool) -> dict[str, Any]:
    """Return what each part came to."""
    found: dict[str, Any] = {}
    if interrupted:
        interrupt_after(3)
        found["interrupted"] = train(folder / "out", model, data)
        found["saved"] = sorted(path.name for path in (folder / "out").glob("checkpoint-*"))
    found["trained"] = train(folder / "out", model, data, "--resume_from_checkpoint", "auto")
    found["checkpoints"] = sorted(path.name for path in (folder / "out").glob("checkpoint-*"))
    found["leftover"] = sorted(path.name for path in (folder / "out").glob(".*"))
    found["weights"] = digest(folder / "out")
    results = json.loads((folder / "out" / "all_results.json").read_text("utf-8"))
    found["accuracy"] = results["eval_accuracy"]
    answers = folder / "answers.jsonl"
    found["predicted"] = whet_command("predict", folder / "out", "--file", data, "--output", answers)[0]
    found["answers"] = answers.read_bytes().decode("ascii")
    found["trainer"] = by_trainer(folder / "trainer", model)
    found["own_loop"] = in_own_loop(model)
    found["doctor"], report = whet_command("doctor", "--json")
    found["machine"] = json.loads(report.splitlines()[-1])["machine"]
    if not sys.platform.startswith("linux"):
        auto = ("classify", "--auto", "--do_train", "--train_file", data, "--output_dir", folder / "auto")
        found["refused"] = [
            refusal("launch", "--dry_run", "--", "classify"),
            refusal("run", "no-script.py"),
            refusal(*auto, "--model_name_or_path", model),
        ]
    if not system.has_addresses_without_memory():
        planned = ("plan", "classify", "--do_train", "--train_file", data, "--output_dir", folder / "planned")
        found["planned"] = refusal(*planned, "--model_name_or_path", model, "--no_time")
    found["locks"] = locks(folder)
    found["runs"] = [system.is_running(os.getpid()), system.is_running(_NO_PROCESS)]
    found["unimportable"] = unimportable()
    return found


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:4]]
    told = story(*given, interrupted="interrupted" in sys.argv)
    Path(given[0], "story.json").write_text(json.dumps(told), "utf-8")
