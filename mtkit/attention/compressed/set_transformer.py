"""Set Transformer: a few learned points read all tokens, and the tokens read what the points have gathered.

Paper: Lee, Lee, Kim, Kosiorek, Choi and Teh, "Set Transformer: A Framework for Attention-based Permutation-Invariant
Neural Networks", ICML 2019, arXiv 1810.00825, equations 9 to 11. With m learned points I (m, D) and MHA(X, Y) the
multi-head attention of X over Y,
    H = MHA(I, X),  Y = MHA(X, H).
The self roles have the paper's induced points (ISAB). In the cross role the seeds of its pooling (PMA) read the source
once, and targets read the seeds. isab_block gives H the residual, norms and feed-forward of the paper's block,
    H' = LN(I + MHA(I, X)),  H = LN(H' + ReLU(H' W));
the same parts around Y are the layer's, and the feed-forward before PMA belongs to the encoder's last layer.
Departures: scores are divided by the square root of a head's width, and the residual is I itself (the authors' code
takes the width of all heads, and the projected I). Without the block, the output projection of the first attention is
folded into the second one's projections of H; its keys have no bias, which would cancel. The decoder role is an
extension: H at each position is what the points have read of the prefix, by a running softmax; keys and values of H are
never formed, and the feed-forward of m points at every position is refused. Dropout acts where tokens read H.
Cost: O((T + S) m K) time for each head, in the decoder O(T m D); O(T + S) memory. A step costs O(m D) for each head, at
any position, and keeps the m means; a step over a source costs O(m K).
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.compressed._prefix_points import read_points
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing, token_means
from mtkit.attention.kernels.dot_product import attend, attend_step, safe_softmax, scores_of
from mtkit.attention.kernels.running_softmax import add_keys, start_softmax
from mtkit.attention.options import Positive, refused
from mtkit.attention.slots import combining


class SetTransformer(HeadAttention):
    """Attention through a few learned points, which read all tokens and are read by all tokens.

    isab_points: number of points in the self roles. pma_seeds: number of points in the cross role. isab_block: whether
    the points' output passes through a residual, norms and a feed-forward of its own (not in the decoder role).
    """

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"encoder", "cross"})
    paper = "Lee et al. 2019, arXiv 1810.00825"
    complexity = "O(T m)"
    growth = 1
    mixes = False
    sequential_operations = "O(1)"
    longest_path = "O(1)"
    slots = combining("merge", "nearby", regularizer={"disagreement"})
    small: ClassVar[dict[str, Any]] = {"isab_points": 3, "pma_seeds": 3}

    def __init__(
        self, site: Site, *, isab_points: Positive = 32, pma_seeds: Positive = 32, isab_block: bool = False
    ) -> None:
        super().__init__(site)
        if isab_block and site.causal:
            raise refused("isab_block", isab_block, "be false in the decoder role: it is of m points at every position")
        width = site.d_model
        self.points = nn.Parameter(torch.empty(pma_seeds if site.role == "cross" else isab_points, width))
        self.point_q_proj = nn.Linear(width, width)
        self.point_out_proj = nn.Linear(width, width) if isab_block else None
        self.gathered_k_proj = nn.Linear(width, width, bias=False)
        self.gathered_v_proj = nn.Linear(width, width)
        for weight in (self.points, self.point_q_proj.weight, self.gathered_k_proj.weight, self.gathered_v_proj.weight):
            nn.init.xavier_uniform_(weight)
        for bias in (self.point_q_proj.bias, self.gathered_v_proj.bias):
            nn.init.zeros_(bias)
        if isab_block:
            self.feed_forward = nn.Linear(width, width)
            self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def attend(self, inputs: Inputs) -> Attended:
        """Compute the equations of the module; in a decoder, H at each position is of the tokens up to it."""
        q = self.queries(inputs.query)
        if self.site.causal:
            k, v = self.keys_values(inputs.query)
            heads = self._read_prefixes(q, k, v)
        else:
            context, valid = inputs.context, inputs.context_valid
            k, v = self.keys_values(context)
            keys, values, has_read = self._points_read(k, v, valid)
            heads, _ = attend(q, keys, values, scale=self.scale, valid=has_read, dropout=self.dropout)
        return self.result(inputs, heads, v)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return what the points have read: nothing, or in the cross role the source, shared by all hypotheses."""
        if inputs.memory is not None:
            keys, values, has_read = self._points_read(*self.keys_values(inputs.memory), inputs.memory_valid)
            return {"shared": {"keys": keys, "values": values, "some": has_read}}, None
        shape, width = (len(self.points), self.site.heads), self.projection.value_width
        return start_softmax(inputs.batch_size, inputs.hypotheses, *shape, width=width, like=self.points), None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        if "shared" in state:
            q = self.queries(inputs.query)  # (B, H, N, K)
            shared = state["shared"]
            visible = None if shared["some"] is None else shared["some"][:, None, None]
            heads, _ = attend_step(
                q.transpose(1, 2), shared["keys"], shared["values"], scale=self.scale, visible=visible
            )
            return Attended(self.merge_heads(heads.transpose(1, 2), inputs.query)), state
        q, k, v = self.queries_keys_values(inputs.query)
        scores = scores_of(self._point_queries(), k, self.scale).permute(0, 3, 2, 1).unsqueeze(-1)  # (B, N, m, H, 1)
        state = add_keys(state, scores, v.transpose(1, 2)[:, :, None, :, None])
        heads = self._read(state["mean"].flatten(3), q)
        return Attended(self.merge_heads(heads, inputs.query)), state

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the mean weight with which tokens read each point, in the roles in which points read all tokens."""
        learned = super().learned_numbers(inputs)
        if inputs is not None and not self.site.causal:
            keys, _, has_read = self._points_read(*self.keys_values(inputs.context), inputs.context_valid)
            visible = None if has_read is None else has_read[:, None, None]
            weights = safe_softmax(scores_of(self.queries(inputs.query), keys, self.scale), visible)
            learned["point use"] = token_means(weights, inputs.query_valid)
        return learned

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        tokens, valid = inputs.context, inputs.context_valid
        q, (k, v) = self.queries(inputs.query), self.keys_values(tokens)
        seen = torch.ones(tokens.shape[:2], dtype=torch.bool) if valid is None else valid
        heads = []
        for i in range(inputs.query.shape[1]):
            prefix = seen & (torch.arange(tokens.shape[1]) <= i) if self.site.causal else seen
            scores = self._point_queries() @ k.transpose(-1, -2) * self.scale
            keys, values = self._keys_values_of(safe_softmax(scores, prefix[:, None, None]) @ v)
            weights = (q[:, :, i : i + 1] @ keys.transpose(-1, -2) * self.scale).softmax(-1)
            heads.append(weights @ values * prefix.any(1)[:, None, None, None])
        return Attended(self.merge_heads(torch.cat(heads, 2), inputs.query))

    def _point_queries(self) -> Tensor:
        """Return the queries (1, H, m, K) of the points."""
        return self.projection.queries(self.point_q_proj(self.points.unsqueeze(0)))

    def _points_read(self, k: Tensor, v: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys and values (B, H, m, K) of H, and whether H has read any token (B, m), None if always."""
        read, _ = attend(self._point_queries().expand(len(k), -1, -1, -1), k, v, scale=self.scale, valid=valid)
        has_read = None if valid is None else valid.any(1, keepdim=True).expand(-1, len(self.points))
        return *self._keys_values_of(read), has_read

    def _keys_values_of(self, read: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, H, m, K) of H, given the points' heads (B, H, m, V)."""
        rows = read.transpose(1, 2).flatten(2)
        if self.point_out_proj is not None:
            rows = self.norms[0](self.points + self.point_out_proj(rows))
            rows = self.norms[1](rows + F.relu(self.feed_forward(rows)))
        return self.projection.keys(self.gathered_k_proj(rows)), self.projection.values(self.gathered_v_proj(rows))

    def _head_maps(self, q: Tensor) -> list[Tensor]:
        """Return each head's projections of H, maps (H, K, D), to apply to the queries and to their outputs.

        This is cheaper, because there is one query per head, but m rows of H.
        """
        return [
            projection.weight.type_as(q).unflatten(0, (self.site.heads, -1))
            for projection in (self.gathered_k_proj, self.gathered_v_proj)
        ]

    def _biased(self, heads: Tensor) -> Tensor:
        return heads + self.gathered_v_proj.bias.type_as(heads).view(self.site.heads, 1, -1)

    def _read_prefixes(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the heads (B, H, T, V) of all tokens, each with H of the tokens up to it."""
        keys, values = (weight.unflatten(2, (self.site.heads, -1)) for weight in self._head_maps(q))
        points = self._point_queries().squeeze(0) * self.scale
        # scale the maps, which are smaller than the queries
        heads = read_points(q, k, v, points, keys * self.scale, values, dropout=self.dropout)
        return self._biased(heads.type_as(q))

    def _read(self, means: Tensor, q: Tensor) -> Tensor:
        """Return the heads (B, H, N, V) of queries (B, H, N, K), given the points' means (B, N, m, D)."""
        keys, values = self._head_maps(q)
        rows = means.type_as(q)
        mapped_q = torch.einsum("bhtk,hkd->bthd", q * self.scale, keys)
        read = safe_softmax(mapped_q @ rows.transpose(-1, -2), None).type_as(rows) @ rows  # (B, N, H, D)
        return self._biased(torch.einsum("bthd,hvd->bhtv", read, values))
