"""The best k of many values, the same ones on every device."""

import torch
from torch import Tensor

BLOCK = 64


def best(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of float32 values (B, M), largest first, and their indices, (B, k) each; of equal ones the first.

    No value may be NaN. The k best lie in the k blocks with the largest maxima (of equal maxima the first blocks), so
    two small selections are enough.
    """
    count = values.shape[1]
    if count <= 2 * k * BLOCK:
        return _first_best(values, k)
    whole = count // BLOCK * BLOCK
    highest = values[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1)
    if whole < count:
        highest = torch.cat([highest, values[:, whole:].amax(1, keepdim=True)], 1)
    blocks = _first_best(highest, k)[1].sort(dim=1).values
    index = (blocks[..., None] * BLOCK + torch.arange(BLOCK, device=values.device)).flatten(1)  # (B, k * BLOCK), rising
    inside = index < count
    near = values.gather(1, index.clamp(max=count - 1)).masked_fill(~inside, -torch.inf)
    top, place = _first_best(near, k)
    return top, index.gather(1, place)


def _first_best(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same by integers that are all different, as `torch.topk` promises nothing about equal values.

    The upper half of an integer has the order of the values, the lower that of the places. A stable sort would do, at
    six times the cost.
    """
    count = values.shape[1]
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32  # the bits of negative numbers rise as these fall
    places = torch.arange(count - 1, -1, -1, device=values.device)
    top = (ordered | places).topk(min(k, count), dim=1).values
    index = count - 1 - (top & 0xFFFFFFFF)
    return values.gather(1, index), index
