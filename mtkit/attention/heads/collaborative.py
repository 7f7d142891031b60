"""Collaborative heads: all heads share one map of queries and one of keys, and each weighs the channels its own way.

Paper: Cordonnier, Loukas and Jaggi, "Multi-Head Attention: Collaborate Instead of Concatenate", 2020,
arXiv 2006.16362, section 3: the score of head a is ((q * m_a) . k + c_a . x) / sqrt(M / H), for shared q and k
of M channels, a mixing vector m_a, and a content bias c_a for the token x of the key.
Departures: the shared maps have biases, as in all mechanisms here. The keys' bias cancels in the softmax; the queries'
bias acts as a content bias, which c_a could hold as well, so that `adopt` does not move it to c_a. Heads of `full` are
adopted if M is their joint width, and are not factorised into fewer channels. c_a starts at zero.
Cost: scores take O(T S H M) time, H times as long as `full` at M = D; the purpose is to use fewer channels. The
keys of all heads are one row of M + H numbers in a step's cache. Values are narrower than keys, for which the CPU has
no fused kernel: memory is O(T S H), for `full` O(T).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from mtkit.attention.contract import Inputs, Site
from mtkit.attention.options import Null, OneOf, Positive
from mtkit.attention.slots import Projection

MIXING = ("concat", "normal")


class Collaborative(Projection):
    """Queries and keys in channels that all heads share, mixed by a learned vector for each head.

    shared_dim: number of shared channels. mixing_init: initial mixing vectors: "concat" gives each head the channels
    that it has in full attention, "normal" all channels at random (standard deviation 0.2).
    """

    paper = "Cordonnier et al. 2020, arXiv 2006.16362"
    apart_from = frozenset({"rotary"})  # it would rotate the content bias as well
    small: ClassVar[dict[str, Any]] = {"shared_dim": 12}
    variants = ({"shared_dim": 5}, {"mixing_init": "normal"})

    def __init__(
        self,
        site: Site,
        *,
        shared_dim: Annotated[Positive | None, Null("the model's width")] = None,
        mixing_init: Annotated[str, OneOf(MIXING)] = "concat",
    ) -> None:
        super().__init__(site)
        self.shared = shared_dim or site.heads_width
        # the content bias is also computed as a product, with one more key channel per head, which only its query reads
        self.key_width = self.shared + site.heads
        self.key_heads = 1
        concat = mixing_init == "concat"
        self.mixing = nn.Parameter(_blocks(site.heads, self.shared) if concat else torch.empty(site.heads, self.shared))
        if not concat:
            nn.init.normal_(self.mixing, std=0.2)

    @property
    def scale(self) -> float:
        """1 / sqrt(M / H), as for heads with an equal share of the channels."""
        return float((self.heads / self.shared) ** 0.5)

    @property
    def widths(self) -> tuple[int, int, int]:
        """M shared channels of queries; M + H of keys, with one content bias per head; values as usual."""
        return self.shared, self.key_width, self.value_heads * self.value_width

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Return the weight of each shared channel in each head."""
        return {"channel mixing": self.mixing.clone()}

    def initialize(self, q_proj: nn.Linear, k_proj: nn.Linear) -> None:
        """Give queries and keys the variance of their inputs, and set the content biases to zero."""
        for linear in (q_proj, k_proj):
            nn.init.kaiming_uniform_(linear.weight, nonlinearity="linear")
        nn.init.zeros_(k_proj.weight[self.shared :])

    def queries(self, projected: Tensor) -> Tensor:
        """Map (B, T, M) to (B, H, T, M + H): the channels mixed for each head, and a 1 for its own content bias."""
        mixed = projected.unsqueeze(1) * self.mixing.type_as(projected).unsqueeze(1)
        one_hot = torch.eye(self.heads, dtype=mixed.dtype, device=mixed.device).unsqueeze(1)
        return torch.cat([mixed, one_hot.expand(len(mixed), -1, mixed.shape[2], -1)], -1)

    def adopted(self, full_state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn heads of `full` with M channels in total into the shared channels, each read by its own head."""
        adopted = dict(full_state)
        if any(
            name not in full_state or len(full_state[name]) != self.shared for name in ("q_proj.bias", "k_proj.bias")
        ):
            return adopted
        for name in ("k_proj.weight", "k_proj.bias"):
            adopted[name] = torch.cat([full_state[name], torch.zeros_like(own[name][self.shared :])])
        return {**adopted, "projection.mixing": _blocks(self.heads, self.shared).to(own["projection.mixing"])}


def _blocks(heads: int, channels: int) -> Tensor:
    """Return (H, M): each head has an equal share of the channels, in order; of a rest, the first heads have more."""
    share = -(-channels // heads)
    return (torch.arange(channels) // share == torch.arange(heads).unsqueeze(1)).float()
