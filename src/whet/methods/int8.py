"""Which models products in 8 bits serve."""

from torch import nn

from whet.errors import ConfigError
from whet.models import fused
from whet.models.families import FAMILIES
from whet.models.packed import PackedModel
from whet.precision.int8 import INSTEAD
from whet.precision.policy import Precision


def require_fused(model: nn.Module, packed: PackedModel | None, precision: Precision) -> None:
    """Raise ConfigError where int8 is asked for and none of the model's linear layers run on whet's operators."""
    if precision.name != "int8" or (packed is not None and any(map(_has_products, packed.module.modules()))):
        return
    raise ConfigError(
        what="int8 is asked for, and none of this model's layers could run in it",
        got=f"{type(model).__name__}, padded batches" if packed is None else type(model).__name__,
        why=f"it serves encoders of the families {', '.join(FAMILIES)} with a head for questions, without padding",
        fix=f"{INSTEAD}; or leave out what makes batches padded (--attn_implementation, a collator)",
    )


def _has_products(module: nn.Module) -> bool:
    """Return whether an operator multiplies by the weight of one of the module's linear layers."""
    if not fused.is_fused(module):
        return False
    called = fused.called(module)
    slots = fused.PARTS[type(module).__name__].slots
    return any(standard is nn.Linear and path not in called for path, standard in slots.items())
