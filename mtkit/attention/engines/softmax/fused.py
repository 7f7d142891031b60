"""PyTorch's fused softmax attention, in the number type in which it is fast."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.engines.softmax.short import short_attention

SHORT = 128
"""Keys up to which batched products serve in bfloat16: twice as fast as the kernel, but the weights lie in memory."""

MOST_KEYS = 256
"""Keys of a query up to which the CPU's kernel trains faster in float32 than in bfloat16. Its backward pass in bfloat16
takes five times as long over 20 keys; the casts to float32 and back take a fraction of the pass."""


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """softmax(q k^T scale + mask) v, (B, H, T, V), of q (B, H, T, K), k (B, H, S, K) and v (B, H, S, V).

    mask broadcasts to (B, H, T, S): boolean, True where a key is seen, or numbers that are added. Each query sees at
    least one key. With is_causal, query i sees keys 0 to i, and there is no mask.
    """
    # also without gradients: reversible layers and checkpoints run forward passes twice, and both must agree
    low = q.dtype == k.dtype == v.dtype == torch.bfloat16 and q.device.type == "cpu"
    learned = mask is not None and mask.requires_grad
    if low and k.shape[-2] <= SHORT and not learned and has_low_products():
        return short_attention(q, k, v, scale=scale, mask=mask, dropout=dropout, is_causal=is_causal)
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and k.shape[-2] <= MOST_KEYS:
        with torch.autocast("cpu", enabled=False):  # which would cast back
            return _fused(q.float(), k.float(), v.float(), scale, mask, dropout, is_causal).bfloat16()
    return _fused(q, k, v, scale, mask, dropout, is_causal)


@cache
def has_low_products() -> bool:
    """Whether PyTorch has fast products in bfloat16 on this processor."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, dropout: float, is_causal: bool
) -> Tensor:
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.type_as(q)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal and q.shape[-2] > 1, scale=scale
    )
