"""Delta rule: linear attention whose memory replaces the value stored under a key instead of adding to it.

Paper: Schlag, Irie and Schmidhuber, "Linear Transformers Are Secretly Fast Weight Programmers", ICML 2021,
arXiv 2102.11174, equations 18 to 26 and 37; the chunked form is the WY representation of Yang et al. 2024,
arXiv 2406.06484.
Departures: the cross role is an extension: the source is written in order, once, and every query reads the result. The
output is not divided by the square root of K, as in the released language models: `out_proj` absorbs it. Features are
divided by their sum plus 0.001; the paper adds nothing, but sums of dpfp can be so small that float32 holds only their
rounding. `beta_proj` learns how much of a value is written. There are no weights, so attention dropout acts on the
outputs of the heads. A single key gives beta (phi(k) . phi(q)) v, not v.
Cost: O(T M V) time, O(T M) memory for M features. A step reads at most 2 M V numbers per head, at any position.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.bases.layers import xavier_linear
from mtkit.attention.bases.recent_sums import corrected_next, fixed_recent, start_recent
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, for_heads, packing, token_means
from mtkit.attention.kernels.dot_product import expand_heads, position_of, upcast
from mtkit.attention.kernels.feature_sums import elu1
from mtkit.attention.kernels.recurrence import Part, prefix_products, recur, triangle_products
from mtkit.attention.options import OneOf, Positive, refused
from mtkit.attention.slots import OWN_VECTORS, combining

FEATURE_MAPS = ("dpfp", "elu1")
EPS = 1e-3


def dpfp(x: Tensor, nu: int) -> Tensor:
    """Map (..., K) to (..., 2 K nu), deterministic and parameter-free: r = relu(x, -x) times its shifts."""
    r = torch.cat([x.relu(), (-x).relu()], dim=-1)
    return torch.cat([r * r.roll(-shift, -1) for shift in range(1, nu + 1)], dim=-1)


class Writes(NamedTuple):
    """The writes into each head's memory, in order."""

    keys: Tensor
    """(B, G, S, M) normalised features."""
    values: Tensor
    """(B, G, S, V)."""
    beta: Tensor
    """(B, G, S, 1) share of the stored value that is replaced, zero at padding."""


class Delta(HeadAttention):
    """Linear attention that reads what its memory gives for a key, and writes only the correction.

    feature_map: "dpfp" (2 K nu features) or "elu1" (elu(x) + 1, K features). nu: number of shifts of dpfp; not used by
    elu1. chunk: number of positions written at once.
    """

    roles = frozenset({"decoder", "cross"})
    published = frozenset({"decoder"})
    paper = "Schlag et al. 2021, arXiv 2102.11174"
    complexity = "O(T)"
    growth = 1
    sequential_operations = "O(T / c)"
    longest_path = "O(1)"
    keeps_shapes = True
    unrounded = True
    # other positions add to scores, which do not exist here
    slots = combining("merge", positions={"rotary"}, projection=OWN_VECTORS, regularizer={"disagreement"})
    small: ClassVar[dict[str, Any]] = {"chunk": 3}
    variants = ({"feature_map": "elu1"}, {"nu": 3})

    def __init__(
        self,
        site: Site,
        *,
        feature_map: Annotated[str, OneOf(FEATURE_MAPS)] = "dpfp",
        nu: Positive = 1,
        chunk: Positive = 32,
    ) -> None:
        super().__init__(site)
        width = self.projection.key_width
        if nu >= 2 * width:
            raise refused("nu", nu, f"be from 1 to {2 * width - 1} for heads of width {width}")
        self.feature_map = feature_map
        self.nu = nu
        self.chunk = chunk
        self.features = width if feature_map == "elu1" else 2 * width * nu
        self.groups = max(self.projection.key_heads, self.projection.value_heads)
        self.beta_proj = xavier_linear(site.memory_width or site.d_model, self.groups)

    def attend(self, inputs: Inputs) -> Attended:
        """Write S_j = S_j-1 + beta_j k_j (v_j - S_j-1^T k_j)^T over real keys; read S_i^T q_i (cross: S_S^T q_i)."""
        query = inputs.query
        if inputs.memory is None:
            writes = self._unmapped(query, inputs.query_valid)
            with torch.autocast(query.device.type, enabled=False):
                q = self.queries(query.type_as(self.q_proj.weight))
            heads = read_causal(q, writes, self.chunk, self._features)
        else:
            writes = self._unmapped(inputs.memory, inputs.memory_valid)
            heads = read(self._reads(query), memory_after(writes, self.chunk, self._features))
        return self.result(inputs, heads.type_as(query), writes.values, dropout=self.dropout)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        if inputs.memory is not None:
            writes = self._unmapped(inputs.memory, inputs.memory_valid)
            return {"shared": {"sums": memory_after(writes, self.chunk, self._features)}}, None
        like, width = upcast(self.q_proj.weight), self.projection.value_width
        shape = {"groups": self.groups, "features": self.features, "width": width}
        recent = start_recent(inputs.batch_size, inputs.hypotheses, like, **shape, fading=False)
        return {"recent": recent, "count": 0}, None

    def fixed_state(self, state: State, hypotheses: int, steps: int) -> State | None:
        if "recent" in state:
            state = {**state, "recent": fixed_recent(state["recent"])}
        return super().fixed_state(state, hypotheses, steps)

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        query = inputs.query
        if "shared" in state:
            heads = read(self._reads(query), state["shared"]["sums"])
            return Attended(self.merge_heads(heads.type_as(query), query)), state
        position = position_of(state["count"], query.device)
        write, q = self._writes(query, None, position), self._reads(query, position).unflatten(1, (self.groups, -1))
        with torch.autocast(query.device.type, enabled=False):
            heads, recent = corrected_next(q, write.keys, write.values, write.beta, state["recent"])
        output = self.merge_heads(heads.flatten(1, 2).type_as(query), query)
        return Attended(output), {"recent": recent, "count": state["count"] + 1}

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the mean share of a stored value that a token replaces."""
        learned = super().learned_numbers(inputs)
        if inputs is not None:
            beta = self._unmapped(inputs.context, None).beta.squeeze(-1)
            learned["replaced share"] = for_heads(token_means(beta, inputs.context_valid), self.site.heads)
        return learned

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """Compute equations 23 to 25, one position after the other."""
        q = self._reads(inputs.query)
        keys, values, beta = self._writes(inputs.context, inputs.context_valid)
        sums = q.new_zeros(*keys.shape[:2], self.features, values.shape[-1])
        heads = []
        for j in range(keys.shape[2]):
            held = torch.einsum("bgmv,bgm->bgv", sums, keys[:, :, j])
            sums = sums + torch.einsum("bgm,bgv->bgmv", keys[:, :, j], beta[:, :, j] * (values[:, :, j] - held))
            if inputs.memory is None:
                heads.append(torch.einsum("bhmv,bhm->bhv", expand_heads(sums, self.site.heads), q[:, :, j]))
        if inputs.memory is None:
            return Attended(self.merge_heads(torch.stack(heads, dim=2), inputs.query))
        return Attended(
            self.merge_heads(torch.einsum("bhmv,bhtm->bhtv", expand_heads(sums, self.site.heads), q), inputs.query)
        )

    # Features are computed without autocast: dpfp divides them by their sum, which can be too small for bfloat16.

    def _reads(self, query: Tensor, position: Tensor | None = None) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            return self._features(self.queries(query.type_as(self.q_proj.weight), position))

    def _writes(self, memory: Tensor, valid: Tensor | None, position: Tensor | None = None) -> Writes:
        writes = self._unmapped(memory, valid, position)
        with torch.autocast(memory.device.type, enabled=False):
            return writes._replace(keys=self._features(writes.keys))

    def _unmapped(self, memory: Tensor, valid: Tensor | None, position: Tensor | None = None) -> Writes:
        """Return writes whose keys have not been mapped to features."""
        with torch.autocast(memory.device.type, enabled=False):
            memory = memory.type_as(self.k_proj.weight)
            keys, values = (expand_heads(upcast(x), self.groups) for x in self.keys_values(memory, position))
            beta = upcast(self.beta_proj(memory)).sigmoid().transpose(1, 2).unsqueeze(-1)
        return Writes(keys, values, beta if valid is None else beta.masked_fill(~valid[:, None, :, None], 0.0))

    def _features(self, x: Tensor) -> Tensor:
        """Return features (B, H, T, M), divided by their sum: with a key norm of at most 1, no write makes the memory
        grow.
        """
        x = upcast(x)
        features = elu1(x) if self.feature_map == "elu1" else dpfp(x, self.nu)
        return features / (features.sum(-1, keepdim=True) + EPS)


def read(q: Tensor, sums: Tensor) -> Tensor:
    """Return the outputs (B, H, T, V) of queries (B, H, T, M) from the memory sums (B, G, M, V)."""
    with torch.autocast(q.device.type, enabled=False):
        rows = q.unflatten(1, (sums.shape[1], -1))  # (B, G, R, T, M)
        return (rows.flatten(2, 3) @ sums).unflatten(2, rows.shape[2:4]).flatten(1, 2)


def read_causal(q: Tensor, writes: Writes, chunk: int, features: Callable[[Tensor], Tensor] = upcast) -> Tensor:
    """Return the outputs (B, H, T, V) of queries (B, H, T, M), each after the write of its position; time and memory
    O(T).

    `features` maps queries and keys, a few positions at a time.
    """
    groups = writes.keys.shape[1]

    def step(part: Part, sequences: list[Tensor], _: list[Tensor], state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        q, k, v, beta = sequences  # (N, R, c, K), (N, c, K): the heads of a group share its memory
        phi_q, phi_k = features(q), features(k)
        if part.is_whole:
            added = _corrections(phi_k, v, beta)
            return triangle_products(phi_q.flatten(1, 2), phi_k, added).view(*q.shape[:-1], -1), []
        rows, sums = prefix_products(phi_q.flatten(1, 2), phi_k, _corrections(phi_k, v, beta, state[0]), state[0])
        return rows.view(*q.shape[:-1], -1), [sums]

    sequences = [x.flatten(0, 1) for x in (q.unflatten(1, (groups, -1)), *writes)]
    heads, _ = recur(step, sequences, [_empty_memory(writes, features)], chunk=chunk)
    return heads.unflatten(0, (-1, groups)).flatten(1, 2)


def memory_after(writes: Writes, chunk: int, features: Callable[[Tensor], Tensor] = upcast) -> Tensor:
    """Return the memory (B, G, M, V) after all writes, with keys mapped by `features`."""

    def step(_: Part, sequences: list[Tensor], __: list[Tensor], state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        phi_k, v, beta = features(sequences[0]), *sequences[1:]
        added = _corrections(phi_k, v, beta, state[0])
        return added, [torch.baddbmm(state[0], phi_k.mT, added)]

    _, (sums,) = recur(step, [x.flatten(0, 1) for x in writes], [_empty_memory(writes, features)], chunk=chunk)
    return sums.unflatten(0, writes.keys.shape[:2])


def _corrections(k: Tensor, v: Tensor, beta: Tensor, sums: Tensor | None = None) -> Tensor:
    """Return the correction (N, c, V) that each key adds: u_j = beta_j (v_j - S_j-1^T k_j), so that S_j = S_j-1 + k_j
    u_j^T.

    The u of a part solve a triangular system; the memory before the part, if any, is on its right-hand side.
    """
    overlap, known = (beta * (k @ k.mT)).tril(-1), beta * (v if sums is None else v - k @ sums)
    return torch.linalg.solve_triangular(overlap, known, upper=False, unitriangular=True)


def _empty_memory(writes: Writes, features: Callable[[Tensor], Tensor]) -> Tensor:
    """Return an empty memory (N, M, V) for each group of each segment."""
    example = features(writes.keys[:1, :1, :1].detach())
    return example.new_zeros(writes.keys.shape[:2].numel(), example.shape[-1], writes.values.shape[-1])
