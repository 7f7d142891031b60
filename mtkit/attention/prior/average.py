"""Average attention: all tokens of the prefix have the same weight, and gates mix the average with the current token.

Paper: Zhang, Xiong and Su, "Accelerating Neural Transformer via an Average Attention Network", ACL 2018,
arXiv 1805.00631, equations 1 to 3.
Departures: residual and layer norm belong to the decoder layer. Input and forget gate see both vectors, as in the paper
(in Marian each sees one). There are no heads, weights or projections: attention dropout acts on the average, and no
weight of `full` can be loaded.
Cost: O(T) time and memory. A step costs O(1), at any position.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.caches import add_rows, prefix_means, start_sums
from mtkit.attention.contract import Attended, Attention, Beginning, Inputs, Site, State, packing, token_means
from mtkit.attention.options import Null, Positive


class Average(Attention):
    """Running mean of the prefix through a feed-forward network, mixed with the current token by two gates.

    ffn: whether a feed-forward network follows the mean. gate: whether two gates mix the result with the current token;
    otherwise it is the output. inner: hidden width of the feed-forward network.
    """

    roles = published = frozenset({"decoder"})
    paper = "Zhang et al. 2018, arXiv 1805.00631"
    complexity = "O(T)"
    growth = 1
    sequential_operations = "O(1)"
    longest_path = "O(1)"
    keeps_shapes = True
    small: ClassVar[dict[str, Any]] = {"inner": 12}

    def __init__(
        self, site: Site, *, ffn: bool = True, gate: bool = True, inner: Annotated[Positive | None, Null("4 D")] = None
    ) -> None:
        super().__init__(site)
        d_model, width = site.d_model, inner or 4 * site.d_model
        layers = nn.Linear(d_model, width), nn.ReLU(), nn.Linear(width, d_model)
        self.feed_forward = nn.Sequential(*layers) if ffn else None
        self.gates = nn.Linear(2 * d_model, 2 * d_model) if gate else None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def attend(self, inputs: Inputs) -> Attended:
        return Attended(self._mixed(inputs.query, prefix_means(inputs.query)))

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        return start_sums("total"), None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        state = add_rows(state, total=inputs.query)
        count = state["count"]
        mean = state["total"] / (count.unsqueeze(2) if isinstance(count, Tensor) else count)
        return Attended(self._mixed(inputs.query, mean)), state

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Return the means of both gates over channels and tokens, in one row: there are no heads."""
        if inputs is None or self.gates is None:
            return {}
        average = prefix_means(inputs.query).type_as(inputs.query)
        gates = self._gates(inputs.query, average if self.feed_forward is None else self.feed_forward(average))
        names = ("gate of the token", "gate of the average")
        means = (token_means(gate.mean(-1).unsqueeze(1), inputs.query_valid) for gate in gates)
        return dict(zip(names, means, strict=True))

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        query = inputs.query
        means = [query[:, : t + 1].mean(1) for t in range(query.shape[1])]
        return Attended(self._mixed(query, torch.stack(means, dim=1)))

    def _mixed(self, token: Tensor, mean: Tensor) -> Tensor:
        """Compute equations 1 and 2 on (B, T, D): i * token + f * g of the mean."""
        average = F.dropout(mean.type_as(token), self.site.dropout, self.training)
        if self.feed_forward is not None:
            average = self.feed_forward(average)
        if self.gates is None:
            return average
        keep, take = self._gates(token, average)
        return keep * token + take * average

    def _gates(self, token: Tensor, average: Tensor) -> Sequence[Tensor]:
        """Return the gates i and f (B, T, D) of equation 2."""
        assert self.gates is not None
        gates: Tensor = self.gates(torch.cat([token, average], dim=-1))
        return gates.sigmoid().chunk(2, dim=-1)
