"""CSALR: the softmax of all pairs is approximated by softmaxes through landmarks, joined by a regularised inverse.

Paper: Chen, Gong, Ge and Du, "Compressed Self-Attention for Deep Metric Learning with Low-Rank Approximation", IJCAI
2020. With F, M and B as in `_landmarks` and M the softmax between landmarks, the heads are
    F (M + gamma I)^-1 B V.
Departures: that is multiplied by 1 + gamma, because the rows of the map would else sum to 1 / (1 + gamma); `rescale`
turns it off. Images become sentences: landmarks are means of neighbouring tokens, the real ones, of which each segment
has m or one for each token; up to m tokens see all pairs. gamma is at least 1, since eigenvalues of M are of modulus 1
at most, and is raised by ten roundings: of two landmarks that see nothing but each other, M rounds to one with the
eigenvalue -1.
Cost: O(T m K + m^3) time for each head, O(T) memory. The map itself is never held, and may be negative.
"""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from mtkit.attention.contract import Site
from mtkit.attention.lowrank._landmarks import LandmarkAttention
from mtkit.attention.options import Positive, Within


class Csalr(LandmarkAttention):
    """Softmax attention approximated through landmarks and a regularised inverse.

    landmarks: number of means m. gamma: what is added to the diagonal of M; the larger, the more each query gets the
    mean of what the landmarks it resembles have read. rescale: whether rows of the map sum to 1.
    """

    paper = "Chen et al. 2020, IJCAI"
    small: ClassVar[dict[str, Any]] = {"landmarks": 4}
    variants: ClassVar[tuple[dict[str, Any], ...]] = ({"gamma": 2.5},)

    def __init__(
        self,
        site: Site,
        *,
        landmarks: Positive = 32,
        gamma: Annotated[float, Within(1.0, 1e6)] = 1.0,
        rescale: bool = True,
    ) -> None:
        super().__init__(site, landmarks)
        self.gamma = gamma
        self.rescale = rescale

    def solve(self, kernel: Tensor, rows: Tensor) -> Tensor:
        """(M + gamma I)^-1 R, by a decomposition and not by an inverse."""
        # unchecked: a check would wait for the device, and no such matrix is singular
        solved, _ = torch.linalg.solve_ex(self._shifted(kernel), rows)
        return solved * self._factor(kernel)

    def inverse(self, kernel: Tensor) -> Tensor:
        """(M + gamma I)^-1 itself."""
        return torch.linalg.inv(self._shifted(kernel)) * self._factor(kernel)

    def _shifted(self, kernel: Tensor) -> Tensor:
        eye = torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
        return kernel + self._shift(kernel) * eye

    def _factor(self, kernel: Tensor) -> float:
        return 1 + self._shift(kernel) if self.rescale else 1.0

    def _shift(self, kernel: Tensor) -> float:
        return self.gamma + 10 * torch.finfo(kernel.dtype).eps
