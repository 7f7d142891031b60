"""CSALR: the softmax of all pairs is approximated by softmaxes through landmarks and a regularised inverse.

Paper: Chen, Gong, Ge and Du, "Compressed Self-Attention for Deep Metric Learning with Low-Rank Approximation", IJCAI
2020. With F, M and B as in `_landmarks` and M the softmax between landmarks, the heads are
    F (M + gamma I)^-1 B V.
Departures: the result is multiplied by 1 + gamma, because the rows of the map would otherwise sum to 1 / (1 + gamma);
`rescale` turns this off. gamma is 1.5 by default, and at least 1.1; the paper's is 1. If scores are peaked, M has
eigenvalues near -1 and M + I is nearly singular: heads then grow to a million times the values. With gamma above 1 the
sum of absolute values in a row of (M + gamma I)^-1 is at most 1 / (gamma - 1), so that no head exceeds
(1 + gamma) / (gamma - 1) times the largest value: 5 times with 1.5, 21 times with 1.1. The paper has images; here
landmarks are means of neighbouring real tokens. Each segment has m landmarks or one per token; up to m tokens see all
pairs.
Cost: O(T m K + m^3) time for each head, O(T) memory. The map itself is never formed, and may be negative.
"""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from mtkit.attention.contract import Site
from mtkit.attention.lowrank._landmarks import LandmarkAttention
from mtkit.attention.options import Positive, Within


class Csalr(LandmarkAttention):
    """Softmax attention approximated through landmarks and a regularised inverse.

    landmarks: number of means m. gamma: number added to the diagonal of M, from 1.1; the larger, the more each query
    gets the mean output of the landmarks that it resembles. rescale: whether rows of the map sum to 1.
    """

    paper = "Chen et al. 2020, IJCAI"
    small: ClassVar[dict[str, Any]] = {"landmarks": 4}
    variants = ({"gamma": 2.5},)

    def __init__(
        self,
        site: Site,
        *,
        landmarks: Positive = 32,
        gamma: Annotated[float, Within(1.1, 1e6)] = 1.5,
        rescale: bool = True,
    ) -> None:
        super().__init__(site, landmarks)
        self.gamma = gamma
        self.factor = 1 + gamma if rescale else 1.0

    def solve(self, kernel: Tensor, rows: Tensor) -> Tensor:
        """Return (M + gamma I)^-1 R, by a decomposition and not by an inverse."""
        # without a check, which would wait for the device: the matrix is never singular
        solved, _ = torch.linalg.solve_ex(self._shifted(kernel), rows)
        return solved * self.factor

    def inverse(self, kernel: Tensor) -> Tensor:
        return torch.linalg.inv(self._shifted(kernel)) * self.factor

    def _shifted(self, kernel: Tensor) -> Tensor:
        return kernel + self.gamma * torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
