"""SAC: an LSTM chooses the few tokens that each token attends to, and is trained by the reward of the translation.

Paper: Li, Meng, Zhou, Han, Wu and Li, "SAC: Accelerating and Structuring Self-Attention via Sparse Adaptive
Connection", NeurIPS 2020, arXiv 2003.09833.
Departures: edges are chosen source by source, and never twice. A token always has an edge to itself, which is not among
the chosen ones. In the decoder a token chooses among earlier tokens, from its own state only, so that no choice depends
on later tokens. In the cross role, an extension, target tokens choose source tokens and have no edge to themselves.
With share=model, each layer draws its own graph with the shared predictor. The reward is the mean log-likelihood of a
segment's target tokens; the training loop provides the baseline.
Cost: attention O(edges T); the predictor scores all pairs, O(edges T^2 hidden) in time but O(T) in memory; a step at
position t costs O(edges (hidden^2 + t hidden)): edges - 1 successive reads of an LSTM, of 4 hidden^2 multiplications.
Training draws edges with noise that changes with each update and is the same for all of its segments; evaluation takes
the likeliest edges.
"""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.bases.caches import append, start_cache, written
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.content._edge_predictor import Candidates, EdgePredictor, Edges, free_candidates
from mtkit.attention.contract import ROLES, Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.cached_rows import attend_cached, supports_cached
from mtkit.attention.kernels.chunks import rows_at
from mtkit.attention.kernels.dot_product import by_hypotheses, expand_heads, safe_softmax, scores_of, weighted
from mtkit.attention.kernels.reproducible import hashed, random_key
from mtkit.attention.options import LossWeight, OneOf, Positive, Within
from mtkit.attention.slots import WITHOUT_SCORES

MOST_KEYS = 64
"""Number of keys up to which all scores of a head are computed."""

SHARE = ("layer", "head", "model")
SCAN = ("source", "sequence")


class Sac(HeadAttention):
    """Softmax attention along the few edges that an LSTM chooses for each token, trained by reward.

    edges: number of edges per token. hidden: width of the predictor. share: "layer" (a predictor and a graph per
    layer), "head" (per head of each layer) or "model" (one predictor for all layers and roles of equal widths and
    options). scan: the start of the LSTM, at every source ("source") or once per segment ("sequence", the paper's
    single run of edges x T sequential steps). weight: weight of the choices in the training loss; it is small because
    their gradient, a sum over all edges, is clipped together with the translation's gradient, and Adam cancels its
    scale. entropy: weight of the bonus for the entropy of the choices.
    """

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"encoder", "decoder"})
    paper = "Li et al. 2020, arXiv 2003.09833"
    complexity = "O(T k), O(T² k) to predict"
    growth = 2
    mixes = False
    sequential_operations = "O(k)"
    longest_path = "by content"
    unrounded = True
    roundable = frozenset({"q_proj", "k_proj", "v_proj", "out_proj"})
    learns_by_steps = False  # edges are learned from samples of whole sequences
    slots = WITHOUT_SCORES | {"positions": frozenset({"rotary"})}  # other positions add to scores by distance
    small: ClassVar[dict[str, Any]] = {"edges": 3, "hidden": 4}
    variants = ({"share": "head"}, {"share": "model"}, {"scan": "sequence"}, {"share": "head", "scan": "sequence"})

    updates: Tensor

    def __init__(
        self,
        site: Site,
        *,
        edges: Annotated[int, Within(1, 256)] = 10,
        hidden: Positive = 64,
        share: Annotated[str, OneOf(SHARE)] = "layer",
        scan: Annotated[str, OneOf(SCAN)] = "source",
        weight: LossWeight = 0.01,
        entropy: LossWeight = 0.0,
    ) -> None:
        super().__init__(site)
        self.weight, self.entropy = weight, entropy
        target_width, graphs = site.memory_width or site.d_model, site.heads if share == "head" else 1
        sequence = scan == "sequence"
        self._shared = ("sac", site.d_model, target_width, hidden, edges, sequence, entropy > 0)
        if share != "model" or self._shared not in site.shared:
            self.own_predictor = EdgePredictor(
                site.d_model,
                target_width,
                hidden=hidden,
                edges=edges,
                graphs=graphs,
                sequence=sequence,
                entropy=entropy > 0,
            )
        if share == "model" and self._shared not in site.shared:
            site.shared[self._shared] = self.own_predictor
        self._site_key = random_key(site.seed, ROLES.index(site.role), site.layer)
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    @property
    def predictor(self) -> EdgePredictor:
        """The layer's predictor, or the model's shared one, which another layer owns."""
        predictor = getattr(self, "own_predictor", None) or self.site.shared[self._shared]
        assert isinstance(predictor, EdgePredictor)
        return predictor

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the bias of edges by distance, one row for each graph, if this layer owns its predictor."""
        learned = super().learned_numbers(inputs)
        if hasattr(self, "own_predictor"):
            learned["edge bias by distance"] = self.own_predictor.distance.flip(1)
        return learned

    def attend(self, inputs: Inputs) -> Attended:
        """Softmax over each token's edges: the best ones, or in training drawn ones, with their log-probability."""
        query, query_valid = inputs.query, inputs.query_valid
        source, valid = inputs.context, inputs.context_valid
        with torch.set_grad_enabled(self.training and torch.is_grad_enabled()):  # choices have no gradient
            candidates = self.predictor.candidates(source)
            edges: Edges = self.predictor(
                query, candidates, role=self.site.role, valid=valid, noise_key=self._noise_key()
            )
        k, v = self.keys_values(source)
        heads = self._attend(self.queries(query), k, v, edges.targets)
        attended = self.result(inputs, heads, v)
        if not self.training:
            return attended
        log_prob, entropy = (x if query_valid is None else x * query_valid[:, None] for x in edges[1:])
        if self.entropy:
            tokens = query.shape[0] * query.shape[1] if query_valid is None else query_valid.sum().clamp(min=1)
            attended.losses["entropy"] = -self.entropy * entropy.sum() / (tokens * entropy.shape[1])
        log_prob = log_prob.sum((1, 2))
        if self.weight != 1:  # scales only the gradient
            log_prob = log_prob.detach() + self.weight * (log_prob - log_prob.detach())
        attended.log_prob = log_prob
        return attended

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return empty keys, values and predictor inputs; in the cross role the source's, for all hypotheses."""
        memory = inputs.memory
        predictor, like = self.predictor, self.q_proj.weight
        lstm = {}
        if predictor.sequence:
            shape = (inputs.batch_size, inputs.hypotheses, predictor.graphs, predictor.hidden)
            lstm = {"hidden": like.new_zeros(shape), "cell": like.new_zeros(shape)}
        if memory is not None:
            k, v = self.keys_values(memory)
            keys, edges = predictor.candidates(memory)
            shared = {"keys": k, "values": v, "edge_keys": keys, "edge_inputs": edges, "valid": inputs.memory_valid}
            return {"shared": shared, "count": 0, **lstm}, None
        shapes = {
            **self.cache_shapes,
            "edge_keys": (predictor.graphs, predictor.hidden),
            "edge_inputs": (predictor.graphs, 4 * predictor.hidden),
        }
        return {**start_cache(inputs.batch_size, inputs.hypotheses, like, **shapes), **lstm}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Choose the best edges of the newest token and attend along them."""
        query = inputs.query
        batch, hypotheses = query.shape[:2]
        here = torch.full((1,), state["count"], device=query.device)
        if "shared" in state:
            rows, held, valid = query, state["shared"], state["shared"]["valid"]
            state = {**state, "count": state["count"] + 1}
        else:
            rows, valid = query.flatten(0, 1).unsqueeze(1), None  # (B*N, 1, D): a segment of one token for each
            known = (*self.keys_values(rows, here), *self.predictor.candidates(rows))
            names = ("keys", "values", "edge_keys", "edge_inputs")
            newest = zip(names, known, strict=True)
            state = append(state, **{name: x.squeeze(2).unflatten(0, (batch, hypotheses)) for name, x in newest})
            held = {name: written(state, name).flatten(0, 1) for name in names}
            # a view with the free places, because it is read only by position
            held["edge_inputs"] = state["edge_inputs"].flatten(0, 1)
        candidates = Candidates(held["edge_keys"], held["edge_inputs"])
        free = free_candidates(here, candidates.keys.shape[2], self.site.role, valid)
        opened, lstm = self.predictor.opened(rows), None
        if self.predictor.sequence:
            hidden, cell = (state[name].reshape(*rows.shape[:2], *state[name].shape[2:]) for name in ("hidden", "cell"))
            lstm = hidden.transpose(1, 2), cell.transpose(1, 2)
        targets, lstm = self.predictor.newest(opened, here, candidates, free, lstm)
        if self.predictor.sequence:
            after = (x.transpose(1, 2).reshape(state["hidden"].shape) for x in lstm)
            state = {**state, **dict(zip(("hidden", "cell"), after, strict=True))}
        q = self.queries(rows, here if self.positions is not None else None)
        heads = self._attend(q, held["keys"], held["values"], targets, here)
        return Attended(self.merge_heads(by_hypotheses(heads, hypotheses), query)), state

    def after_update(self, update: int, total_updates: int) -> None:
        super().after_update(update, total_updates)
        self.updates.fill_(update)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The same with edges chosen one by one, segment by segment, and a dense softmax over them."""
        query = inputs.query
        source, valid = inputs.context, inputs.context_valid
        q, (k, v) = self.queries(query), self.keys_values(source)
        heads, log_probs = [], []
        for b in range(len(query)):
            length = query.shape[1] if inputs.query_valid is None else int(inputs.query_valid[b].sum())
            tokens = source[b] if valid is None else source[b, valid[b]]
            seen = torch.zeros(self.predictor.graphs, query.shape[1], source.shape[1], dtype=torch.bool)
            log_prob = query.new_zeros(())
            for graph in range(self.predictor.graphs):
                chosen, drawn = self.predictor.naive(
                    query[b, :length], tokens, role=self.site.role, graph=graph, noise_key=self._noise_key()
                )
                log_prob = log_prob + drawn
                for i, targets in enumerate(chosen):
                    seen[graph, i, targets if self.site.role == "cross" else [*targets, i]] = True
            outputs = []
            for head in range(self.site.heads):
                key, value = (x[b, head * x.shape[1] // self.site.heads] for x in (k, v))
                weights = safe_softmax(q[b, head] @ key.T * self.scale, seen[head % len(seen)].to(q.device))
                outputs.append(weights @ value)
            heads.append(torch.stack(outputs))
            log_probs.append(log_prob)
        return Attended(
            self.merge_heads(torch.stack(heads), query), log_prob=torch.stack(log_probs) if self.training else None
        )

    def _noise_key(self) -> Tensor | None:
        """Return the key of this update's noise, or None in evaluation."""
        return hashed(self.updates + self._site_key) if self.training else None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, targets: Tensor, position: Tensor | None = None) -> Tensor:
        """Return the heads' outputs (B, H, T, V) along edges to `targets` (B, G, T, edges); a negative target is none.

        q (B, H, T, K), k (B, G', S, K), v (B, G', S, V); position (T,) of the queries, 0 to T - 1 if None.
        """
        if self.site.role != "cross":
            i = torch.arange(q.shape[2], device=q.device) if position is None else position
            targets = torch.cat([targets, i.view(-1, 1).expand(*targets.shape[:3], 1)], dim=-1)
        if k.shape[2] <= MOST_KEYS:
            return self._attend_all(q, k, v, targets)
        exists, at = targets >= 0, targets.clamp(min=0)
        if targets.shape[1] > 1:  # heads with different graphs do not share rows
            k, v = (expand_heads(x, self.site.heads) for x in (k, v))
        keys, values = rows_at(k, at), rows_at(v, at)  # (B, G', T, L, K)
        rows = (q * self.scale).unflatten(1, (keys.shape[1], -1)).transpose(2, 3)
        scores = (rows @ keys.transpose(-1, -2)).transpose(2, 3).flatten(1, 2)  # (B, H, T, L)
        weights = safe_softmax(scores, exists)
        dropped = (F.dropout(weights, self.dropout) if self.dropout else weights).type_as(values)
        rows = dropped.unflatten(1, (values.shape[1], -1)).transpose(2, 3)
        return (rows @ values).transpose(2, 3).flatten(1, 2)

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, targets: Tensor) -> Tensor:
        """The same by a mask over all keys, which is faster for few keys."""
        seen = torch.zeros(*targets.shape[:3], k.shape[2] + 1, dtype=torch.bool, device=q.device)
        seen = seen.scatter_(-1, targets.where(targets >= 0, k.shape[2]), True)[..., :-1]
        # only in inference mode: a pass that is run again with gradients must be the same to the last digit
        if torch.is_inference_mode_enabled() and supports_cached(q, k, v) and not self.dropout:
            visible, keys, values = expand_heads(seen, q.shape[1]).transpose(1, 2), k.unsqueeze(1), v.unsqueeze(1)
            return attend_cached(q.transpose(1, 2), keys, values, scale=self.scale, visible=visible).transpose(1, 2)
        weights = safe_softmax(scores_of(q, k, self.scale), seen)
        return weighted(F.dropout(weights, self.dropout) if self.dropout else weights, v)
