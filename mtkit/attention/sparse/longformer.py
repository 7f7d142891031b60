"""Longformer: a sliding window, optionally dilated, and a few global tokens with their own projections.

Paper: Beltagy, Peters and Cohan, "Longformer: The Long-Document Transformer", 2020, arXiv 2004.05150, section 3.1.
Departures: the first tokens are global, or the separators of documents (the paper chooses them by task); the option is
the radius on each side. In the decoder role global tokens are an extension (the paper's autoregressive model has none):
every set of keys ends at the query's own position, and separators are global keys only, as global queries would need
the second projections of all earlier tokens. In the cross role the paper's LED keeps full
attention.
Cost: O(T (r + g)). A step costs O(r + g), at any position, and keeps r d + 1 + g tokens for dilation d.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.caches import append, start_cache, written
from mtkit.attention.bases.pattern_attention import PatternAttention, by_head
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.dot_product import attend, attend_step, is_plain, scores_of, weighted
from mtkit.attention.kernels.pattern import Band, Columns, Pattern, Rows
from mtkit.attention.kernels.sparse import dense_attend, visible_pairs
from mtkit.attention.marks import separators
from mtkit.attention.options import NaturalByLayer, Null, OneOf, PositiveByLayer, of_layer, refused
from mtkit.attention.sparse._marked_globals import (
    at,
    listed,
    replace_rows,
    start_steps,
    step_window_and_globals,
    window_and_globals,
)

GLOBAL_AT = ("first", "separators", "both")
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
Computed = tuple[Tensor, Tensor | None, Tensor | None]
"""Outputs (B, H, T, V), weights (B, H, T, T) and visible keys of all queries."""


class Longformer(PatternAttention):
    """Sliding-window attention with global tokens.

    window_radius: steps seen on each side, one number or one per layer. dilation: positions per step, one number or one
    per layer. global_tokens: number of first tokens that see all tokens and are seen by all. global_separate_proj:
    whether global tokens have their own projections for queries, keys and values. global_at: which tokens are global:
    the first, the separators between the sentences of a document, or in the encoder both.
    """

    roles = published = frozenset({"encoder", "decoder"})
    paper = "Beltagy et al. 2020, arXiv 2004.05150"
    complexity = "O(T (r + g))"
    growth = 1
    longest_path = "O(1), decoder O(T / r)"
    small: ClassVar[dict[str, Any]] = {"window_radius": 3}
    variants = (
        {"global_tokens": 2},
        {"dilation": 2},
        {"window_radius": [2, 4]},
        {"global_tokens": 2, "dilation": 2},
        {"global_tokens": 2, "global_separate_proj": False},
        {"global_at": "separators"},
        {"global_at": "both", "global_tokens": 2, "dilation": 2},
        {"global_at": "both", "global_separate_proj": False},
    )
    global_q_proj: nn.Linear
    global_k_proj: nn.Linear
    global_v_proj: nn.Linear

    def __init__(
        self,
        site: Site,
        *,
        window_radius: NaturalByLayer = 256,
        dilation: PositiveByLayer = 1,
        global_tokens: Annotated[NaturalByLayer | None, Null("1 in the encoder, 0 in the decoder")] = None,
        global_separate_proj: bool = True,
        global_at: Annotated[str, OneOf(GLOBAL_AT)] = "first",
    ) -> None:
        super().__init__(site)
        self.radius = of_layer("window_radius", window_radius, site)
        self.dilation = of_layer("dilation", dilation, site)
        default = 0 if site.causal else 1
        self.globals = of_layer("global_tokens", default if global_tokens is None else global_tokens, site)
        self.at_separators = global_at != "first"
        if global_at == "separators":
            self.globals = 0
        if self.at_separators:
            self._check_separators(global_at)
            self.reads_marks = True
        queries = self.at_separators and not site.causal
        self.separate = global_separate_proj and (self.globals > 0 or queries)
        pattern: Pattern = Band(self.radius, self.radius, self.dilation)
        if self.globals:
            pattern = pattern | Columns(self.globals)
        if self.globals and not self.separate:
            pattern = pattern | Rows(self.globals)
        self.groups = by_head([pattern] * site.heads)
        if self.separate:
            for name in PROJECTIONS:
                local = getattr(self, name)
                copy = nn.Linear(local.in_features, local.out_features)
                copy.load_state_dict(local.state_dict())
                self.add_module(f"global_{name}", copy)

    def _check_separators(self, global_at: str) -> None:
        if self.site.causal and global_at == "both":
            raise refused("global_at", global_at, "be first or separators in the decoder role")
        if not is_plain(self.positions):
            raise refused("global_at", global_at, "be first with positions that change scores")

    def sees(self, i: Tensor, j: Tensor, lengths: Tensor) -> Tensor:
        """The pattern, and all keys for global queries, also if these have their own projections."""
        return super().sees(i, j, lengths) | (i < self.globals)

    def attend(self, inputs: Inputs) -> Attended:
        """Softmax over the window and the global keys; for global queries, over all keys by the second projections."""
        query, query_valid, need_weights = inputs.query, inputs.query_valid, inputs.need_weights
        if self.at_separators:
            return self._attend_marked(inputs)
        if not self.separate:
            return super().attend(inputs)
        q, (k, v) = self.queries(query), self.keys_values(query)
        heads, weights = self.attended(q, k, v, valid=query_valid, need_weights=need_weights)
        first, first_weights = self._global_rows(query, query_valid, need_weights or self.regularizes_weights)
        heads = heads.slice_scatter(first.type_as(heads), 2, 0, first.shape[2])
        if weights is not None and first_weights is not None:
            weights = self._with_first(first_weights, weights)
        read, visible = self.weights_to_regularize(q, k, query_valid) if self.regularizes_weights else (None, None)
        if read is not None and first_weights is not None:
            read = self._with_first(first_weights[:, : read.shape[1]], read)
        attended = self.result(inputs, heads, v, read, visible)
        attended.weights = weights if need_weights else None
        return attended

    def _chosen(self, inputs: Inputs) -> Tensor:
        """Return which real tokens are global, (B, T), with `at_separators`."""
        batch, length = inputs.query.shape[:2]
        chosen = (torch.arange(length, device=inputs.query.device) < self.globals).expand(batch, -1)
        if inputs.query_marks is not None:
            chosen = chosen | separators(inputs.query_marks)
        return chosen if inputs.query_valid is None else chosen & inputs.query_valid

    def _attend_marked(self, inputs: Inputs) -> Attended:
        """The same for global tokens whose number and places differ between segments."""
        query, valid, chosen = inputs.query, inputs.query_valid, self._chosen(inputs)
        q, (k, v) = self.queries(query), self.keys_values(query)
        weighs = inputs.need_weights or self.regularizes_weights
        weights, visible = None, None
        if weighs:
            position = torch.arange(query.shape[1], device=query.device)
            seen = Band(self.radius, self.radius, self.dilation).sees(position.unsqueeze(1), position)
            visible = visible_pairs((seen | chosen.unsqueeze(1)).unsqueeze(1), self.site.causal, valid)
            heads, weights = dense_attend(q, k, v, visible, self.scale, None, self.dropout)
        else:
            heads = window_and_globals(
                q,
                k,
                v,
                chosen,
                radius=self.radius,
                dilation=self.dilation,
                scale=self.scale,
                valid=None if self.site.causal else valid,  # no real query sees the padding after it
                dropout=self.dropout,
                causal=self.site.causal,
            )
        if not self.site.causal:
            heads, weights, visible = self._with_global_queries(inputs, chosen, (q, k, v), (heads, weights, visible))
        return self.result(inputs, heads, v, weights, visible)

    def _with_global_queries(
        self, inputs: Inputs, chosen: Tensor, local: tuple[Tensor, Tensor, Tensor], computed: Computed
    ) -> Computed:
        """Replace the outputs, weights and visible keys of the chosen queries: they see all keys."""
        query, valid, (q, k, v), (heads, weights, visible) = inputs.query, inputs.query_valid, local, computed
        index, some = listed(chosen)
        rows, keys, values = self._global_heads(query, query) if self.separate else (q, k, v)
        first, first_weights = attend(
            at(rows, index),
            keys,
            values,
            scale=self.scale,
            valid=valid,
            dropout=self.dropout,
            need_weights=weights is not None,
        )
        heads = replace_rows(heads, first, index, some)
        if weights is not None and visible is not None and first_weights is not None:
            weights = replace_rows(weights, first_weights, index, some)
            visible = visible | chosen[:, None, :, None]
        return heads, weights, visible

    def _with_first(self, first: Tensor, weights: Tensor) -> Tensor:
        """Replace the global queries' rows of weights (B, H, T, T) by their weights (B, H, g, T or g)."""
        rest = weights.shape[3] - first.shape[3]  # in the decoder role they see only each other
        return torch.cat([F.pad(first, (0, rest)), weights[:, :, self.globals :]], dim=2)

    def _global_rows(self, query: Tensor, valid: Tensor | None, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        """Return the global queries' outputs (B, H, g, V), and their weights if needed."""
        rows = query[:, : self.globals]
        if self._maps_queries:
            return self._mapped_rows(rows, query, valid, need_weights)
        q, k, v = self._global_heads(rows, rows if self.site.causal else query)
        return attend(
            q,
            k,
            v,
            scale=self.scale,
            causal=self.site.causal,
            valid=valid,
            positions=self.positions,
            dropout=self.dropout,
            need_weights=need_weights,
        )

    @property
    def _maps_queries(self) -> bool:
        """Whether mapping the queries to the tokens is cheaper than projecting the tokens; the maps must be linear."""
        few = not self.site.causal and self.globals * self.site.heads < self.site.d_model
        linear = all(isinstance(proj, nn.Linear) for proj in (self.global_k_proj, self.global_v_proj))
        return few and linear and self.positions is None

    def _mapped_rows(
        self, rows: Tensor, tokens: Tensor, valid: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The same by q . (W x) = (W^T q) . x: few queries are mapped to the tokens' width, instead of all tokens.

        The bias of the keys cancels in the softmax. The bias of the values is added to their mean, without dropout.
        """
        p, batch = self.projection, len(tokens)
        # all segments' queries are rows of one product, so that no weight is copied per segment
        q = p.queries(self.global_q_proj(rows).flatten(0, 1).unsqueeze(0))  # (1, H, B*g, K)
        q = scores_of(q, p.keys(self.global_k_proj.weight.T.unsqueeze(0)), 1.0)  # (1, H, B*g, D)
        q = q.squeeze(0).unflatten(1, (batch, -1)).transpose(0, 1).flatten(1, 2).unsqueeze(1)  # (B, 1, H*g, D)
        x = tokens.unsqueeze(1)
        # need_weights avoids the fused kernel, which is slow for few queries
        read, weights = attend(q, x, x, scale=self.scale, valid=valid, dropout=self.dropout, need_weights=True)
        read = read.squeeze(1).unflatten(1, (self.site.heads, -1)).transpose(0, 1).flatten(1, 2)  # (H, B*g, D)
        heads = weighted(read.unsqueeze(0), p.values(self.global_v_proj.weight.T.unsqueeze(0)))  # (1, H, B*g, V)
        heads = heads.squeeze(0).unflatten(1, (batch, -1)).transpose(0, 1)
        bias = p.values(self.global_v_proj.bias.view(1, 1, -1))
        bias = bias.repeat_interleave(self.site.heads // bias.shape[1], 1)  # (1, H, 1, V)
        heads = heads + (bias if valid is None else bias * valid.any(1).view(-1, 1, 1, 1))
        if weights is None or not need_weights:
            return heads, None
        return heads, weights.squeeze(1).unflatten(1, (self.site.heads, -1))

    def _global_heads(
        self, rows: Tensor, tokens: Tensor, position: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries of the rows, and keys and values of the tokens, by the second projections."""
        p = self.projection
        q = self._rotated(p.queries(self.global_q_proj(rows)), position)
        k = self._rotated(p.keys(self.global_k_proj(tokens)), position)
        return q, k, p.values(self.global_v_proj(tokens))

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return the window's empty caches, and a cache for the global tokens' second keys and values."""
        if self.at_separators:
            like = self.q_proj.weight
            return {**start_steps(inputs.batch_size, inputs.hypotheses, like, **self.cache_shapes), "count": 0}, None
        state, _ = super().begin(inputs)
        if self.separate:
            state["global"] = start_cache(inputs.batch_size, inputs.hypotheses, self.q_proj.weight, **self.cache_shapes)
        return state, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Read the window and the global tokens before it; a global token reads all tokens before it."""
        query = inputs.query
        if self.at_separators:
            return self._advance_marked(inputs, state)
        second, t = state.get("global"), state["count"]
        heads, weights, state = self.heads_of_step(query, state, inputs.need_weights)
        if second is not None:
            if t < self.globals:
                here = torch.full((1,), t, device=query.device)
                rows = query.flatten(0, 1).unsqueeze(1)
                q, k, v = (x.squeeze(2).unflatten(0, query.shape[:2]) for x in self._global_heads(rows, rows, here))
                second = append(second, keys=k, values=v)
                heads, weights = attend_step(
                    q,
                    written(second, "keys"),
                    written(second, "values"),
                    scale=self.scale,
                    positions=self.positions,
                    query_position=t,
                    need_weights=inputs.need_weights,
                )
            state["global"] = second
        return Attended(self.merge_heads(heads.transpose(1, 2), query), weights=weights), state

    def _advance_marked(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Read the window and the separators before it."""
        query, t = inputs.query, state["count"]
        here = torch.full((1,), t, device=query.device) if self.positions is not None else None
        q, k, v = self.newest_heads(query, here)
        chosen = None if inputs.query_marks is None else separators(inputs.query_marks)
        window = {"radius": self.radius, "dilation": self.dilation}
        heads, weights, after = step_window_and_globals(
            state, q, k, v, chosen, **window, scale=self.scale, need_weights=inputs.need_weights
        )
        output = self.merge_heads(heads.transpose(1, 2), query)
        return Attended(output, weights=weights), {**after, "count": t + 1}

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The same from all pairs under a mask, for the local and for the global projections."""
        query = inputs.query
        if not self.separate and not self.at_separators:
            return super().naive(query, query_valid=inputs.query_valid)
        local = self.queries(query), *self.keys_values(query)
        visible = self._visible(local[0], local[1], inputs.query_valid)
        is_global = (torch.arange(query.shape[1], device=query.device) < self.globals).unsqueeze(-1)
        if self.at_separators and inputs.query_marks is not None:
            real = torch.ones_like(query[..., 0]).bool() if inputs.query_valid is None else inputs.query_valid
            is_global, visible = (x.expand(len(query), 1, -1, -1).clone() for x in (is_global, visible))
            for segment, token in ((inputs.query_marks % 2 == 1) & real).nonzero().tolist():
                visible[segment, 0, token if self.site.causal else 0 :, token] = True
                if not self.site.causal:
                    is_global[segment, 0, token] = True
                    visible[segment, 0, token] = real[segment]
        outputs = [
            dense_attend(q, k, v, visible, self.scale, self.positions)
            for q, k, v in (local, self._global_heads(query, query) if self.separate else local)
        ]
        (heads, weights), (rows, row_weights) = outputs
        return Attended(
            self.merge_heads(rows.where(is_global, heads), query), weights=row_weights.where(is_global, weights)
        )

    def adopt(self, full_state: Mapping[str, Tensor]) -> None:
        super().adopt(full_state)
        self.adopt_copies(full_state, {f"global_{name}": name for name in PROJECTIONS if self.separate})
