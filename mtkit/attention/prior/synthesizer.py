"""Synthesizer: scores are learned per position or predicted by each query, and are not products of two tokens.

Paper: Tay, Bahri, Metzler, Juan, Zhao and Zheng, "Synthesizer: Rethinking Self-Attention for Transformer Models",
ICML 2021, arXiv 2005.00743, sections 3.1 to 3.3 and table 1.
Departures: in factorized-dense, a times b is at least the number of positions; the paper divides that number, which
may be prime. The parts of a mixture are weighted by the softmax of one number for each, the same for all heads. The
cross role is an extension: its columns are positions of the source.
Cost: O(T S) time and memory, without the fused kernel. Parameters per layer, for N positions: random H N², factorized-
random 2 H N r, dense H N K and D², factorized-dense H (a + b) K and 2 D². A step costs O(t), or O(t K) or O(t r) if
scores are predicted or factorised; keys are projected and kept only for a mixture with "dot".
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.layers import xavier_linear
from mtkit.attention.bases.score_attention import Pairs, ScoreAttention
from mtkit.attention.contract import Inputs, Site
from mtkit.attention.kernels.dot_product import scores_of, upcast
from mtkit.attention.options import Null, OneOf, Positive, SomeOf, parts, refused
from mtkit.attention.slots import combining
from mtkit.errors import MtkitError

BY_POSITION = ("random", "factorized-random")
BY_TOKEN = ("dense", "factorized-dense")
PARTS = (*BY_POSITION, *BY_TOKEN, "dot")
VARIANTS = (*BY_POSITION, *BY_TOKEN, "mixture")


class Synthesizer(ScoreAttention):
    """Softmax attention whose scores do not compare tokens.

    variant: "random" (a learned map of positions), "factorized-random" (a map of rank factor_rank), "dense" (each token
    predicts its scores), "factorized-dense" (it predicts factor_a numbers, and as many others as are needed for all
    products), or "mixture" of the parts that mix names, "dot" for scaled products among them. factor_a: the
    first of the two counts of factorized-dense. fixed: whether random maps stay as they are drawn.
    """

    roles = frozenset({"encoder", "decoder", "cross"})
    keeps_shapes = False
    published = frozenset({"encoder", "decoder"})
    paper = "Tay et al. 2021, arXiv 2005.00743"
    slots = combining(
        "merge", "regularizer", "nearby", positions={"alibi"}, projection={"multi-query", "grouped-query"}
    )
    small: ClassVar[Mapping[str, Any]] = {"factor_rank": 3, "factor_a": 5}
    variants = (
        {"variant": "factorized-random"},
        {"variant": "factorized-random", "fixed": True},
        {"variant": "dense"},
        {"variant": "factorized-dense"},
        {"variant": "mixture"},
        {"variant": "mixture", "mix": "factorized-random,factorized-dense"},
    )

    def __init__(
        self,
        site: Site,
        *,
        variant: Annotated[str, OneOf(VARIANTS)] = "random",
        factor_rank: Positive = 8,
        factor_a: Annotated[Positive | None, Null("the square root of the longest length, rounded up")] = None,
        fixed: bool = False,
        mix: Annotated[str | Sequence[str], SomeOf(PARTS)] = "random,dense,dot",
    ) -> None:
        super().__init__(site)
        names = parts(mix) if variant == "mixture" else [variant]
        if len(set(names)) < len(names):
            raise refused("mix", mix, "name each part once")
        if fixed and not set(names) & set(BY_POSITION):
            raise refused("fixed", fixed, f"be false if no part is {' or '.join(BY_POSITION)}")
        self.longest: int = (site.memory_length or site.max_length) if site.role == "cross" else site.max_length
        self.reads_query = site.role != "cross" or self.merge_reads_query or not set(names) <= set(BY_POSITION)
        sizes = site.heads, site.max_length, self.longest
        inner = math.ceil(math.sqrt(self.longest)) if factor_a is None else factor_a
        if "factorized-dense" in names and inner > self.longest:
            raise refused("factor_a", inner, f"be at most the {self.longest} positions")
        constructors: dict[str, Callable[[], nn.Module]] = {
            "random": lambda: RandomScores(*sizes, fixed),
            "factorized-random": lambda: FactorizedRandomScores(*sizes, factor_rank, fixed),
            "dense": lambda: DenseScores(site, self.longest),
            "factorized-dense": lambda: FactorizedDenseScores(site, self.longest, inner),
        }
        self.synthetic = nn.ModuleDict({name: constructors[name]() for name in names if name != "dot"})
        self.has_dot = "dot" in names
        if not self.has_dot:
            del self.q_proj, self.k_proj
        self.mix_weight = nn.Parameter(torch.zeros(len(names))) if len(names) > 1 else None

    def queries(self, query: Tensor, position: Tensor | None = None) -> Tensor:
        """Return the tokens (B, 1, T, D), from which each part makes its own queries."""
        return query.unsqueeze(1)

    def columns(self, memory: Tensor, position: Tensor | None = None) -> dict[str, Tensor]:
        """Return keys and values; only values without "dot"."""
        if self.has_dot:
            return super().columns(memory, position)
        return {"values": self.projection.values(self.projected(memory, self.v_proj)[0])}

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the share of each part in a mixture, the same in all heads."""
        learned = super().learned_numbers(inputs)
        if self.mix_weight is not None:
            names = [*self.synthetic, *(["dot"] if self.has_dot else [])]
            learned |= {f"share of {n}": x for n, x in zip(names, self.mix_weight.softmax(0).split(1), strict=True)}
        return learned

    def scores(self, pairs: Pairs) -> Tensor:
        """Return the sum of the parts' scores (B or 1, H, T, S) under the softmax of `mix_weight`; "dot" is the last.

        Raises: MtkitError beyond the positions that it was built for.
        """
        tokens, keys, step = pairs.q.squeeze(1), pairs.values.shape[2], pairs.state
        reached = tokens.shape[1] if step is None else step["count"]
        for count, most in ((reached, self.site.max_length), (keys, self.longest)):
            if count > most:
                raise MtkitError(f"synthesizer was built for {most} positions, not {count}: raise model.max_length")
        position = None if step is None else pairs.query_position
        scores = [part(tokens, position, keys) for part in self.synthetic.values()]
        if self.has_dot:
            scores.append(scores_of(super().queries(tokens), pairs.keys, self.scale))
        if self.mix_weight is None:
            return scores[0]
        shares = upcast(self.mix_weight).softmax(0)
        return sum(share * upcast(part_scores) for share, part_scores in zip(shares, scores, strict=True))


class RandomScores(nn.Module):
    """A map R (H, N, M) for N queries and M keys.

    Like the other kinds of scores, it takes tokens (B, T, D), their position, and the number S of keys, and returns
    scores (B or 1, H, T, S). In a step, position (1,) applies to all tokens; None means 0 to T - 1.
    """

    def __init__(self, heads: int, queries: int, keys: int, fixed: bool) -> None:
        super().__init__()
        self.map: Tensor
        _add(self, "map", _drawn(heads, queries, keys), fixed)

    def forward(self, tokens: Tensor, position: Tensor | None, number: int) -> Tensor:
        return _rows(self.map, position, tokens.shape[1])[:, :, :number].unsqueeze(0)


class FactorizedRandomScores(nn.Module):
    """A map R1 R2^T of rank r, from R1 (H, N, r) and R2 (H, M, r)."""

    def __init__(self, heads: int, queries: int, keys: int, rank: int, fixed: bool) -> None:
        super().__init__()
        self.left: Tensor
        self.right: Tensor
        _add(self, "left", _drawn(heads, queries, rank), fixed)
        _add(self, "right", _drawn(heads, keys, rank), fixed)

    def forward(self, tokens: Tensor, position: Tensor | None, number: int) -> Tensor:
        left = _rows(self.left, position, tokens.shape[1])
        return (left @ self.right[:, :number].transpose(-1, -2)).unsqueeze(0)


class DenseScores(nn.Module):
    """W2 relu(W1 x + b1) + b2: M scores of each head from the token, through a hidden layer as wide as the head."""

    undecayed = ("bias",)

    def __init__(self, site: Site, keys: int) -> None:
        super().__init__()
        self.heads = site.heads
        self.hidden = xavier_linear(site.d_model, site.heads_width)
        self.weight = nn.Parameter(_drawn(site.heads, keys, site.head_width))
        self.bias = nn.Parameter(torch.zeros(site.heads, keys))

    def forward(self, tokens: Tensor, position: Tensor | None, number: int) -> Tensor:
        hidden = F.relu(self.hidden(tokens)).unflatten(-1, (self.heads, -1))  # (B, T, H, K)
        scores = torch.einsum("bthk,hsk->bhts", hidden, self.weight[:, :number].type_as(hidden))
        return scores + self.bias[:, None, :number]


class FactorizedDenseScores(nn.Module):
    """alpha_(j mod a) beta_(j div a): a + b predicted numbers instead of up to a b."""

    def __init__(self, site: Site, keys: int, inner: int) -> None:
        super().__init__()
        self.inner = inner
        self.alpha = DenseScores(site, inner)
        self.beta = DenseScores(site, -(-keys // inner))

    def forward(self, tokens: Tensor, position: Tensor | None, number: int) -> Tensor:
        alpha = self.alpha(tokens, position, self.inner)
        beta = self.beta(tokens, position, -(-number // self.inner))
        return (beta.unsqueeze(-1) * alpha.unsqueeze(-2)).flatten(-2)[..., :number]


def _rows(table: Tensor, position: Tensor | None, count: int) -> Tensor:
    """Return rows (H, T, X) of a table (H, N, X)."""
    return table[:, :count] if position is None else table.index_select(1, position)


def _drawn(heads: int, rows: int, columns: int) -> Tensor:
    """Return matrices (H, rows, columns), each drawn separately as Glorot and Bengio do."""
    bound = math.sqrt(6 / (rows + columns))
    return torch.empty(heads, rows, columns).uniform_(-bound, bound)


def _add(module: nn.Module, name: str, value: Tensor, fixed: bool) -> None:
    """Add a parameter, or a saved buffer that is never trained."""
    if fixed:
        module.register_buffer(name, value)
    else:
        module.register_parameter(name, nn.Parameter(value))
