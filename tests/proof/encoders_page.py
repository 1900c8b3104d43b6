"""Write a table of docs/families.md: every text encoder that transformers' AutoModel knows, and how whet trains it.

Run it after a change of transformers, of the families or of the proof: `.venv/bin/python -m tests.proof.encoders_page`.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel
from transformers.models.auto import modeling_auto as auto

from whet.models.known import known
from whet.models.packable import why_padded
from whet.models.proof import prove

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
_SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 32,
    "embedding_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
}
_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
_TOKEN_IDS |= {"mask_token_id": 3, "unk_token_id": 4}
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "flaubert": {"emb_dim": 32, "n_layers": 2, "n_heads": 4},
    "xlm": {"emb_dim": 32, "n_layers": 2, "n_heads": 4},
    "esm": {"mask_token_id": 3, "position_embedding_type": "rotary"},
    "mobilebert": {"true_hidden_size": 32, "intra_bottleneck_size": 32, "num_feedforward_networks": 1},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
"""Settings of the tiny models of some types that the usual ones do not reach."""
_MOST_WEIGHTS = 5_000_000
_PART = re.compile(r"(<!-- encoders -->\n).*?(<!-- end of encoders -->)", re.DOTALL)
_TOP = "| transformers {version} | model_type |\n|---|---|\n"
_NAME = re.compile(r"`([^`]+)`")
_ORDER = ("family", "proof", "padded", "not tried")


def model_types() -> list[str]:
    """Return the encoders that have a head for masked words, or for token labels and none for the next word."""
    words, labels = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
    both_ways = {*words, *(set(labels) - set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))}
    return sorted(both_ways & set(auto.MODEL_MAPPING_NAMES))


def tiny(model_type: str) -> Any:
    """Return a tiny encoder of this type with random weights."""
    torch.manual_seed(0)
    usual = AutoConfig.for_model(model_type).to_dict()
    own = known()[model_type].tiny if model_type in known() else {}
    wanted = {**_SIZES, **_TOKEN_IDS}
    changes = {name: value for name, value in wanted.items() if name in usual}
    config = AutoConfig.for_model(model_type, **changes | dict(own) | _OWN_SIZES.get(model_type, {}))
    with torch.device("meta"):
        n_weights = sum(one.numel() for one in AutoModel.from_config(config).parameters())
    if n_weights > _MOST_WEIGHTS:
        raise ValueError(f"{n_weights} weights")
    return AutoModel.from_config(config)


def verdict_on(model_type: str) -> tuple[str, str]:
    """Return how a tiny encoder of this type runs, and why if it runs padded."""
    try:
        model = tiny(model_type)
    except Exception as error:
        return "not tried", f"no tiny model: {type(error).__name__}"
    prove.ensure(model)
    why = why_padded(model)
    if why is not None:
        return "padded", why
    return ("family" if model_type in known() else "proof"), ""


def table(verdicts: Iterable[tuple[str, str, str]]) -> str:
    """Return the table: a row for each way to run, or reason for padding, with its types; of (type, runs, why)."""
    import transformers

    types: dict[str, list[str]] = {}
    for name, runs, why in verdicts:
        types.setdefault(f"{runs}: {why}" if runs == "padded" else runs, []).append(f"`{name}`")
    in_order = sorted(types.items(), key=lambda row: (_ORDER.index(row[0].split(":")[0]), -len(row[1]), row[0]))
    return _TOP.format(version=transformers.__version__) + "".join(
        f"| {runs} | {', '.join(names)} |\n" for runs, names in in_order
    )


def listed() -> dict[str, str]:
    """Return model type -> how it runs, as the page says it."""
    found = _PART.search(PAGE.read_text("utf-8"))
    assert found, "the page has no place for the table of encoders"
    lines = [line.split("|") for line in found[0].splitlines() if line.startswith("| ")]
    return {name: cells[1].split(":")[0].strip() for cells in lines[1:] for name in _NAME.findall(cells[2])}


def write() -> None:
    """Put the table into the page."""
    verdicts = [(name, *verdict_on(name)) for name in model_types()]
    text = _PART.sub(lambda found: f"{found[1]}{table(verdicts)}{found[2]}", PAGE.read_text("utf-8"))
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    write()
