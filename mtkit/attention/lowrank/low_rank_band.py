"""Low-rank and band heads: some heads see all keys through few dimensions, the others see a band with full width.

Paper: Guo, Qiu, Xue and Zhang, "Low-Rank and Locality Constrained Self-Attention for Sequence Modeling", IEEE/ACM
TASLP 27(12), 2019, doi 10.1109/TASLP.2019.2944078.
Departures: one `out_proj` joins both kinds of heads, as in other mechanisms. By default half of the heads are low-rank.
The cross role (an extension) has only low-rank heads: there is no band between two sequences. The scores of a low-rank
head have at most rank r; their softmax can have a higher rank.
Cost: low-rank heads O(T² (r + V)), which is quadratic, band heads O(T w K); O(T) memory, O(T²) if weights are
requested. A step costs O(t (r + V)) and O(w K); it keeps r + V numbers per token in each low-rank head, and the last
w + 1 keys and values in each band head.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.bases.pattern_attention import PatternGroup, together
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.dot_product import attend_step, safe_softmax
from mtkit.attention.kernels.pattern import Band
from mtkit.attention.options import Natural, Null, Positive, refused
from mtkit.attention.slots import combining


class LowRankBand(HeadAttention):
    """Softmax attention of low-rank heads over all keys, and of other heads over a band.

    rank: width of the queries and keys of a low-rank head. band: tokens that a band head sees on each side of the query
    (in the decoder role, before it), in addition to the query's own. band_heads: number of band heads, the last ones.
    """

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"encoder", "decoder"})
    paper = "Guo et al. 2019, doi 10.1109/TASLP.2019.2944078"
    complexity = "O(T²)"
    growth = 2
    sequential_operations = "O(1)"
    longest_path = "O(1)"
    weights = True
    # other positions need one head width, and there are two
    slots = combining("merge", "regularizer", "nearby", positions={"alibi"})
    small: ClassVar[dict[str, Any]] = {"band": 3}
    variants = ({"band_heads": 0}, {"band_heads": 1}, {"rank": 3})

    def __init__(
        self,
        site: Site,
        *,
        rank: Positive = 16,
        band: Natural = 5,
        band_heads: Annotated[
            Natural | None, Null("half of the heads in the self roles, none in the cross role")
        ] = None,
    ) -> None:
        super().__init__(site)
        most = 0 if site.role == "cross" else site.heads
        banded = (site.heads // 2 if most else 0) if band_heads is None else band_heads
        if banded > most:
            why = f"be from 0 to {most} in the {site.role} role with {site.heads} heads"
            raise refused("band_heads", band_heads, why)
        self.rank, self.band, self.low = rank, band, site.heads - banded
        kinds = [
            (range(self.low), Band(None, None), rank),
            (range(self.low, site.heads), Band(band, band), self.projection.key_width),
        ]
        self.groups = [(PatternGroup(some, site.heads, keys), width) for some, keys, width in kinds if some]
        total = sum(len(group.some) * width for group, width in self.groups)
        self.q_proj, self.k_proj = (nn.Linear(linear.in_features, total) for linear in (self.q_proj, self.k_proj))
        for linear in (self.q_proj, self.k_proj):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def attend(self, inputs: Inputs) -> Attended:
        """Attend to all keys in low-rank heads and to the band in the others, each scaled by its own width."""
        query = inputs.query
        q, k, v = self._by_group(query, inputs.context)
        outputs = [
            group.attend(
                q[at].transpose(1, 2),
                k[at].transpose(1, 2),
                *group.of(v.transpose(1, 2)),
                scale=width**-0.5,
                causal=self.site.causal,
                valid=inputs.context_valid,
                positions=self.positions,
                dropout=self.dropout,
                need_weights=inputs.need_weights or self.regularizes_weights,
            )
            for at, (group, width) in enumerate(self.groups)
        ]
        heads, weights = together(outputs, 1)
        visible = self._shown(query.shape[1], query.device) if self.regularizes_weights else None
        return self.result(inputs, heads, v.transpose(1, 2), weights, visible)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        if inputs.memory is not None:
            k, v = self.projected(inputs.memory, self.k_proj, self.v_proj)
            rows = {"keys": self._of_groups(k)[0], "values": v.unflatten(-1, (self.site.heads, -1))}
            shared = {name: x.transpose(1, 2).contiguous() for name, x in rows.items()}
            return {"shared": {**shared, "valid": inputs.memory_valid}}, None
        like, heads = self.v_proj.weight, self.site.heads
        values = (heads, self.projection.value_width)
        caches = [
            group.start(inputs.batch_size, inputs.hypotheses, like, keys=(heads, width), values=values)
            for group, width in self.groups
        ]
        return {"groups": caches, "count": 0}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        query = inputs.query
        if "shared" in state:
            return self._step_over_source(query, state["shared"], inputs.need_weights), state
        q, k, v = self._by_group(query, query)
        outputs, caches = [], []
        for at, ((group, width), cache) in enumerate(zip(self.groups, state["groups"], strict=True)):
            heads, weights, new_cache = group.step(
                cache,
                q[at],
                k[at],
                *group.of(v, axis=2),
                scale=width**-0.5,
                positions=self.positions,
                need_weights=inputs.need_weights,
            )
            outputs.append((heads, weights))
            caches.append(new_cache)
        all_heads, maps = together(outputs, 2)
        attended = Attended(self.merge_heads(all_heads.transpose(1, 2), query), weights=maps)
        return attended, {**state, "groups": caches, "count": state["count"] + 1}

    def _step_over_source(self, query: Tensor, shared: State, need_weights: bool) -> Attended:
        [q] = self._of_groups(self.projected(query, self.q_proj)[0])
        visible = None if shared["valid"] is None else shared["valid"][:, None, None]
        heads, weights = attend_step(
            q, shared["keys"], shared["values"], scale=self.rank**-0.5, visible=visible, need_weights=need_weights
        )
        return Attended(self.merge_heads(heads.transpose(1, 2), query), weights=weights)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        source, valid = inputs.context, inputs.context_valid
        q, k = self.q_proj(inputs.query), self.k_proj(source)
        v = self.v_proj(source).unflatten(-1, (self.site.heads, -1))
        i, j = torch.arange(inputs.query.shape[1])[:, None], torch.arange(source.shape[1])
        first, heads, maps = 0, [], []
        for head in range(self.site.heads):
            width = self.rank if head < self.low else self.projection.key_width
            columns = slice(first, first + width)
            scores = q[..., columns] @ k[..., columns].mT / width**0.5
            if self.positions is not None:
                penalty = self.positions.bias(q, i[:, 0], j, 1.0)
                scores = scores if penalty is None else scores + penalty[head]
            visible = torch.ones_like(scores, dtype=torch.bool)
            if head >= self.low:
                visible = visible & ((i - j).abs() <= self.band)
            if self.site.causal:
                visible = visible & (j <= i)
            if valid is not None:
                visible = visible & valid[:, None]
            maps.append(safe_softmax(scores, visible))
            heads.append(maps[-1] @ v[:, :, head])
            first += width
        return Attended(self.merge_heads(torch.stack(heads, 1), inputs.query), weights=torch.stack(maps, 1))

    def adopt(self, full_state: Mapping[str, Tensor]) -> None:
        """Load the weights of `full`; the scores of low-rank heads become the nearest ones of rank r."""
        names = [f"{projection}.{part}" for projection in ("q_proj", "k_proj") for part in ("weight", "bias")]
        state, heads, converted = self.state_dict(), self.site.heads, dict(full_state)
        wide = heads * self.projection.key_width
        matches = all(name in full_state and len(full_state[name]) == wide for name in names)
        if matches and len(self.q_proj.weight) != wide:
            q, qb, k, kb = (full_state[name].unflatten(0, (heads, -1)) for name in names)
            low = _of_rank(torch.cat([q, qb.unsqueeze(-1)], -1)[: self.low], k[: self.low], self.rank)
            rows = [low[0][..., :-1], low[0][..., -1], low[1], torch.zeros_like(low[1][..., -1])]
            for name, few, every in zip(names, rows, (q, qb, k, kb), strict=True):
                converted[name] = torch.cat([few.flatten(0, 1), every[self.low :].flatten(0, 1)]).type_as(state[name])
        super().adopt(converted)

    def _shown(self, length: int, device: torch.device) -> Tensor:
        """Return (H', T, T): the keys that each of the `weighed_heads` sees."""
        i = torch.arange(length, device=device)
        near = (i.unsqueeze(-1) - i).abs() <= self.band
        return torch.stack([near if head >= self.low else torch.ones_like(near) for head in self.weighed_heads])

    def _by_group(self, query: Tensor, memory: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
        """Return queries and keys (B, T, h, width) of each group of heads, and the values (B, S, H, V) of all."""
        if query is memory:
            q, k, v = self.projected(query, self.q_proj, self.k_proj, self.v_proj)
        else:
            (q,), (k, v) = self.projected(query, self.q_proj), self.projected(memory, self.k_proj, self.v_proj)
        return self._of_groups(q), self._of_groups(k), v.unflatten(-1, (self.site.heads, -1))

    def _of_groups(self, x: Tensor) -> list[Tensor]:
        """Split rows (B, T, ...) of all heads into (B, T, h, width) for each group."""
        parts = x.split([len(group.some) * width for group, width in self.groups], -1)
        return [part.unflatten(-1, (-1, width)) for part, (_, width) in zip(parts, self.groups, strict=True)]


def _of_rank(q: Tensor, k: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return maps (H, rank, D) and (H, rank, M) whose product / sqrt(rank) is nearest to q^T k / sqrt(K), for q (H, K,
    D).

    The singular value decomposition of q^T k, with k (H, K, M), is computed from factors with K rows. Rows beyond K add
    nothing to the product but can learn.
    """
    width = q.shape[1]
    (side_q, inner_q), (side_k, inner_k) = torch.linalg.qr(q.mT.double()), torch.linalg.qr(k.mT.double())
    u, s, vh = torch.linalg.svd(inner_q @ inner_k.mT, full_matrices=False)
    root = (s * (rank / width) ** 0.5).sqrt().unsqueeze(1)
    maps = [((basis @ x * root).mT[:, :rank]) for basis, x in ((side_q, u), (side_k, vh.mT))]
    rest = max(rank - maps[0].shape[1], 0)
    more_q = torch.randn(len(q), rest, q.shape[2], dtype=torch.float64, device=q.device) * q.shape[2] ** -0.5
    more_k = more_q.new_zeros(len(k), rest, k.shape[2])
    return torch.cat([maps[0], more_q], 1), torch.cat([maps[1], more_k], 1)
