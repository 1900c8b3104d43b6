"""OLMoE: Llama's blocks with norms of all query and key heads together, and experts in each block.

Attention's products and norms are torch's own: no fused piece normalises all heads together yet.
"""

from whet.models.families import llama
from whet.models.family import Family, RmsNorm
from whet.models.fused import decoder

FAMILY = Family(
    model_types=("olmoe",),
    package="transformers.models.olmoe",
    attention=("OlmoeAttention",),
    blocks=("OlmoeDecoderLayer",),
    causal=True,
    rms_norms={"OlmoeRMSNorm": RmsNorm()},
    why_padded=decoder.why_padded,
    tiny={**llama.TINY, "num_experts": 4, "num_experts_per_tok": 2},
)
