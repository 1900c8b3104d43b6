"""The native operators as custom operators of torch: torch.compile keeps them in its graph without looking inside.

Each module registers one operator and its gradient. They call the pure functions of `layers/` and `attention/`, which
the autograd Functions of eager execution call too. An operator of torch takes and returns tensors and numbers only, and
always the same number of tensors, none of which share memory: an empty tensor stands for no result.
"""

from whet.kernels.torch_ops import activation, attention, dropout, norm

REGISTERED = all((activation.NAME, attention.NAME, dropout.NAME, norm.NAME))
"""True: importing this package registers the operators."""
