"""Delta rule: linear attention whose memory overwrites what it held under a key instead of adding to it.

Paper: Schlag, Irie and Schmidhuber, "Linear Transformers Are Secretly Fast Weight Programmers", ICML 2021,
arXiv 2102.11174, equations 18 to 26 and 37; the chunked form is the WY representation of Yang et al. 2024,
arXiv 2406.06484.
Departures: the cross role is an extension: the source is written in order, once, and read by every query. The output is
not divided by the square root of K, as the released language models do: `out_proj` absorbs it. Features are divided by
their sum plus 0.001, where the paper adds nothing: dpfp can give sums next to zero, of which float32 has only rounding.
Cost: O(T M V) time, O(T M) memory for M features. A step reads and writes M V numbers a head, whatever came before it.
Options: feature_map is dpfp, with 2 K nu features, or elu1, with K; nu is the number of shifts of dpfp (it has no
meaning for elu1); chunk is the number of positions written at once. How much of a value is written is learned, by
`beta_proj`. Attention dropout acts on the heads' outputs: there are no weights. One key alone gives
beta (phi(k) . phi(q)) v, not v.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.contract import Attended, Site, State
from mtkit.attention.dot_product import widened
from mtkit.attention.feature_sums import chunks, elu1, spread
from mtkit.attention.projected import HeadAttention
from mtkit.errors import MtkitError, did_you_mean

FEATURE_MAPS = ("dpfp", "elu1")
EPS = 1e-3


def dpfp(x: Tensor, nu: int) -> Tensor:
    """Deterministic parameter-free projection: (..., K) to (..., 2 K nu), r = relu(x, -x) times its shifts."""
    r = torch.cat([x.relu(), (-x).relu()], dim=-1)
    return torch.cat([r * r.roll(-shift, -1) for shift in range(1, nu + 1)], dim=-1)


class Writes(NamedTuple):
    """What is written into the memory of each head, in order."""

    keys: Tensor
    """(B, G, S, M) normalised features, zero at padding."""
    values: Tensor
    """(B, G, S, V)."""
    beta: Tensor
    """(B, G, S, 1) the share of what stands there that is replaced, zero at padding."""


class Delta(HeadAttention):
    """Delta rule: linear attention that corrects what its memory gives for a key before it writes there."""

    roles = frozenset({"decoder", "cross"})
    published = frozenset({"decoder"})
    paper = "Schlag et al. 2021, arXiv 2102.11174"
    complexity = "O(T)"
    growth = 1
    slots: ClassVar[Mapping[str, frozenset[str] | None]] = {
        "positions": frozenset({"rotary"}),  # the others add to scores, of which there are none
        "projection": None,
        "merge": None,
        "regularizer": frozenset({"disagreement"}),
    }
    small: ClassVar[dict[str, Any]] = {"chunk": 3}
    variants: ClassVar[tuple[dict[str, Any], ...]] = ({"feature_map": "elu1"}, {"nu": 3})

    def __init__(self, site: Site, *, feature_map: str = "dpfp", nu: int = 1, chunk: int = 32) -> None:
        super().__init__(site)
        if feature_map not in FEATURE_MAPS:
            hint = did_you_mean(feature_map, list(FEATURE_MAPS))
            raise MtkitError(f"no feature_map '{feature_map}'{hint}; there are {', '.join(FEATURE_MAPS)}")
        width = self.projection.key_width
        if not 1 <= nu < 2 * width or chunk < 1:
            raise MtkitError(
                f"delta needs nu from 1 to {2 * width - 1} and chunk >= 1, not nu = {nu} and chunk = {chunk}"
            )
        self.feature_map = feature_map
        self.nu = nu
        self.chunk = chunk
        self.features = width if feature_map == "elu1" else 2 * width * nu
        self.groups = max(self.projection.key_heads, self.projection.value_heads)
        self.beta_proj = nn.Linear(site.memory_width or site.d_model, self.groups)
        nn.init.xavier_uniform_(self.beta_proj.weight)
        nn.init.zeros_(self.beta_proj.bias)

    def forward(
        self,
        query: Tensor,
        memory: Tensor | None = None,
        *,
        query_valid: Tensor | None = None,
        memory_valid: Tensor | None = None,
        carry: Any = None,
        memory_carry: Any = None,
        task: Tensor | None = None,
        need_weights: bool = False,
    ) -> Attended:
        """S_j = S_j-1 + beta_j k_j (v_j - S_j-1^T k_j)^T over real keys; S_i^T q_i, in the cross role S_S^T q_i."""
        q = self._reads(query)
        if memory is None:
            writes = self._writes(query, query_valid)
            heads = read_causal(q, writes, self.chunk)
        else:
            writes = self._writes(memory, memory_valid)
            heads = read(q, written(writes, self.chunk))
        losses = self.losses(heads, writes.values, None, query_valid, memory_valid)
        return Attended(self.joined(F.dropout(heads.type_as(query), self.dropout)), losses=losses)

    def start(
        self,
        batch_size: int,
        memory: Tensor | None = None,
        memory_valid: Tensor | None = None,
        *,
        hypotheses: int = 1,
        carry: Any = None,
        memory_carry: Any = None,
        task: Tensor | None = None,
    ) -> tuple[State, Any]:
        """An empty memory; in the cross role the one with the source in it, once for all hypotheses."""
        if memory is not None:
            return {"shared": {"sums": written(self._writes(memory, memory_valid), self.chunk)}}, None
        shape = (batch_size, hypotheses, self.groups, self.features, self.projection.value_width)
        return {"sums": widened(self.q_proj.weight).new_zeros(shape), "count": 0}, None

    def step(
        self, query: Tensor, state: State, *, carry: Any = None, need_weights: bool = False
    ) -> tuple[Attended, State]:
        """The same equation for the newest token of each hypothesis; O(M V) a head, at any position."""
        if "shared" in state:
            heads = read(self._reads(query), state["shared"]["sums"])
            return Attended(self.joined(heads.type_as(query))), state
        rows = query.flatten(0, 1).unsqueeze(1)  # (B*N, 1, D): a segment of one token for each hypothesis
        here = torch.full((1,), state["count"], device=query.device)
        write, sums = self._writes(rows, None, here), state["sums"].flatten(0, 1)
        with torch.autocast(query.device.type, enabled=False):
            sums.add_(write.keys.transpose(-1, -2) @ (write.beta * (write.values - write.keys @ sums)))
        heads = read(self._reads(rows, here), sums)
        output = self.joined(heads.type_as(query)).squeeze(1).unflatten(0, query.shape[:2])
        return Attended(output), {"sums": state["sums"], "count": state["count"] + 1}

    def naive(
        self,
        query: Tensor,
        memory: Tensor | None = None,
        *,
        query_valid: Tensor | None = None,
        memory_valid: Tensor | None = None,
        **_: Any,
    ) -> Attended:
        """Equations 23 to 25, one position after the other."""
        q = self._reads(query)
        keys, values, beta = self._writes(
            query if memory is None else memory, query_valid if memory is None else memory_valid
        )
        sums = q.new_zeros(*keys.shape[:2], self.features, values.shape[-1])
        heads = []
        for j in range(keys.shape[2]):
            held = torch.einsum("bgmv,bgm->bgv", sums, keys[:, :, j])
            sums = sums + torch.einsum("bgm,bgv->bgmv", keys[:, :, j], beta[:, :, j] * (values[:, :, j] - held))
            if memory is None:
                heads.append(torch.einsum("bhmv,bhm->bhv", spread(sums, self.site.heads), q[:, :, j]))
        if memory is None:
            return Attended(self.joined(torch.stack(heads, dim=2)))
        return Attended(self.joined(torch.einsum("bhmv,bhtm->bhtv", spread(sums, self.site.heads), q)))

    # Features of dpfp can sum to next to nothing before they are divided by it: bfloat16 would leave only its rounding.

    def _reads(self, query: Tensor, position: Tensor | None = None) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            return self._features(self.queries(query.type_as(self.q_proj.weight), position))

    def _writes(self, memory: Tensor, valid: Tensor | None, position: Tensor | None = None) -> Writes:
        with torch.autocast(memory.device.type, enabled=False):
            memory = memory.type_as(self.k_proj.weight)
            k, v = self.keys_values(memory, position)
            keys, values = (spread(x, self.groups) for x in (self._features(k), widened(v)))
            beta = widened(self.beta_proj(memory)).sigmoid().transpose(1, 2).unsqueeze(-1)
        if valid is not None:
            padding = ~valid[:, None, :, None]
            keys, beta = keys.masked_fill(padding, 0.0), beta.masked_fill(padding, 0.0)
        return Writes(keys, values, beta)

    def _features(self, x: Tensor) -> Tensor:
        """(B, H, T, M), divided by their sum: with the norm of a key at most 1, no write makes the memory grow."""
        x = widened(x)
        features = elu1(x) if self.feature_map == "elu1" else dpfp(x, self.nu)
        return features / (features.sum(-1, keepdim=True) + EPS)


def read(q: Tensor, sums: Tensor) -> Tensor:
    """What queries (B, H, T, M) find in sums (B, G, M, V): (B, H, T, V)."""
    with torch.autocast(q.device.type, enabled=False):
        rows = q.unflatten(1, (sums.shape[1], -1))  # (B, G, R, T, M)
        return (rows.flatten(2, 3) @ sums).unflatten(2, rows.shape[2:4]).flatten(1, 2)


def read_causal(q: Tensor, writes: Writes, chunk: int) -> Tensor:
    """What query i of (B, H, T, M) finds after write i: (B, H, T, V); time and memory O(T)."""
    with torch.autocast(q.device.type, enabled=False):
        length = q.shape[2]
        chunk = min(chunk, length)
        before, corrections, _ = _scan(writes, chunk)
        k = chunks(writes.keys, chunk)
        rows = chunks(q.unflatten(1, (k.shape[1], -1)), chunk)  # (B, G, R, n, c, M)
        rows = rows.transpose(2, 3).flatten(3, 4)  # (B, G, n, R*c, M): the heads of a group share its memory
        inside = (rows @ k.transpose(-1, -2)).unflatten(3, (-1, chunk)).tril().flatten(3, 4) @ corrections
        total = (inside + rows @ before).unflatten(3, (-1, chunk)).transpose(2, 3)  # (B, G, R, n, c, V)
        return total.flatten(3, 4)[:, :, :, :length].flatten(1, 2)


def written(writes: Writes, chunk: int) -> Tensor:
    """The memory (B, G, M, V) after all writes."""
    with torch.autocast(writes.keys.device.type, enabled=False):
        return _scan(writes, min(chunk, writes.keys.shape[2]))[2]


def _scan(writes: Writes, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """The memory before each chunk (B, G, n, M, V), what each key adds (B, G, n, c, V), and the memory at the end.

    With u_j = beta_j (v_j - S_j-1^T k_j), S_j = S_j-1 + k_j u_j^T. Inside a chunk the u solve a triangular system,
    linear in the memory before it: solved for all chunks at once, they leave one product a chunk to the scan.
    """
    k, v, beta = (chunks(x, chunk) for x in writes)
    overlap = (beta * (k @ k.transpose(-1, -2))).tril(-1)
    known = torch.cat([beta * v, beta * k], dim=-1)
    solved = torch.linalg.solve_triangular(overlap, known, upper=False, unitriangular=True)
    own, erased = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    sums = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    before, corrections = [], []
    for keys, new, old in zip(k.unbind(2), own.unbind(2), erased.unbind(2), strict=True):
        before.append(sums)
        corrections.append(new - old @ sums)
        sums = sums + keys.transpose(-1, -2) @ corrections[-1]
    return torch.stack(before, dim=2), torch.stack(corrections, dim=2), sums
