"""Embeddings, LayerNorm and dropout in one pass, and gradients of the rows in use alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_support import (
    assert_near_float64,
    assert_same_on_two_threads,
    need_native,
    outputs_and_gradients,
    position_of,
    quick,
)

from whet.kernels.batch_position import Drop
from whet.kernels.embedding import RowGradient, Tables, embed, embed_reference
from whet.kernels.norm import Norm

need_native()
ENTRIES = (50, 130, 2)


def case(n, width, n_tables):
    """Return ids and [tables, weight, bias]."""
    generator = torch.Generator().manual_seed(n + width)
    ids = [torch.randint(0, entries, (n,), generator=generator) for entries in ENTRIES[:n_tables]]
    shapes = [(entries, width) for entries in ENTRIES[:n_tables]] + [(width,), (width,)]
    return ids, [torch.randn(shape, generator=generator) for shape in shapes]


def embedded_by(way, ids, drop):
    def run(*tensors):
        *tables, weight, bias = tensors
        paddings = (0, *[None] * (len(tables) - 1))
        return way(ids, Tables(tuple(tables), paddings), Norm(weight, bias, 1e-12), drop=drop)

    return run


@quick
@given(n=st.integers(1, 120), width=st.integers(8, 100), n_tables=st.integers(1, 3), p=st.sampled_from([0.0, 0.2]))
def test_up_to_three_tables_match_the_reference(n, width, n_tables, p):
    ids, tensors = case(n, width, n_tables)
    drop = Drop(p, position_of([n]), 1)
    assert_near_float64(embedded_by(embed, ids, drop), embedded_by(embed_reference, ids, drop), tensors)


def test_padding_entry_gets_no_gradient():
    ids, tensors = case(40, 16, 2)
    ids[0][:10] = 0
    _, table_grad, *_ = outputs_and_gradients(embedded_by(embed, ids, None), tensors)
    assert torch.equal(table_grad[0], torch.zeros(16))


def test_kept_gradients_equal_fresh_ones():
    """Three steps with other ids each, the second over two micro-batches: nothing of a step is left in the next."""
    _, (table, weight, bias) = case(1, 32, 1)
    kept, plain = table.clone().requires_grad_(), table.clone().requires_grad_()
    rows = RowGradient(kept)
    for step, n_micro in enumerate([1, 2, 1]):
        kept.grad = plain.grad = None
        for micro in range(n_micro):
            ids = [torch.randint(0, 50, (20,), generator=torch.Generator().manual_seed(10 * step + micro))]
            for own, gradients in ((kept, [rows]), (plain, None)):
                y = embed(ids, Tables((own,), (None,)), Norm(weight, bias, 1e-5), gradients=gradients)
                y.square().sum().backward()
        assert torch.equal(kept.grad, plain.grad)


def test_forget_clears_foreign_values():
    _, (table, weight, bias) = case(1, 32, 1)
    kept = table.clone().requires_grad_()
    rows = RowGradient(kept)
    rows.buffer += 1.0
    rows.forget()
    ids = [torch.tensor([3, 4])]
    embed(ids, Tables((kept,), (None,)), Norm(weight, bias, 1e-5), gradients=[rows]).sum().backward()
    untouched = torch.ones(50, dtype=torch.bool)
    untouched[[3, 4]] = False
    assert torch.equal(kept.grad[untouched], torch.zeros(48, 32))


def test_id_outside_of_the_table_is_refused():
    _, tensors = case(5, 16, 1)
    with pytest.raises(IndexError):
        embedded_by(embed, [torch.tensor([50])], None)(*tensors)


def test_embedding_does_not_depend_on_threads():
    ids, tensors = case(500, 48, 3)
    drop = Drop(0.1, position_of([500]), 1)
    assert_same_on_two_threads(lambda: outputs_and_gradients(embedded_by(embed, ids, drop), tensors))


def test_gradients_that_are_asked_for_are_returned():
    """torch.autograd.grad returns the table's gradient and leaves `grad`; backward(inputs=...) leaves it, too."""
    ids, (table, weight, bias) = case(30, 32, 1)
    kept, weight = table.clone().requires_grad_(), weight.requires_grad_()
    rows = RowGradient(kept)

    def loss():
        return embed(ids, Tables((kept,), (None,)), Norm(weight, bias, 1e-12), gradients=[rows]).square().sum()

    (asked,) = torch.autograd.grad(loss(), kept)
    assert kept.grad is None
    loss().backward(inputs=[weight])
    assert kept.grad is None
    loss().backward()
    assert torch.equal(kept.grad, asked)
