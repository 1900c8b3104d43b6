"""Products of linear layers in 8 bits: which models they serve. `precision/` switches them on in each step."""

from whet.card import Card
from whet.config.methods import MethodSettings
from whet.errors import ConfigError
from whet.kernels.int8 import packed_bytes
from whet.methods import counting
from whet.methods.seam import Applied, Cost, Stage
from whet.models import known
from whet.models.adapters import unwrapped
from whet.models.fused.parts import has_products
from whet.models.packed import packed_model
from whet.models.view import ModelView
from whet.precision.device import INSTEAD_OF_INT8, int8_backward_too

CARD = Card(
    name="int8",
    asked_by="precision",
    does="Linear layers multiply 8-bit integers; gradients of weights stay float32.",
    improves="speed",
    same_result="no",
    hurts="When the last tenth of a point counts. Refused on CPUs without VNNI or with fast bf16.",
    source="Wortsman et al. 2023, arXiv:2304.13013 (SwitchBack)",
    wanted_by="precision=int8",
    page="speed.md#int8",
)
STAGE = Stage.PRODUCTS


def apply(view: ModelView, settings: MethodSettings) -> Applied | None:
    """Check that linear layers can run in 8 bits, and count the modules that hold them; the model stays as it is.

    Raises ConfigError if none of the model's linear layers runs on whet's operators.
    """
    if settings.precision != "int8":
        return None
    model = view.model
    packed = packed_model(model)
    served = [] if packed is None else [module for module in model.modules() if has_products(module)]
    if served:
        return Applied(CARD.name, f"linear layers of {len(served)} modules multiply in 8 bits")
    raise ConfigError(
        what="int8 is asked for, and none of this model's layers could run in it",
        got=f"{type(model).__name__}, padded batches" if packed is None else type(model).__name__,
        why=f"it serves encoders of the families {known.names()} with a head that whet runs without padding",
        fix=INSTEAD_OF_INT8
        if known.of_model(unwrapped(model)) is None
        else f"{INSTEAD_OF_INT8}; or leave out what makes batches padded (--attn_implementation, a collator)",
    )


def restore(view: ModelView) -> None:
    """Nothing to undo: the format is a setting of each step."""


def cost(view: ModelView, settings: MethodSettings) -> Cost:
    """Return the bytes of the packed weights, which a step makes again: for forward, and once more for backward."""
    packed = packed_model(view.model)
    if settings.precision != "int8" or packed is None:
        return Cost()
    products = [size for block in counting.blocks(view) for size in block.products]
    directions = [(n_out, n_in) for n_in, n_out in products]
    if int8_backward_too():
        directions += products
    return Cost(weights_bytes=sum(packed_bytes(columns, depth) for columns, depth in directions))
