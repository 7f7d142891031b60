"""Nyströmformer: the softmax of all pairs is approximated by softmaxes through landmarks, means of neighbouring tokens.

Paper: Xiong, Zeng, Chakraborty, Tan, Fung, Li and Singh, "Nyströmformer: A Nyström-Based Algorithm for Approximating
Self-Attention", AAAI 2021, arXiv 2102.03902, equations 13 to 15. With F, M and B as in `_landmarks` and M the softmax
between landmarks, the heads are
    F Z B V + DConv(V),  Z_0 = M^T / (|M|_1 |M|_inf),  Z <- 1/4 Z (13 I - M Z (15 I - M Z (7 I - M Z))),
which iterates Z towards the pseudo-inverse of M. DConv is a convolution over time with one kernel per head, which other
mechanisms have in the slot `nearby` (`mtkit.attention.nearby`).
Departures: Z_0 has one scale for each segment and head (the authors' code takes the largest of the whole batch).
Landmarks are means of real tokens; each segment has m landmarks or one per token; up to m tokens see all pairs.
If landmarks resemble each other, M is near-singular and Z has not converged after the paper's 6 iterations: they
restore 65% of a singular value of 0.03, and 11% of 0.01. Each further iteration restores more, and multiplies rounding
errors there by 13/4; with up to 20 iterations all numbers stay finite in float32.
Cost: O(T m K + iterations m^3) time for each head, O(T) memory. The map itself is never formed, and may be negative.
"""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from mtkit.attention.contract import Site
from mtkit.attention.lowrank._landmarks import LandmarkAttention
from mtkit.attention.nearby import Convolution
from mtkit.attention.options import Positive, Within, refused
from mtkit.attention.slots import combining


class Nystrom(LandmarkAttention):
    """Softmax attention approximated through landmarks and an iterated pseudo-inverse.

    landmarks: number of means m. pinv_iters: iterations of the pseudo-inverse. conv_kernel: positions, an odd
    number, that the convolution of the values sees; 0 for no convolution.
    """

    paper = "Xiong et al. 2021, arXiv 2102.03902"
    slots = combining("projection", "merge", regularizer={"disagreement"})  # `nearby` is a part of it
    small: ClassVar[dict[str, Any]] = {"landmarks": 4, "pinv_iters": 5, "conv_kernel": 3}
    variants = ({"conv_kernel": 0},)

    def __init__(
        self,
        site: Site,
        *,
        landmarks: Positive = 64,
        pinv_iters: Annotated[int, Within(1, 20)] = 6,
        conv_kernel: Annotated[int, Within(0, 1023)] = 33,
    ) -> None:
        super().__init__(site, landmarks)
        if conv_kernel and conv_kernel % 2 == 0:
            raise refused("conv_kernel", conv_kernel, "be odd, or 0 for no convolution")
        self.iterations = pinv_iters
        self.nearby = Convolution(site, kernel=conv_kernel) if conv_kernel else None

    def inverse(self, kernel: Tensor) -> Tensor:
        return pseudo_inverse(kernel, self.iterations)


def pseudo_inverse(kernel: Tensor, iterations: int) -> Tensor:
    """Return Z (..., m, m) of M, whose rows sum to 1.

    If Z_0 M has the eigenvalue 1 - e, the square of a singular value, one iteration makes it 1 - e^3 (3 + e) / 4.
    """
    eye = torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
    z = kernel.mT / kernel.sum(-2).amax(-1)[..., None, None]
    for _ in range(iterations):
        product = kernel @ z
        z = 0.25 * z @ (13 * eye - product @ (15 * eye - product @ (7 * eye - product)))
    return z
