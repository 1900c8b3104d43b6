"""Whatever the four parsers are given, they read it or refuse it in our words: 2,000 made and 20,000 damaged inputs.

No process is forked: a test that takes long is told by its own clock. Seeds are fixed, so a failure comes again; the
input that failed stays in the test's folder.
"""

from __future__ import annotations

import json
import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from bad_squad import document
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from whet.config.command_line import read_config
from whet.errors import WhetError
from whet.models.loading.folder_check import check_folder, check_tokenizer_config, checked_config
from whet.models.loading.tensor_check import check_weights
from whet.store import find, write
from whet.tasks.qa.read import read_questions

pytestmark = pytest.mark.reliability
N_MADE = 2_000
N_DAMAGED = round(20_000 * float(os.environ.get("WHET_RELIABILITY_TIMES", "1")))
_SEED = int(os.environ.get("WHET_TEST_SEED", "0"))
"""The same inputs in each run of the gate; the night run takes other ones each night, and many more."""
_HANG_S = 2.0
_MOST_MIB = 512
_STEP = find.folder_name(3)
_CONFIG = {"model_type": "bert", "vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "dtype": "float32"}
_TOKENIZER = {"tokenizer_class": "BertTokenizer", "cls_token": "[CLS]", "added_tokens_decoder": {"0": {"content": "a"}}}
_NAMES = ("data", "paragraphs", "qas", "context", "id", "question", "answers", "text", "answer_start", "files", "bytes",
          "checksum", "step", "format_version",
          "model_type", "vocab_size", "auto_map", "sub", "seed", "token", "weight_map",
          "metadata", "dtype", "shape", "data_offsets", "xxh3_128", "vocab_file", "fast_tokenizer_files")  # fmt: skip
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["bert", "../x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=5),
    max_leaves=20,
)


def _read_data(path: Path, file: str) -> None:
    """Read the questions of a file."""
    read_questions(path / file)


def _read_config(path: Path, file: str) -> None:
    read_config(str(path / file))


def _read_manifest(path: Path, _: str) -> None:
    find.newest(path)


def _read_model(path: Path, _: str) -> None:
    check_folder(path)
    check_tokenizer_config(path)
    check_weights(path, checked_config(path))


Parser = tuple[Callable[[Path, str], None], tuple[str, ...]]
PARSERS: dict[str, Parser] = {
    "data": (_read_data, ("data.json",)),
    "config": (_read_config, ("run.json", "run.yaml")),
    "manifest": (_read_manifest, (f"{_STEP}/MANIFEST.json",)),
    "model folder": (_read_model, ("config.json", "tokenizer_config.json", "model.safetensors.index.json")),
}
_DAMAGED: dict[str, tuple[str, ...]] = {
    "data": ("data.json",),
    "config": ("run.json", "run.yaml"),
    "manifest": (f"{_STEP}/MANIFEST.json", f"{_STEP}/weights.safetensors", f"{_STEP}/state.json"),
    "model folder": ("config.json", "tokenizer_config.json", "model.safetensors"),
}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A folder with a good input of every parser."""
    (tmp_path / "data.json").write_text(json.dumps(document()), "utf-8")
    (tmp_path / "run.json").write_text('{"seed": 3, "learning_rate": 1e-4, "report_to": ["none"]}', "utf-8")
    (tmp_path / "run.yaml").write_text("seed: 3\nlearning_rate: 1e-4\nreport_to:\n- none\ntoken: 'x'\n", "utf-8")
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG), "utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER), "utf-8")
    tensors = {"embeddings.weight": np.zeros((30, 8), np.float32), "bias": np.zeros(8, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")

    def fill(folder: Path) -> None:
        save_file(tensors, folder / "weights.safetensors")
        (folder / "state.json").write_text('{"step": 3}', "utf-8")

    write.save(tmp_path, 3, fill, {"n_ranks": 1})
    for parse, files in PARSERS.values():
        for file in files:
            parse(tmp_path, file)
    return tmp_path


@contextmanager
def _ours_and_fast(counts: dict[str, int]) -> Iterator[None]:
    began_s = time.process_time()
    try:
        yield
        counts["read"] += 1
    except WhetError as error:
        counts["refused"] += 1
        counts["without its parts"] += not all(problem.why and problem.fix for problem in error.problems)
    took_s = time.process_time() - began_s
    assert took_s < _HANG_S, took_s


@contextmanager
def _small() -> Iterator[None]:
    """See that no input takes more memory than this process has ever held, and 512 MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < _MOST_MIB, grown_mib


@pytest.mark.parametrize("name", PARSERS)
def test_anything_that_json_can_say(name: str, good: Path) -> None:
    parse, files = PARSERS[name]
    counts = {"read": 0, "refused": 0, "without its parts": 0}
    if name == "model folder":
        (good / "model.safetensors").unlink()

    @seed(20261121 + _SEED)
    @settings(max_examples=N_MADE // len(PARSERS), deadline=None, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(value=_VALUES | st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=6), which=st.integers(0, 9))
    def try_one(value: Any, which: int) -> None:
        file = files[which % len(files)]
        if name == "manifest" and isinstance(value, dict) and which < 5:  # a forger knows how to compute a checksum
            value["checksum"] = xxhash.xxh3_128(json.dumps(value, sort_keys=True).encode()).hexdigest()
        if file == "config.json" and isinstance(value, dict):
            value = _CONFIG | value
        (good / file).write_text(json.dumps(value), "utf-8")
        with _ours_and_fast(counts):
            parse(good, file)

    with _small():
        try_one()
    print(f"\n{name}: {sum(counts.values())} made inputs, {counts}")
    assert counts["without its parts"] == 0
    assert sum(counts.values()) >= N_MADE // len(PARSERS)
    assert counts["refused"] > 0 or name == "manifest"


def _damage(numbers: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(numbers.randint(1, 4)):
        at = numbers.randrange(len(data) + 1)
        kind = numbers.randrange(4)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << numbers.randrange(8)
        elif kind == 1:
            del data[at : at + numbers.randint(1, 8)]
        elif kind == 2:
            data[at:at] = numbers.choice([b'"', b"{", b"]", b"\n", b"\0", b"\xff", b"[" * 50, b"9" * 40, b": &a *a "])
        else:
            data[at : at + 4] = numbers.randbytes(4)
    return bytes(data)


@pytest.mark.parametrize("name", PARSERS)
def test_good_inputs_with_damaged_bytes(name: str, good: Path) -> None:
    parse, numbers = PARSERS[name][0], random.Random(f"whet {name}" + (f" {_SEED}" if _SEED else ""))
    originals = {file: (good / file).read_bytes() for file in _DAMAGED[name]}
    counts = {"read": 0, "refused": 0, "without its parts": 0}
    with _small():
        for n in range(N_DAMAGED // len(PARSERS)):
            file = _DAMAGED[name][n % len(originals)]
            (good / file).write_bytes(_damage(numbers, originals[file]))
            with _ours_and_fast(counts):
                parse(good, file)
            (good / file).write_bytes(originals[file])
    print(f"\n{name}: {sum(counts.values())} damaged inputs, {counts}")
    assert counts["without its parts"] == 0
    assert sum(counts.values()) == N_DAMAGED // len(PARSERS)
    assert counts["refused"] > 0
