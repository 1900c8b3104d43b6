"""Tiny random models of each family, rows of tokens that they can learn from, and short runs on them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForQuestionAnswering

import engine
from whet.data.store import RowStore
from whet.kernels.library import library
from whet.models.known import known

FAMILIES = tuple(name for name, family in known().items() if not family.causal)
"""Every family of encoders that whet knows: tests over them cover a new one without a change."""
DECODERS = tuple(name for name, family in known().items() if family.causal)
"""The same for decoders."""
NO_AUTOCAST = ("deberta",)
"""Families whose forward in transformers fails under bf16 autocast: the mask overflows. whet's own forward does not."""
VOCABULARY = 200
FIRST_WORD = 10
"""Token ids below it are left to padding and special tokens."""
START_MARK, END_MARK = 198, 199

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
    "initializer_range": 0.1,  # wide enough that tokens matter from the first step on
}


def tiny_config(family: str, *, dropout: float = 0.0, **changes: Any) -> Any:
    """Return the configuration of a tiny model of the family."""
    usual = AutoConfig.for_model(family).to_dict()
    rates = {name: dropout for name, value in usual.items() if "dropout" in name and isinstance(value, float)}
    sizes = _SIZES | dict(known()[family].tiny) | rates | changes
    return AutoConfig.for_model(family, **sizes)


def has_segments(family: str) -> bool:
    """Return whether rows of the family have token types; RoBERTa and its relatives have a table of one that counts."""
    return hasattr(AutoConfig.for_model(family), "type_vocab_size") and not known()[family].skips_padding


def need_head(auto: Any, family: str) -> None:
    """Skip the test if transformers has no such head for the family: DeBERTa v1 has none for multiple choice."""
    if type(AutoConfig.for_model(family)) not in auto._model_mapping:
        pytest.skip(f"transformers has no {auto.__name__} for {family}")


def tiny_model(family: str, *, dropout: float = 0.0, seed: int = 0, **changes: Any) -> Any:
    """Return a new question answering model of the family in float32, the same each time."""
    torch.manual_seed(seed)
    return AutoModelForQuestionAnswering.from_config(tiny_config(family, dropout=dropout, **changes))


def tiny_rows(n_rows: int, family: str = "bert", *, lengths: tuple[int, int] = (6, 40), seed: int = 1) -> RowStore:
    """Return rows of random tokens whose answers stand between two marks, with segments where the family has them."""
    numbers = np.random.default_rng(seed)
    row_lengths = numbers.integers(lengths[0], lengths[1] + 1, n_rows)
    starts = np.concatenate([[0], np.cumsum(row_lengths)]).astype(np.int64)
    ids = numbers.integers(FIRST_WORD, START_MARK, starts[-1])
    first = numbers.integers(0, row_lengths - 1)
    last = numbers.integers(first + 1, row_lengths)
    ids[starts[:-1] + first], ids[starts[:-1] + last] = START_MARK, END_MARK
    tokens = {"input_ids": ids}
    if has_segments(family):
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], row_lengths)
        tokens["token_type_ids"] = (positions > np.repeat(row_lengths // 3, row_lengths)).astype(np.int64)
    return RowStore(cu_seqlens=starts, tokens=tokens, labels={"start_positions": first, "end_positions": last})


def padded(rows: Sequence[Mapping[str, Any]], pad_id: int, length: int | None = None) -> dict[str, Tensor]:
    """Return the rows below each other as everybody else's models take them: padded on the right, with a mask."""
    length = length or max(len(row["input_ids"]) for row in rows)
    batch: dict[str, Tensor] = {}
    for name, value in rows[0].items():
        if isinstance(value, int):
            batch[name] = torch.tensor([row[name] for row in rows])
            continue
        fill = pad_id if name == "input_ids" else 0
        batch[name] = torch.tensor([row[name] + [fill] * (length - len(row[name])) for row in rows])
    n_tokens = torch.tensor([len(row["input_ids"]) for row in rows])
    return batch | {"attention_mask": (torch.arange(length) < n_tokens[:, None]).long()}


def lora_targets(family: str) -> list[str]:
    """Return the names of the family's projections of queries and values."""
    own = {
        "distilbert": ["q_lin", "v_lin"],
        "mpnet": ["q", "v"],
        "modernbert": ["Wqkv"],
        "deberta": ["in_proj"],
        "deberta-v2": ["query_proj", "value_proj"],
    }
    return own.get(family, ["query", "value"])


def qa_head(family: str) -> list[str]:
    """Return the names of the family's parts after the encoder, for question answering."""
    return ["head", "classifier"] if family == "modernbert" else ["qa_outputs"]


class Pad:
    """A tokenizer as far as a Trainer is concerned: it pads, and leaves no file behind."""

    def __init__(self, pad_id: int = 0, length: int | None = None) -> None:
        self.pad_id = pad_id
        self.length = length

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        return padded(rows, self.pad_id, self.length)


def masked_loss(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross entropy of starts and ends for a padded batch, padding left out of the softmax."""
    inputs = {name: value for name, value in batch.items() if not name.endswith("_positions")}
    output, padding = model(**inputs), batch["attention_mask"] == 0
    sides = ((output.start_logits, "start_positions"), (output.end_logits, "end_positions"))
    losses = [cross_entropy(logits.masked_fill(padding, -torch.inf), batch[name]) for logits, name in sides]
    return (losses[0] + losses[1]) / 2


def arguments(folder: Path, **changes: Any) -> engine.TrainingArguments:
    """Return the settings of a short run that logs each step and saves nothing, unless told otherwise."""
    usual: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-4,
        "lr_scheduler_type": "linear",
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return engine.TrainingArguments(**(usual | changes))


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run the block with WHET_KERNELS=reference: every operator in plain torch."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WHET_KERNELS", "reference")
            library.cache_clear()
            yield
    finally:
        library.cache_clear()


@pytest.fixture(params=["native", "plain-torch"])
def operators(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test with the native operators, and without them."""
    if request.param == "native" and library() is None:
        pytest.skip("the native operators are not built here (python -m whet.kernels.build)")
    with plain_torch() if request.param == "plain-torch" else nullcontext():
        yield


def with_own_code(families: Collection[str]) -> tuple[str, ...]:
    """Return those of the families that run forwards of their own; roberta, say, runs bert's. Others are kept."""
    found: dict[Any, str] = {}
    for name in sorted(families, key=lambda name: (name not in ("bert", "llama"), name)):
        family = known().get(name)
        found.setdefault(frozenset(part.forward for part in family.parts.values()) if family else name, name)
    return tuple(found.values())


FAMILIES_WITH_OWN_CODE = with_own_code(FAMILIES)
DECODERS_WITH_OWN_CODE = with_own_code(DECODERS)


def losses(trainer: Any) -> list[float]:
    """Return the loss of each step of a run that logged each step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return a copy of the model's weights by name."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_weights(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], within: float) -> None:
    """Every weight differs by no more than this, but for those on which the loss does not depend.

    A number added to all logits of a row, or to all scores of a query, cancels in the softmax: so the gradient of the
    head's bias, of the last norm's bias and of the key biases is 0, and what is computed for it is rounding alone. The
    same holds for the sum of a head's biases by distance (MPNet), from which those of rare distances differ little.
    AdamW divides a gradient by its own size, and so makes steps of any size from it.
    """
    idle = (
        "key.bias",
        "k_lin.bias",
        "attn.k.bias",
        "qa_outputs.bias",
        "classifier.bias",
        "relative_attention_bias.weight",
        "layer.1.output.LayerNorm.bias",
        "layer.1.output_layer_norm.bias",
        "encoder.LayerNorm.bias",
    )
    assert found.keys() == wanted.keys()
    gaps = {name: float((found[name] - wanted[name]).abs().max()) for name in found if not name.endswith(idle)}
    assert {name: gap for name, gap in gaps.items() if gap > within} == {}
