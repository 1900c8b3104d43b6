"""DeBERTa in all its configurations: packed passes compute what the untouched model computes from padded batches."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM
from transformers.models.deberta_v2 import modeling_deberta_v2 as theirs

import engine
import whet
from tiny import arguments, padded, tiny_config, tiny_model, tiny_rows
from whet.data.batch import pack
from whet.errors import ConfigError
from whet.kernels.batch_position import Drop
from whet.kernels.dropout import dropout
from whet.models.families.deberta import places_by_distance
from whet.models.packable import why_padded
from whet.models.packed import PackedModel, position_of, prepare

FAMILY, FIRST = "deberta-v2", "deberta"
# Logits are of size 0.5, gradients are sums of hundreds of terms of size 0.1; both rounded in float32. Seen: 1e-6.
TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "as v3": {},
    "own projections": {"share_att_key": False},
    "own projections, without norm": {"share_att_key": False, "norm_rel_ebd": "none"},
    "queries alone": {"pos_att_type": ["c2p"]},
    "keys alone": {"pos_att_type": "p2c", "share_att_key": False},
    "no term": {"pos_att_type": []},
    "no term by name": {"pos_att_type": None},
    "without buckets": {"position_buckets": -1},
    "rows beyond the table": {"position_buckets": -1, "max_relative_positions": 12},
    "rows beyond the buckets": {"position_buckets": 8, "max_relative_positions": 24},
    "no relative attention": {"relative_attention": False, "position_biased_input": True},
    "positions and segments": {"position_biased_input": True, "type_vocab_size": 2},
    "segments without positions": {"type_vocab_size": 2},
    "narrow embeddings": {"embedding_size": 16},
}
FIRST_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "v1": {},
    "v1, queries alone": {"pos_att_type": ["c2p"]},
    "v1, keys alone": {"pos_att_type": "p2c"},
    "v1, no term": {"pos_att_type": []},
    "v1, rows beyond the table": {"max_relative_positions": 12},
    "v1, no relative attention": {"relative_attention": False},
    "v1, positions and segments": {"position_biased_input": True, "type_vocab_size": 2},
}
CASES = [
    *((FAMILY, changes) for changes in CONFIGURATIONS.values()),
    *((FIRST, changes) for changes in FIRST_CONFIGURATIONS.values()),
]

operators = pytest.mark.usefixtures("operators")


@pytest.mark.parametrize(("buckets", "most"), [(256, 512), (16, 80), (32, 512), (10, 23), (-1, 64), (-1, 512)])
@pytest.mark.parametrize("length", [1, 2, 17, 128, 129, 300, 512, 513, 700])
def test_places_are_those_of_transformers(buckets: int, most: int, length: int) -> None:
    """For every pair of tokens: a logarithm that is rounded otherwise would move a distance to another bucket."""
    tokens = torch.zeros(length, 1)
    relative = theirs.build_relative_position(tokens, tokens, buckets, most)[0]
    span = buckets if buckets > 0 else most
    wanted = (relative + span).clamp(0, 2 * span - 1)
    at = torch.arange(length)
    found = places_by_distance(buckets, most, length - 1)[at - at[:, None] + length - 1]
    assert torch.equal(found, wanted)
    assert torch.equal(found, (-relative.T + span).clamp(0, 2 * span - 1))  # the keys' term reads the same places


def logits_and_gradients(model: Any, start: Tensor, end: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    (start.square().sum() + end.square().sum()).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return torch.stack([start, end]).detach(), grads


def packed_results(folder: Path, rows: Any, family: str = FAMILY, **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    trainer = engine.Trainer(model=tiny_model(family, **changes).train(), args=arguments(folder))
    objective: Any = trainer.objective
    assert objective.packed
    batch = objective.batch(rows, range(len(rows)), 0)
    start, end, _ = objective.span_logits(objective.forward(batch, seed=0, step=0), batch)
    return logits_and_gradients(trainer.model, start, end)


def padded_results(rows: Any, family: str, **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model = tiny_model(family, **changes).train()
    batch = padded(list(rows), model.config.pad_token_id)
    real = batch["attention_mask"].bool()
    output = model(**{name: value for name, value in batch.items() if not name.endswith("_positions")})
    return logits_and_gradients(model, output.start_logits[real], output.end_logits[real])


@operators
@pytest.mark.parametrize(("family", "changes"), CASES, ids=[*CONFIGURATIONS, *FIRST_CONFIGURATIONS])
def test_each_configuration_equals_the_untouched_models(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    rows = tiny_rows(5, family, lengths=(3, 70))
    logits, gradients = packed_results(tmp_path, rows, family, **changes)
    expected_logits, expected = padded_results(rows, family, **changes)
    assert float(expected_logits.max() - expected_logits.min()) > 0.1
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=TOLERANCE)
    used = {name for name, grad in expected.items() if grad.any()}
    assert used <= gradients.keys()
    for weight in used:
        exact = expected[weight]
        limit = GRADIENT_TOLERANCE * max(float(exact.abs().max()), 0.1)
        assert float((gradients[weight] - exact).abs().max()) < limit, weight


def test_relative_vectors_get_gradients(tmp_path: Path) -> None:
    """What the test above compares is there: the table and its norm, of near and far distances."""
    _, gradients = packed_results(tmp_path, tiny_rows(5, FAMILY, lengths=(60, 70)))
    table = gradients["deberta.encoder.rel_embeddings.weight"]
    assert (table.abs().sum(1) > 0).sum() == len(table) - 1  # the row of the distance -16 buckets is for longer rows
    assert gradients["deberta.encoder.LayerNorm.weight"].any()


@operators
@pytest.mark.parametrize("legacy", [True, False])
def test_both_heads_for_masked_words_equal_the_untouched_models(legacy: bool) -> None:
    torch.manual_seed(1)
    model = AutoModelForMaskedLM.from_config(tiny_config(FAMILY, legacy=legacy)).eval()
    batch = padded(list(tiny_rows(4, FAMILY)), 0)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.no_grad():
        wanted = model(**inputs, labels=labels)
        found = whet.optimize(model)(**inputs, labels=labels)
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(found.logits[real], wanted.logits[real], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=0)


@operators
@pytest.mark.parametrize("padding", ["sampled", "all"])
@pytest.mark.parametrize("family", [FAMILY, FIRST])
def test_states_of_padding_are_exact_even_if_sampled(family: str, padding: Any) -> None:
    """All padding of a row has one state: the question answering loss of transformers, which counts it, is the same."""
    batch = padded(list(tiny_rows(5, family)), 0, length=60)
    wanted = tiny_model(family)(**batch)
    found = whet.optimize(tiny_model(family), padding=padding)(**batch)
    torch.testing.assert_close(found.start_logits, wanted.start_logits, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=0)


def kept_by_layer(packed: PackedModel, first_slot: int, step: int) -> list[Tensor]:
    """Return which channels of the vectors by distance each layer gets, in a packed pass."""
    seen: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda *call: seen.append(call[2]["rel_embeddings"] != 0), with_kwargs=True)
        for module in packed.module.modules()
        if type(module).__name__ == "DisentangledSelfAttention"
    ]
    batch = pack(tiny_rows(3, FAMILY, lengths=(20, 20), seed=step + 1), first_slot=first_slot, position_offset=0)
    packed(batch, seed=3, step=step)
    for hook in hooks:
        hook.remove()
    return seen


@operators
def test_vectors_by_distance_are_dropped_by_layer_and_step_alone() -> None:
    """All micro-batches of a step have one mask, or a step would depend on how it is split."""
    packed = prepare(tiny_model(FAMILY, dropout=0.3).train())
    assert packed is not None
    first, second = kept_by_layer(packed, 0, step=4)
    assert 0.6 < float(first.float().mean()) < 0.8
    assert not torch.equal(first, second)
    assert torch.equal(kept_by_layer(packed, 12, step=4)[0], first)
    assert not torch.equal(kept_by_layer(packed, 0, step=5)[0], first)
    packed.module.eval()
    assert all(kept.all() for kept in kept_by_layer(packed, 0, step=4))


def test_longer_rows_drop_the_same_vectors() -> None:
    """A batch reads the part of the table that its longest row needs: a mask belongs to the row of the table."""
    position = position_of(pack(tiny_rows(3, FAMILY), first_slot=0, position_offset=0), seed=1, step=2)
    tables = [(60, 40), (40, 80)]
    short, long = (dropout(torch.ones(n, 32), Drop(0.3, position.of_table(first, n), 5)) for first, n in tables)
    assert torch.equal(long[20:60], short)


def test_a_convolution_keeps_the_padding_and_says_so() -> None:
    why = why_padded(tiny_model(FAMILY, conv_kernel_size=3))
    assert why is not None
    assert "Conv1d" in why


def test_talking_heads_keep_the_padding_and_say_so() -> None:
    why = why_padded(tiny_model(FIRST, talking_head=True))
    assert why is not None
    assert "talking_head" in why


def test_the_first_debertas_own_code_in_bf16_is_refused_with_a_way_to_go_on(tmp_path: Path) -> None:
    """The mask of transformers' code overflows under autocast; whet's own attention trains in bf16."""
    rows = list(tiny_rows(8, FIRST))
    padding = {"data_collator": partial(padded, pad_id=0)}
    eager = arguments(tmp_path, bf16=True, max_steps=2, attn_implementation="eager")
    with pytest.raises(ConfigError, match="fails under autocast in 16 bits"):
        engine.Trainer(tiny_model(FIRST), eager, train_dataset=rows, **padding).train()
    usual = arguments(tmp_path, bf16=True, max_steps=2)
    assert engine.Trainer(tiny_model(FIRST), usual, train_dataset=rows).train().global_step == 2


def test_an_attention_of_a_users_own_keeps_the_padding() -> None:
    model = tiny_model(FAMILY)

    class Own(theirs.DisentangledSelfAttention):
        def forward(self, *given: Any, **options: Any) -> Any:
            return super().forward(*given, **options)

    model.deberta.encoder.layer[1].attention.self.__class__ = Own
    assert why_padded(model) is not None


@operators
@pytest.mark.parametrize(("family", "changes"), [(FAMILY, {"position_buckets": 14}), (FIRST, {})])
def test_training_after_an_evaluation_in_inference_mode(family: str, changes: dict[str, Any]) -> None:
    """What the evaluation computes of distances is kept, and autograd keeps no tensor of that mode."""
    changes |= {"max_relative_positions": 58}  # a table that no other test has kept
    rows = tiny_rows(4, family, lengths=(40, 50))
    wanted, expected = padded_results(rows, family, **changes)
    model, batch = whet.optimize(tiny_model(family, **changes)), padded(list(rows), 0)
    inputs = {name: value for name, value in batch.items() if not name.endswith("_positions")}
    with torch.inference_mode():
        model.eval()(**inputs)
    out, real = model.train()(**inputs), batch["attention_mask"].bool()
    found, gradients = logits_and_gradients(model, out.start_logits[real], out.end_logits[real])
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
    for name, grad in gradients.items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=GRADIENT_TOLERANCE)
