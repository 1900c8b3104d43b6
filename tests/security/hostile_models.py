"""Model folders that want more than to be loaded: one good folder, spoilt in one way each."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PYTHON = "from pathlib import Path\nPath({marker!r}).touch()\nclass Own: pass\n"

Spoil = Callable[[Path], None]


def make_all(good: Path, cases: Path, outside: Path) -> dict[str, str]:
    """Write every spoilt folder below `cases`; return what the message of each has to say."""
    outside.mkdir()
    shutil.copy(good / _WEIGHTS, outside / _WEIGHTS)
    (outside / "secret.json").write_text('{"secret": 1}', "utf-8")
    (outside / "vocab.txt").write_text("secret\n", "utf-8")
    for name, (spoil, _) in KINDS.items():
        folder = cases / name
        shutil.copytree(good, folder)
        marker = str(outside / f"sprung-{name}")
        (folder / "own.py").write_text(_PYTHON.format(marker=marker), "utf-8")
        spoil(folder)
    return {name: message for name, (_, message) in KINDS.items()}


def _config(**changes: Any) -> Spoil:
    return lambda folder: _edit(folder / "config.json", changes)


def _tokenizer(**changes: Any) -> Spoil:
    return lambda folder: _edit(folder / "tokenizer_config.json", changes)


def _edit(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


def _index(shard: str, *, link: str | None = None) -> Spoil:
    """Weights by an index that names this file; or a link of that name to another."""

    def spoil(folder: Path) -> None:
        names = list(load_file(folder / _WEIGHTS))
        (folder / _WEIGHTS).unlink()
        named = shard.replace("OUTSIDE", str(_outside(folder)))
        if link is not None:
            (folder / named).symlink_to(_outside(folder) / link)
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, named)}
        (folder / _INDEX).write_text(json.dumps(index), "utf-8")

    return spoil


def _huge_index(folder: Path) -> None:
    (folder / _WEIGHTS).unlink()
    entries = ",".join(f'"layer.{n}.weight":"model-00001-of-00001.safetensors"' for n in range(1_000_000))
    (folder / _INDEX).write_text(f'{{"metadata":{{}},"weight_map":{{{entries}}}}}', "utf-8")


def _huge_header(folder: Path) -> None:
    with (folder / _WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", 100_000_000))
        file.truncate(100_000_008)


def _header(change: Callable[[dict[str, Any]], None]) -> Spoil:
    def spoil(folder: Path) -> None:
        raw = (folder / _WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        (folder / _WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return spoil


def _tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Spoil:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / _WEIGHTS)
        change(tensors)
        save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})

    return spoil


def _overflow(header: dict[str, Any]) -> None:
    first = next(name for name in header if name != "__metadata__")
    header[first]["shape"] = [2**40, 2**40]


def _overlap(header: dict[str, Any]) -> None:
    one, other = [name for name in header if name != "__metadata__" and "LayerNorm.weight" in name][:2]
    header[one]["data_offsets"] = header[other]["data_offsets"]


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["encoder.layer.1.output.dense.weight"][3, 5] = torch.nan


def _whole_numbers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["embeddings.word_embeddings.weight"] = torch.ones(217, 64, dtype=torch.int64)


def _other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["encoder.layer.0.output.dense.weight"] = torch.ones(65, 128)


def _more_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    tokenizer["model"]["vocab"]["rain"] = 70_000
    path.write_text(json.dumps(tokenizer), "utf-8")


def _template_link(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "x.jinja").symlink_to(_outside(folder) / "secret.json")


def _config_link(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(_outside(folder) / "secret.json")


def _pipe(folder: Path) -> None:
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    os.mkfifo(folder / "special_tokens_map.json")


def _adapter(folder: Path) -> None:
    base = {"base_model_name_or_path": "https://example.invalid/evil", "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(base), "utf-8")


def _distributed(folder: Path) -> None:
    (folder / _WEIGHTS).rename(folder / "shard-00001-model-00001-of-00001.safetensors")
    (folder / ".metadata").write_bytes(b"\x80\x04.")


def _deep(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "bert", "x": ' + "[" * 200_000, "utf-8")


def _outside(folder: Path) -> Path:
    return folder.parents[1] / "outside"


_MAP = {"AutoConfig": "own.Own", "AutoModelForQuestionAnswering": "own.Own", "AutoTokenizer": [None, "own.Own"]}
KINDS: dict[str, tuple[Spoil, str]] = {
    "code in the config": (_config(auto_map=_MAP), "config.json: auto_map is not read"),
    "code of an unknown type": (_config(auto_map=_MAP, model_type="own"), "config.json: auto_map is not read"),
    "code in the tokenizer": (_tokenizer(auto_map=_MAP, tokenizer_class="Own"), "tokenizer_config.json: auto_map is"),
    "trust in the config": (_config(trust_remote_code=True), "trust_remote_code is not read"),
    "trust in the tokenizer": (_tokenizer(trust_remote_code=True), "trust_remote_code is not read"),
    "kernel from the hub": (
        _config(_attn_implementation_internal="evil/kernel"), "_attn_implementation_internal is not read",
    ),
    "kernel by its public name": (_config(attn_implementation="evil/kernel:fn"), "is not one of transformers' own"),
    "nested": (_config(text_config={"deep": [{"auto_map": _MAP}]}), r"text_config.deep.0.auto_map is not read"),
    "nested kernel": (_config(text_config={"_attn_implementation_internal": "evil/x"}), "text_config._attn"),
    "quantised": (_config(quantization_config={"quant_method": "gptq"}), "quantization_config is not read"),
    "index up": (_index("../../outside/model.safetensors"), r"index.json is damaged"),
    "index absolute": (_index("OUTSIDE/model.safetensors"), r"index.json is damaged"),
    "linked shard": (_index("model-1.safetensors", link="model.safetensors"), "this link leaves the folder"),
    "linked config": (_config_link, "this link leaves the folder"),
    "other weights": (_config(transformers_weights="../../outside/model.safetensors"), "transformers_weights is not"),
    "vocabulary elsewhere": (_tokenizer(vocab_file="../../outside/vocab.txt"), "vocab_file leads out of the folder"),
    "merges elsewhere": (_tokenizer(merges_file="/etc/passwd"), "merges_file leads out of the folder"),
    "tokenizer of a version": (
        _tokenizer(fast_tokenizer_files=["tokenizer.4.0.json/../../../outside/secret.json"]), "leads out of the folder",
    ),
    "linked template": (_template_link, "this link leaves the folder"),
    "model file of a tokenizer": (_tokenizer(sp_model_kwargs={"model_file": "/etc/passwd"}), "leads out of the folder"),
    "adapter": (_adapter, "this is an adapter"),
    "distributed checkpoint": (_distributed, "a distributed checkpoint"),
    "pipe": (_pipe, "a pipe, a socket or a device"),
    "deep": (_deep, "nested too deep"),
    "index of a million": (_huge_index, "the file is too large"),
    "header of 100 MB": (_huge_header, "a header of 100,000,000 bytes"),
    "shape overflow": (_header(_overflow), "model.safetensors is damaged"),
    "overlap": (_header(_overlap), "model.safetensors is damaged"),
    "vocabulary of a trillion": (_config(vocab_size=10**12), "vocab_size of .* does not fit"),
    "million layers": (_config(num_hidden_layers=10**6), "config.json.* that a model has"),
    "positions": (_config(max_position_embeddings=10**9), "max_position_embeddings of .* does not fit"),
    "NaN": (_tensors(_nan), "not finite.*layer.1.output.dense.weight"),
    "whole numbers": (_tensors(_whole_numbers), "word_embeddings.weight: I64"),
    "wrong shape": (_tensors(_other_shape), "layer.0.output.dense.weight|size mismatch|mismatch"),
    "too many tokens": (_more_tokens, "'rain' is token 70,000"),
}  # fmt: skip
