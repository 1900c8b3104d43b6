"""Qwen2-MoE: Qwen2's blocks with experts in the place of some or all feed-forward parts."""

from whet.models.families import llama
from whet.models.family import Family, RmsNorm
from whet.models.fused import decoder

FAMILY = Family(
    model_types=("qwen2_moe",),
    package="transformers.models.qwen2_moe",
    attention=("Qwen2MoeAttention",),
    blocks=("Qwen2MoeDecoderLayer",),
    causal=True,
    parts=llama.parts_of("Qwen2Moe"),
    rms_norms={"Qwen2MoeRMSNorm": RmsNorm()},
    why_padded=decoder.why_padded,
    tiny={
        **llama.TINY,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": True,
    },
)
