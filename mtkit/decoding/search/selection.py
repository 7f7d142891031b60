"""The best k of many values, the same ones on every device."""

import torch
from torch import Tensor

BLOCK = 64


def best(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of values (B, M), largest first, and their indices, (B, k) each; of equal ones the first.

    `torch.topk` promises nothing about equal values. The k best lie in the k blocks with the largest maxima (of equal
    maxima the first blocks), so two small stable sorts are enough.
    """
    count = values.shape[1]
    if count <= 2 * k * BLOCK:
        top = values.sort(dim=1, descending=True, stable=True)
        return top.values[:, :k], top.indices[:, :k]
    whole = count // BLOCK * BLOCK
    highest = values[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1)
    if whole < count:
        highest = torch.cat([highest, values[:, whole:].amax(1, keepdim=True)], 1)
    blocks = highest.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
    index = (blocks[..., None] * BLOCK + torch.arange(BLOCK, device=values.device)).flatten(1)  # (B, k * BLOCK), rising
    inside = index < count
    near = values.gather(1, index.clamp(max=count - 1)).masked_fill(~inside, -torch.inf)
    top = near.sort(dim=1, descending=True, stable=True)
    return top.values[:, :k], index.gather(1, top.indices[:, :k])
