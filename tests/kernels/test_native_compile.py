"""Under torch.compile the plain versions run inside the compiled graph, with the masks of the native ones."""

import torch
from native_support import need_native, position_of

from whet.kernels.activation import bias_act
from whet.kernels.batch_position import Drop
from whet.kernels.norm import Norm, add_norm

need_native()


def block(x, residual, weight, drop):
    y, _ = add_norm(bias_act(x, None, "gelu"), residual, Norm(weight, None, 1e-5), drop=drop)
    return y


def test_compiled_block_has_the_masks_of_each_step():
    x, residual, weight = torch.randn(10, 32, requires_grad=True), torch.randn(10, 32), torch.ones(32)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    for step in range(3):
        drop = Drop(0.3, position_of([10], step=step), 1)
        torch.testing.assert_close(compiled(x, residual, weight, drop), block(x, residual, weight, drop))
