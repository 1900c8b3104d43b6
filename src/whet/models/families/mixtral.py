"""Mixtral: Mistral's blocks with experts in the place of each feed-forward part."""

from typing import Any

from whet.models.families import llama
from whet.models.family import Family, RmsNorm
from whet.models.fused import decoder


def why_padded(model: Any) -> str | None:
    """Return why a model needs its padding: noise on the routers' input follows the order of the batch."""
    if getattr(model.config, "router_jitter_noise", 0.0):
        return f"its routers draw noise (router_jitter_noise {model.config.router_jitter_noise})"
    return decoder.why_padded(model)


FAMILY = Family(
    model_types=("mixtral",),
    package="transformers.models.mixtral",
    attention=("MixtralAttention",),
    blocks=("MixtralDecoderLayer",),
    causal=True,
    parts={name: part for name, part in llama.parts_of("Mixtral").items() if name != "MixtralMLP"},
    rms_norms={"MixtralRMSNorm": RmsNorm()},
    why_padded=why_padded,
    tiny={**llama.TINY, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
)
