"""Only global nodes: tokens interact through a few nodes that read all tokens and are read by all.

Paper: the atomic pattern of Lin et al., "A Survey of Transformers", 2021, arXiv 2106.04554, section 4.1.1; internal
nodes as in Longformer (arXiv 2004.05150), external ones as in ETC (arXiv 2004.08483).
internal: the first g tokens are the nodes: they see all tokens; the other tokens see them and themselves.
external: g learned vectors E; first E' = attention of E over the tokens, then each token sees itself and E'.
Departures: the decoder and cross roles are extensions. In the decoder role every set of keys ends at the query's own
position; an external node then has, at each position, its value over the prefix, by a running softmax. In the cross
role (external only) the nodes summarize the source once and each query sees only the nodes. The output projection of E'
is folded into the nodes' own key and value projections, `node_k_proj` and `node_v_proj`; dropout acts only when tokens
read. Nodes are not carried from layer to layer, and internal ones have no projections of their own (see `etc` and
`longformer`).
Cost: O(T g). A step costs O(g), at any position, and keeps g tokens or sums.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from mtkit.attention.bases.pattern_attention import PatternAttention, by_head
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.dot_product import attend, attend_step, expand_heads, safe_softmax, scores_of, weighted
from mtkit.attention.kernels.pattern import Band, Columns, Rows
from mtkit.attention.kernels.running_softmax import add_keys, read_prefixes, start_softmax
from mtkit.attention.options import Null, OneOf, PositiveByLayer, of_layer, refused
from mtkit.attention.slots import WITHOUT_SCORES
from mtkit.errors import MtkitError

MODES = ("internal", "external")


class Global(PatternAttention):
    """Attention through a few global nodes.

    global_tokens: number of nodes; with one node in the cross role all queries get the same output. mode: "internal" or
    "external".
    """

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"encoder"})
    paper = "Lin et al. 2021, arXiv 2106.04554"
    complexity = "O(T g)"
    growth = 1
    longest_path = "O(1), decoder none"
    weights = False
    slots = WITHOUT_SCORES | {"positions": None}
    small: ClassVar[dict[str, Any]] = {"global_tokens": 3}
    variants = ({"mode": "internal"}, {"mode": "external"})

    def __init__(
        self,
        site: Site,
        *,
        global_tokens: Annotated[PositiveByLayer | None, Null("1 in the self roles, 8 in the cross role")] = None,
        mode: Annotated[
            Annotated[str, OneOf(MODES)] | None, Null("internal in the self roles, external in the cross role")
        ] = None,
    ) -> None:
        super().__init__(site)
        cross = site.role == "cross"
        mode = mode or ("external" if cross else "internal")
        if cross and mode == "internal":
            raise refused("mode", mode, "be external in the cross role")
        self.count = of_layer("global_tokens", (8 if cross else 1) if global_tokens is None else global_tokens, site)
        self.external = mode == "external"
        if not self.external:
            self.groups = by_head([Band(0, 0) | Columns(self.count) | Rows(self.count)] * site.heads)
            return
        if self.positions is not None:
            raise MtkitError("external global nodes have no positions: leave positions out, or take mode=internal")
        self.nodes = nn.Parameter(torch.randn(self.count, site.d_model))
        width = site.heads * self.projection.value_width
        self.node_k_proj = nn.Linear(width, self.k_proj.out_features)
        self.node_v_proj = nn.Linear(width, self.v_proj.out_features)
        for linear in (self.node_k_proj, self.node_v_proj):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def attend(self, inputs: Inputs) -> Attended:
        """Internal: softmax over the token itself and the global tokens. External: over itself and the nodes."""
        if not self.external:
            return super().attend(replace(inputs, need_weights=False))
        q = self.queries(inputs.query)
        k, v = self.keys_values(inputs.context)
        valid = inputs.context_valid
        if self.site.causal:
            scores = scores_of(self._node_queries(), k, self.scale)  # (B, H, g, T)
            heads = read_prefixes(self._own_and_prefix, scores, expand_heads(v, q.shape[1]).unsqueeze(2), q, k, v)
        else:
            gathered, _ = attend(self._node_queries().expand(len(k), -1, -1, -1), k, v, scale=self.scale, valid=valid)
            nodes = self._node_heads(gathered)
            if inputs.memory is None:
                heads = self._own_and_nodes(q, k, v, *nodes)
            else:
                real = None if valid is None else valid.any(1, keepdim=True).expand(-1, self.count)
                heads, _ = attend(q, *nodes, scale=self.scale, valid=real, dropout=self.dropout)
        return self.result(inputs, heads, v)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Internal: an empty cache of the global tokens. External: the nodes' sums, empty or over the source."""
        batch_size, memory_valid = inputs.batch_size, inputs.memory_valid
        if not self.external:
            return super().begin(inputs)
        if inputs.memory is not None:
            k, v = self.keys_values(inputs.memory)
            queries = self._node_queries().expand(batch_size, -1, -1, -1)
            gathered, _ = attend(queries, k, v, scale=self.scale, valid=memory_valid)
            keys, values = self._node_heads(gathered)
            valid = None if memory_valid is None else memory_valid.any(1)
            return {"shared": {"keys": keys, "values": values, "valid": valid}}, None
        nodes, width = (self.site.heads, self.count), self.projection.value_width
        return start_softmax(batch_size, inputs.hypotheses, *nodes, width=width, like=self.nodes), None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Add the newest token to the nodes' sums; it then reads the nodes and itself."""
        query = inputs.query
        if not self.external:
            return super().advance(replace(inputs, need_weights=False), state)
        rows = query.flatten(0, 1).unsqueeze(1)  # (B*N, 1, D): a segment of one token for each hypothesis
        q = self.queries(rows)
        if "shared" in state:
            shared = state["shared"]
            visible = None if shared["valid"] is None else shared["valid"][:, None, None, None]
            q = q.squeeze(2).unflatten(0, query.shape[:2])
            heads, _ = attend_step(q, shared["keys"], shared["values"], scale=self.scale, visible=visible)
            return Attended(self.merge_heads(heads.transpose(1, 2), query)), state
        k, v = self.keys_values(rows)
        scores = scores_of(self._node_queries(), k, self.scale).unflatten(0, query.shape[:2])  # (B, N, H, g, 1)
        state = add_keys(state, scores, expand_heads(v, self.site.heads).unflatten(0, query.shape[:2]).unsqueeze(3))
        heads = self._own_and_prefix(state["mean"].flatten(0, 1).unsqueeze(3), q, k, v)  # (B*N, H, 1, V)
        return Attended(self.merge_heads(heads, query).squeeze(1).unflatten(0, query.shape[:2])), state

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """Internal: a dense mask. External: both steps with all scores, query by query if causal."""
        query = inputs.query
        if not self.external:
            return super().naive(query, query_valid=inputs.query_valid)
        tokens, valid = inputs.context, inputs.context_valid
        real = tokens.new_ones(tokens.shape[:2], dtype=torch.bool) if valid is None else valid
        (k, v), queries = self.keys_values(tokens), self._node_queries()
        outputs = []
        for i in range(query.shape[1]):
            seen = real & (torch.arange(tokens.shape[1]) <= i) if self.site.causal else real
            weights = safe_softmax(scores_of(queries, k, self.scale), seen[:, None, None])
            keys, values = self._node_heads(weighted(weights, v))
            visible = seen.any(1)[:, None, None, None].expand(-1, 1, 1, self.count)
            if inputs.memory is None:
                keys, values = torch.cat([k[:, :, i : i + 1], keys], 2), torch.cat([v[:, :, i : i + 1], values], 2)
                visible = torch.ones_like(visible[..., :1]).expand(-1, -1, -1, self.count + 1)
            scores = scores_of(self.queries(query[:, i : i + 1]), keys, self.scale)
            outputs.append(weighted(safe_softmax(scores, visible), values))
        return Attended(self.merge_heads(torch.cat(outputs, dim=2), query))

    def _node_queries(self) -> Tensor:
        """Return the nodes' queries (1, H, g, K)."""
        return self.projection.queries(self.q_proj(self.nodes.unsqueeze(0)))

    def _node_heads(self, gathered: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nodes' keys (B, G, g, K) and values (B, G, g, V) from their heads' outputs (B, H, g, V)."""
        merged = self.merged(gathered, self.nodes.expand(len(gathered), -1, -1))
        return self.projection.keys(self.node_k_proj(merged)), self.projection.values(self.node_v_proj(merged))

    def _own_and_prefix(self, gathered: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the heads' outputs (B, H, T, V); at each position the nodes have gathered (B, H, g, T, V)."""
        # each position becomes a segment of one token with its own nodes
        nodes = self._node_heads(gathered.type_as(v).movedim(3, 1).flatten(0, 1))
        segments, tokens = q.shape[0], q.shape[2]
        q, k, v = (x.transpose(1, 2).flatten(0, 1).unsqueeze(2) for x in (q, k, v))
        return self._own_and_nodes(q, k, v, *nodes).squeeze(2).unflatten(0, (segments, tokens)).transpose(1, 2)

    def _own_and_nodes(self, q: Tensor, k: Tensor, v: Tensor, node_keys: Tensor, node_values: Tensor) -> Tensor:
        """Return the outputs (B, H, T, V) of tokens that see themselves, k (B, G, T, K), and nodes (B, G, g, K)."""
        k, v = (expand_heads(x, q.shape[1]) for x in (k, v))
        score = (q * k).sum(-1, keepdim=True) * self.scale
        weights = safe_softmax(torch.cat([score, scores_of(q, node_keys, self.scale)], dim=-1), None)
        weights = nn.functional.dropout(weights, self.dropout).type_as(v)
        return weights[..., :1] * v + weighted(weights[..., 1:], node_values)
