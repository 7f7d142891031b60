"""Dropout whose masks are cut from a pool on the CPU, where drawing them anew takes a tenth of training's time."""

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

POOL_ELEMENTS = 1 << 24
"""Numbers in a pool, 64 MB: a million places where a mask may begin."""

STRIDE = 16
"""Masks begin at multiples of this, so that they are aligned for vector loads."""


class Dropout(nn.Module):
    """Zeroes each number with probability `share` in training and scales the others up (Srivastava et al., 2014).

    On the CPU the mask is a stretch of a fixed pool of independent draws, from a place that is drawn each time with
    torch's generator: a multiplication instead of a draw for each number. Where two stretches overlap (for two of a
    million numbers each, one time in eight), two masks have draws in common, at other places. All of it is a function
    of the generator's seed. What is larger than half a pool, and all on other devices, is drawn in the ordinary way.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, to the same."""
        if not self.training or not self.share:
            return x
        if x.device.type != "cpu" or x.numel() > POOL_ELEMENTS // 2:
            return F.dropout(x, self.share)
        last = (POOL_ELEMENTS - x.numel()) // STRIDE
        begin = int(torch.randint(last + 1, ())) * STRIDE
        return x * _pool(self.share, x.dtype)[begin : begin + x.numel()].view(x.shape)

    def extra_repr(self) -> str:
        """The share, where the module is printed."""
        return str(self.share)


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # what is kept here serves training too
def _pool(share: float, dtype: torch.dtype) -> Tensor:
    """Zeros with probability `share`, else 1 / (1 - share); the same in every process."""
    generator = torch.Generator().manual_seed(20_141_958)
    kept = torch.empty(POOL_ELEMENTS).bernoulli_(1.0 - share, generator=generator)
    return kept.div_(1.0 - share).to(dtype)
