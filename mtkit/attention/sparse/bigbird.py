"""BigBird: blocks of tokens see their neighbouring blocks, a few global blocks, and a few blocks drawn for each head.

Paper: Zaheer et al., "Big Bird: Transformers for Longer Sequences", 2020, arXiv 2007.14062, section 2 and appendix D.
itc: the first and the last blocks of a segment are global: they see all tokens and are seen by all.
etc: learned vectors before the tokens are global; they use the tokens' projections.
Departures: drawn blocks are neither near nor global, so that each key counts once; a draw is a hash
of seed, role, layer, head, block and slot. The last block is the last one of each segment, without padding. Global
vectors go from layer to layer with their own residual, norms and feed-forward; the last layer of a run does not update
them, because no layer reads them. In the decoder role (an extension) only the first blocks are global, and blocks are
drawn from the past; global vectors, which read all tokens, are for the encoder only.
Cost: O(T b (w + g + r)) for w, g and r blocks of b. A step reads the keys of as many blocks, and keeps all tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.pattern_attention import PatternAttention, PatternGroup, by_head
from mtkit.attention.contract import ROLES, Attended, Inputs, Site, packing
from mtkit.attention.kernels.pattern import Blocks, Columns, Pattern, Rows
from mtkit.attention.kernels.random_pattern import LastBlocks, LastRows, RandomBlocks
from mtkit.attention.kernels.reproducible import random_key
from mtkit.attention.kernels.sparse import dense_attend
from mtkit.attention.options import Natural, OneOf, Positive, refused
from mtkit.attention.sparse._node_update import NodeUpdate
from mtkit.errors import MtkitError

FORMS = ("itc", "etc")


class BigBird(PatternAttention):
    """Attention over neighbouring, global and drawn blocks.

    block_size: tokens per block. bigbird_window: number of blocks seen around a token, its own included, an odd number;
    in the decoder role the blocks up to its own. bigbird_global: number of global blocks, in the encoder half of them
    at each end; an odd one is at the start. bigbird_random: number of blocks drawn for each block and head.
    bigbird_form: the global blocks are the segment's own ("itc") or learned vectors ("etc"), bigbird_global times
    block_size of them. Block size and numbers of blocks are limited by the longest segment.
    """

    roles = frozenset({"encoder", "decoder"})
    published = frozenset({"encoder"})
    paper = "Zaheer et al. 2020, arXiv 2007.14062"
    complexity = "O(T b (w + g + r))"
    growth = 1
    longest_path = "O(1), decoder O(log T)"
    slots: ClassVar[Mapping[str, frozenset[str] | None]] = {
        **PatternAttention.slots,
        "positions": frozenset({"rotary"}),
    }
    small: ClassVar[dict[str, Any]] = {"block_size": 3, "bigbird_random": 2}
    variants = (
        {"bigbird_form": "etc"},
        {"bigbird_form": "etc", "bigbird_global": 1, "bigbird_random": 1},
        {"bigbird_global": 3, "bigbird_window": 5},
        {"bigbird_global": 0},
        {"bigbird_random": 0, "bigbird_window": 1},
    )

    def __init__(
        self,
        site: Site,
        *,
        block_size: Positive = 64,
        bigbird_window: Positive = 3,
        bigbird_global: Natural = 2,
        bigbird_random: Natural = 3,
        bigbird_form: Annotated[str, OneOf(FORMS)] = "itc",
    ) -> None:
        super().__init__(site)
        if bigbird_window % 2 == 0:
            raise refused("bigbird_window", bigbird_window, "be odd: a block and as many on either side")
        self.external = bigbird_form == "etc"
        if self.external and site.causal:
            rule = "be itc in the decoder role: global vectors read the whole sequence"
            raise refused("bigbird_form", bigbird_form, rule)
        if self.external and self.positions is not None:
            raise MtkitError("global vectors have no positions: leave positions out, or take bigbird_form=itc")
        self.size = min(block_size, site.max_length)
        most = -(-site.max_length // self.size)  # blocks of the longest segment
        self.side, self.count, ends = bigbird_window // 2, min(bigbird_random, most), min(bigbird_global, most)
        self.last = 0 if site.causal or self.external else ends // 2
        self.first = ends - self.last
        self.key = random_key(site.seed, ROLES.index(site.role), site.layer)
        self.nodes = self.first * self.size if self.external else 0
        self.updates = self.nodes > 0 and site.layer + 1 < site.layers
        if site.causal:
            self.groups = by_head([self._pattern(None)] * site.heads)
        if self.nodes and site.layer == 0:
            self.first_nodes = nn.Parameter(torch.randn(self.nodes, site.d_model))
        if self.updates:
            self.node_update = NodeUpdate(site.d_model)

    def _pattern(self, lengths: Tensor | None) -> Pattern:
        """Return the pattern for segments of these lengths; None: the past, for the decoder."""
        pattern: Pattern = Blocks(self.size, self.side, 0 if lengths is None else self.side)
        if self.first:
            pattern = pattern | Columns(self.first * self.size)
        if self.first and lengths is not None and (self.updates or not self.external):
            pattern = pattern | Rows(self.first * self.size)
        if self.last and lengths is not None:
            pattern = pattern | LastBlocks(self.last, self.site.heads, 0, self.size, lengths)
            pattern = pattern | LastRows(self.last, self.size, lengths)
        if not self.count:
            return pattern
        near, heads = self.side + 1, self.site.heads
        return pattern | RandomBlocks(self.count, heads, self.key, self.size, near, self.first, self.last, lengths)

    def groups_of(self, lengths: Tensor) -> Sequence[PatternGroup]:
        """Global and drawn blocks depend on the length of each segment; in the decoder role only on the past."""
        return self.groups if self.site.causal else by_head([self._pattern(lengths)] * self.site.heads)

    def attend(self, inputs: Inputs) -> Attended:
        """Softmax over the pattern's keys, in blocks; carries global vectors (B, n, D).

        Weights are from tokens to tokens: rows sum to 1 minus the weights of global vectors.
        """
        query_valid = inputs.query_valid
        if not self.nodes:
            return super().attend(inputs)
        tokens, valid = self._with_nodes(inputs.query, query_valid, inputs.carry)
        q, k, v = self.queries_keys_values(tokens)
        heads, weights = self.attended(q, k, v, valid=valid, need_weights=inputs.need_weights)
        read = self.weights_to_regularize(q, k, valid) if self.regularizes_weights else (None, None)
        n = self.nodes
        weights, weighed, visible = (None if x is None else x[..., n:, n:] for x in (weights, *read))
        if self.nearby is not None:
            heads = torch.cat([heads[:, :, :n], self.with_nearby(heads[:, :, n:], v[:, :, n:], query_valid)], 2)
        losses = self.losses(inputs, heads[:, :, n:], v[:, :, n:], weighed, visible)
        return self._split_nodes(tokens, heads, weights=weights, losses=losses)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        query = inputs.query
        if not self.nodes:
            return super().naive(query, query_valid=inputs.query_valid)
        tokens, valid = self._with_nodes(query, inputs.query_valid, inputs.carry)
        q, k, v = self.queries_keys_values(tokens)
        return self._split_nodes(tokens, dense_attend(q, k, v, self._visible(q, k, valid), self.scale)[0])

    def _with_nodes(self, query: Tensor, valid: Tensor | None, carry: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the global vectors followed by the tokens, (B, n + T, D), and their mask."""
        if self.site.layer == 0:
            carry = self.first_nodes.expand(len(query), -1, -1)
        if carry is None:
            raise MtkitError("bigbird needs the global vectors that the layer below carries")
        tokens = torch.cat([carry.type_as(query), query], dim=1)
        return tokens, None if valid is None else F.pad(valid, (self.nodes, 0), value=True)

    def _split_nodes(self, tokens: Tensor, heads: Tensor, **further: Any) -> Attended:
        """Return the tokens' output; carries the global vectors after residual, norms and feed-forward."""
        output, n = self.merge_heads(heads, tokens), self.nodes
        above = self.node_update(tokens[:, :n], output[:, :n]) if self.updates else None
        return Attended(output[:, n:], carry=above, **further)
