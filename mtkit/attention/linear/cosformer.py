"""cosFormer: sums over keys of relu features, whose products fade with the distance as a cosine does.

Paper: Qin et al., "cosFormer: Rethinking Softmax in Attention", ICLR 2022, arXiv 2202.08791, equations 9 to 14.
Departures: the horizon M is a constant. The authors' code takes the longest length of the batch, and in the decoder the
final length, so that an output depends on other segments and on later tokens. Positions beyond M count as M, so that
no weight is negative; only queries of the cross role can be there. The magnitude of a denominator is at least eps: a
query whose features vanish has the output zero, and no gradient; elu1 has no such queries. There are no weights, so
attention dropout acts on the outputs of the heads.
Cost: O(T K V) time, O(T) memory. A step reads at most 4 K V numbers per head, at any position.
"""

import math
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from mtkit.attention.bases.feature_attention import FeatureAttention
from mtkit.attention.contract import Attended, Inputs, Site, State
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.feature_sums import FEATURE_MAPS, Keys
from mtkit.attention.options import Null, OneOf, Positive, Within
from mtkit.attention.slots import OWN_VECTORS, combining
from mtkit.errors import MtkitError


class CosFormer(FeatureAttention):
    """Weights relu(q_i) . relu(k_j) cos(pi (i - j) / (2 M)), divided by their sum.

    horizon: M, the distance at which weights reach zero and the longest length; 128 or 256 for sentences, since at
    1,024 weights hardly change within 30 tokens. activation: "relu" (the paper's) or "elu1" (elu(x) + 1). eps: smallest
    denominator. chunk: number of positions computed at once in the decoder role.
    """

    roles = published = frozenset({"encoder", "decoder", "cross"})
    paper = "Qin et al. 2022, arXiv 2202.08791"
    complexity = "O(T)"
    growth = 1
    slots = combining("merge", "nearby", projection=OWN_VECTORS, regularizer={"disagreement"})
    small: ClassVar[dict[str, Any]] = {"chunk": 3}
    variants = ({"activation": "elu1"},)

    def __init__(
        self,
        site: Site,
        *,
        horizon: Annotated[Positive | None, Null("the longest length of both sides")] = None,
        activation: Annotated[str, OneOf(("relu", "elu1"))] = "relu",
        eps: Annotated[float, Within(1e-12, 1.0)] = 1e-6,
        chunk: Positive = 64,
    ) -> None:
        super().__init__(site, floor=eps, chunk=chunk)
        self.longest: int = horizon or max(site.max_length, site.memory_length or 0)
        self.limit = "horizon" if horizon else "model.max_length"
        self.activation = FEATURE_MAPS[activation]

    def queries(self, query: Tensor, position: Tensor | None = None) -> Tensor:
        """Map (B, T, D) to the features (B, H, T, 2 K) of queries at position (T,), 0 to T - 1 if None."""
        return self._placed(super().queries(query), position)

    def keys_values(self, memory: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map (B, S, D) to the features (B, G, S, 2 K) of keys, and to values (B, G, S, V).

        Raises: MtkitError if S is more than `longest`.
        """
        self._check_length(memory.shape[1])
        k, v = super().keys_values(memory)
        return self._placed(k, position), v

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Attend with the next token. Raises: MtkitError in the decoder role beyond `longest`."""
        count = state["count"]
        if self.site.causal and not isinstance(count, Tensor):  # a fixed state's count is not read from the device
            self._check_length(count + 1)
        return super().advance(inputs, state)

    def _check_length(self, length: int) -> None:
        if length > self.longest:
            raise MtkitError(f"cosformer was built for {self.longest} positions, not {length}: raise {self.limit}")

    def features_of(self, x: Tensor, *parameters: Tensor) -> Keys:
        """Return x, which is features already: they depend on positions."""
        return Keys(upcast(x), None)

    @property
    def state_features(self) -> tuple[int, bool]:
        return 2 * self.projection.key_width, False

    def _placed(self, x: Tensor, position: Tensor | None) -> Tensor:
        """Return [f(x) cos(pi i / (2 M)), f(x) sin(pi i / (2 M))] of x (..., T, K), in float32 at least."""
        if position is None:
            position = torch.arange(x.shape[-2], device=x.device)
        angle = position.clamp(max=self.longest).double().unsqueeze(-1) * (math.pi / 2 / self.longest)
        x = self.activation(upcast(x))
        return torch.cat([x * angle.cos().type_as(x), x * angle.sin().type_as(x)], dim=-1)
