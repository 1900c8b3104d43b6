"""The number formats that a run stores and computes in: fp32 master weights, and the log line about them."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet import console
from whet.errors import ConfigError
from whet.kernels import shared_memory
from whet.log import logger
from whet.precision.device import uses_tf32
from whet.precision.policy import Precision

_SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_PRODUCTS = {"int8": "int8 (those that make gradients of weights: fp32)"}
_HALF = (torch.bfloat16, torch.float16)


_FLOATING_LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm)


def require_floating(model: nn.Module) -> None:
    """Raise ConfigError for plain layers with integer weights: torch cannot compute with them."""
    odd = [
        f"{name}.weight ({module.weight.dtype})"
        for name, module in model.named_modules()
        if type(module) in _FLOATING_LAYERS and type(module.weight) is nn.Parameter
        if not module.weight.is_floating_point()  # pyright: ignore[reportCallIssue]
    ]
    if odd:
        raise ConfigError(
            what="some weights of the model are integers",
            got=", ".join(odd[:3]) + (f" and {len(odd) - 3} more" if len(odd) > 3 else ""),
            why="a plain layer of torch multiplies numbers of one floating-point format; quantised weights need "
            "a layer that knows their scale",
            fix="load the model with the quantization_config that it was saved with, or use weights in float32",
        )


def raise_to_float32(model: nn.Module) -> None:
    """Convert half-precision weights and buffers to float32, in place; the log says how many.

    Usual learning rates make updates smaller than a weight's last bit (2^-9 of it in bf16), which would be lost.
    Parameters stay the same objects, so an existing optimizer still works, and those over one memory still share it.
    """
    found = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dtype in _HALF]
    stored = ", ".join(sorted({_SHORT[tensor.dtype] for tensor in found}))
    together = shared_memory.converted_together(found, torch.float32)
    for number, tensor in enumerate(found):
        gradient, tensor.grad = tensor.grad, None
        tensor.data = together.pop(number) if number in together else tensor.data.float()
        tensor.grad = None if gradient is None else gradient.float()
    if found:
        n_weights = console.count(sum(tensor.numel() for tensor in found))
        logger.warning("%s weights came in %s and are trained in fp32, and saved in it", n_weights, stored)


def describe(model: nn.Module, precision: Precision, optimizer: Optimizer) -> str:
    """Return the formats of weights, products and optimizer state after a first step."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    name = "tf32" if precision.name == "fp32" and uses_tf32(device) else precision.name
    states = (item for values in optimizer.state.values() for item in values.items())
    kept = _formats(value for name, value in states if isinstance(value, Tensor) and name != "step")
    products = _PRODUCTS.get(name, name)
    return f"weights {_formats(model.parameters())}, products {products}, optimizer state {kept}"


def _formats(tensors: Iterable[Tensor]) -> str:
    """Return the formats by size, most bytes first: `fp32 (91 MB)`."""
    n_bytes: Counter[str] = Counter()
    for tensor in tensors:
        name = _SHORT.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        n_bytes[name] += tensor.numel() * tensor.element_size()
    return " + ".join(f"{name} ({count / 1e6:.4g} MB)" for name, count in n_bytes.most_common()) or "none"
