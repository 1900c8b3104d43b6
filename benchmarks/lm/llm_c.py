"""Compiles llm.c's trainer of GPT-2 and returns how long its steps take, on random weights and tokens.

llm.c is not part of this project: its folder is given, its one source file is compiled in a folder of the run, with the
length of its rows set. A step is 4 rows.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np

BATCH = 4
FLAGS = ("-O3", "-march=native", "-ffast-math", "-fopenmp", "-Wno-unused-result")
_MAX_LENGTH, _WORDS, _PADDED_WORDS, _LAYERS, _HEADS, _WIDTH = 1024, 50257, 50304, 12, 12, 768
_MODEL_MAGIC, _MODEL_VERSION, _TOKEN_MAGIC, _TOKEN_VERSION = 20240326, 3, 20240520, 1


def step_seconds(source: Path, folder: Path, length: int, n_steps: int, n_threads: int) -> list[float]:
    """Return the seconds of steps 2 to n_steps + 1 of llm.c with rows of `length` tokens; raises CalledProcessError."""
    program = _compiled(source, folder, length)
    _write_model(folder / "gpt2_124M.bin")
    data = folder / "dev" / "data" / "tinyshakespeare"
    data.mkdir(parents=True, exist_ok=True)
    for part in ("train", "val"):
        _write_tokens(data / f"tiny_shakespeare_{part}.bin", 60 * BATCH * length)
    words = ["stdbuf", "-oL", str(program)]
    environment = os.environ | {"OMP_NUM_THREADS": str(n_threads)}
    with subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        found: list[float] = []
        for line in run.stdout:
            if shown := re.match(r"step \d+: .*\(took ([\d.]+) ms\)", line):
                found.append(float(shown[1]) / 1000)
            if len(found) > n_steps:
                break
        run.kill()
    return found[1:]


def _compiled(source: Path, folder: Path, length: int) -> Path:
    text = (source / "train_gpt2.c").read_text("utf-8")
    changed = text.replace("int T = 64;", f"int T = {length};", 1)
    if changed == text and length != 64:
        raise ValueError(f"{source}/train_gpt2.c sets the length of its rows in another way than this script knows")
    file, program = folder / "train_gpt2.c", folder / f"train_gpt2_{length}"
    file.write_text(changed, "utf-8")
    subprocess.run(["gcc", *FLAGS, f"-I{source}", str(file), "-lm", "-o", str(program)], check=True)
    return program


def _write_model(path: Path) -> None:
    header = np.zeros(256, np.int32)
    header[:8] = (_MODEL_MAGIC, _MODEL_VERSION, _MAX_LENGTH, _WORDS, _LAYERS, _HEADS, _WIDTH, _PADDED_WORDS)
    layers, d = _LAYERS, _WIDTH
    sizes = [_PADDED_WORDS * d, _MAX_LENGTH * d, layers * d, layers * d, layers * 3 * d * d, layers * 3 * d,
             layers * d * d, layers * d, layers * d, layers * d, layers * 4 * d * d, layers * 4 * d,
             layers * 4 * d * d, layers * d, d, d]  # fmt: skip
    numbers = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(header.tobytes())
        for size in sizes:
            file.write((numbers.standard_normal(size, np.float32) * 0.02).tobytes())


def _write_tokens(path: Path, n_tokens: int) -> None:
    header = np.zeros(256, np.int32)
    header[:3] = (_TOKEN_MAGIC, _TOKEN_VERSION, n_tokens)
    tokens = np.random.default_rng(0).integers(0, _WORDS, n_tokens).astype(np.uint16)
    path.write_bytes(header.tobytes() + tokens.tobytes())
