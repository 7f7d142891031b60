"""Multi-head latent attention: keys and values of all heads are maps of one short vector per token, which is cached.

Paper: DeepSeek-AI, "DeepSeek-V2", 2024, arXiv 2405.04434, section 2.1, equations 9 to 19. A token h has the latent
vector c = n(W_DKV h) of r numbers, with the RMS norm n; its keys are W_UK c and its values W_UV c. Position enters by R
further numbers: q^R and k^R are rotated (RoFormer), k^R is shared by all heads, and scores are
(q^C . k^C + q^R . k^R) / sqrt(K + R). With `q_rank`, q^C and q^R come from another latent vector. The equations were
checked against the authors' code (DeepSeek-V3's `inference/model.py`), not against the paper's text.
Decoding: W_UK is applied to the query and W_UV to the weighted sum, q^C . (W_UK c) = (W_UK^T q^C) . c, so that a step
reads c and k^R of each token, r + R numbers instead of 2 H K, and never forms keys or values.
Departures: all maps have biases, except W_UK, whose bias would cancel. The encoder role is an extension, and so is the
cross role, in which R is 0, because queries and keys have no common axis. Defaults are smaller than the paper's.
Cost: O(T S) time; memory is O(T) with the fused kernel, O(T S) if weights are requested. A step costs
O(t H (r + R)): more arithmetic than over cached keys, less memory to read.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.caches import append, written
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.bases.layers import ChannelNorm, xavier_linear
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.dot_product import attend, attend_step, safe_softmax, visible_keys
from mtkit.attention.options import Natural, Null, Positive, refused
from mtkit.attention.positions import Rotary
from mtkit.attention.slots import combining


class Latent(HeadAttention):
    """Softmax attention whose keys and values are low-rank maps of the tokens; only the low-rank vectors are cached.

    kv_rank: width r of the vector that keys and values come from. rope_width: number R of rotated channels, even.
    q_rank: width of the vector that queries come from. norm: whether these vectors have an RMS norm.
    """

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"decoder"})
    paper = "DeepSeek-AI 2024, arXiv 2405.04434"
    complexity = "O(T²)"
    growth = 2
    sequential_operations = "O(1)"
    longest_path = "O(1)"
    weights = True
    slots = combining("merge", "regularizer", "nearby")
    small: ClassVar[Mapping[str, Any]] = {"kv_rank": 7}
    variants = ({"q_rank": 6}, {"rope_width": 0}, {"rope_width": 2, "norm": False})

    def __init__(
        self,
        site: Site,
        *,
        kv_rank: Annotated[Positive | None, Null("four heads' widths, at most the model's width")] = None,
        rope_width: Annotated[
            Natural | None, Null("half of a head's width in the self roles, 0 in the cross role")
        ] = None,
        q_rank: Annotated[Positive | None, Null("none: queries come from the token itself")] = None,
        norm: bool = True,
    ) -> None:
        super().__init__(site)
        width = self.projection.key_width
        self.rank = min(4 * width, site.d_model) if kv_rank is None else kv_rank
        self.turned = _rope_width(site, width, rope_width)
        self.down_proj = xavier_linear(site.memory_width or site.d_model, self.rank)
        self.k_up_proj = xavier_linear(self.rank, site.heads * width, bias=None)
        self.v_up_proj = xavier_linear(self.rank, site.heads * width)
        self.latent_norm = ChannelNorm(self.rank) if norm else nn.Identity()
        del self.k_proj, self.v_proj
        if q_rank is not None:
            self.q_down_proj = xavier_linear(site.d_model, q_rank)
            self.q_up_proj = xavier_linear(q_rank, site.heads * width)
            self.q_norm = ChannelNorm(q_rank) if norm else nn.Identity()
            del self.q_proj
        self.q_rank = q_rank
        if self.turned:
            self.q_rope_proj = xavier_linear(q_rank or site.d_model, site.heads * self.turned)
            self.k_rope_proj = xavier_linear(site.d_model, self.turned)
            self.rotary = Rotary(site, self.turned)

    @property
    def scale(self) -> float:
        """1 / sqrt(K + R)."""
        return float((self.projection.key_width + self.turned) ** -0.5)

    def latent(self, memory: Tensor) -> Tensor:
        """Return c (B, S, r) of memory (B, S, D)."""
        normed: Tensor = self.latent_norm(self.down_proj(memory))
        return normed

    def queries_in_parts(self, query: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return q^C (B, H, T, K) and q^R (B, H, T, R) of query (B, T, D) at position (T,)."""
        if self.q_rank is not None:
            query = self.q_norm(self.q_down_proj(query))
        unrotated = self.projection.queries(self.q_proj(query) if self.q_rank is None else self.q_up_proj(query))
        if not self.turned:
            return unrotated, unrotated[..., :0]
        rotated = self.q_rope_proj(query).unflatten(-1, (self.site.heads, self.turned)).transpose(1, 2)
        return unrotated, self.rotary.rotate(rotated, position)

    def turned_keys(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Return k^R (B, S, R) of tokens (B, S, D) at position (S,)."""
        return self.rotary.rotate(self.k_rope_proj(tokens), position) if self.turned else tokens[..., :0]

    def attend(self, inputs: Inputs) -> Attended:
        """Attend with keys and values of all heads, which training and whole sequences form."""
        query, context, valid = inputs.query, inputs.context, inputs.context_valid
        q = torch.cat(self.queries_in_parts(query, _range(query)), -1)
        c, turned = self.latent(context), self.turned_keys(context, _range(context))
        k, v = self.projection.keys(self.k_up_proj(c)), self.projection.values(self.v_up_proj(c))
        k = torch.cat([k, turned.unsqueeze(1).expand(-1, self.site.heads, -1, -1).type_as(k)], -1)
        # of one width with the keys, as the CPU's fused kernel needs
        heads, weights = attend(
            q.type_as(k),
            k,
            F.pad(v, (0, self.turned)),
            scale=self.scale,
            causal=self.site.causal,
            valid=valid,
            dropout=self.dropout,
            need_weights=inputs.need_weights or self.regularizes_weights,
        )
        heads = heads[..., : v.shape[-1]]
        return self.result(inputs, heads, v, weights)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return an empty cache; in the cross role c of the source, shared by all hypotheses."""
        if inputs.memory is None:
            return {"count": 0}, None
        return {"shared": {"latent": self.latent(inputs.memory).unsqueeze(1), "valid": inputs.memory_valid}}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Attend over the cached c and k^R only; O(t H (r + R))."""
        query, visible = inputs.query, None  # (B, N, D)
        here = torch.full((1,), state.get("count", 0), device=query.device)
        plain, turned = (x.transpose(1, 2) for x in self.queries_in_parts(query, here))  # (B, N, H, K) and R
        if "shared" in state:
            rows, valid = state["shared"]["latent"], state["shared"]["valid"]  # (B, 1, S, r)
            visible = None if valid is None else valid[:, None, None]
        else:
            row = torch.cat([self.latent(query), self.turned_keys(query, here)], -1)
            state = append(state, latent=row.unsqueeze(2))
            rows = written(state, "latent")  # (B, N, 1, t, r + R)
        up = self.k_up_proj.weight.unflatten(0, (self.site.heads, -1))  # (H, K, r)
        q = torch.cat([torch.einsum("bnhk,hkr->bnhr", plain, up.type_as(plain)), turned.type_as(plain)], -1)
        # values are the rows too, k^R included: a view of their first r numbers would be copied
        read, weights = attend_step(
            q.type_as(rows), rows, rows, scale=self.scale, visible=visible, need_weights=inputs.need_weights
        )
        heads = self._values_of(read[..., : self.rank])
        if visible is not None:
            heads = heads * visible.any(-1, keepdim=True)
        return Attended(self.merge_heads(heads.transpose(1, 2), query), weights=weights), state

    def _values_of(self, read: Tensor) -> Tensor:
        """Return W_UV z + b of weighted sums z (B, N, H, r): (B, N, H, V)."""
        up, bias = (x.unflatten(0, (self.site.heads, -1)) for x in (self.v_up_proj.weight, self.v_up_proj.bias))
        return torch.einsum("bnhr,hvr->bnhv", read, up.type_as(read)) + bias.type_as(read)

    @torch.no_grad()
    def adopt(self, full_state: Mapping[str, Tensor]) -> None:
        """Take over the projections of `full`, keys and values by a truncated SVD of their stacked maps.

        Without the norm this is `full` if r is at least the rank of the stacked maps.
        """
        super().adopt(full_state)
        keys, values = full_state.get("k_proj.weight"), full_state.get("v_proj.weight")
        shape = self.k_up_proj.out_features, self.down_proj.in_features
        if keys is None or values is None or keys.shape != shape or values.shape != shape:
            return
        down, up = _factors(torch.cat([keys, values]), self.rank)
        k_up, v_up = up.split(len(keys))
        width = self.projection.key_width
        self.down_proj.weight.copy_(down)
        self.k_up_proj.weight.copy_(k_up * ((width + self.turned) / width) ** 0.5)  # for the scale of scores
        self.v_up_proj.weight.copy_(v_up)
        self.v_up_proj.bias.copy_(full_state["v_proj.bias"])
        if self.turned:
            self.q_rope_proj.weight.zero_()
            self.q_rope_proj.bias.zero_()
        if self.q_rank is not None:
            down, up = _factors(full_state["q_proj.weight"], self.q_rank)
            self.q_down_proj.weight.copy_(down)
            self.q_up_proj.weight.copy_(up)
            self.q_up_proj.bias.copy_(full_state["q_proj.bias"])

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """Compute the equations head by head, with all scores."""
        query, context = inputs.query, inputs.context
        plain, turned = self.queries_in_parts(query, _range(query))
        c, turned_k = self.latent(context), self.turned_keys(context, _range(context))
        heads, maps = [], []
        maps_up = zip(*(x.weight.chunk(self.site.heads) for x in (self.k_up_proj, self.v_up_proj)), strict=True)
        for h, (k_up, v_up) in enumerate(maps_up):
            k, v = c @ k_up.T, c @ v_up.T + self.v_up_proj.bias.chunk(self.site.heads)[h]
            scores = (plain[:, h] @ k.mT + turned[:, h] @ turned_k.mT) / (k.shape[-1] + self.turned) ** 0.5
            visible = visible_keys(query, context, self.site.causal, inputs.context_valid)
            maps.append(safe_softmax(scores.unsqueeze(1), visible).squeeze(1))
            heads.append(maps[-1] @ v)
        return Attended(self.merge_heads(torch.stack(heads, 1), query), weights=torch.stack(maps, 1))


def _rope_width(site: Site, width: int, given: int | None) -> int:
    """Return R. Raises: MtkitError if it is odd, or not 0 in the cross role."""
    if site.role == "cross":
        if given:
            raise refused("rope_width", given, "be 0 in the cross role: no axis is common to queries and keys")
        return 0
    if given is None:
        return width // 4 * 2
    if given % 2:
        raise refused("rope_width", given, "be even")
    return given


def _factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return maps (rank, D) and (M, rank) whose product is the best approximation of weight (M, D) of this rank."""
    u, s, vt = torch.linalg.svd(weight.double(), full_matrices=False)
    used = min(rank, len(s))
    down, up = weight.new_zeros(rank, weight.shape[1]), weight.new_zeros(len(weight), rank)
    down[:used] = vt[:used]
    up[:, :used] = u[:, :used] * s[:used]
    return down, up


def _range(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)
