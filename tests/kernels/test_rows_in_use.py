"""Rows of a table that never had a gradient are passed by, and nothing else becomes another."""

import copy
import gc
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_support import assert_same_on_two_threads, need_native, quick
from torch import nn

from whet.kernels import adamw as fused_optimizer
from whet.kernels import embedding
from whet.kernels.adamw import AdamWStep, AdamWTensors
from whet.kernels.embedding import RowGradient, RowsInUse, rows_in_use
from whet.optim.optimizers.native import WhetAdamW

need_native()
TABLES = st.tuples(st.integers(1, 700), st.integers(1, 130))  # up to three of the pieces that threads work on
STEP = AdamWStep(0.9, 0.999, 1e-8, 1, grad_scale=0.5)


def table_and_gradient(n_rows, width, seed, outside=0.0):
    """Return a table, its gradient in a fifth of the rows, and these rows."""
    generator = torch.Generator().manual_seed(seed)
    table, grad = torch.randn(2, n_rows, width, generator=generator).unbind()
    rows = torch.randperm(n_rows, generator=generator)[: max(n_rows // 5, 1)]
    use = RowsInUse(table)
    use.include(rows)
    others = use.bytes == 0
    grad[others] = outside
    return table, grad, use


def clear_sample(grad, use):
    """Set to zero what is looked at of other rows."""
    rows, columns = embedding._sample(*grad.shape)
    others = use.bytes[rows] == 0
    grad[rows[others], columns[others]] = 0.0


def moments(table):
    return [torch.zeros_like(table)], [torch.zeros_like(table)]


@quick
@given(shape=TABLES, seed=st.integers(0, 999))
def test_step_over_rows_in_use_equals_the_step_over_all_rows(shape, seed):
    table, grad, use = table_and_gradient(*shape, seed)
    all_rows, bias = table.clone(), torch.randn(3)
    others = [bias, bias.clone()]
    for tensor, other, rows in zip((table, all_rows), others, ([use, None], None), strict=True):
        first, second = moments(tensor)
        tensors = AdamWTensors([tensor, other], [*first, torch.zeros(3)], [*second, torch.zeros(3)])
        tensors.update([grad, torch.ones(3)], [(1e-2, 0.0), (1e-2, 0.1)], STEP, rows)
    assert torch.equal(table, all_rows)
    assert torch.equal(*others)


@quick
@given(shape=TABLES, seed=st.integers(0, 999))
def test_other_rows_are_not_read(shape, seed):
    """Were they, what is not a number would spread."""
    table, grad, use = table_and_gradient(*shape, seed, outside=math.nan)
    AdamWTensors([table], *moments(table)).update([grad], [(1e-2, 0.0)], STEP, [use])
    assert table.isfinite().all()
    clear_sample(grad, use)
    use.put_on(grad)
    exact = grad[use.bytes == 1].double().square().sum()
    assert math.isclose(fused_optimizer.squared_norm([grad]), float(exact), rel_tol=1e-6)  # fp32 sums of 2,048 at most


def test_rows_in_use_do_not_depend_on_threads():
    def run():
        table, grad, use = table_and_gradient(3000, 70, 1)
        use.put_on(grad)
        AdamWTensors([table], *moments(table)).update([grad], [(1e-2, 0.0)], STEP, [use])
        return [table, torch.tensor(fused_optimizer.squared_norm([grad]), dtype=torch.float64)]

    assert_same_on_two_threads(run)


def test_norm_does_not_depend_on_the_row_tracking():
    """A resumed run knows less: rows whose gradients were all zero. Its norm has the same bits."""
    _, grad, use = table_and_gradient(3000, 70, 1)
    use.put_on(grad)
    before = fused_optimizer.squared_norm([grad])
    use.include(torch.arange(0, 3000, 2))
    assert fused_optimizer.squared_norm([grad]) == before


class Words:
    """A table of words whose gradient comes as in training, and AdamW over it."""

    def __init__(self, weight_decay=0.0):
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(50, 20))
        self.gradient = RowGradient(self.table)
        self.optimizer = WhetAdamW([self.table], lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
        self.optimizer.param_groups[0]["weight_decay"] = weight_decay

    def step(self, seed, *, dense=False):
        generator = torch.Generator().manual_seed(seed)
        ids, values = torch.randint(0, 12, (9,), generator=generator), torch.randn(9, 20, generator=generator)
        self.gradient.add(ids, values, None)
        assert self.table.grad is not None
        if dense:  # somebody puts another tensor there
            self.table.grad = self.table.grad + torch.randn(50, 20, generator=generator)
        grad = self.table.grad.clone()
        self.optimizer.step()
        self.table.grad = None
        return grad


def torchs(start, grads, weight_decay=0.0):
    """Return what torch's AdamW makes of the table."""
    table = nn.Parameter(start)
    optimizer = torch.optim.AdamW([table], lr=1e-2, weight_decay=weight_decay)
    for grad in grads:
        table.grad = grad
        optimizer.step()
    return table


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dense", [(), (0,), (2,), (1, 2)], ids=str)
def test_adamw_equals_torchs_for_any_gradients(dense, weight_decay):
    """After a gradient in all rows, later steps move all of them, though their gradients are zero again."""
    words = Words(weight_decay)
    start = words.table.detach().clone()
    grads = [words.step(seed, dense=seed in dense) for seed in range(6)]
    torch.testing.assert_close(words.table, torchs(start, grads, weight_decay))


def test_optimizer_skips_rows_without_gradient():
    """What stands in other rows behind torch's back is not read, neither by the step nor by the norm."""
    words = Words()
    words.step(1)
    words.gradient.add(torch.tensor([3]), torch.ones(1, 20), None)
    words.gradient.buffer.numpy()[20:] = math.nan
    rows, columns = embedding._sample(50, 20)
    words.gradient.buffer.numpy()[rows[20:], columns[20:]] = 0.0
    assert math.isfinite(fused_optimizer.squared_norm([words.gradient.buffer]))
    words.optimizer.step()
    assert words.table.isfinite().all()


def _by_data(grad, by):
    grad.data.add_(by)


def _by_numpy(grad, by):
    grad.numpy()[...] += by.numpy()


def _by_other_data(grad, by):
    grad.data = grad + by


@pytest.mark.parametrize("write", [_by_data, _by_numpy, _by_other_data])
@pytest.mark.parametrize("n_rows", [12, 50, 3000])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_what_torch_does_not_count_counts_all_the_same(write, n_rows, optimizer):
    """As noise for privacy, or decay by hand: in every row, and none of it is there in the next step."""
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(n_rows, 20))
    other = nn.Parameter(table.detach().clone())
    gradient = RowGradient(table)
    make = {"adamw": lambda one: WhetAdamW([one], lr=1e-2), "sgd": lambda one: torch.optim.SGD([one], lr=1e-2)}
    theirs = {"adamw": lambda one: torch.optim.AdamW([one], lr=1e-2, weight_decay=0.0), "sgd": make["sgd"]}
    ours, torchs_own = make[optimizer](table), theirs[optimizer](other)
    for step in range(6):
        ids = torch.randint(0, 12, (9,))
        values, by = torch.randn(9, 20), torch.randn(n_rows, 20)
        gradient.add(ids, values, None)
        other.grad = torch.zeros_like(other).index_add_(0, ids, values)
        assert table.grad is not None
        if step in (1, 2, 4):
            write(table.grad, by)
            other.grad += by
        torch.testing.assert_close(table.grad, other.grad)
        for one in (ours, torchs_own):
            one.step()
            one.zero_grad()
    torch.testing.assert_close(table, other)


def test_second_use_of_the_table_invalidates_the_tracking():
    """Autograd adds to the same gradient, in rows that nobody announced; the step after begins from zero."""
    words, start = Words(), Words().table.detach().clone()
    grads = []
    for number in range(4):
        words.gradient.add(torch.tensor([1, 2]), torch.ones(2, 20), None)
        assert words.table.grad is not None
        if number in (0, 2):
            words.table[30:35].square().sum().backward()
            assert rows_in_use(words.table.grad) is None
        grads.append(words.table.grad.clone())
        exact = grads[-1].double().square().sum()
        assert math.isclose(fused_optimizer.squared_norm([words.table.grad]), float(exact), rel_tol=1e-6)
        words.optimizer.step()
        words.table.grad = None
    assert [bool(grad[30:35].any()) for grad in grads] == [True, False, True, False]
    torch.testing.assert_close(words.table, torchs(start, grads))


def test_second_gradient_over_the_same_table_is_added():
    words = Words()
    other = RowGradient(words.table)
    words.gradient.add(torch.tensor([1]), torch.ones(1, 20), None)
    other.add(torch.tensor([2]), torch.ones(1, 20), None)
    assert words.table.grad is not None
    assert math.isclose(fused_optimizer.squared_norm([words.table.grad]), 40.0)
    before = words.table.detach().clone()
    words.optimizer.step()
    assert (words.table != before).any(dim=1).nonzero().flatten().tolist() == [1, 2]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copied_optimizer_continues(copied):
    words = Words()
    words.step(0)
    optimizer = copied(words.optimizer)
    ((table,),) = (group["params"] for group in optimizer.param_groups)
    table.grad = torch.ones(50, 20)
    before = table.detach().clone()
    optimizer.step()
    assert (table != before).all()


def test_clipping_factor_applies_to_one_step():
    words = Words()
    words.optimizer.grad_scale = 0.5
    words.optimizer.register_step_post_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        words.step(0)
    assert words.optimizer.grad_scale == 1.0


def test_resumed_run_updates_earlier_rows():
    """Their moments are in the checkpoint; the rows of a new process begin empty."""
    whole, resumed = Words(), Words()
    for seed in range(3):
        whole.step(seed)
    resumed.table.data.copy_(whole.table.data)
    resumed.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
    for seed in range(3, 6):
        whole.step(seed)
        resumed.step(seed)
        assert torch.equal(whole.table, resumed.table)


def test_loaded_state_restores_the_rows_in_use():
    words, other = Words(), Words()
    words.step(0)
    for seed in range(20, 24):
        other.step(seed)
    words.table.data.copy_(other.table.data)
    words.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
    words.step(5)
    other.step(5)
    assert torch.equal(words.table, other.table)


def test_state_of_torchs_adamw_continues():
    words = Words()
    theirs = nn.Parameter(words.table.detach().clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.0)
    theirs.grad = torch.randn(50, 20)
    optimizer.step()
    words.table.data.copy_(theirs.data)
    words.optimizer.load_state_dict(optimizer.state_dict())
    theirs.grad = words.step(3)
    optimizer.step()
    torch.testing.assert_close(words.table, theirs)


def test_torchs_adamw_continues_from_whets_state():
    words = Words()
    words.step(1)
    theirs = nn.Parameter(words.table.detach().clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.0, fused=True)
    optimizer.load_state_dict(copy.deepcopy(words.optimizer.state_dict()))
    theirs.grad = words.step(3)
    optimizer.step()
    torch.testing.assert_close(words.table, theirs)


def test_a_gradient_that_is_zeroed_and_never_dropped_takes_no_more_memory():
    """As by zero_grad(set_to_none=False), in a training of any length."""
    words, other = Words(), Words()

    def live():
        return sum(one.numel() for one in gc.get_objects() if type(one) is torch.Tensor and one.dtype == torch.int64)

    sizes = []
    for step in range(700):
        other.step(step % 90)
        generator = torch.Generator().manual_seed(step % 90)
        ids, values = torch.randint(0, 12, (9,), generator=generator), torch.randn(9, 20, generator=generator)
        words.gradient.add(ids, values, None)
        words.optimizer.step()
        words.optimizer.zero_grad(set_to_none=False)
        if step in (199, 699):
            sizes.append(live())
    torch.testing.assert_close(words.table, other.table)
    assert sizes[1] - sizes[0] < 9 * 100  # of 4,500 ids
