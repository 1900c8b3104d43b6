"""Weight files, checked by their headers alone: what they say they hold fits the bytes and the configuration."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.models.experts.settings import KEY
from whet.models.loading.folder_check import bad_model, plain_name, read_object
from whet.strict_json import BadJson, parse_document

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
_LARGEST_HEADER_BYTES = 32 << 20
_MOST_TENSORS = 200_000
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_OTHER_BYTES = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_COUNTERS = ("position_ids", "token_type_ids", "num_batches_tracked", "relative_position_index")
"""Ends of the names of tensors that hold whole numbers, not weights."""
_MASK_DIMENSIONS = 4
"""Of the causal masks that GPT-2 and its relatives saved as `attn.bias`."""
_DAMAGED = "copy the model again from where it comes"
_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
_WIDTHS = ("vocab_size", "hidden_size", "dim", "d_model", "n_embd", "embedding_size", "type_vocab_size")
_SMALLER = (
    *("intermediate_size", "hidden_dim", "d_inner", "ffn_dim", "num_attention_heads", "n_heads", "n_head", "d_head"),
    *("num_key_value_heads", "head_dim", "num_labels", "num_hidden_groups", "inner_group_num"),
)
_MOST_POSITIONS = 1 << 21
_TABLE = ("position_embeddings", "wpe.weight", "embed_positions")


@dataclass(frozen=True)
class Tensor:
    """What a header says of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def is_weight(self) -> bool:
        """Whether it may be one: whole numbers, the masks of old decoders (four dimensions) and constants are none."""
        return self.dtype in _FLOAT_BYTES and 0 < len(self.shape) < _MASK_DIMENSIONS


def check_weights(folder: Path, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what the weight files hold by name.

    Refuses files that are damaged or lead elsewhere, and a configuration of other sizes than theirs.
    """
    shards = _shards(folder)
    if not shards:
        raise bad_model(
            f"{folder} holds no weights that whet reads",
            got=", ".join(sorted(path.name for path in folder.iterdir()))[:300],
            why=f"weights are read from {WEIGHTS}, or from the files that {INDEX} names; never from a pickle",
            fix="convert the model with its save_pretrained of transformers, or use another one",
        )
    tensors: dict[str, Tensor] = {}
    for path in shards:
        tensors |= read_header(path)
    _check_sizes(folder, config, tensors)
    return tensors


def layers_setting(config: Any) -> str:
    """Return the name of the setting that says how many blocks a model of this configuration has."""
    return next((name for name in _LAYERS if name in config.to_dict()), _LAYERS[0])


def read_header(path: Path) -> dict[str, Tensor]:
    """Return what the file says it holds, by name; raises ConfigError if that is not what its bytes can hold."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _LARGEST_HEADER_BYTES):
            raise _damaged(path, f"a header of {length:,} bytes in a file of {size:,}", "the header stands in the file")
        raw = file.read(length)
    try:
        header = parse_document(raw.decode("utf-8").rstrip(" "))
    except (UnicodeDecodeError, BadJson) as error:
        raise _damaged(path, str(error), "the header is JSON") from None
    if not isinstance(header, dict) or len(header) > _MOST_TENSORS:
        raise _damaged(path, f"{type(header).__name__} of {len(header):,}", "the header names the tensors")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, facts) for name, facts in header.items()}
    _check_places(path, tensors, size - 8 - length)
    return tensors


def _shards(folder: Path) -> list[Path]:
    """Return the files that hold the weights, each in the folder; the single file comes before the index, as ever."""
    if parts := sorted(path.name for path in folder.glob("shard-*.safetensors")):
        raise bad_model(
            f"{folder} holds a distributed checkpoint",
            got=", ".join(parts)[:300],
            why=f"weights are read from {WEIGHTS}, or from the files that {INDEX} names",
            fix="write the model with save_pretrained of transformers",
        )
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        return []
    index = read_object(folder / INDEX)
    named = index.get("weight_map")
    if not isinstance(named, dict) or not isinstance(index.get("metadata", {}), dict) or len(named) > _MOST_TENSORS:
        raise _damaged(folder / INDEX, sorted(index), "weight_map says which file holds which tensor")
    for name in set(map(str, named.values())):
        if not plain_name(name) or not name.endswith(".safetensors") or not (folder / name).is_file():
            raise _damaged(folder / INDEX, name, "every file that it names is a safetensors file of the folder itself")
    return [folder / name for name in sorted(set(named.values()))]


def _tensor(path: Path, name: str, facts: Any) -> Tensor:
    if not isinstance(facts, dict) or not {"dtype", "shape", "data_offsets"} <= facts.keys():
        raise _damaged(path, {name: facts}, "a tensor has a type, a shape and a place")
    shape, places, dtype = facts["shape"], facts["data_offsets"], facts["dtype"]
    numbers = [*shape, *places] if isinstance(shape, list) and isinstance(places, list) else [None]
    if len(numbers) != len(shape) + 2 or not all(type(n) is int and 0 <= n < 1 << 60 for n in numbers):
        raise _damaged(path, {name: facts}, "shapes and places are whole numbers that a file can have")
    is_mask = name.endswith(".bias") and len(shape) == _MASK_DIMENSIONS
    if dtype not in _FLOAT_BYTES and not (dtype in _OTHER_BYTES and (is_mask or name.endswith(_COUNTERS))):
        raise _damaged(path, f"{name}: {dtype}", f"weights are of type {', '.join(_FLOAT_BYTES)}")
    n_bytes = math.prod(shape) * (_FLOAT_BYTES | _OTHER_BYTES)[dtype]
    if n_bytes != places[1] - places[0]:
        got = f"{name}: shape {shape} of {dtype} in {places[1] - places[0]:,} bytes"
        raise _damaged(path, got, f"this shape takes {n_bytes:,} bytes")
    return Tensor(name, dtype, tuple(shape), places[0], places[1])


def _check_places(path: Path, tensors: Mapping[str, Tensor], n_bytes: int) -> None:
    at = 0
    for tensor in sorted(tensors.values(), key=lambda one: (one.begin, one.end)):
        if tensor.begin != at:
            raise _damaged(path, f"{tensor.name} begins at {tensor.begin:,}, not at {at:,}", "tensors lie end to end")
        at = tensor.end
    if at != n_bytes:
        raise _damaged(path, f"{n_bytes:,} bytes of data for {at:,} of tensors", "tensors fill the file to its end")


def _check_sizes(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse sizes that no tensor has: a model of them would take memory for weights that are not there."""
    found = {n for tensor in tensors.values() for n in tensor.shape}
    largest = max(found, default=0)
    tables = [t.shape[0] for t in tensors.values() if len(t.shape) == 2 and any(word in t.name for word in _TABLE)]
    rules = {name: lambda n: n <= len(tensors) for name in _LAYERS}
    rules |= {name: lambda n: n in found or n <= 2 for name in _WIDTHS}
    rules |= {name: lambda n: n <= largest for name in _SMALLER}
    rules["max_position_embeddings"] = lambda n: n <= max(tables, default=_MOST_POSITIONS)
    rules["experts"] = lambda n: n in found
    config = {**config, "experts": (config.get(KEY) or {}).get("experts")}
    for name, fits in rules.items():
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 0 or not fits(value):
            raise bad_model(
                f"{name} of {folder / 'config.json'} does not fit its weights",
                got=value,
                why=f"the folder holds {len(tensors):,} tensors, the longest side of one is {largest:,}",
                fix="copy config.json again from where the model comes",
            )


def _damaged(path: Path, got: object, why: str) -> Exception:
    return bad_model(f"{path} is damaged", got=got, why=why, fix=_DAMAGED)
