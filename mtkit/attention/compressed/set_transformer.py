"""Set Transformer: a few learned points read all tokens, and the tokens read what the points have gathered.

Paper: Lee, Lee, Kim, Kosiorek, Choi and Teh, "Set Transformer: A Framework for Attention-based Permutation-Invariant
Neural Networks", ICML 2019, arXiv 1810.00825, equations 9 to 11. With m learned points I (m, D) and MHA(X, Y) the
multi-head attention of X over Y,
    H = MHA(I, X),  Y = MHA(X, H).
The self roles have the paper's induced points (ISAB). In the cross role the seeds of its pooling (PMA) read the source,
once, and targets read them. isab_block gives H the residual, norms and feed-forward of the paper's block,
    H' = LN(I + MHA(I, X)),  H = LN(H' + ReLU(H' W)),
and those around Y are the layer's, as the feed-forward of the source before PMA is that of the encoder's last layer.
Departures: scores are divided by the square root of the width of a head, and I itself is in the residual (the authors'
code has the width of all heads there, and the projected I). Without the block, the output projection of the first
attention is folded into the second's projections of H, which has no bias on keys: it cancels. The decoder role is an
extension: H is at each position what the points read of the prefix, by a running softmax, and keys and values of H are
never formed. A feed-forward of m points at every position is refused there. Dropout acts where tokens read H.
Cost: O((T + S) m K) time for each head, in the decoder O(T m D); O(T + S) memory. A step costs O(m D) for each head, at
any position, and keeps the m means; one over a source O(m K).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.compressed._prefix_points import read_points
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.dot_product import attend, attend_step, safe_softmax, scores_of
from mtkit.attention.kernels.running_softmax import add_keys, start_softmax
from mtkit.attention.options import Positive, refused


class SetTransformer(HeadAttention):
    """Attention through a few learned points, which read all tokens and are read by all.

    isab_points: number of points in the self roles. pma_seeds: number of points in the cross role. isab_block: whether
    what the points gather passes through a residual, norms and a feed-forward of its own (not in the decoder role).
    """

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"encoder", "cross"})
    paper = "Lee et al. 2019, arXiv 1810.00825"
    complexity = "O(T m)"
    growth = 1
    slots: ClassVar[Mapping[str, frozenset[str] | None]] = {
        "merge": None,
        "regularizer": frozenset({"disagreement"}),
    }
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
        """The equations of the class; in a decoder at every position with H of the tokens up to it."""
        q = self.queries(inputs.query)
        if self.site.causal:
            k, v = self.keys_values(inputs.query)
            heads = self._read_prefixes(q, k, v)
        else:
            context, valid = inputs.context, inputs.context_valid
            k, v = self.keys_values(context)
            keys, values, some = self._gathered(k, v, valid)
            heads, _ = attend(q, keys, values, scale=self.scale, valid=some, dropout=self.dropout)
        losses = self.losses(heads, v, None, inputs.query_valid, inputs.memory_valid)
        return Attended(self.merge_heads(heads), losses=losses)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """What the points have read of no tokens; in the cross role of the source, shared by all hypotheses."""
        if inputs.memory is not None:
            keys, values, some = self._gathered(*self.keys_values(inputs.memory), inputs.memory_valid)
            return {"shared": {"keys": keys, "values": values, "some": some}}, None
        shape, width = (self.site.heads, len(self.points)), self.projection.value_width
        return start_softmax(inputs.batch_size, inputs.hypotheses, *shape, width=width, like=self.points), None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """The points read the newest token of each hypothesis, which then reads them."""
        q = self.queries(inputs.query)  # (B, H, N, K)
        if "shared" in state:
            shared = state["shared"]
            visible = None if shared["some"] is None else shared["some"][:, None, None]
            heads, _ = attend_step(
                q.transpose(1, 2), shared["keys"], shared["values"], scale=self.scale, visible=visible
            )
            return Attended(self.merge_heads(heads.transpose(1, 2))), state
        k, v = self.keys_values(inputs.query)
        scores = scores_of(self._asks(), k, self.scale).movedim(3, 1).unsqueeze(-1)  # (B, N, H, m, 1)
        state = add_keys(state, scores, v.transpose(1, 2)[:, :, :, None, None])
        heads = self._read(state["mean"].movedim(1, 3), q)
        return Attended(self.merge_heads(heads)), state

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """Both attentions with all scores, and for each prefix by itself where causal."""
        tokens, valid = inputs.context, inputs.context_valid
        q, (k, v) = self.queries(inputs.query), self.keys_values(tokens)
        seen = torch.ones(tokens.shape[:2], dtype=torch.bool) if valid is None else valid
        heads = []
        for i in range(inputs.query.shape[1]):
            now = seen & (torch.arange(tokens.shape[1]) <= i) if self.site.causal else seen
            scores = self._asks() @ k.transpose(-1, -2) * self.scale
            keys, values = self._keys_values_of(safe_softmax(scores, now[:, None, None]) @ v)
            weights = (q[:, :, i : i + 1] @ keys.transpose(-1, -2) * self.scale).softmax(-1)
            heads.append(weights @ values * now.any(1)[:, None, None, None])
        return Attended(self.merge_heads(torch.cat(heads, 2)))

    def _asks(self) -> Tensor:
        """The queries (1, H, m, K) of the points."""
        return self.projection.queries(self.point_q_proj(self.points.unsqueeze(0)))

    def _gathered(self, k: Tensor, v: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values (B, H, m, K) of H, and whether it is of any token (B, m), None if always."""
        read, _ = attend(self._asks().expand(len(k), -1, -1, -1), k, v, scale=self.scale, valid=valid)
        some = None if valid is None else valid.any(1, keepdim=True).expand(-1, len(self.points))
        return *self._keys_values_of(read), some

    def _keys_values_of(self, read: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, m, K) of H, from what the points' heads have read (B, H, m, V)."""
        rows = read.transpose(1, 2).flatten(2)
        if self.point_out_proj is not None:
            rows = self.norms[0](self.points + self.point_out_proj(rows))
            rows = self.norms[1](rows + F.relu(self.feed_forward(rows)))
        return self.projection.keys(self.gathered_k_proj(rows)), self.projection.values(self.gathered_v_proj(rows))

    def _moved(self, q: Tensor) -> list[Tensor]:
        """The projections of H as maps (H, K, D) of each head, moved to the queries and to what they read.

        There is one query for each head, where there are m rows of H.
        """
        return [
            each.weight.type_as(q).unflatten(0, (self.site.heads, -1))
            for each in (self.gathered_k_proj, self.gathered_v_proj)
        ]

    def _biased(self, heads: Tensor) -> Tensor:
        return heads + self.gathered_v_proj.bias.type_as(heads).view(self.site.heads, 1, -1)

    def _read_prefixes(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The heads (B, H, T, V) of all tokens, each with H of the tokens up to it."""
        keys, values = (each.unflatten(2, (self.site.heads, -1)) for each in self._moved(q))
        points = self._asks().squeeze(0) * self.scale
        # the maps are scaled, which are smaller than the queries
        heads = read_points(q, k, v, points, keys * self.scale, values, dropout=self.dropout)
        return self._biased(heads.type_as(q))

    def _read(self, means: Tensor, q: Tensor) -> Tensor:
        """The heads (B, H, N, V) of queries (B, H, N, K), for which points have read means (B, H, m, N, V)."""
        keys, values = self._moved(q)
        rows = means.type_as(q).permute(0, 3, 2, 1, 4).flatten(3)  # (B, N, m, D)
        asks = torch.einsum("bhtk,hkd->bthd", q * self.scale, keys)
        read = safe_softmax(asks @ rows.transpose(-1, -2), None).type_as(rows) @ rows  # (B, N, H, D)
        return self._biased(torch.einsum("bthd,hvd->bhtv", read, values))
