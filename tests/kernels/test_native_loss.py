"""The chunked cross entropy against the textbook in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_support import assert_near_float64, assert_same_on_two_threads, need_native, outputs_and_gradients, quick

from whet.kernels import cross_entropy as fused_loss
from whet.kernels.cross_entropy import linear_cross_entropy_reference, row_cross_entropy_reference

need_native()


def case(n, width, n_words, dtype=torch.float32):
    generator = torch.Generator().manual_seed(n + width + n_words)
    labels = torch.randint(-1, n_words, (n,), generator=generator)
    labels[labels == -1] = -100
    return (
        torch.randn(n, width, generator=generator).to(dtype),
        torch.randn(n_words, width, generator=generator).to(dtype),
        labels,
    )


@quick
@given(
    n=st.integers(1, 40),
    n_words=st.integers(2, 300),
    chunk_rows=st.integers(1, 20),
    cap=st.sampled_from([None, 2.0, 30.0]),
    products=st.sampled_from(["mkl", "onednn"]),
)
def test_any_chunk_gives_the_textbook_loss(n, n_words, chunk_rows, cap, products):
    hidden, weight, labels = case(n, 24, n_words)
    bias = torch.linspace(-1.0, 1.0, n_words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_loss, "_CHUNK_BYTES", chunk_rows * n_words * 4)
        patch.setattr(fused_loss, "_LEAST_ROWS", 1)
        patch.setattr(fused_loss, "_BLOCK", 64)
        patch.setattr(fused_loss, "by_onednn", lambda: products == "onednn")
        for given in ([hidden, weight], [hidden, weight, bias]):
            assert_near_float64(
                lambda h, w, b=None: fused_loss.linear_cross_entropy(h, w, labels, cap, b),
                lambda h, w, b=None: linear_cross_entropy_reference(h, w, labels, cap, b),
                given,
            )


def test_bf16_loss_matches_the_reference():
    hidden, weight, labels = case(30, 24, 200, torch.bfloat16)
    given = [hidden, weight, torch.linspace(-1.0, 1.0, 200).bfloat16()]
    found = outputs_and_gradients(lambda h, w, b: fused_loss.linear_cross_entropy(h, w, labels, None, b), given)
    exact = outputs_and_gradients(
        lambda h, w, b: linear_cross_entropy_reference(h, w, labels, None, b), [one.double() for one in given]
    )
    for ours, theirs in zip(found, exact, strict=True):  # the logits themselves are rounded to 8 bits: scores reach 20
        assert float((ours - theirs).norm() / theirs.norm()) < 0.03


def test_gradient_of_the_weight_under_autocast_is_summed_in_fp32(monkeypatch):
    hidden, weight, labels = case(30, 24, 200)
    found, chunks = [], (5, 1000)
    for n_rows in chunks:
        monkeypatch.setattr(fused_loss, "by_pairs", lambda: True)  # elsewhere this way is slower, and the same
        monkeypatch.setattr(fused_loss, "chunk_rows", lambda _, n=n_rows: n)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            loss = fused_loss.linear_cross_entropy(x, w, labels)
        loss.backward()
        found.append(w.grad)
    assert found[0].dtype == torch.float32
    # rounded to bf16 chunk by chunk, six chunks and one would differ by 2^-9
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_gradients_of_bf16_weights_are_rounded_once_whatever_the_chunks(monkeypatch):
    """Added up in bf16, 64 chunks would be off by five times as much as bf16 rounds."""
    monkeypatch.setattr(fused_loss, "chunk_rows", lambda _: 32)
    hidden, weight, _ = case(2048, 24, 200, torch.bfloat16)
    labels = (torch.rand(2048, generator=torch.Generator().manual_seed(1)) ** 4 * 200).long()  # some are frequent
    given = [hidden * 0.2, weight, torch.zeros(200).bfloat16()]
    _, _, *found = outputs_and_gradients(lambda h, w, b: fused_loss.linear_cross_entropy(h, w, labels, None, b), given)
    _, _, *exact = outputs_and_gradients(
        lambda h, w, b: linear_cross_entropy_reference(h, w, labels, None, b), [one.double() for one in given]
    )
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 2**-8


def test_second_backward_pass_has_the_same_gradients():
    hidden, weight, labels = case(9, 8, 21)
    loss = fused_loss.linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), labels) / 3
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rows_without_label_are_ignored():
    hidden, weight, labels = case(6, 8, 11)
    labels[:] = -100
    loss, *grads = outputs_and_gradients(lambda h, w: fused_loss.linear_cross_entropy(h, w, labels), [hidden, weight])
    assert float(loss) == 0.0
    assert all(float(grad.abs().max()) == 0.0 for grad in grads)


def test_label_outside_of_the_vocabulary_is_refused():
    hidden, weight, labels = case(6, 8, 11)
    labels[2] = 11
    with pytest.raises(IndexError):
        fused_loss.linear_cross_entropy(hidden, weight, labels)


def test_losses_do_not_depend_on_threads():
    hidden, weight, labels = case(50, 16, 5000)

    def loss_of(logits):
        losses = torch.empty(50)
        return [fused_loss._losses_and_gradient(logits, labels, losses, differentiate=True), losses]

    assert_same_on_two_threads(lambda: loss_of(hidden @ weight.T))


@quick
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=9), seed=st.integers(0, 5))
def test_rows_of_any_length_give_the_textbook_loss(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor([int(torch.randint(0, n, (1,), generator=generator)) for n in lengths])
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    logits = 3 * torch.randn(sum(lengths), generator=generator)
    weights = torch.rand(len(lengths), generator=generator)
    assert_near_float64(
        lambda x: fused_loss.row_cross_entropy(x, labels, starts) * weights.to(x.dtype),
        lambda x: row_cross_entropy_reference(x, labels, starts) * weights.to(x.dtype),
        [logits],
    )


def test_row_of_one_token_has_no_loss():
    logits = torch.tensor([5.0, -2.0], requires_grad=True)
    losses = fused_loss.row_cross_entropy(logits, torch.tensor([0, 0]), torch.tensor([0, 1, 2], dtype=torch.int32))
    losses.sum().backward()
    assert losses.tolist() == [0.0, 0.0]
    assert logits.grad is not None
    assert logits.grad.tolist() == [0.0, 0.0]
