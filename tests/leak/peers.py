"""The same change of one row in what transformers offers for batches without padding, set up as its docs say."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from leak_runs import DROPOUT, SEED, Run, model_of
from torch import Tensor
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM


def by_position_ids(model: Any) -> Run:
    """Rows end to end with positions that restart: how transformers' docs describe packed sequences."""

    def run(rows: list[dict[str, Any]]) -> list[Tensor]:
        lengths = [len(row["input_ids"]) for row in rows]
        ids = torch.cat([torch.tensor(row["input_ids"]) for row in rows])[None]
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        return _logits(model, {"input_ids": ids, "position_ids": places}, lengths)

    return run


def by_flattening(model: Any) -> Run:
    """What DataCollatorWithFlattening makes of the rows, with the arguments for flash attention."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def run(rows: list[dict[str, Any]]) -> list[Tensor]:
        lengths = [len(row["input_ids"]) for row in rows]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch = dict(collate([{"input_ids": row["input_ids"]} for row in rows]))
        batch.pop("labels", None)
        return _logits(model, batch, lengths)

    return run


def llama() -> Any:
    """Return a tiny decoder, for which transformers finds packed rows by their positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=64, attention_dropout=DROPOUT)).train()


def peers() -> dict[str, tuple[Any, Run]]:
    """Return each peer: a model, and how it runs rows."""
    made: dict[str, tuple[Any, Run]] = {}
    for attention in ("sdpa", "eager"):
        for name, way in (("position_ids", by_position_ids), ("flattening collator", by_flattening)):
            bert = model_of("bert", "tag")
            bert.set_attn_implementation(attention)
            made[f"transformers BERT, {name}, {attention}"] = bert, way(bert)
    decoder = llama()
    made["transformers Llama, position_ids, sdpa"] = decoder, by_position_ids(decoder)
    return made


def _logits(model: Any, batch: dict[str, Any], lengths: list[int]) -> list[Tensor]:
    torch.manual_seed(SEED)
    options = {"use_cache": False} if type(model).__name__.endswith("ForCausalLM") else {}
    return list(model(**batch, **options).logits[0].split(lengths))
