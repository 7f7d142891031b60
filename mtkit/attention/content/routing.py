"""Routing: each query attends to the keys of its own cluster, under centroids that follow queries and keys.

Paper: Roy, Saffar, Vaswani and Grangier, "Efficient Content-Based Sparse Attention with Routing Transformers", 2020,
arXiv 2003.05997. A routing vector is the layer norm of a query or key; its cluster is the centroid with the largest
product.
assign=argmax: the keys of the query's cluster, ordered by position, are cut into chunks of `window`. A query sees the
chunk of the last key that is not after it, the chunk before, and in the encoder the chunk after. A query whose cluster
has no key sees only itself.
assign=balanced (the paper's; encoder only): each centroid takes its `window` best queries and its `window` best keys; a
query that several centroids take gets the mean, one that none takes gets zero.
Departures: the default assignment is argmax, because in the paper's form later tokens decide which keys a decoder sees.
Chunks are formed by rank among earlier members only. As in the paper, the decoder shares queries and keys, unless a
projection is set; a shared query sees its own key only if there is no other. In the cross role (an extension) a query
sees the `window` source keys of its cluster with the largest products, or none. Centroids move by sums over counts.
Local heads see a band of `window` on each side.
Training differs from evaluation by dropout, by the loss `commitment`, and because `after_update` moves the centroids by
the tokens of the last batches. Under autocast routing vectors are projected a second time, in float32, so that the
clusters are the same as in float32.
Cost: O(T (C + w)). A step costs O(C + w), at any position; it keeps all keys, and for each cluster the positions of its
last 2 w.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.caches import append, picked
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.bases.layers import xavier_linear
from mtkit.attention.bases.pattern_attention import HeadGroup, PatternGroup
from mtkit.attention.content._clusters import Centroids, enlist, enlisted, start_lists
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, for_heads, packing
from mtkit.attention.kernels.chunks import (
    attend_chosen_to_chosen,
    attend_in_chunks,
    attend_to_chosen,
    others_first,
    rows_at,
)
from mtkit.attention.kernels.dot_product import attend_step, expand_heads, safe_softmax, upcast
from mtkit.attention.kernels.pattern import Band
from mtkit.attention.kernels.reproducible import replay_choice
from mtkit.attention.options import LossWeight, Natural, Null, OneOf, Positive, Share, refused
from mtkit.attention.slots import OWN_VECTORS, WITHOUT_SCORES

ASSIGN = ("argmax", "balanced")


class Routing(HeadAttention):
    """Attention inside clusters of content.

    clusters: number of centroids per head. window: keys per chunk, or members per centroid with assign=balanced.
    assign: "argmax" or "balanced". decay: decay of the moving statistics. commitment: weight of the mean squared
    distance of routing vectors to their centroids. local_heads: number of local heads. share_qk: whether routed heads
    use one projection for queries and keys. normalize_logits: whether scores are products of normalised vectors.
    """

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"encoder"})
    paper = "Roy et al. 2020, arXiv 2003.05997"
    complexity = "O(T (C + w))"
    growth = 1
    sequential_operations = "O(1)"
    longest_path = "by content"
    unrounded = True
    learns_by_steps = False  # centroids follow whole sequences
    slots = WITHOUT_SCORES | {"projection": OWN_VECTORS}
    small: ClassVar[dict[str, Any]] = {"clusters": 3, "window": 3}
    variants = (
        {"assign": "balanced"},
        {"assign": "balanced", "share_qk": True},
        {"share_qk": True},
        {"share_qk": False},
        {"local_heads": 0},
        {"local_heads": 0, "share_qk": False},
    )

    def __init__(
        self,
        site: Site,
        *,
        clusters: Positive = 8,
        window: Positive = 64,
        assign: Annotated[str, OneOf(ASSIGN)] = "argmax",
        decay: Share = 0.999,
        commitment: LossWeight = 1e-4,
        local_heads: Annotated[
            Natural | None, Null("half of the heads in the self roles, none in the cross role")
        ] = None,
        share_qk: Annotated[bool | None, Null("true in the decoder, unless a projection is set, else false")] = None,
        normalize_logits: bool = False,
    ) -> None:
        super().__init__(site)
        self_role = site.role != "cross"
        local = (site.heads // 2 if self_role else 0) if local_heads is None else local_heads
        shared = (site.causal and site.projection is None) if share_qk is None else share_qk
        if assign == "balanced" and site.role != "encoder":
            raise refused("assign", assign, f"be argmax in the {site.role} role")
        most = site.heads - 1 if self_role else 0
        if local > most:
            raise refused("local_heads", local, f"be from 0 to {most} in the {site.role} role with {site.heads} heads")
        if shared and (site.projection is not None or not self_role):
            raise refused("share_qk", shared, "be false in the cross role, and with projection=")
        self.clusters, self.window, self.balanced = clusters, window, assign == "balanced"
        self.commitment, self.local, self.shared, self.normalize = commitment, local, shared, normalize_logits
        self.near = PatternGroup(range(local), site.heads, Band(window, window))
        self.routed = HeadGroup(range(local, site.heads), site.heads)
        self.centroids = Centroids(site.heads - local, clusters, self.projection.key_width, decay)
        if shared:  # only local heads have their own keys
            del self.k_proj
            if local:
                self.k_proj = xavier_linear(site.d_model, local * self.projection.key_width)

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the share of training tokens at each centroid, a moving average; local heads have none."""
        mass = self.centroids.mass
        shares = mass / mass.sum(-1, keepdim=True).clamp(min=1e-20)
        return super().learned_numbers(inputs) | {"centroid use": for_heads(shares, self.site.heads, first=self.local)}

    def attend(self, inputs: Inputs) -> Attended:
        """Softmax over the keys of the query's cluster, block by block."""
        source, valid = inputs.context, inputs.context_valid
        q, k, v, xq, xk = self._projected(inputs.query, source)
        losses = self._losses(xq, xk, inputs.query_valid, valid)
        routed = self._routed(q), self._routed(k), self._routed(v)
        how: dict[str, Any] = {"scale": self.scale, "dropout": self.dropout}
        if self.balanced:
            query_key = self._best(xq, valid), self._best(xk, valid)
            heads = attend_chosen_to_chosen(*routed, *query_key, shared=self.shared, **how)
        elif inputs.memory is not None:
            chosen = self._best(xk, valid, only_nearest=True)
            heads = attend_to_chosen(*routed, self._nearest(xq), *chosen, window=self.window, **how)
        else:
            groups = [self._nearest(x, valid) for x in (xq, xk)]
            how |= {"groups": self.clusters, "window": self.window, "causal": self.site.causal, "shared": self.shared}
            heads = attend_in_chunks(*routed, *groups, **how)
        if self.local:
            near, _ = self.near.attend(
                *self.near.of(q, k, v), scale=self.scale, causal=self.site.causal, valid=valid, dropout=self.dropout
            )
            heads = torch.cat([near.type_as(heads), heads], dim=1)
        attended = self.result(inputs, heads, v)
        attended.losses |= losses
        return attended

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return empty caches and lists; in the cross role each cluster's source keys, for all hypotheses."""
        batch_size, memory, hypotheses = inputs.batch_size, inputs.memory, inputs.hypotheses
        if memory is not None:
            k, xk = self._keys(memory)
            k, v = (self._routed(x) for x in (self._normalized(k), self.projection.values(self.v_proj(memory))))
            key, valid = self.centroids.best(xk, self.window, inputs.memory_valid, only_nearest=True)
            return {"shared": {"keys": rows_at(k, key), "values": rows_at(v, key), "valid": valid}}, None
        like = self.q_proj.weight
        lists = start_lists(batch_size, hypotheses, len(self.routed.some), self.clusters, like)
        state = self.routed.start(batch_size, hypotheses, like, **self.cache_shapes) | {"lists": lists}
        if self.local:
            state["near"] = self.near.start(batch_size, hypotheses, like, **self.cache_shapes)
        return state, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Add the token to its key's cluster, then attend to the last members of its query's cluster."""
        query = inputs.query
        if "shared" in state:
            return Attended(self._step_over_source(query, state["shared"])), state
        tokens = query.flatten(0, 1).unsqueeze(1)  # (B*N, 1, D): a segment of one token for each hypothesis
        *qkv, xq, xk = self._projected(tokens, tokens)
        qkv = [x.squeeze(2).unflatten(0, query.shape[:2]) for x in qkv]
        cluster_q, cluster_k = (self.centroids.nearest(x).squeeze(2).unflatten(0, query.shape[:2]) for x in (xq, xk))
        q, k, v = self.routed.of(*qkv, axis=2)
        here: int = state["count"]
        lists = enlist(state["lists"], cluster_k, here, 2 * self.window)
        state = {**append(state, keys=k, values=v), "lists": lists}
        position, rank = enlisted(lists, cluster_q)
        last = rank.amax(-1, keepdim=True)
        visible = (rank >= 0) & (rank // self.window >= last // self.window - 1)
        if self.shared:
            visible = others_first(visible, position == here)
        alone = ~visible.any(-1, keepdim=True)
        position = torch.where(alone, here, position)
        keys, values = (picked(state[name], position) for name in ("keys", "values"))
        heads, _ = attend_step(q, keys, values, scale=self.scale, visible=visible | alone)
        if self.local:
            near, _, state["near"] = self.near.step(state["near"], *self.near.of(*qkv, axis=2), scale=self.scale)
            heads = torch.cat([near, heads], dim=2)
        return Attended(self.merge_heads(heads.transpose(1, 2), query)), state

    def _step_over_source(self, query: Tensor, shared: State) -> Tensor:
        """Attend to the source keys of each query's cluster; (B, N, D)."""
        q, xq = self._queries(query)
        cluster = self.centroids.nearest(xq).unsqueeze(-1)  # (B, H, N, 1)
        keys, values, visible = (
            rows_at(shared[name].flatten(3), cluster).unflatten(4, shared[name].shape[3:]).squeeze(3).transpose(1, 2)
            for name in ("keys", "values", "valid")
        )
        rows = self._normalized(q).transpose(1, 2)
        heads, _ = attend_step(rows, keys, values, scale=self.scale, visible=visible)
        return self.merge_heads(heads.transpose(1, 2), query)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The same with each query's keys listed, and a dense softmax over them."""
        source, valid = inputs.context, inputs.context_valid
        q, k, v, xq, xk = self._projected(inputs.query, source)
        q, k, v = (expand_heads(x, self.site.heads) for x in (q, k, v))
        lengths = [source.shape[1]] * len(inputs.query) if valid is None else valid.sum(1).tolist()
        segments = []
        for b, length in enumerate(lengths):
            heads = []
            for h in range(self.site.heads):
                outputs, taken = [], []
                for seen in self._seen(h, xq[b], xk[b], length):
                    mask = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
                    for i, keys in seen.items():
                        mask[i, keys] = True
                    outputs.append(safe_softmax(q[b, h] @ k[b, h].T * self.scale, mask) @ v[b, h])
                    taken.append(mask.any(-1, keepdim=True))
                heads.append(torch.stack(outputs).sum(0) / torch.stack(taken).sum(0).clamp(min=1))
            segments.append(torch.stack(heads))
        return Attended(self.merge_heads(torch.stack(segments), inputs.query))

    def _seen(self, head: int, xq: Tensor, xk: Tensor, length: int) -> list[dict[int, list[int]]]:
        """Return the keys of each query, {i: [j, ...]}, in one head of one segment; one map per cluster if balanced."""
        w, causal, cross = self.window, self.site.causal, self.site.role == "cross"
        if head < self.local:
            steps = range(-w, 1 if causal else w + 1)
            return [{i: [j for j in range(length) if j - i in steps] for i in range(length)}]
        scores_q, scores_k = (self.centroids.scores(x.unsqueeze(0))[0, head - self.local] for x in (xq, xk))
        if self.balanced:
            clusters = zip(scores_q[:length].unbind(1), scores_k[:length].unbind(1), strict=True)
            best = ([x.argsort(descending=True)[:w].tolist() for x in pair] for pair in clusters)
            return [{i: self._without(i, keys) for i in queries} for queries, keys in best]
        cluster_q, cluster_k = scores_q.argmax(-1).tolist(), scores_k[:length].argmax(-1).tolist()
        seen = {}
        for i, cluster in enumerate(cluster_q if cross else cluster_q[:length]):
            members = [j for j in range(length) if cluster_k[j] == cluster]
            if cross:
                seen[i] = sorted(members, key=lambda j: -scores_k[j, cluster].item())[:w]
                continue
            chunk = max(sum(j <= i for j in members) - 1, 0) // w
            near = range(chunk - 1, chunk + (1 if causal else 2))
            keys = [j for rank, j in enumerate(members) if rank // w in near and (j <= i or not causal)]
            seen[i] = self._without(i, keys) or [i]
        return [seen]

    def _without(self, i: int, keys: list[int]) -> list[int]:
        """Leave out a shared query's own key, unless it is the only one."""
        return [j for j in keys if j != i] or keys if self.shared else keys

    def after_update(self, update: int, total_updates: int) -> None:
        super().after_update(update, total_updates)
        self.centroids.update()

    def adopt(self, full_state: Mapping[str, Tensor]) -> None:
        """Copy the projections of `full`; if routed heads share queries and keys, only the local heads' keys."""
        rows = self.local * self.projection.key_width
        super().adopt({n: x[:rows] if self.shared and n.startswith("k_proj") else x for n, x in full_state.items()})

    def _projected(self, query: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v of all heads, and the routing vectors of q and k, (B, H', T, K) of the routed heads."""
        q, xq = self._queries(query)
        if not self.shared:
            k, xk = self._keys(source)
        else:
            k, xk = q[:, self.local :], xq
            if self.local:
                local_k = self.k_proj(source).unflatten(-1, (self.local, -1)).transpose(1, 2)
                k = torch.cat([local_k, k], dim=1)
        return self._normalized(q), self._normalized(k), self.projection.values(self.v_proj(source)), xq, xk

    def _queries(self, query: Tensor) -> tuple[Tensor, Tensor]:
        q = self.queries(query)
        return q, self._routing_vectors(q, query, self.q_proj, self.projection.queries)

    def _keys(self, source: Tensor) -> tuple[Tensor, Tensor]:
        k = self.projection.keys(self.k_proj(source))
        return k, self._routing_vectors(k, source, self.k_proj, self.projection.keys)

    def _routing_vectors(
        self, x: Tensor, tokens: Tensor, linear: nn.Linear, read: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the layer norm, (B, H', T, K) in float32 or wider, of the routed heads' queries or keys x."""
        if x.dtype != upcast(x).dtype:  # the 8 bits of bfloat16 must not decide the cluster
            with torch.autocast(x.device.type, enabled=False):
                x = read(linear(tokens.type_as(linear.weight)))  # the module's own: it may have an adapter
        x = upcast(self._routed(x))
        return F.layer_norm(x, x.shape[-1:])

    def _nearest(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return replay_choice(self.centroids.nearest(x, valid), self.clusters + 1)

    def _best(self, x: Tensor, valid: Tensor | None, *, only_nearest: bool = False) -> tuple[Tensor, Tensor]:
        position, exists = self.centroids.best(x, self.window, valid, only_nearest=only_nearest)
        return replay_choice(position, x.shape[2]), replay_choice(exists, 2)

    def _normalized(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]).type_as(x) if self.normalize else x

    def _routed(self, x: Tensor) -> Tensor:
        """Return the routed heads' rows of x, which has rows for all heads or for groups of heads."""
        [rows] = self.routed.of(x)
        return expand_heads(rows, len(self.routed.some))

    def _losses(self, xq: Tensor, xk: Tensor, query_valid: Tensor | None, valid: Tensor | None) -> dict[str, Tensor]:
        """In training, gather vectors for the centroids and return the loss that keeps routing vectors near them."""
        if not self.training:
            return {}
        streams = [(xq, query_valid)] if self.shared else [(xq, query_valid), (xk, valid)]
        for stream in streams:
            self.centroids.gather(*stream)
        distances = [self.centroids.distance(*stream) for stream in streams]
        return {"commitment": self.commitment * torch.stack(distances).mean()} if self.commitment else {}
