"""Selection of the k best values, with the same result on every device."""

import torch
from torch import Tensor

BLOCK = 64


def best(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of float32 values (B, M), largest first, and their indices, (B, k) each; ties go to the first.

    NaN counts as -inf. A row is NaN as a whole or not at all, as the result of a softmax is.
    """
    return best_sums(values.unsqueeze(1), values.new_zeros(len(values), 1), k)


def best_sums(values: Tensor, before: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`best` of the N * V sums of values (B, N, V) and before (B, N), of which only the best are computed.

    The k best lie in the k blocks with the largest maxima (ties go to the first blocks), so that two small selections
    suffice. Adding the same number to all values of a block keeps their order.
    """
    count = values.shape[2]
    whole = count // BLOCK * BLOCK
    highest = [values[..., :whole].unflatten(2, (-1, BLOCK)).amax(-1)] if whole else []
    if whole < count:
        highest.append(values[..., whole:].amax(2, keepdim=True))
    maxima = torch.cat(highest, 2) + before[..., None]  # (B, N, blocks)
    blocks = _first_best(maxima.flatten(1), k)[1].sort(dim=1).values[..., None]
    row, column = blocks // maxima.shape[2], blocks % maxima.shape[2] * BLOCK
    column = column + torch.arange(BLOCK, device=values.device)  # (B, k, BLOCK)
    index = (row * count + column.clamp(max=count - 1)).flatten(1)  # rising
    near = values.flatten(1).gather(1, index).view(column.shape) + before.gather(1, row.squeeze(2))[..., None]
    if whole < count:
        near = near.masked_fill(column >= count, -torch.inf)
    near = near.flatten(1)
    top, place = _first_best(near, min(k, values.shape[1] * count))
    return top, index.gather(1, place)


def _first_best(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`best` by distinct integers, because the order of equal values in `torch.topk` is undefined.

    The upper half of an integer has the order of the values, the lower half that of the places. A stable sort takes six
    times as long.
    """
    count, values = values.shape[1], values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32  # the bits of negative numbers rise as these fall
    places = torch.arange(count - 1, -1, -1, device=values.device)
    top = (ordered | places).topk(min(k, count), dim=1).values
    index = count - 1 - (top & 0xFFFFFFFF)
    return values.gather(1, index), index
