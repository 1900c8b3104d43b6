"""Qwen3-MoE: Qwen3's blocks with experts in the place of some or all feed-forward parts."""

from whet.models.families import llama
from whet.models.family import Family, RmsNorm
from whet.models.fused import decoder

FAMILY = Family(
    model_types=("qwen3_moe",),
    package="transformers.models.qwen3_moe",
    attention=("Qwen3MoeAttention",),
    blocks=("Qwen3MoeDecoderLayer",),
    causal=True,
    parts=llama.parts_of("Qwen3Moe"),
    rms_norms={"Qwen3MoeRMSNorm": RmsNorm()},
    why_padded=decoder.why_padded,
    tiny={
        **llama.TINY,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
)
