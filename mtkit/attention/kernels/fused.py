"""Fused softmax attention by PyTorch, in the number type in which it is fastest.

In bfloat16 on the CPU the fused kernel multiplies the matrices of each head and segment one by one, which for sentences
takes longer than all else it does. Over few keys, batched products by the processor's bfloat16 units replace it. Scores
and their softmax are in float32; weights and gradients are rounded to bfloat16 as factors of products.
"""

from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mtkit.recording import recording

LEAST = 16
"""Keys there are at least, the missing ones hidden: PyTorch's softmax over fewer takes several times as long."""


def short_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None, dropout: float, is_causal: bool
) -> Tensor:
    """The result (B, H, T, V) of `fused_attention` in bfloat16; a mask of numbers gets no gradient."""
    heads: Tensor = _Short.apply(q, k, v, mask, scale, dropout, is_causal)  # type: ignore[no-untyped-call]
    return heads


class _Short(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float, is_causal: bool
    ) -> Tensor:
        (*lead, length, _), keys = q.shape, k.shape[2]
        with torch.autocast("cpu", enabled=False):
            q, k, v = (x.flatten(0, 1).contiguous() for x in (q, k, v))
            scores = q.new_empty(len(q), length, max(keys, LEAST), dtype=torch.float32)
            wide = F.pad(k.float(), (0, 0, 0, LEAST - keys)) if keys < LEAST else k.float()
            torch.baddbmm(scores, q.float(), wide.mT, beta=0, alpha=scale, out=scores)
            _hide(scores.unflatten(0, lead), keys, mask, is_causal)
            weights = torch.softmax(scores, -1, out=scores)
            keep = torch.empty_like(weights).bernoulli_(1 - dropout).div_(1 - dropout) if dropout else None
            ctx.save_for_backward(q, k, v, weights, keep)
            ctx.scale, ctx.lead = scale, lead
            return (_applied(weights, keep, keys) @ v).unflatten(0, lead)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_heads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights, keep = ctx.saved_tensors
        keys = k.shape[1]
        with torch.autocast("cpu", enabled=False):
            d_heads = d_heads.flatten(0, 1).contiguous()
            d_weights = (d_heads @ v.mT).float()
            if keys < LEAST:
                d_weights = F.pad(d_weights, (0, LEAST - keys))
            if keep is not None:
                d_weights *= keep
            product = d_weights.mul_(weights)
            d_scores = product.addcmul_(weights, product.sum(-1, keepdim=True), value=-1).mul_(ctx.scale)
            d_scores = d_scores[..., :keys].bfloat16()
            d_q, d_k, d_v = d_scores @ k, d_scores.mT @ q, _applied(weights, keep, keys).mT @ d_heads
        return *(x.unflatten(0, ctx.lead) for x in (d_q, d_k, d_v)), None, None, None, None


def _applied(weights: Tensor, keep: Tensor | None, keys: int) -> Tensor:
    """The weights of the first `keys` keys after dropout, in bfloat16."""
    return (weights if keep is None else weights * keep)[..., :keys].bfloat16()


def _hide(scores: Tensor, keys: int, mask: Tensor | None, is_causal: bool) -> None:
    """Sets the scores (B, H, T, S) of hidden keys, and of those from `keys` on, to -inf; adds a mask of numbers."""
    scores[..., keys:] = -torch.inf
    real = scores[..., :keys]
    if is_causal:
        later = torch.ones(scores.shape[2], keys, dtype=torch.bool).triu_(1)
        real.masked_fill_(later, -torch.inf)
    elif mask is not None and mask.dtype == torch.bool:
        real.masked_fill_(~mask, -torch.inf)
    elif mask is not None:
        real += mask


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

    mask broadcasts to (B, H, T, S): boolean, True if a key is seen, or numbers that are added. Each query sees at
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


def hides_all_keys(q: Tensor) -> bool:
    """Whether a query (B, H, T, K) all of whose scores get -inf gets zero, and no gradient, from the fused kernel.

    On CUDA all kernels of PyTorch do so, except cuDNN's.
    """
    return q.is_cuda and not torch.backends.cuda.cudnn_sdp_enabled()


ALIGNED = 16
"""Numbers between rows of a mask, at least: CUDA's kernel for attention with a mask copies a mask of other rows."""

_latest: list[Any] = [lambda: None, None, None, None]
"""The `padding_bias` made last: a reference to its `valid`; its version and the type; the recording; the result."""


@torch.inference_mode(False)  # the kept tensor also serves training
def padding_bias(valid: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask (B, 1, 1, S) to add to scores: 0 for keys of `valid` (B, S), -inf for others.

    All layers that read the same padding share one, made by the first of them: to make it takes a GPU longer than to
    read it.
    """
    latest_valid, state, of_recording, bias = _latest
    # a tensor of inference mode does not know its changes, and what is recorded is not computed yet
    shareable = not valid.is_inference()
    if shareable and latest_valid() is valid and of_recording is recording() and state == (valid._version, dtype):
        return bias
    length = valid.shape[1]
    bias = torch.full((len(valid), 1, 1, -(-length // ALIGNED) * ALIGNED), -torch.inf, dtype=dtype, device=valid.device)
    bias = bias[..., :length].masked_fill_(valid[:, None, None], 0.0)
    if shareable:
        _latest[:] = ref(valid), (valid._version, dtype), recording(), bias
    return bias


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
