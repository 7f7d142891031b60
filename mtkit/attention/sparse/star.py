"""Star-Transformer: a ring, in which every token sees its two neighbours, around a relay that reads all tokens.

Paper: Guo, Qiu, Liu, Shao, Xue and Zhang, "Star-Transformer", NAACL 2019, arXiv 1902.09113.
carry (the paper's): the relay is carried from layer to layer. It reads itself and the tokens with its own projections,
followed by ReLU and norm; tokens then read their neighbours, themselves and the relay.
local (an extension): each layer builds its own relay, the result of one query over all tokens, before tokens read it.
Departures: the tokens use the layer's residual, norm and feed-forward. The relay is updated at the start of
the next layer, so that the last update, which nothing reads, is left out. The first layer's tokens are the embeddings;
an embedding's key counts once. The ring connects the real ends of each segment; if both neighbours are the same token,
it counts once. In the decoder role (an extension, local only) the ring is open, a token sees the token before it, and
the relay at each position reads the prefix, by a running softmax.
Cost: O(T). A step costs O(1) and keeps one token and the relay's sums.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.chunks import rows_at
from mtkit.attention.kernels.dot_product import attend, expand_heads, safe_softmax, scores_of, upcast
from mtkit.attention.kernels.running_softmax import add_keys, read_prefixes, start_softmax
from mtkit.attention.kernels.sparse import dense_attend
from mtkit.attention.options import Null, OneOf, refused
from mtkit.attention.slots import WITHOUT_SCORES
from mtkit.errors import MtkitError

MEMORIES, RINGS, RELAYS = ("local", "carry"), ("closed", "open"), ("learned", "mean")

Key = tuple[Tensor, Tensor, Tensor | None]
"""One key for each query: keys (B, G, T or 1, K), values (B, G', T or 1, V), and whether it is seen, (B or 1, T)."""


def attend_few(q: Tensor, keys: Sequence[Key], *, scale: float, dropout: float = 0.0) -> Tensor:
    """Softmax of each query over a few keys of its own, without a matrix product: (B, H, T, K) to (B, H, T, V).

    A query that sees no key gets zero.
    """
    heads = q.shape[1]
    scores = torch.stack([(upcast(q) * expand_heads(k, heads)).sum(-1) for k, _, _ in keys], dim=-1) * scale
    seen = [scores.new_ones(1, 1, dtype=torch.bool) if mask is None else mask for _, _, mask in keys]
    visible = torch.stack(torch.broadcast_tensors(*seen), dim=-1).unsqueeze(1)  # (B or 1, 1, T, keys)
    weights = safe_softmax(scores, visible)
    dropped = (F.dropout(weights, dropout) if dropout else weights).type_as(keys[0][1])
    output, *others = [
        weight * expand_heads(v, heads) for weight, (_, v, _) in zip(dropped.split(1, dim=-1), keys, strict=True)
    ]
    for other in others:
        output = output + other
    return output


class Star(HeadAttention):
    """Attention to two neighbours, the token itself and a relay.

    star_memory: the relay is rebuilt in each layer ("local") or carried from layer to layer ("carry"). star_ring:
    whether the first and the last token are neighbours ("closed") or not ("open"). star_embed_key: whether tokens also
    see their own input to the first layer (carry only). star_relay: whether the relay, or its query if it is rebuilt,
    starts as a learned vector ("learned") or as the mean of the tokens ("mean").
    """

    roles = frozenset({"encoder", "decoder"})
    published = frozenset({"encoder"})
    paper = "Guo et al. 2019, arXiv 1902.09113"
    complexity = "O(T)"
    growth = 1
    mixes = False
    sequential_operations = "O(1)"
    longest_path = "O(1)"
    slots = WITHOUT_SCORES
    variants = (
        {"star_ring": "open"},
        {"star_relay": "mean"},
        {"star_memory": "carry"},
        {"star_memory": "carry", "star_relay": "mean", "star_embed_key": True},
        {"star_memory": "carry", "star_ring": "open", "star_embed_key": True},
    )

    relay_q_proj: nn.Linear
    relay_k_proj: nn.Linear
    relay_v_proj: nn.Linear
    relay_out_proj: nn.Linear

    def __init__(
        self,
        site: Site,
        *,
        star_memory: Annotated[str, OneOf(MEMORIES)] = "local",
        star_ring: Annotated[
            Annotated[str, OneOf(RINGS)] | None, Null("closed in the encoder, open in the decoder")
        ] = None,
        star_embed_key: bool = False,
        star_relay: Annotated[str, OneOf(RELAYS)] = "learned",
    ) -> None:
        super().__init__(site)
        self.carries, self.embeds, self.mean = star_memory == "carry", star_embed_key, star_relay == "mean"
        self.closed = star_ring == "closed" or (star_ring is None and not site.causal)
        if site.causal and self.closed:
            raise refused("star_ring", star_ring, "be open in the decoder role")
        if site.causal and self.carries:
            raise refused("star_memory", star_memory, "be local in the decoder role")
        if site.causal and self.mean:
            rule = "be learned in the decoder role: a mean of all tokens would read later ones"
            raise refused("star_relay", star_relay, rule)
        if star_embed_key and not self.carries:
            raise refused("star_embed_key", star_embed_key, "be false unless star_memory is carry")
        first = site.layer == 0 or not self.carries
        if first and not self.mean:
            self.relay = nn.Parameter(torch.randn(site.d_model))
        if not (first and self.carries):
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                self.add_module(f"relay_{name}", copy.deepcopy(getattr(self, name)))
        if not first:
            self.relay_norm = nn.LayerNorm(site.d_model)

    def attend(self, inputs: Inputs) -> Attended:
        """Softmax over the neighbours, the token and the relay; carries the relay and, if used, the embeddings."""
        query, query_valid, carry = inputs.query, inputs.query_valid, inputs.carry
        q, k, v = self.projection.queries(self.q_proj(query)), self.k_proj(query), self.v_proj(query)
        near: list[Key] = [(*self._heads(k, v), None)]
        near += [(*self._heads(_rows(k, at), _rows(v, at)), seen) for at, seen in self._ring(query, query_valid)]
        relay = None
        if self.site.causal:
            heads = self._over_prefixes(query, q, near)
        else:
            relay = self._relay(query, query_valid, carry)
            nodes = [relay]
            if self.embeds and carry is not None:
                nodes.append(carry[:, 1:])
            near += [(*self._heads(self.k_proj(node), self.v_proj(node)), None) for node in nodes]
            heads = attend_few(q, near, scale=self.scale, dropout=self.dropout)
        return self.result(inputs, heads, self.projection.values(v), carry=self._carried(relay, query, carry))

    def _carried(self, relay: Tensor | None, tokens: Tensor, carry: Tensor | None) -> Tensor | None:
        """Return the carry for the next layer: the relay, followed by the embeddings if used."""
        if not self.carries or self.site.layer + 1 == self.site.layers or relay is None:
            return None
        return torch.cat([relay, tokens if carry is None else carry[:, 1:]], dim=1) if self.embeds else relay

    def _heads(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.projection.keys(k), self.projection.values(v)

    def _ring(self, tokens: Tensor, valid: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Return the neighbour before and (encoder) after each token: places and whether they count, (B or 1, T)."""
        i = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        if self.site.causal:
            return [((i - 1).clamp(min=0), i > 0)]
        end = valid.sum(1, keepdim=True).clamp(min=1) if valid is not None else i[:, -1:] + 1
        left, right = (i - 1) % end, (i + 1) % end
        if self.closed:
            return [(left, (end > 1).expand_as(left)), (right, (end > 2).expand_as(right))]
        return [(left, i > 0), (right, i + 1 < end)]

    def _relay(self, tokens: Tensor, valid: Tensor | None, carry: Tensor | None) -> Tensor:
        """Return the relay (B, 1, D) that the tokens of this layer read."""
        if self.carries and self.site.layer > 0:
            if carry is None:
                raise MtkitError("star needs the relay that the layer below carries")
            relay = carry[:, :1]
            valid = None if valid is None else F.pad(valid, (1, 0), value=True)
            read = self._read(relay, torch.cat([relay.type_as(tokens), tokens], dim=1), valid)
            updated: Tensor = self.relay_norm(F.relu(read))
            return updated
        if not self.mean:
            start = self.relay.expand(len(tokens), 1, -1)
        elif valid is None:
            start = tokens.mean(1, keepdim=True)
        else:
            real = valid.unsqueeze(-1)
            start = tokens.where(real, 0.0).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
        return start if self.carries else self._read(start, tokens, valid)

    def _read(self, relay: Tensor, tokens: Tensor, valid: Tensor | None) -> Tensor:
        """Return what the relay (B, 1, D) reads with its own projections."""
        q, k, v = self._relay_heads(relay, tokens)
        # need_weights avoids the fused kernel, which is slow for one query
        heads, _ = attend(q, k, v, scale=self.scale, valid=valid, dropout=self.dropout, need_weights=True)
        read: Tensor = self.relay_out_proj(self.merged(heads, relay))
        return read

    def _relay_heads(self, relay: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.projection.queries(self.relay_q_proj(relay))
        return q, *self._heads(self.relay_k_proj(tokens), self.relay_v_proj(tokens))

    def _over_prefixes(self, tokens: Tensor, q: Tensor, near: list[Key]) -> Tensor:
        """Return the heads' outputs if the relay has read the tokens up to each token's position."""
        relay_q, k, v = self._relay_heads(self.relay.expand(1, 1, -1), tokens)
        (k_own, v_own, _), (k_left, v_left, seen) = near
        assert seen is not None
        rows = q, k_left, v_left, k_own, v_own, seen[:, None, :, None]
        scores = scores_of(relay_q, k, self.scale).squeeze(2)  # (B, H, T)
        return read_prefixes(self._with_relay, scores, expand_heads(v, q.shape[1]), *rows)

    def _with_relay(
        self, read: Tensor, q: Tensor, k_left: Tensor, v_left: Tensor, k_own: Tensor, v_own: Tensor, seen: Tensor
    ) -> Tensor:
        """Return the heads' outputs (B, H, T, V); at each position the relay's heads have read (B, H, T, V)."""
        start = self.relay.expand(len(read), read.shape[2], -1)
        relay = self.relay_out_proj(self.merged(read.type_as(v_own), start))
        relay_kv = self._heads(self.k_proj(relay), self.v_proj(relay))
        near: list[Key] = [(k_left, v_left, seen[:, 0, :, 0]), (k_own, v_own, None), (*relay_kv, None)]
        return attend_few(q, near, scale=self.scale, dropout=self.dropout)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return zero keys and values for the token before the first, and the relay's empty sums."""
        like, width = self.q_proj.weight, self.projection.value_width
        shape = inputs.batch_size, inputs.hypotheses
        k, v = (like.new_zeros(*shape, linear.out_features) for linear in (self.k_proj, self.v_proj))
        sums = start_softmax(*shape, self.site.heads, width=width, like=like)
        return {"keys": k, "values": v, "relay": sums, "count": 0}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Add the token to the relay's sums; it then reads the token before it, itself and the relay."""
        query = inputs.query
        rows = query.flatten(0, 1).unsqueeze(1)  # (B*N, 1, D): a segment of one token for each hypothesis
        relay_q, *read = self._relay_heads(self.relay.expand(1, 1, -1), rows)
        scores = scores_of(relay_q, read[0], self.scale).squeeze(2).unflatten(0, query.shape[:2])
        values = expand_heads(read[1], self.site.heads).unflatten(0, query.shape[:2])
        relay = add_keys(state["relay"], scores, values)
        k, v = self.k_proj(rows), self.v_proj(rows)
        left = (state[name].flatten(0, 1).unsqueeze(1).type_as(k) for name in ("keys", "values"))
        seen = torch.full((1, 1, 1, 1), state["count"] > 0, device=query.device)
        q, mean = self.projection.queries(self.q_proj(rows)), relay["mean"].flatten(0, 1).unsqueeze(2)
        heads = self._with_relay(mean, q, *self._heads(*left), *self._heads(k, v), seen)
        output = self.merge_heads(heads, query).squeeze(1).unflatten(0, query.shape[:2])
        k, v = k.view_as(state["keys"]), v.view_as(state["values"])
        return Attended(output), {"keys": k, "values": v, "relay": relay, "count": state["count"] + 1}

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The same from the scores of all tokens and relays, under a mask."""
        query, query_valid, carry = inputs.query, inputs.query_valid, inputs.carry
        i = torch.arange(query.shape[1], device=query.device)
        real = torch.ones_like(query[..., 0], dtype=torch.bool) if query_valid is None else query_valid
        end = real.sum(1).clamp(min=1).view(-1, 1, 1) if self.closed else 2 * len(i)  # the ring closes there
        distance = (i - i.unsqueeze(-1)) % end
        near = ((distance <= 1) | (distance == end - 1)) & real.unsqueeze(1)
        if self.site.causal:
            start = self.relay.expand(*query.shape[:2], -1)
            relay_q, k, v = self._relay_heads(start, query)
            past = torch.ones(len(i), len(i), dtype=torch.bool, device=query.device).tril()
            relay = self.relay_out_proj(self.merged(dense_attend(relay_q, k, v, past, self.scale)[0], start))
            nodes, seen = [relay], [torch.eye(len(i), dtype=torch.bool, device=query.device)]
            near = near & past
        else:
            nodes, seen = [self._relay(query, query_valid, carry)], [torch.ones_like(i, dtype=torch.bool).unsqueeze(-1)]
        if self.embeds and carry is not None:
            nodes.append(carry[:, 1:])
            seen.append(torch.eye(len(i), dtype=torch.bool, device=query.device))
        visible = torch.cat([near, *(mask.expand(len(near), -1, -1) for mask in seen)], dim=-1).unsqueeze(1)
        k, v = (torch.cat([linear(x) for x in (query, *nodes)], dim=1) for linear in (self.k_proj, self.v_proj))
        q = self.projection.queries(self.q_proj(query))
        heads, _ = dense_attend(q, *self._heads(k, v), visible, self.scale)
        return Attended(self.merge_heads(heads, query), carry=self._carried(nodes[0], query, carry))

    def adopt(self, full_state: Mapping[str, Tensor]) -> None:
        super().adopt(full_state)
        relays = [name for name, _ in self.named_children() if name.startswith("relay_") and name.endswith("_proj")]
        self.adopt_copies(full_state, {name: name.removeprefix("relay_") for name in relays})


def _rows(x: Tensor, place: Tensor) -> Tensor:
    """Return the rows (B, T, W) of x at these places (B or 1, T)."""
    return rows_at(x, place.unsqueeze(1).expand(len(x), -1, -1)).squeeze(1)
