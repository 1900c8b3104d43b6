"""Blocks that a user copies, shares or takes from elsewhere, before and after whet has changed the model.

Nothing may leak from one row to another: the result is that of the untouched model, or an error says how to go on.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import engine
import whet
from tiny import DECODERS, FAMILIES, arguments, losses, tiny_config
from whet.models.known import known

Change = Callable[[Any], None]
_WITHIN = 2e-5
"""Two orders of summation in float32."""
_MECHANISMS = ("bert", "deberta-v2", "modernbert", "mpnet", "llama")
"""One family of each kind of attention; the others run among the long tests."""


def _blocks(model: Any) -> nn.ModuleList:
    """Return the list that holds the model's blocks."""
    family = known()[model.config.model_type]
    lists = [part for part in model.base_model.modules() if isinstance(part, nn.ModuleList)]
    return next(part for part in lists if len(part) and family.is_block(part[0]))


def append_a_copy(model: Any) -> None:
    blocks = _blocks(model)
    blocks.append(deepcopy(blocks[0]))
    if model.config.model_type in DECODERS:  # they run as many as they are configured to
        model.config.num_hidden_layers = len(blocks)
        if getattr(model.config, "layer_types", None):
            model.config.layer_types = [*model.config.layer_types, model.config.layer_types[0]]


def replace_by_a_copy(model: Any) -> None:
    blocks = _blocks(model)
    blocks[0] = deepcopy(blocks[_last_like_the_first(model)])


def share(model: Any) -> None:
    blocks = _blocks(model)
    blocks[_last_like_the_first(model)] = blocks[0]


def _last_like_the_first(model: Any) -> int:
    """Return the last place whose window is that of the first: transformers takes windows from places, not blocks."""
    kinds = getattr(model.config, "layer_types", None) or [None] * len(_blocks(model))
    return max(place for place, kind in enumerate(kinds) if kind == kinds[0])


CHANGES: dict[str, tuple[str, Change]] = {
    "a copy appended": ("after", append_a_copy),
    "a copy instead": ("after", replace_by_a_copy),
    "shared before": ("before", share),
    "shared after": ("after", share),
}


def _model(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    auto = AutoModelForCausalLM if family in DECODERS else AutoModelForSequenceClassification
    kinds = getattr(tiny_config(family), "layer_types", None) or []
    if len(set(kinds)) > 1:
        changes |= {"num_hidden_layers": 3, "layer_types": [kinds[0], kinds[1], kinds[0]]}
    if family == "gpt2":
        changes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = auto.from_config(tiny_config(family, **changes)).eval()
    model.config.use_cache = False  # transformers' cache takes a block that runs twice for two calls
    return model


def _batch(*lengths: int) -> dict[str, Tensor]:
    ids = torch.randint(10, 190, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}


def _answers(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found = model(**batch).logits
    return found[batch["attention_mask"].bool()] if found.dim() == 3 else found


def _changed(family: str, when: str, change: Change, **changes: Any) -> tuple[Any, Any]:
    """Return the model without whet, and as whet.optimize has it, both with the change."""
    plain, ours = _model(family, **changes), _model(family, **changes)
    change(plain)
    if when == "before":
        change(ours)
    whet.optimize(ours)
    if when == "after":
        _answers(ours, _batch(5, 3))
        change(ours)
    return plain.eval(), ours.eval()


def _holds_in_optimize(family: str, name: str) -> None:
    plain, ours = _changed(family, *CHANGES[name])
    for lengths in ((12, 5, 1, 20), (7,), (9, 9), (1, 1, 1)):
        batch = _batch(*lengths)
        torch.testing.assert_close(_answers(ours, batch), _answers(plain, batch), rtol=_WITHIN, atol=_WITHIN)


def _holds_in_trainer(family: str, name: str, folder: Path, *, adapted: bool = False, **settings: Any) -> None:
    when, change = CHANGES[name]
    labels = {} if family in DECODERS else {"labels": 1}
    rows = [{"input_ids": list(range(10 + n, 16 + 4 * n)), **labels} for n in range(4)]
    if family in DECODERS:
        rows = [row | {"labels": row["input_ids"]} for row in rows]
    rows = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
    plain, ours = _model(family), _model(family)
    change(plain)
    if when == "before":
        change(ours)
    if adapted:
        ours = _with_adapter(ours)
    args = arguments(folder, max_steps=1, **settings)
    trainer = engine.Trainer(model=ours, args=args, data_collator=_padded, train_dataset=rows)  # type: ignore[arg-type]
    if when == "after":
        change(trainer.model.get_base_model() if adapted else trainer.model)
    trainer.train()
    with torch.no_grad():
        wanted = float(plain.train()(**_padded(rows)).loss)
    assert losses(trainer) == pytest.approx([wanted], rel=1e-4)


def _with_adapter(model: Any) -> Any:
    """Return the model with an adapter, which adds nothing yet."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules="all-linear", r=2, lora_alpha=8))


def _padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}

    def column(name: str) -> Tensor:
        given = [row[name] for row in rows]
        if isinstance(given[0], int):
            return torch.tensor(given)
        return torch.tensor([one + [fill[name]] * (width - len(one)) for one in given])

    return {name: column(name) for name in rows[0]}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("family", _MECHANISMS)
def test_changed_blocks_answer_as_without_whet(family: str, name: str) -> None:
    _holds_in_optimize(family, name)


@pytest.mark.reliability
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("family", [one for one in (*FAMILIES, *DECODERS) if one not in _MECHANISMS])
def test_changed_blocks_of_every_family_answer_as_without_whet(family: str, name: str) -> None:
    _holds_in_optimize(family, name)


@pytest.mark.parametrize("name", CHANGES)
def test_changed_blocks_train_as_without_whet(name: str, tmp_path: Path) -> None:
    _holds_in_trainer("bert", name, tmp_path)


@pytest.mark.reliability
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("how", ["gradient_checkpointing", "torch_compile", "adapter"])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_changed_blocks_train_under_other_methods(family: str, name: str, how: str, tmp_path: Path) -> None:
    if how == "adapter":
        pytest.importorskip("peft")
        _holds_in_trainer(family, name, tmp_path, adapted=True)
    else:
        _holds_in_trainer(family, name, tmp_path, **{how: True})


@pytest.mark.reliability
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("family", [one for one in (*FAMILIES, *DECODERS) if one != "bert"])
def test_changed_blocks_of_every_family_train_as_without_whet(family: str, name: str, tmp_path: Path) -> None:
    _holds_in_trainer(family, name, tmp_path)


def swap(model: Any) -> None:
    """Put the first two blocks, one with a window and one without, into each other's places."""
    blocks = _blocks(model)
    blocks[0], blocks[1] = blocks[1], blocks[0]


def copy_to_the_other_kind(model: Any) -> None:
    _blocks(model)[1] = deepcopy(_blocks(model)[0])


_WITH_WINDOWS = ("gemma2", "gemma3_text", "qwen2", "qwen3")


@pytest.mark.parametrize("change", [swap, copy_to_the_other_kind])
@pytest.mark.parametrize("family", _WITH_WINDOWS)
def test_blocks_in_places_of_the_other_kind_answer_as_without_whet(family: str, change: Change) -> None:
    """transformers takes the window, and Gemma 3's angles, from the place: such a model runs padded."""
    with pytest.raises(whet.WhetError, match=r"block . has .* window.*, and its place in the configuration"):
        _changed(family, "before", change)
    plain, ours = _changed(family, "after", change)
    unchanged = _model(family)
    for lengths in ((12, 5, 1, 20), (19,)):
        batch = _batch(*lengths)
        torch.testing.assert_close(_answers(ours, batch), _answers(plain, batch), rtol=_WITHIN, atol=_WITHIN)
        assert not torch.allclose(_answers(ours, batch), _answers(unchanged, batch), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3"])
def test_blocks_in_places_of_the_other_kind_train_padded(family: str, tmp_path: Path) -> None:
    rows: Any = [{"input_ids": list(range(10 + n, 30 + 4 * n))} for n in range(4)]
    rows = [row | {"labels": row["input_ids"], "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    moved, plain = _model(family), _model(family)
    swap(moved)
    swap(plain)
    before = engine.Trainer(moved, arguments(tmp_path, max_steps=1), _padded, rows)
    assert not before.objective.packed
    before.train()
    with torch.no_grad():
        assert losses(before) == pytest.approx([float(plain.train()(**_padded(rows)).loss)], rel=1e-4)
    after = engine.Trainer(_model(family), arguments(tmp_path, max_steps=1), _padded, rows)
    swap(after.model)
    after.train()
    assert losses(after) == pytest.approx(losses(before), rel=1e-4)


class _Wrapper(nn.Module):
    """A block of a user's own that runs another one, which is no child of it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.held = [block]

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.held[0](*args, **options)


def test_a_last_block_that_also_runs_unseen_is_refused() -> None:
    """No list of modules says that it runs twice: the attention that gets too few tokens does."""
    model = whet.optimize(_model("bert"))
    blocks, batch = _blocks(model), _batch(12, 5, 1, 20)
    blocks[0] = _Wrapper(blocks[-1])
    with pytest.raises(whet.WhetError, match="last_block_tokens"):
        model(**batch)


@pytest.mark.parametrize("family", ["bert", "deberta", "deberta-v2", "mpnet", "modernbert", "llama"])
@pytest.mark.parametrize("of", ["another model of whet's", "an untouched model"])
def test_a_block_of_another_model_is_refused(family: str, of: str) -> None:
    model, other = whet.optimize(_model(family)), _model(family)
    _blocks(model)[0] = _blocks(whet.optimize(other) if of.startswith("another") else other)[0]
    if of.startswith("an "):
        for part in _blocks(model)[0].modules():
            if hasattr(part, "config"):
                part.config = model.config
    with pytest.raises(whet.WhetError, match="came into the model after"):
        model(**_batch(12, 5, 1, 20))


def test_a_block_of_another_model_is_refused_in_training(tmp_path: Path) -> None:
    model = _model("bert", dropout=0.1)
    rows = [{"input_ids": list(range(10 + n, 16 + 4 * n)), "labels": 1} for n in range(4)]
    rows = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
    args = arguments(tmp_path, max_steps=1)
    trainer = engine.Trainer(model=model, args=args, data_collator=_padded, train_dataset=rows)  # type: ignore[arg-type]
    _blocks(model)[0] = _blocks(whet.optimize(_model("bert", dropout=0.1)))[0]
    with pytest.raises(whet.WhetError, match="came into the model after"):
        trainer.train()


def test_copied_blocks_draw_masks_of_their_own() -> None:
    """With one mask for a block and its copy, both would drop the same channels."""
    model = whet.optimize(_model("bert", dropout=0.5)).train()
    _blocks(model).append(deepcopy(_blocks(model)[0]))
    seen: list[Tensor] = []
    blocks: Any = _blocks(model)
    for block in (blocks[0], blocks[-1]):
        block.attention.output.dropout.register_forward_hook(lambda _, __, out: seen.append(out == 0))
    model(**_batch(12, 5, 1, 20))
    assert not torch.equal(*seen)


def test_a_copy_and_its_original_run_in_threads() -> None:
    model = whet.optimize(_model("bert"))
    batches = [_batch(12, 5, 1, 20), _batch(3, 9)]
    wanted = [_answers(model, batch) for batch in batches]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(_answers, [model, deepcopy(model)] * 4, batches * 4))
    for one, expected in zip(found, wanted * 4, strict=True):
        torch.testing.assert_close(one, expected)
