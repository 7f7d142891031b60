"""Softmax attention in one call: PyTorch's fused kernel, or plain products where that kernel is slow.

The fused kernel of the CPU takes ten times as long for its backward pass in bfloat16 as in float32, where sequences are
short. Two products and a softmax, whose sums are in float32 inside the kernel, take an eighth of that.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

MOST_KEYS = 512
"""Keys of a query up to which plain products are faster than the fused kernel's backward pass in bfloat16 on the CPU.
Their weights are kept for the backward pass: T times as many numbers per head."""


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
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.type_as(q)
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and trains and k.shape[-2] <= MOST_KEYS:
        return _by_products(q, k, v, scale, mask, dropout, is_causal)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal and q.shape[-2] > 1, scale=scale
    )


def _by_products(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, dropout: float, is_causal: bool
) -> Tensor:
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scores = (q * scale) @ k.transpose(-1, -2)
    if mask is not None:
        # the sum is one pass, where `masked_fill` of the scores takes several on the CPU
        hidden = (
            torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
            if mask.dtype == torch.bool
            else mask
        )
        scores = scores + hidden
    weights = scores.softmax(-1)
    return (F.dropout(weights, dropout) if dropout else weights) @ v
