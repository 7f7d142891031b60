"""ETC: tokens see a band and global nodes; nodes see all tokens and are carried from layer to layer.

Paper: Ainslie et al., "ETC: Encoding Long and Structured Inputs in Transformers", 2020, arXiv 2004.08483, section 3.
Tokens see their band and all global nodes, nodes see each other and all tokens, each in one softmax. Each score adds a
vector and a bias for the pair's label: the clipped distance of two tokens or of two nodes, or whether a token belongs
to a node's block. Nodes have their own residual, norm and feed-forward; all start from one learned vector.
Departures: blocks of tokens replace the paper's sentences, unless nodes=sentences gives a node to each sentence of a
document. There are at most global_tokens nodes, and the last one has the rest of the tokens, so that the cost is linear
at any length. The last layer of a run does not update the nodes, because neither another layer nor the decoder reads
them. Nodes that are rebuilt in each layer (global_memory) are an extension: they read the tokens before the tokens read
them. Without labels and hard masks all nodes are equal.
There is no pretraining loss.
Cost: O(T (r + g) + g²).
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.contract import Attended, Inputs, Site, packing
from mtkit.attention.kernels.dot_product import expand_heads, safe_softmax, scores_of, upcast, weighted
from mtkit.attention.kernels.listed import LabelScores, attend_listed
from mtkit.attention.kernels.running_softmax import attend_part, join_parts
from mtkit.attention.marks import sentences
from mtkit.attention.options import Natural, NaturalByLayer, OneOf, Positive, of_layer
from mtkit.attention.slots import WITHOUT_SCORES
from mtkit.attention.sparse._node_update import NodeUpdate
from mtkit.attention.sparse._relative_labels import LONGEST_BLOCK, RelativeLabels, token_lists
from mtkit.errors import MtkitError

PREFIXES = {
    "qkv": dict[tuple[str, str], str](),
    "kv": {("node", "node"): "global_", ("node", "token"): "global_"},
    "none": {("token", "node"): "token_global_", ("node", "node"): "global_", ("node", "token"): "global_token_"},
}
"""For each value of `share`: the prefix of the key and value projections by (reader, what it reads)."""
MEMORIES = ("carry", "local")
NODES = ("blocks", "sentences")
Heads = tuple[Tensor, Tensor]
"""Keys (B, G, S, K) and values (B, G, S, V)."""


@dataclass(frozen=True)
class Graph:
    """The tokens and the nodes of a layer, and which of them belong together."""

    tokens: Tensor
    """(B, T, D)"""
    nodes: Tensor
    """(B, g, D)"""
    owner: Tensor
    """(B or 1, T) number of each token's node."""
    valid: Tensor
    """(B, T)"""
    padded: bool
    """Whether some tokens may not be valid; if not, no mask is needed."""
    token_heads: Heads
    """Keys and values of tokens that tokens read."""

    @property
    def members(self) -> Tensor:
        """The mask (B or 1, 1, T, g) of the node to which each token belongs."""
        numbers = torch.arange(self.nodes.shape[1], device=self.nodes.device)
        return (self.owner.unsqueeze(-1) == numbers).unsqueeze(1)

    @property
    def real_nodes(self) -> Tensor:
        """The nodes (B, g) that have a real token."""
        last = self.owner.expand(self.valid.shape).masked_fill(~self.valid, -1).amax(1)
        return torch.arange(self.nodes.shape[1], device=self.nodes.device) <= last.unsqueeze(1)


class Etc(HeadAttention):
    """Sliding-window attention with global nodes in addition to the tokens.

    window_radius: number of tokens seen on each side, one number or one per layer. global_tokens: maximum number of
    nodes. nodes: whether a node represents a block of tokens ("blocks") or a sentence of a document ("sentences").
    block: tokens per node, for blocks. rel_clip: distance beyond which labels are the same; 0 disables labels. share:
    "qkv" (tokens and nodes share all projections), "kv" (each has its own, whatever it reads) or "none" (keys and
    values also differ by what is read). hard_g2l: nodes read only the tokens of their block or sentence. hard_l2g:
    tokens read only their own node. global_memory: nodes are carried from layer to layer ("carry") or rebuilt in each
    ("local").
    """

    roles = published = frozenset({"encoder"})
    paper = "Ainslie et al. 2020, arXiv 2004.08483"
    complexity = "O(T (r + g))"
    growth = 1
    mixes = False
    sequential_operations = "O(1)"
    longest_path = "O(1)"
    slots = WITHOUT_SCORES
    small: ClassVar[dict[str, Any]] = {"window_radius": 3, "global_tokens": 4, "block": 4, "rel_clip": 2}
    variants = (
        {"share": "kv"},
        {"share": "none"},
        {"rel_clip": 0},
        {"global_memory": "local"},
        {"global_tokens": 0},
        {"global_tokens": 0, "share": "none"},
        {"window_radius": [2, 5]},
        {"hard_g2l": True, "hard_l2g": True, "global_memory": "local", "share": "kv"},
        {"nodes": "sentences"},
        {"nodes": "sentences", "global_tokens": 2, "hard_g2l": True, "hard_l2g": True, "share": "none"},
    )

    global_q_proj: nn.Linear
    global_out_proj: nn.Linear

    def __init__(
        self,
        site: Site,
        *,
        window_radius: NaturalByLayer = 84,
        global_tokens: Natural = 230,
        nodes: Annotated[str, OneOf(NODES)] = "blocks",
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
        self.by_sentence = self.reads_marks = nodes == "sentences" and global_tokens > 0
        self.share = share if global_tokens else "qkv"  # without nodes nothing is shared
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
            self.node_labels = RelativeLabels(site.heads, width, clip=rel_clip) if rel_clip else None
            if self.share != "qkv":
                self._copy("global_", "q_proj", "k_proj", "v_proj", "out_proj")
            if self.share == "none":
                self._copy("global_token_", "k_proj", "v_proj")
            self.node_update = NodeUpdate(site.d_model)

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the tokens' biases by distance, and the nodes' biases of tokens outside and inside their block."""
        learned = super().learned_numbers(inputs)
        if self.labels is not None:
            learned["bias by distance"] = self.labels.biases_by_distance * self.scale
        if self.node_labels is not None:
            learned["node bias outside and inside its block"] = self.node_labels.biases[:, -2:] * self.scale
        return learned

    def attend(self, inputs: Inputs) -> Attended:
        """Return the tokens' outputs; carries the nodes (B, g, D), ordered by block or sentence."""
        return self._attend(inputs, literal=False)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The same with all scores of [nodes; tokens], a mask, and a label for each pair."""
        return self._attend(inputs, literal=True)

    def _attend(self, inputs: Inputs, literal: bool) -> Attended:
        query, valid = inputs.query, inputs.query_valid
        padded = valid is not None
        if valid is None:
            valid = query.new_ones(query.shape[:2], dtype=torch.bool)
        token_heads = self.keys_values(query)
        owner, count = self._owner(valid, inputs.query_marks)
        graph = Graph(query, self._nodes(query, count, inputs.carry), owner, valid, padded, token_heads)
        carried = None
        if self.updates:
            updated = self._updated_nodes(graph, literal)
            if self.carries:
                carried = updated
            else:
                graph = replace(graph, nodes=updated)
        if literal:
            heads = self._literal_token_rows(graph)
        elif self.by_sentence:
            heads = self._token_rows_by_sentence(graph)
        else:
            heads = self._token_rows(graph)
        return self.result(inputs, heads, token_heads[1], carry=carried)

    def _owner(self, valid: Tensor, marks: Tensor | None) -> tuple[Tensor, int]:
        """Return the number of each token's node, (B or 1, T), and the number of nodes in the longest segment."""
        if not self.by_sentence:
            blocks = torch.arange(valid.shape[1], device=valid.device) // self.block
            return blocks.clamp(max=self.most - 1).unsqueeze(0), min(self.most, -(-valid.shape[1] // self.block))
        if marks is None:
            return torch.zeros_like(valid[:1], dtype=torch.long), 1
        sentence = sentences(marks)
        begins = F.pad(sentence[:, 1:] != sentence[:, :-1], (1, 0)) & valid  # marks at padding are arbitrary
        owner = begins.cumsum(1).clamp(max=self.most - 1)
        return owner, int(owner.max()) + 1  # on an accelerator this waits: there are as many nodes as sentences

    def _nodes(self, query: Tensor, count: int, carry: Tensor | None) -> Tensor:
        """Return the nodes (B, g, D) before this layer."""
        if count == 0 or self.site.layer == 0 or not self.carries:
            start = self.first_node if self.most else query.new_zeros(query.shape[2])
            return start.expand(len(query), count, -1)
        if carry is None:
            raise MtkitError("etc needs the global nodes that the layer below carries")
        return carry

    def _updated_nodes(self, graph: Graph, literal: bool) -> Tensor:
        """Residual and norm around the nodes' attention, then around their feed-forward, as in the paper."""
        heads = self._literal_node_rows(graph) if literal else self._node_rows(graph)
        projection = self.out_proj if self.share == "qkv" else self.global_out_proj
        updated: Tensor = self.node_update(graph.nodes, projection(self.merged(heads, graph.nodes)))
        return updated

    def _token_rows_by_sentence(self, graph: Graph) -> Tensor:
        """Return the same as `_token_rows` for nodes of sentences, whose tokens differ between segments.

        Queries go in blocks: the keys of a block are all nodes and the tokens within reach.
        """
        q, labels, length = self.queries(graph.tokens), self.labels, graph.tokens.shape[1]
        node_k, node_v = (expand_heads(x, self.site.heads) for x in self._keys_values("token", "node", graph))
        k, v = (expand_heads(x, self.site.heads) for x in graph.token_heads)
        member, real, at = graph.members, graph.real_nodes, torch.arange(length, device=q.device)
        heads, size = [], max(LONGEST_BLOCK, 2 * self.radius)
        for start in range(0, length, size):
            some, near = slice(start, start + size), slice(max(start - self.radius, 0), start + size + self.radius)
            distance = at[near] - at[some].unsqueeze(-1)
            seen = (distance.abs() <= self.radius) & graph.valid[:, None, None, near]
            nodes_seen = real[:, None, None] & (member[:, :, some] | (not self.hard_l2g))
            visible = torch.cat([nodes_seen.expand(*seen.shape[:3], -1), seen], -1)
            scores = scores_of(q[:, :, some], torch.cat([node_k, k[:, :, near]], 2), self.scale)
            if labels is not None:
                by_node = labels.belonging(q[:, :, some], member[:, :, some], self.scale)
                scores = scores + torch.cat([by_node, labels.bias(q[:, :, some], at[some], at[near], self.scale)], -1)
            weights = F.dropout(safe_softmax(upcast(scores), visible), self.dropout)
            heads.append(weighted(weights, torch.cat([node_v, v[:, :, near]], 2)))
        return torch.cat(heads, 2)

    def _token_rows(self, graph: Graph) -> Tensor:
        """Return the heads' outputs (B, H, T, V) of tokens: one softmax over the band and the nodes."""
        q, labels = self.queries(graph.tokens), self.labels
        of_nodes = self._keys_values("token", "node", graph)
        k, v = (
            expand_heads(torch.cat(pair, 2), self.site.heads) for pair in zip(graph.token_heads, of_nodes, strict=True)
        )
        by_label = None if labels is None else LabelScores(labels.vectors, labels.biases)
        clip = 0 if labels is None else labels.clip
        sizes = q.shape[2], graph.nodes.shape[1], self.radius, self.block
        lists = token_lists(*sizes, clip=clip, hard=self.hard_l2g, device=q.device)
        missing = ~torch.cat([graph.valid, graph.real_nodes], dim=1) if graph.padded else None
        return attend_listed(q, k, v, by_label, lists, missing=missing, scale=self.scale, dropout=self.dropout)

    def _node_rows(self, graph: Graph) -> Tensor:
        """Return the heads' outputs (B, H, g, V) of nodes: one softmax over the nodes and the tokens."""
        q, labels, member = self._node_queries(graph.nodes), self.node_labels, graph.members.mT
        at = torch.arange(graph.nodes.shape[1], device=q.device)
        near = attend_part(
            q,
            *self._keys_values("node", "node", graph),
            scale=self.scale,
            visible=graph.real_nodes[:, None, None],
            bias=None if labels is None else labels.bias(q, at, at, self.scale),
            dropout=self.dropout,
        )
        far = attend_part(
            q,
            *self._keys_values("node", "token", graph),
            scale=self.scale,
            visible=self._tokens_seen(graph),
            bias=None if labels is None else labels.belonging(q, member, self.scale),
            dropout=self.dropout,
        )
        return join_parts([near, far])[0]

    def _literal_token_rows(self, graph: Graph) -> Tensor:
        member, at = graph.members, torch.arange(graph.tokens.shape[1], device=graph.tokens.device)
        distance = at - at.unsqueeze(-1)
        seen = (distance.abs() <= self.radius) & graph.valid[:, None, None]
        nodes_seen = graph.real_nodes[:, None, None] & (member | (not self.hard_l2g))
        visible = torch.cat([nodes_seen.expand(*seen.shape[:3], -1), seen], dim=-1)
        read = self._keys_values("token", "node", graph), self._keys_values("token", "token", graph)
        kinds = [(member, True), (distance, False)]
        return self._literal(self.queries(graph.tokens), read, visible, self.labels, kinds)

    def _literal_node_rows(self, graph: Graph) -> Tensor:
        at = torch.arange(graph.nodes.shape[1], device=graph.nodes.device)
        real = graph.real_nodes[:, None, None].expand(-1, 1, len(at), -1)
        visible = torch.cat([real, self._tokens_seen(graph).expand(-1, 1, len(at), -1)], dim=-1)
        read = self._keys_values("node", "node", graph), self._keys_values("node", "token", graph)
        kinds = [(at - at.unsqueeze(-1), False), (graph.members.mT, True)]
        return self._literal(self._node_queries(graph.nodes), read, visible, self.node_labels, kinds)

    def _literal(
        self,
        q: Tensor,
        read: tuple[Heads, Heads],
        visible: Tensor,
        labels: RelativeLabels | None,
        kinds: list[tuple[Tensor, bool]],
    ) -> Tensor:
        """s_ij = (q_i . k_j + q_i . a_l(i,j) + b_l(i,j)) / sqrt(K) with a vector for each pair, and one softmax.

        `kinds` has one entry for nodes and one for tokens: distances, or with True whether the token is in the node's
        block.
        """
        k, v = (torch.cat(pair, dim=2) for pair in zip(*read, strict=True))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("bhik,bhjk->bhij", q, k)
        if labels is not None:
            clip, pairs = labels.clip, []
            for kind, belongs in kinds:
                right, left = kind.clamp(0, clip), clip + (-kind.long()).clamp(max=clip)
                pairs.append(2 * clip + 1 + kind.long() if belongs else torch.where(kind < 0, left, right))
            label = torch.cat([pair.expand(len(q), 1, *pair.shape[-2:]).squeeze(1) for pair in pairs], dim=-1)
            by_label = torch.einsum("bhik,hbijk->bhij", q, labels.vectors[:, label])
            scores = scores + by_label + labels.biases[:, label].transpose(0, 1)
        return weighted(safe_softmax(scores * self.scale, visible), v)

    def _tokens_seen(self, graph: Graph) -> Tensor:
        """Return which tokens nodes see, (B, 1, 1 or g, T)."""
        real = graph.valid[:, None, None]
        return real & graph.members.mT if self.hard_g2l else real

    def _node_queries(self, nodes: Tensor) -> Tensor:
        """Return the nodes' queries (B, H, g, K)."""
        return self.projection.queries((self.q_proj if self.share == "qkv" else self.global_q_proj)(nodes))

    def _keys_values(self, reader: str, kind: str, graph: Graph) -> Heads:
        """Return keys and values of one kind ("token" or "node") as a reader of one kind sees them."""
        prefix = PREFIXES[self.share].get((reader, kind), "")
        if kind == "token" and not prefix:
            return graph.token_heads
        x = graph.tokens if kind == "token" else graph.nodes
        k, v = (getattr(self, f"{prefix}{name}")(x) for name in ("k_proj", "v_proj"))
        return self.projection.keys(k), self.projection.values(v)

    def _copy(self, prefix: str, *names: str) -> None:
        for name in names:
            self.add_module(f"{prefix}{name}", copy.deepcopy(getattr(self, name)))

    def adopt(self, full_state: Mapping[str, Tensor]) -> None:
        super().adopt(full_state)
        seconds = [name for name, _ in self.named_children() if "global_" in name]
        self.adopt_copies(full_state, {name: "_".join(name.split("_")[-2:]) for name in seconds})  # "k_proj"
