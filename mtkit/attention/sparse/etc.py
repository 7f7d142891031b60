"""ETC: a band and separate global nodes, which read the whole sequence and are carried from layer to layer.

Paper: Ainslie et al., "ETC: Encoding Long and Structured Inputs in Transformers", 2020, arXiv 2004.08483, section 3.
Tokens see their band and all global nodes, nodes see one another and all tokens, each in one softmax. Scores take a
vector and a bias for the pair's label: the clipped distance of two tokens or of two nodes, and whether a token belongs
to a node's block. Nodes have a residual, norm and feed-forward of their own; all start from one learned vector.
Departures: blocks of tokens stand for the paper's sentences, and there are at most global_tokens of them, the last of
which holds the rest, so that the cost is linear at any length. The last layer of a run does not update the nodes,
because no layer reads them, and the decoder does not read them either. Nodes rebuilt in each layer (global_memory) are
an extension: they read the tokens before the tokens read them. Without labels and hard masks all nodes are equal. There
is no pretraining loss.
Cost: O(T (r + g) + g²).
"""

import copy
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.contract import Attended, Inputs, Site, packing
from mtkit.attention.kernels.dot_product import expand_heads, safe_softmax, weighted
from mtkit.attention.kernels.listed import LabelScores, Lists, attend_listed, smallest_type
from mtkit.attention.kernels.running_softmax import attend_part, join_parts
from mtkit.attention.options import Natural, NaturalByLayer, OneOf, Positive, of_layer
from mtkit.attention.slots import WITHOUT_SCORES
from mtkit.attention.sparse._node_update import NodeUpdate
from mtkit.errors import MtkitError


class RelativeLabels(nn.Module):
    """Adds scale * (q . a_label + b_label) to the scores, one table of (a, b) for each head.

    Label 0 is the same position, 1 to `clip` a key to the right, clip + 1 to 2 clip one to the left, the last of each
    for all further ones; behind these come two for pairs that do not belong together and pairs that do.
    """

    undecayed = ("biases",)

    def __init__(self, heads: int, width: int, *, clip: int) -> None:
        super().__init__()
        self.clip = clip
        labels = 2 * clip + 3
        self.vectors = nn.Parameter(0.02 * torch.randn(heads, labels, width))
        self.biases = nn.Parameter(torch.zeros(heads, labels))

    def bias(self, q: Tensor, query_position: Tensor, key_position: Tensor, scale: float) -> Tensor:
        """(B, H, ..., T, S) by the positions, through one product with the table."""
        label = distance_label(key_position.unsqueeze(-2) - query_position.unsqueeze(-1), self.clip)
        return self.by_label(q, scale).gather(-1, label.expand(*q.shape[:-1], label.shape[-1]))

    def belonging(self, q: Tensor, member: Tensor, scale: float) -> Tensor:
        """(B, H, T, S) by whether query and key belong together: member (T, S)."""
        apart, together = self.by_label(q, scale)[..., -2:].split(1, dim=-1)
        return torch.where(member, together, apart)

    def by_label(self, q: Tensor, scale: float) -> Tensor:
        """What each label adds to a query's score, (B, H, ..., T, labels)."""
        rows = q.flatten(2, -2)  # the heads' tables are the only batch: none is copied for a block
        scores = (rows @ self.vectors.transpose(-1, -2) + self.biases.unsqueeze(-2)) * scale
        return scores.unflatten(2, q.shape[2:-1])


def distance_label(distance: Tensor, clip: int) -> Tensor:
    """The label of a key that lies so far to the right."""
    distance = distance.clamp(-clip, clip)
    return torch.where(distance < 0, clip - distance, distance)


PREFIXES = {
    "qkv": dict[tuple[str, str], str](),
    "kv": {("node", "node"): "global_", ("node", "token"): "global_"},
    "none": {
        ("token", "node"): "token_global_",
        ("node", "node"): "global_",
        ("node", "token"): "global_token_",
    },
}
"""By what is shared: for who reads whom, the prefix of the key and value projections."""
MEMORIES = ("carry", "local")
SHORTEST_BLOCK, LONGEST_BLOCK = 16, 64
"""Tokens that share a list of keys: more of them waste products, fewer of them copies of keys."""
Heads = tuple[Tensor, Tensor]
"""Keys (B, G, S, K) and values (B, G, S, V)."""


class Etc(HeadAttention):
    """Sliding-window attention with global nodes beside the tokens.

    window_radius: tokens seen on each side, one number or one per layer. global_tokens: maximum number of nodes.
    block: tokens per node. rel_clip: distance beyond which labels are alike; 0 for no labels at all.
    share: "qkv" (tokens and nodes share all projections), "kv" (each has its own, whatever it reads) or "none" (keys
    and values also differ by what is read). hard_g2l: nodes read only the tokens of their block. hard_l2g: tokens read
    only the node of their block. global_memory: nodes are carried from layer to layer ("carry") or rebuilt in each
    ("local").
    """

    roles = frozenset({"encoder"})
    published = frozenset({"encoder"})
    paper = "Ainslie et al. 2020, arXiv 2004.08483"
    complexity = "O(T (r + g))"
    growth = 1
    slots = WITHOUT_SCORES
    small: ClassVar[dict[str, Any]] = {"window_radius": 3, "global_tokens": 4, "block": 4, "rel_clip": 2}
    variants: ClassVar[tuple[dict[str, Any], ...]] = (
        {"share": "kv"},
        {"share": "none"},
        {"rel_clip": 0},
        {"global_memory": "local"},
        {"global_tokens": 0},
        {"global_tokens": 0, "share": "none"},
        {"window_radius": [2, 5]},
        {"hard_g2l": True, "hard_l2g": True, "global_memory": "local", "share": "kv"},
    )

    global_q_proj: nn.Linear
    global_out_proj: nn.Linear

    def __init__(
        self,
        site: Site,
        *,
        window_radius: NaturalByLayer = 84,
        global_tokens: Natural = 230,
        block: Positive = 16,
        rel_clip: Natural = 12,
        share: Annotated[str, OneOf(PREFIXES)] = "qkv",
        hard_g2l: bool = False,
        hard_l2g: bool = False,
        global_memory: Annotated[str, OneOf(MEMORIES)] = "carry",
    ) -> None:
        super().__init__(site)
        self.radius = of_layer("window_radius", window_radius, site)
        self.most, self.block = global_tokens, block
        self.share = share if global_tokens else "qkv"  # without nodes there is nobody to share with
        self.hard_g2l, self.hard_l2g, self.carries = hard_g2l, hard_l2g, global_memory == "carry"
        width = self.projection.key_width
        self.labels = RelativeLabels(site.heads, width, clip=rel_clip) if rel_clip else None
        self.node_labels: RelativeLabels | None = None
        self.updates = global_tokens > 0 and (not self.carries or site.layer + 1 < site.layers)
        if global_tokens and (site.layer == 0 or not self.carries):
            self.first_node = nn.Parameter(torch.randn(site.d_model))
        if self.share == "none":
            self._copy("token_global_", "k_proj", "v_proj")
        if self.updates:
            self._build_nodes(width, rel_clip)

    def _build_nodes(self, width: int, clip: int) -> None:
        """What nodes that read need: labels, projections of their own if any, norms and feed-forward."""
        self.node_labels = RelativeLabels(self.site.heads, width, clip=clip) if clip else None
        if self.share != "qkv":
            self._copy("global_", "q_proj", "k_proj", "v_proj", "out_proj")
        if self.share == "none":
            self._copy("global_token_", "k_proj", "v_proj")
        self.node_update = NodeUpdate(self.site.d_model)

    def attend(self, inputs: Inputs) -> Attended:
        """The tokens' outputs; carries the nodes (B, g, D), of which the first belong to blocks of real tokens."""
        return self._attended(inputs.query, inputs.query_valid, inputs.carry, literal=False)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The same with all scores of [nodes; tokens], a mask, and labels looked up pair by pair."""
        return self._attended(inputs.query, inputs.query_valid, inputs.carry, literal=True)

    def _attended(self, query: Tensor, valid: Tensor | None, carry: Tensor | None, literal: bool) -> Attended:
        padded, valid = valid, query.new_ones(query.shape[:2], dtype=torch.bool) if valid is None else valid
        node_rows = self._literal_node_rows if literal else self._node_rows
        own = self.keys_values(query)
        nodes, above = self._nodes(query, carry), None
        if self.updates and not self.carries:
            nodes = self._updated(nodes, node_rows(query, nodes, valid, own))
        elif self.updates:
            above = self._updated(nodes, node_rows(query, nodes, valid, own))
        if literal:
            heads = self._literal_token_rows(query, nodes, valid, own)
        else:
            heads = self._token_rows(query, nodes, padded, own)
        return Attended(self.merge_heads(heads), carry=above, losses=self.losses(heads, own[1], None, valid))

    def _nodes(self, query: Tensor, carry: Tensor | None) -> Tensor:
        """(B, g, D) as they are before this layer."""
        count = min(self.most, -(-query.shape[1] // self.block))
        if count == 0 or self.site.layer == 0 or not self.carries:
            start = self.first_node if self.most else query.new_zeros(query.shape[2])
            return start.expand(len(query), count, -1)
        if carry is None:
            raise MtkitError("etc needs the global nodes that the layer below it carries up")
        return carry

    def _updated(self, nodes: Tensor, heads: Tensor) -> Tensor:
        """Residual and norm around what the nodes' heads read, then around their feed-forward, as in the paper."""
        merged = self.merged(heads)
        updated: Tensor = self.node_update(
            nodes, (self.out_proj if self.share == "qkv" else self.global_out_proj)(merged)
        )
        return updated

    def _token_rows(self, tokens: Tensor, nodes: Tensor, valid: Tensor | None, own: Heads) -> Tensor:
        """(B, H, T, V): the band and the nodes, in one softmax."""
        q, labels = self.queries(tokens), self.labels
        k, v = (torch.cat(pair, 2) for pair in zip(own, self._read("token", "node", nodes, own), strict=True))
        k, v = (expand_heads(x, self.site.heads) for x in (k, v))
        by_label = None if labels is None else LabelScores(labels.vectors, labels.biases)
        clip = 0 if labels is None else labels.clip
        sizes = q.shape[2], nodes.shape[1], self.radius, self.block
        lists = token_lists(*sizes, clip=clip, hard=self.hard_l2g, device=q.device)
        missing = None if valid is None else ~torch.cat([valid, self._there(valid)], dim=1)
        return attend_listed(q, k, v, by_label, lists, missing=missing, scale=self.scale, dropout=self.dropout)

    def _node_rows(self, tokens: Tensor, nodes: Tensor, valid: Tensor, own: Heads) -> Tensor:
        """(B, H, g, V): the nodes and the tokens, joined."""
        q, labels = self._node_queries(nodes), self.node_labels
        member, at = self._member(tokens, nodes).T, torch.arange(nodes.shape[1], device=nodes.device)
        near = attend_part(
            q,
            *self._read("node", "node", nodes, own),
            scale=self.scale,
            visible=self._there(valid)[:, None, None],
            bias=None if labels is None else labels.bias(q, at, at, self.scale),
            dropout=self.dropout,
        )
        far = attend_part(
            q,
            *self._read("node", "token", tokens, own),
            scale=self.scale,
            visible=self._tokens_seen(member, valid),
            bias=None if labels is None else labels.belonging(q, member, self.scale),
            dropout=self.dropout,
        )
        return join_parts([near, far])[0]

    def _literal_token_rows(self, tokens: Tensor, nodes: Tensor, valid: Tensor, own: Heads) -> Tensor:
        member, at = self._member(tokens, nodes), torch.arange(tokens.shape[1], device=tokens.device)
        distance = at - at.unsqueeze(-1)
        seen = (distance.abs() <= self.radius) & valid[:, None, None]
        visible = torch.cat([self._nodes_seen(member, valid).expand(*seen.shape[:3], -1), seen], dim=-1)
        read = self._read("token", "node", nodes, own), self._read("token", "token", tokens, own)
        kinds = [(member, True), (distance, False)]
        return self._literal(self.queries(tokens), read, visible, self.labels, kinds)

    def _literal_node_rows(self, tokens: Tensor, nodes: Tensor, valid: Tensor, own: Heads) -> Tensor:
        member, at = self._member(tokens, nodes).T, torch.arange(nodes.shape[1], device=nodes.device)
        there = self._there(valid)[:, None, None].expand(-1, 1, len(member), -1)
        visible = torch.cat([there, self._tokens_seen(member, valid).expand(-1, 1, len(member), -1)], dim=-1)
        read = self._read("node", "node", nodes, own), self._read("node", "token", tokens, own)
        kinds = [(at - at.unsqueeze(-1), False), (member, True)]
        return self._literal(self._node_queries(nodes), read, visible, self.node_labels, kinds)

    def _literal(
        self,
        q: Tensor,
        read: tuple[Heads, Heads],
        visible: Tensor,
        labels: RelativeLabels | None,
        kinds: list[tuple[Tensor, bool]],
    ) -> Tensor:
        """s_ij = (q_i . k_j + q_i . a_l(i,j) + b_l(i,j)) / sqrt(K) with a vector for each pair, and one softmax.

        `kinds` are distances, or (True) whether two belong together, for the nodes and for the tokens.
        """
        k, v = (torch.cat(pair, dim=2) for pair in zip(*read, strict=True))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("bhik,bhjk->bhij", q, k)
        if labels is not None:
            clip, pairs = labels.clip, []
            for kind, belongs in kinds:
                right, left = kind.clamp(0, clip), clip + (-kind.long()).clamp(max=clip)
                pairs.append(2 * clip + 1 + kind.long() if belongs else torch.where(kind < 0, left, right))
            label = torch.cat(pairs, dim=-1)
            scores = scores + torch.einsum("bhik,hijk->bhij", q, labels.vectors[:, label]) + labels.biases[:, label]
        return weighted(safe_softmax(scores * self.scale, visible), v)

    def _member(self, tokens: Tensor, nodes: Tensor) -> Tensor:
        """(T, g): whose block each token is in."""
        own = (torch.arange(tokens.shape[1], device=tokens.device) // self.block).clamp(max=self.most - 1)
        return own.unsqueeze(-1) == torch.arange(nodes.shape[1], device=nodes.device)

    def _there(self, valid: Tensor) -> Tensor:
        """(B, g): the nodes whose block has a real token."""
        return valid[:, :: self.block][:, : self.most]

    def _nodes_seen(self, member: Tensor, valid: Tensor) -> Tensor:
        """By tokens, (B, 1, 1 or T, g)."""
        there = self._there(valid)[:, None, None]
        return there & member if self.hard_l2g else there

    def _tokens_seen(self, member: Tensor, valid: Tensor) -> Tensor:
        """By nodes, (B, 1, 1 or g, T)."""
        shown = valid[:, None, None]
        return shown & member if self.hard_g2l else shown

    def _node_queries(self, nodes: Tensor) -> Tensor:
        """(B, H, g, K)."""
        return self.projection.queries((self.q_proj if self.share == "qkv" else self.global_q_proj)(nodes))

    def _read(self, reader: str, kind: str, x: Tensor, own: Heads) -> Heads:
        """Keys and values of tokens or nodes x, as tokens or nodes read them; `own` are those of tokens for tokens."""
        prefix = PREFIXES[self.share].get((reader, kind), "")
        if kind == "token" and not prefix:
            return own
        k, v = (getattr(self, f"{prefix}{name}")(x) for name in ("k_proj", "v_proj"))
        return self.projection.keys(k), self.projection.values(v)

    def _copy(self, prefix: str, *names: str) -> None:
        for name in names:
            self.add_module(f"{prefix}{name}", copy.deepcopy(getattr(self, name)))

    def adopt(self, full_state: Mapping[str, Tensor]) -> None:
        """Take over the projections of `full`, for all who read and are read."""
        super().adopt(full_state)
        seconds = [name for name, _ in self.named_children() if "global_" in name]
        self.adopt_copies(full_state, {name: "_".join(name.split("_")[-2:]) for name in seconds})  # "k_proj"


@lru_cache(maxsize=4)  # a byte or four for each pair that is looked at
@torch.inference_mode(False)  # what is kept here serves training too
def token_lists(
    length: int, nodes: int, radius: int, members: int, *, clip: int, hard: bool, device: torch.device
) -> Lists:
    """Beside each block of tokens the band, then all nodes, which are numbered behind the tokens.

    Labels are those of `RelativeLabels`, or 0 for all where clip is 0. Depends on nothing but its arguments, so that
    all layers share what is made once.
    """
    blocks = -(-length // min(max(radius, SHORTEST_BLOCK), LONGEST_BLOCK))
    block = -(-length // blocks)  # no longer than need be
    width = min(block + 2 * radius, length)
    start = torch.arange(0, length, block, device=device).unsqueeze(-1)
    i = (start + torch.arange(block, device=device)).unsqueeze(-1)  # (blocks, block, 1)
    near = (start - radius).clamp(0, length - width) + torch.arange(width, device=device)
    node = torch.arange(nodes, device=device)
    distance = near.unsqueeze(1) - i
    member = (i // members).clamp(max=nodes - 1) == node
    apart = 2 * clip + 1 if clip else 0
    hidden = apart + (2 if clip else 1)
    to_tokens = torch.where(distance.abs() <= radius, distance_label(distance, clip), hidden)
    to_nodes = torch.where(member, apart + (clip > 0), hidden if hard else apart)
    labels = torch.cat([to_tokens, to_nodes], dim=-1)
    return Lists(torch.cat([near, length + node.expand(len(near), -1)], dim=-1), labels.to(smallest_type(hidden)))
