"""Packed attention on a GPU."""

import torch
from torch import Tensor

from whet.kernels.attention import choice as attention_path
from whet.kernels.attention import flash
from whet.kernels.attention import padded as padded_attention
from whet.kernels.specs import AttentionSpec, Bias


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bias: Bias | None = None) -> Tensor:
    """Return softmax(q k^T scale + b) v (N, H, K) within each row; k and v (N, G, K) may have fewer heads.

    `bias` is b, as in `packed.attend`; flash kernels have none.
    Under autocast, float32 is computed in autocast's format, as in torch's own attention. Raises ConfigError if
    flash_attention_2 was requested and its kernels cannot run.
    """
    q, k, v = (_as_in_autocast(tensor) for tensor in (q, k, v))
    dropping = spec.drop is not None and spec.drop.p > 0.0
    call = attention_path.Call(q.dtype, q.shape[-1], dropping, biased=bias is not None)
    path = attention_path.choose(spec.kernel, call, attention_path.have(q.device))
    attention_path.tell(path, dropping=dropping)
    if path == "padded":
        return padded_attention.attend(q, k, v, spec, bias)
    return flash.attend(q, k, v, spec, package=path == "package")


def _as_in_autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    if x.dtype != torch.float32 or not torch.amp.is_autocast_available(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
