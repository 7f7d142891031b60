"""The slot `nearby`: a convolution of the values over neighbouring tokens, added to the outputs of the heads.

Paper: Xiong et al., "Nyströmformer", AAAI 2021, arXiv 2102.03902, section 4; there it is a part of the mechanism
(`nystrom`). docs/nearby.md measures what it adds to others.
Cost: O(T k V) time for each head, and O(T V) memory; O(T^2) in segments of up to 2 (k - 1) tokens, or 64.
"""

from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.contract import Inputs, Site
from mtkit.attention.kernels.dot_product import expand_heads
from mtkit.attention.options import Within, refused
from mtkit.attention.slots import Nearby


class Convolution(Nearby):
    """The sum of w_j v_(t + j - k // 2) over the k positions of a kernel that each head learns.

    kernel: k, an odd number of positions, half of them before the token.
    """

    def __init__(self, site: Site, *, kernel: Annotated[int, Within(1, 1023)] = 33) -> None:
        super().__init__(site)
        if kernel % 2 == 0:
            raise refused(
                "nearby 'convolution': kernel", kernel, "be odd: as many positions after the token as before it"
            )
        self.weight = nn.Parameter(torch.empty(site.heads, kernel).uniform_(-(kernel**-0.5), kernel**-0.5))

    def forward(self, values: Tensor, valid: Tensor | None) -> Tensor:
        """Map values (B, G, T, V) to (B, H, T, V), with zeros at padding and around the segment."""
        if valid is not None:
            values = values.masked_fill(~valid[:, None, :, None], 0.0)
        return convolved(expand_heads(values, self.site.heads), self.weight.type_as(values))

    @torch.no_grad()
    def adopt(self, weights: Mapping[str, Tensor]) -> None:
        """Take over the kernels, cut or extended by zeros at both ends; without them the term is zero."""
        kernels, adopted = weights.get("weight"), torch.zeros_like(self.weight)
        if kernels is not None and len(kernels) == len(adopted):
            common = min(kernels.shape[1], adopted.shape[1])
            _middle(adopted, common).copy_(_middle(kernels, common))
        self.weight.copy_(adopted)

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Return the kernels."""
        return {"kernel by distance": self.weight.clone()}


def convolved(values: Tensor, kernel: Tensor) -> Tensor:
    """Return the sum of w_j v_(t + j - k // 2) over the k positions of the kernel, (B, H, T, V), with zeros around v.

    values: (B, H, T, V); kernel: (H, k). Blocks of values are multiplied by bands, matrices with the kernel in each
    row. On a CPU this is 3 to 30 times as fast as PyTorch's depthwise convolution.
    """
    taps, length = kernel.shape[1], values.shape[2]
    reach, block = taps // 2, max(taps - 1, 32)
    if length <= 2 * block:
        return torch.einsum("hij,bhjv->bhiv", _band(kernel, length)[..., reach : reach + length], values)
    padded = F.pad(values, (0, 0, reach, reach + -length % block))
    windows = padded.unfold(2, block + taps - 1, block)  # (B, H, blocks, V, positions)
    return torch.einsum("hij,bhnvj->bhniv", _band(kernel, block), windows).flatten(2, 3)[:, :, :length]


def _middle(kernel: Tensor, taps: int) -> Tensor:
    """Return the view of the middle `taps` columns."""
    first = (kernel.shape[1] - taps) // 2
    return kernel[:, first : first + taps]


def _band(kernel: Tensor, rows: int) -> Tensor:
    """Return (H, rows, rows + k - 1): row i has the kernel (H, k) from column i on, and zeros elsewhere."""
    columns = rows + kernel.shape[1] - 1
    repeated = F.pad(kernel, (0, rows)).repeat(1, rows)  # each row of the band begins one number later
    return repeated[:, : rows * columns].unflatten(1, (rows, columns))


NEARBY = {"convolution": Convolution}
"""Classes by name."""
