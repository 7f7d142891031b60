"""Reformer: a token attends to the tokens that random rotations hash into its own bucket, in several rounds.

Paper: Kitaev, Kaiser and Levskaya, "Reformer: The Efficient Transformer", ICLR 2020, arXiv 2001.04451, section 2.
Departures: none in the encoder: tokens sorted by bucket are cut into chunks, and a chunk sees itself and the chunk
before it. In the decoder later tokens would then choose which keys an earlier one sees. There a chunk is `chunk`
neighbours within one bucket, by their rank among the bucket's earlier tokens, so that it never changes.
Queries are keys (`q_proj` makes both), keys have length 1, and scores are not divided by the square root of K. A pair
that several rounds bring together counts once, in the first of them. This equals the correction log N_ij of the paper,
which the authors' code omits. A token sees itself only if it sees nothing else.
Cost: O(rounds T chunk) plus sorting; a step reads at most 2 chunk keys per round. Its state holds keys and values, and
the last 2 chunk positions of every bucket.
Each training update draws new rotations; evaluation always uses the first ones.
"""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.bases.caches import append, picked, start_cache, written
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.content._clusters import enlist, enlisted, start_lists, with_places
from mtkit.attention.contract import ROLES, Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.cached_rows import attend_cached, supports_cached
from mtkit.attention.kernels.dot_product import attend_step, upcast
from mtkit.attention.kernels.reproducible import random_key, replay_choice
from mtkit.attention.kernels.tiled_softmax import FAR
from mtkit.attention.kernels.windowed_rows import SHORTEST, attend_layouts, stream_rows
from mtkit.attention.options import Null, Positive, Within, refused
from mtkit.attention.slots import combining
from mtkit.device import to_device

FEW = 2
"""Keys up to which all are read, with a mask, in shares of the places in the lists: picking a row costs several."""
LAST_RESORT = -1e5
"""The paper's score of a token with itself."""
ROTATED_AT_ONCE = 1 << 20
"""Rotated features computed at a time, so that they stay in the cache."""
STEP = 2.0**50
"""Chunk numbers are multiples of it, so that the squared distance of two chunks is 0 or exceeds any score."""


class Reformer(HeadAttention):
    """Attention to tokens of the same hash bucket, in chunks, over several rounds of hashing.

    lsh_buckets: number of hash buckets per round, 1 or even, at any length. chunk: tokens per chunk. rounds: number of
    rounds of hashing. across_buckets: whether chunks may contain several buckets, which only the encoder role allows.
    """

    roles = frozenset({"encoder", "decoder"})
    published = frozenset({"encoder"})
    paper = "Kitaev et al. 2020, arXiv 2001.04451"
    complexity = "O(T w r)"
    growth = 1
    sequential_operations = "O(1)"
    longest_path = "by content"
    unrounded = True
    roundable = frozenset({"v_proj", "out_proj"})
    # other positions add to scores by distance, which a chunk does not determine
    slots = combining("merge", "nearby", positions={"rotary"}, regularizer={"disagreement"})
    small: ClassVar[dict[str, Any]] = {"lsh_buckets": 4, "chunk": 3, "rounds": 2}
    variants = ({"rounds": 1}, {"lsh_buckets": 1}, {"across_buckets": False})

    rotations: Tensor
    training_rotations: Tensor

    def __init__(
        self,
        site: Site,
        *,
        lsh_buckets: Positive = 32,
        chunk: Positive = 64,
        rounds: Annotated[int, Within(1, 64)] = 4,
        across_buckets: Annotated[bool | None, Null("true in the encoder, false in the decoder")] = None,
    ) -> None:
        super().__init__(site)
        if lsh_buckets > 1 and lsh_buckets % 2:
            raise refused("lsh_buckets", lsh_buckets, "be 1 or even")
        if across_buckets and site.causal:
            rule = "be false in the decoder: later tokens would move its chunks"
            raise refused("across_buckets", across_buckets, rule)
        self.lsh_buckets, self.chunk, self.rounds = lsh_buckets, chunk, rounds
        self.across_buckets = not site.causal if across_buckets is None else across_buckets
        del self.k_proj  # queries are keys
        self.register_buffer("rotations", self._drawn(update=0))
        self.register_buffer("training_rotations", self._drawn(update=0))

    def attend(self, inputs: Inputs) -> Attended:
        """Softmax over the union of all rounds' keys, in blocks of tokens sorted by bucket."""
        query_valid = inputs.query_valid
        q, v, buckets = self._hashed(inputs.query, query_valid)
        heads = self._attend(q, v, replay_choice(buckets, self.lsh_buckets + 1), query_valid)
        return self.result(inputs, heads, v)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return empty caches, and the lists of each bucket's last 2 chunk positions, for (H * rounds) streams."""
        batch_size, hypotheses, like = inputs.batch_size, inputs.hypotheses, self.q_proj.weight
        state = start_cache(batch_size, hypotheses, like, **self.cache_shapes)
        streams, places = self.projection.heads * self.rounds, min(2 * self.chunk, state["keys"].shape[3])
        lists = start_lists(batch_size, hypotheses, streams, self.lsh_buckets, like, places=places)
        return {**state, "lists": lists}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Attend to the last two chunks of the token's bucket in each round."""
        query = inputs.query
        here = torch.full((1,), state["count"], device=query.device)
        rows = query.flatten(0, 1).unsqueeze(1)  # (B*N, 1, D): a segment of one token for each hypothesis
        q, v, buckets = (x.squeeze(-2 if x.is_floating_point() else -1) for x in self._hashed(rows, None, here))
        q, v, buckets = (x.unflatten(0, query.shape[:2]) for x in (q, v, buckets))
        position, state = state["count"], append(state, keys=_keys(q), values=v)
        keys, values = written(state, "keys"), written(state, "values")
        if supports_cached(q, keys, values):
            visible, lists = self._seen(buckets, state["lists"], position)
            heads = attend_cached(q, keys, values, scale=1.0, visible=visible)
        else:
            members, seen, lists = self._listed(buckets, state["lists"], position)
            length = keys.shape[3]
            if length <= FEW * members.shape[-1]:
                everywhere = torch.zeros(*q.shape[:3], length + 1, dtype=torch.bool, device=q.device)
                visible = everywhere.scatter_(-1, members.where(seen, length), True)[..., :-1]
            else:
                picks = members.masked_fill(~seen, -1).sort(dim=-1).values
                visible = (picks >= 0) & F.pad(picks[..., 1:] != picks[..., :-1], (1, 0), value=True)  # each once
                keys, values = (picked(x, picks.clamp(min=0)) for x in (keys, values))
            heads, _ = attend_step(q, keys, values, scale=1.0, visible=visible)
        heads = torch.where(visible.any(-1, keepdim=True), heads, v)
        return Attended(self.merge_heads(heads.transpose(1, 2), query)), {**state, "lists": lists}

    def after_update(self, update: int, total_updates: int) -> None:
        super().after_update(update, total_updates)
        self.training_rotations.copy_(to_device(self._drawn(update), self.training_rotations.device))

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The paper's sum over rounds, each a dense map: o_i = sum_r exp(z_ir - z_i) o_ir."""
        query_valid = inputs.query_valid
        q, v, buckets = self._hashed(inputs.query, query_valid)
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])
        same = buckets.unsqueeze(-1) == buckets.unsqueeze(-2)  # (B, H, rounds, T, T)
        place = (same & (j < i)).sum(-1)
        if self.across_buckets:
            place = place + (buckets.unsqueeze(-2) < buckets.unsqueeze(-1)).sum(-1)
        chunks = place // self.chunk
        back = chunks.unsqueeze(-1) - chunks.unsqueeze(-2)
        together = ((back == 0) | (back == 1)) & (same | self.across_buckets)
        allowed = (j <= i) if self.site.causal else torch.ones_like(i == j)
        if query_valid is not None:
            allowed = allowed & (query_valid[:, None, None, None, :] | (i == j))
        together = together & allowed
        times = together.sum(2, keepdim=True)  # N_ij
        scores = (q @ _keys(q).transpose(-1, -2)).masked_fill(i == j, LAST_RESORT).unsqueeze(2)
        scores = (scores - times.clamp(min=1).to(scores.dtype).log()).masked_fill(~together, float("-inf"))
        z = scores.logsumexp(-1, keepdim=True)
        outputs = scores.softmax(-1) @ v.unsqueeze(2)  # (B, H, rounds, T, V)
        return Attended(self.merge_heads(((z - z.logsumexp(2, keepdim=True)).exp() * outputs).sum(2), inputs.query))

    def _drawn(self, update: int) -> Tensor:
        """Return the rotations (H, rounds, K, buckets / 2) after that many updates."""
        site, p = self.site, self.projection
        generator = torch.Generator().manual_seed(random_key(site.seed, ROLES.index(site.role), site.layer, update))
        return torch.randn(p.heads, self.rounds, p.key_width, self.lsh_buckets // 2, generator=generator)

    def _hashed(
        self, query: Tensor, valid: Tensor | None, position: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and values (B, H, T, K), and buckets (B, H, rounds, T); padding has an extra bucket."""
        v = self.projection.values(self.v_proj(query))
        with torch.autocast(query.device.type, enabled=False):  # rounding must not move a token to another bucket
            q = self.queries(query.type_as(self.q_proj.weight), position)
            buckets = self._buckets(upcast(q.detach()))
        if valid is not None:
            buckets = buckets.masked_fill(~valid[:, None, None], self.lsh_buckets)
        return q.type_as(v), v, buckets

    def _buckets(self, q: Tensor) -> Tensor:
        """argmax [x R; -x R] of each q (B, H, T, K) in each round: (B, H, rounds, T)."""
        if self.lsh_buckets == 1:
            return torch.zeros(*q.shape[:2], self.rounds, q.shape[2], dtype=torch.long, device=q.device)
        rotations = self.training_rotations if self.training else self.rotations
        together = rotations.type_as(q).transpose(1, 2).flatten(2)  # (H, K, rounds * buckets / 2)
        most = max(ROTATED_AT_ONCE // max(q.shape[0] * together.shape[0] * together.shape[2], 1), 1)
        buckets = []
        for part in q.split(most, dim=2):
            # (H, B T, K): all rows of a head meet its rotations in one product
            rotated = part.transpose(0, 1).flatten(1, 2) @ together
            buckets.append(self._largest(rotated.unflatten(1, (part.shape[0], part.shape[2])).transpose(0, 1)))
        return torch.cat(buckets, dim=-1)

    def _largest(self, rotated: Tensor) -> Tensor:
        """argmax [y; -y] of each round's y in rotated (B, H, T, rounds * buckets / 2): (B, H, rounds, T)."""
        rotated = rotated.unflatten(-1, (self.rounds, -1)).transpose(2, 3)
        top, bucket = rotated.max(-1)
        low, opposite = rotated.min(-1)
        return torch.where(top >= -low, bucket, opposite + self.lsh_buckets // 2)

    def _attend(self, q: Tensor, v: Tensor, buckets: Tensor, valid: Tensor | None) -> Tensor:
        """Return the heads' outputs (B, H, T, V)."""
        layouts = sorted_chunks(buckets, valid, self.chunk, self.across_buckets, self.site.causal)
        return attend_layouts(q.transpose(1, 2), v.transpose(1, 2), layouts, dropout=self.dropout).transpose(1, 2)

    def _seen(self, buckets: Tensor, lists: State, position: int) -> tuple[Tensor, State]:
        """Return which positions the newest token sees, (B, N, H, T), and the lists with the token, by a loop."""
        from mtkit.attention.kernels.cpu.choice_loops import enlist_and_see

        lists = with_places(lists, position, 2 * self.chunk)
        seen = torch.zeros(*buckets.shape[:3], position + 1, dtype=torch.bool)
        members, count, group, marks = (
            x.flatten(0, 1).contiguous() for x in (lists["members"], lists["count"], buckets, seen)
        )
        enlist_and_see(members.numpy(), count.numpy(), group.numpy(), position, self.chunk, marks.numpy())
        return seen, {"members": members.view_as(lists["members"]), "count": count.view_as(lists["count"])}

    def _listed(self, buckets: Tensor, lists: State, position: int) -> tuple[Tensor, Tensor, State]:
        """Return positions, which of them the newest token sees, and the lists with the token in its buckets.

        buckets (B, N, H, rounds); both results are (B, N, H, places), and a position may be there several times.
        """
        bucket = buckets.flatten(2)  # (B, N, H * rounds)
        lists = enlist(lists, bucket, position, 2 * self.chunk)
        members, rank = enlisted(lists, bucket)
        newest = rank.amax(-1, keepdim=True)
        seen = (rank >= (newest // self.chunk - 1).clamp(min=0) * self.chunk) & (rank < newest)
        members, seen = (x.unflatten(2, buckets.shape[2:]).flatten(-2) for x in (members, seen))
        return members, seen, lists


def _keys(q: Tensor) -> Tensor:
    """Normalize queries to length 1."""
    return F.normalize(upcast(q), dim=-1, eps=SHORTEST).type_as(q)


def sorted_chunks(
    buckets: Tensor, valid: Tensor | None, chunk: int, across_buckets: bool, causal: bool
) -> list["SortedChunks"]:
    """Return the layout of the rows in each round, from buckets (B, H, rounds, T) and valid (B, T).

    With `across_buckets`, all sorted tokens are cut into chunks, and a token sees its chunk and the one before.
    Otherwise the tokens of each bucket are cut separately, and a token sees no other bucket. Keys that a token has seen
    in an earlier round are hidden. Rows and their N = B H streams are as in `stream_rows`.
    """
    batch, heads, _, length = buckets.shape
    rows = stream_rows((batch, length, heads), buckets.device)
    ordered, order = buckets.permute(2, 0, 1, 3).flatten(1, 2).sort(dim=-1, stable=True)  # (rounds, N, T)
    token = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    place = torch.empty_like(order).scatter_(-1, order, token)
    chunks = place // chunk if across_buckets else _chunk_numbers(ordered, chunk).gather(-1, place)
    real = None if valid is None else valid.repeat_interleave(heads, 0)
    return [
        SortedChunks(rows, order[r], place[r], chunks[: r + 1], real, chunk, across_buckets, causal)
        for r in range(len(order))
    ]


class SortedChunks:
    """Tokens sorted by bucket in one round, in blocks, each with the keys that may be visible to it: a `Layout`."""

    def __init__(
        self,
        rows: Tensor,
        order: Tensor,
        place: Tensor,
        chunks: Tensor,
        real: Tensor | None,
        chunk: int,
        across: bool,
        causal: bool,
    ) -> None:
        """Rows, order, place and real are (N, T); chunks (rounds, N, T) of this round (the last) and earlier ones."""
        streams, length = order.shape
        # if chunks begin with buckets, they begin inside blocks: shorter blocks then read fewer unseen keys
        self.block = min(chunk if across or chunk % 2 else chunk // 2, length)
        self.stream_blocks = -(-length // self.block)
        self.positions_before = self.block * min(
            -(-(chunk if across else 2 * chunk) // self.block), self.stream_blocks - 1
        )
        self._positions_after = self.block * min(
            0 if across or causal else -(-chunk // self.block), self.stream_blocks - 1
        )
        self._rest, self._across, self._causal = self.stream_blocks * self.block - length, across, causal
        self.width = self.positions_before + self.block + self._positions_after
        stream = torch.arange(streams, device=order.device).unsqueeze(-1)
        self.keys = self._keys(rows.gather(-1, order), rows.numel())
        self.place = place + stream * (self.stream_blocks * self.block)
        stream_of_key = self._windows(self._keys(stream.expand_as(order), -1))
        elsewhere = stream_of_key != stream.repeat_interleave(self.stream_blocks, 0).unsqueeze(-1)
        # odd numbers for queries, even ones for keys: the own chunk and the one before are both one step away
        numbers = (2 * STEP) * chunks.gather(-1, order.expand_as(chunks)).float()
        pairs = [(self._queries(x - STEP), self._windows(self._keys(x, 0))) for x in numbers]
        self._earlier = pairs[:-1]
        if across:  # a window has only the two chunks
            missing = torch.zeros_like(order, dtype=torch.bool) if real is None else (~real).gather(-1, order)
            self._hidden = (self._windows(self._keys(missing, 1)) | elsewhere) * FAR
        else:  # padding has a bucket of its own
            self._own = pairs[-1][0], pairs[-1][1].masked_fill(elsewhere, -(2.0**100))
        # within a bucket, tokens are sorted by position
        self._future = torch.full((self.block, self.block), FAR, device=order.device).triu()

    def hide(self, scores: Tensor, blocks: slice) -> None:
        """See `Layout`."""
        if self._across:
            scores += self._hidden[blocks]
        else:
            i, j = (x[blocks] for x in self._own)
            _limit(scores, i - j, near=True)
        own_block = scores[..., self.positions_before : self.positions_before + self.block]
        if self._causal:
            own_block += self._future
        else:
            own_block.diagonal(dim1=-2, dim2=-1).add_(FAR)
        for i, j in self._earlier:
            _limit(scores, i[blocks] - j[blocks], near=False)

    def _queries(self, numbers: Tensor) -> Tensor:
        """Pad and reshape (N, T) to (blocks, c, 1)."""
        return F.pad(numbers, (0, self._rest)).view(-1, self.block, 1)

    def _keys(self, x: Tensor, nothing: int) -> Tensor:
        """Pad and flatten (N, T) to (places,)."""
        return F.pad(
            F.pad(x, (0, self._rest), value=nothing).flatten(),
            (self.positions_before, self._positions_after),
            value=nothing,
        )

    def _windows(self, keys: Tensor) -> Tensor:
        """Unfold (places,) to (blocks, 1, L)."""
        return keys.unfold(0, self.width, self.block).unsqueeze(1)


def _limit(scores: Tensor, distance: Tensor, near: bool) -> None:
    """Hide keys further than one step away if `near`, else keys no further than that."""
    sign = 1 if near else -1
    limit = scores.new_full((), sign * 2 * STEP**2)  # no copy from the host
    torch.minimum(scores, torch.addcmul(limit, distance, distance, value=-sign).type_as(scores), out=scores)


def _chunk_numbers(buckets: Tensor, chunk: int) -> Tensor:
    """Number the chunks (..., T) of sorted buckets (..., T); a bucket's first token and a full chunk begin a new one.

    Between buckets a number is skipped: the last chunk of a bucket is not just before the first of the next.
    """
    place = torch.arange(buckets.shape[-1], device=buckets.device).expand_as(buckets)
    first = buckets != F.pad(buckets[..., :-1], (1, 0), value=-1)
    start = torch.where(first, place, 0).cummax(-1).values
    begins = (place - start) % chunk == 0
    return (begins.long() + first).cumsum(-1)
