"""The base of gated attention with one head: relu² or Laplace weights as well as a softmax, and attention in chunks.

Scores have a learned bias by distance, b_(j-i). Queries and keys may come from one vector z of a token, z * kappa + mu
with two pairs of kappa and mu. A mechanism adds its gates in `merge_heads`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.caches import append, written
from mtkit.attention.bases.query_blocks import QueryBlocks
from mtkit.attention.bases.score_attention import Pairs
from mtkit.attention.contract import Attended, Inputs, Site, State
from mtkit.attention.kernels.dot_product import scores_of, upcast
from mtkit.attention.kernels.tiled_softmax import scores_at_once
from mtkit.attention.slots import Projection
from mtkit.errors import MtkitError

DEVIATION = 0.02
"""Standard deviation of initial weights, as the authors of Mega draw them."""


def relu_squared(x: Tensor) -> Tensor:
    """Return max(x, 0)² (So et al., "Primer", 2021, arXiv 2109.08668)."""
    return x.relu().square()


def laplace(x: Tensor) -> Tensor:
    """Return (1 + erf((x - m) / (s sqrt 2))) / 2 with m = sqrt(1/2), s = sqrt(1 / 4 pi): close to relu² near its
    inflection point (Ma et al. 2022, arXiv 2209.10655, section 3.3).
    """
    return (1 + torch.erf((x - math.sqrt(0.5)) * math.sqrt(2 * math.pi))) / 2


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {"relu2": relu_squared, "laplace": laplace}
"""Functions of one score that give its weight; rows of these weights do not sum to 1."""


class OneHead(Projection):
    """One head, also if the model has several, with its own widths of keys and values."""

    def __init__(self, site: Site, key_width: int, value_width: int) -> None:
        super().__init__(site, key_width)
        self.heads = self.key_heads = self.value_heads = 1
        self.value_width = value_width

    @property
    def joined_width(self) -> int:
        return self.value_width


class ScaleAndShift(nn.Module):
    """Vectors z * kappa + mu of one vector z, with `count` pairs of kappa and mu; kappa N(0, 0.02), mu 0."""

    undecayed = ("kappa", "mu")

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.kappa = nn.Parameter(torch.empty(count, width).normal_(std=DEVIATION))
        self.mu = nn.Parameter(torch.zeros(count, width))

    def forward(self, z: Tensor, which: int) -> Tensor:
        """Map z (..., K) to (..., K)."""
        return torch.addcmul(self.mu[which].type_as(z), z, self.kappa[which].type_as(z))


class SingleHead(QueryBlocks):
    """Attention of one head; a subclass defines `queries`, `columns` and `merge_heads`, which all get the same rows."""

    slots: ClassVar[Mapping[str, frozenset[str] | None]] = {}
    softmax_heads = 1
    mixes = False  # its one head is as wide as a layer
    keeps_shapes = False

    def __init__(
        self, site: Site, *, key_width: int, value_width: int, chunk: int | None = None, activation: str = "softmax"
    ) -> None:
        super().__init__(site, OneHead(site, key_width, value_width))
        self.chunk, self.activation = chunk, activation
        most = max(site.max_length, (site.memory_length or 0) if site.role == "cross" else 0)
        self.reach = most if chunk is None else min(chunk, most)
        """Positions of the table, so that distances are below this."""
        self.longest = (site.memory_length or site.max_length) if site.role == "cross" else site.max_length
        if chunk is not None and chunk <= most:
            self.longest = None
        self.table = nn.Parameter(torch.empty(2 * self.reach - 1).normal_(std=DEVIATION))

    def initialize(self, linears: Iterable[nn.Module]) -> None:
        """Draw weights of linear maps from N(0, 0.02), with biases of 0."""
        for linear in linears:
            if isinstance(linear, nn.Linear):
                nn.init.normal_(linear.weight, std=DEVIATION)
                nn.init.zeros_(linear.bias)

    def counts(self, pairs: Pairs) -> Tensor | float:
        """Return the divisor of the scores of relu² and Laplace weights: the number of keys that a query may see."""
        visible = self._visible(pairs)
        if visible is None:
            return float(len(pairs.key_position))
        return visible.sum(-1, keepdim=True).clamp(min=1).to(upcast(pairs.q).dtype)

    def logits(self, pairs: Pairs, carry: Any) -> tuple[Tensor, Any]:
        """Return q . k / sqrt(K) + b, with the number of visible keys instead of sqrt(K) if there is no softmax."""
        if self.activation == "softmax":
            scores = upcast(self.scores(pairs))
        else:
            scores = upcast(scores_of(pairs.q, pairs.keys, 1.0)) / self.counts(pairs)
        return scores + self.bias(pairs.query_position, pairs.key_position).type_as(scores), None

    def bias(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """Return b_(j-i), (T, S), of positions i (T,) and j (S,). Raises: MtkitError for a distance without a bias."""
        distance = key_position - query_position.unsqueeze(-1)
        if self.chunk == self.reach:
            distance = distance.clamp(1 - self.reach, self.reach - 1)  # only pairs of different chunks are farther
        else:
            self._check_length(max(len(query_position), len(key_position)))
        return self.table.index_select(0, (distance + self.reach - 1).flatten()).view_as(distance)

    def softmax(self, logits: Tensor, pairs: Pairs) -> Tensor:
        """Return the weights, zero where keys are hidden, in float32 at least."""
        if self.activation == "softmax":
            return super().softmax(logits, pairs)
        weights, visible = ELEMENTWISE[self.activation](logits), self._visible(pairs)
        return weights if visible is None else weights.where(visible, 0.0)

    def shown(self, pairs: Pairs) -> Tensor | None:
        """Return whether query and key are in the same chunk, (T, S)."""
        if self.chunk is None or len(pairs.key_position) <= self.chunk:
            return None
        query, key = (x // self.chunk for x in (pairs.query_position, pairs.key_position))
        return query.unsqueeze(-1) == key

    def attend(self, inputs: Inputs) -> Attended:
        """Attend over all pairs, or chunk by chunk."""
        if self.chunk is None or inputs.need_weights or inputs.query.shape[1] <= self.chunk:
            return super().attend(inputs)
        pairs = self.pairs(inputs.query, valid=inputs.query_valid)
        return Attended(self.merge_heads(self.chunk_heads(pairs), inputs.query))

    def chunk_heads(self, pairs: Pairs) -> Tensor:
        """Return the outputs (B, 1, T, V) of attention in each chunk, from the pairs of a whole sequence."""
        assert self.chunk is not None
        batch, length, size = len(pairs.q), pairs.q.shape[2], min(self.chunk, pairs.q.shape[2])
        columns = {name: in_chunks(x, size) for name, x in pairs.columns.items()}
        valid = pairs.valid
        if valid is None and length % size and not pairs.causal:
            valid = pairs.query_position.new_ones(batch, length, dtype=torch.bool)
        if valid is not None:
            valid = in_chunks(valid.unsqueeze(-1), size).squeeze(-1)
        position = pairs.query_position[:size]
        folded = pairs._replace(
            q=in_chunks(pairs.q, size), columns=columns, valid=valid, query_position=position, key_position=position
        )
        most = max(scores_at_once(pairs.q.device) // size**2, 1)
        if size**2 > scores_at_once(pairs.q.device) or most >= len(folded.q):
            heads = self.attended(folded, None, False)[0]
        else:
            heads = torch.cat(self.recomputed(_segments(folded, most)))
        return heads.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)[:, :, :length]

    def newest(self, query: Tensor, state: State) -> tuple[Pairs, State]:
        """Return the pairs of a step, and their state; with chunks, it holds the keys of the open one only."""
        if self.chunk is None or self.site.role == "cross":
            return super().newest(query, state)
        place = state["count"] % self.chunk
        token, here = query.flatten(0, 1).unsqueeze(1), torch.full((1,), state["count"], device=query.device)
        q, columns = self.queries(token, here), self.columns(token, here)
        rows = {name: x.squeeze(2).unflatten(0, query.shape[:2]) for name, x in columns.items()}
        state = append(state, window=self.chunk, **rows)
        columns = {name: written(state, name, window=self.chunk)[:, :, :, : place + 1].flatten(0, 1) for name in rows}
        key_position = torch.arange(place + 1, device=query.device)
        return Pairs(q, columns, key_position[-1:], key_position, state=state, hypotheses=query.shape[1]), state

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Attend with the newest token; keys of finished chunks have weights of zero.

        Raises: MtkitError for a distance without a bias.
        """
        if self.site.role == "cross":  # whose keys do not show the position of the query
            self._check_length(state["count"] + 1)
        attended, state = super().advance(inputs, state)
        if attended.weights is not None and "shared" not in state:
            hidden = state["count"] - attended.weights.shape[-1]
            attended = replace(attended, weights=F.pad(attended.weights, (hidden, 0)))
        return attended, state

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the bias by distance."""
        return super().learned_numbers(inputs) | {"bias by distance": self.table.detach().clone().unsqueeze(0)}

    def _check_length(self, length: int) -> None:
        if length > self.reach:
            raise MtkitError(
                f"the attention was built for {self.reach} positions, not {length}: raise model.max_length"
            )

    def _visible(self, pairs: Pairs) -> Tensor | None:
        """Return which keys each query sees, broadcastable to (B, 1, T, S); None: all."""
        shown, visible = self.shown(pairs), pairs.visible
        return visible if shown is None else shown if visible is None else shown & visible


def _segments(pairs: Pairs, most: int) -> Iterator[Pairs]:
    """Yield pairs of at most so many segments each."""
    # split, not sliced: gradients of slices are as large as the whole
    columns = {name: x.split(most) for name, x in pairs.columns.items()}
    valid = None if pairs.valid is None else pairs.valid.split(most)
    for number, q in enumerate(pairs.q.split(most)):
        some = {name: parts[number] for name, parts in columns.items()}
        yield pairs._replace(q=q, columns=some, valid=None if valid is None else valid[number])


def in_chunks(x: Tensor, size: int) -> Tensor:
    """Return x (B, ..., T, X) as segments of `size` positions, (B * chunks, ..., size, X), the last with zeros at its
    end.
    """
    padded = F.pad(x, (0, 0, 0, -x.shape[-2] % size))
    return padded.unflatten(-2, (-1, size)).movedim(-3, 1).flatten(0, 1)
