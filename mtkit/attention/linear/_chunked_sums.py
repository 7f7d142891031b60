"""Decayed sums over a sequence, chunk by chunk: outputs, the last sums and all gradients, in O(T) memory.

The forward pass computes what each chunk adds, then the sums before each chunk, which are kept, then the outputs. The
backward pass does the same in the other direction with gradients; it forms products within chunks again. Each pass
works on a part of the chunks at a time, whose tensors stay in the processor's cache.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mtkit.attention.linear._chunk_decays import ChannelDecays, Directions, HeadDecays, sums_of
from mtkit.attention.linear._chunk_rules import Added, Decays, Rows
from mtkit.attention.linear._looped_sums import LoopedSums, loops_sum

NUMBERS_AT_ONCE = {"cpu": 1 << 19}
"""Numbers of keys worked on at a time, by kind of device; 2^26 on others."""


class Part(NamedTuple):
    """A range of chunks in a few segments; several chunks only of all segments."""

    chunks: slice
    segments: slice


Move = Callable[[Added, Part, int], tuple[Tensor, Tensor]]
"""Returns the share (n, 1 or K) of the sums that each of a part's chunks passes on, and what it adds (n, K, V)."""

DECAY = 3
"""Place of the decays among the terms, after queries, keys and values."""


class Layout:
    """Chunks of `size` positions of sequences (B, H, T, X), and parts of them, (n, c, X)."""

    def __init__(self, example: Tensor, chunk: int) -> None:
        self.segments, self.heads, self.length, width = example.shape
        self.size = min(chunk, self.length)
        self.count = -(-self.length // self.size)
        at_once = NUMBERS_AT_ONCE.get(example.device.type, 1 << 26) // (self.heads * self.size * width)
        segments, chunks = min(max(at_once, 1), self.segments), max(at_once // self.segments, 1)
        self.parts = [
            Part(slice(first, min(first + chunks, self.count)), slice(segment, segment + segments))
            for first in range(0, self.count, chunks)
            for segment in range(0, self.segments, segments)
        ]

    def load(self, x: Tensor, part: Part) -> Tensor:
        """Return the part's rows, with zeros after the last position."""
        rows = x[part.segments, :, part.chunks.start * self.size : part.chunks.stop * self.size]
        more = -rows.shape[2] % self.size
        return self._in_chunks(F.pad(rows, (0, 0, 0, more)) if more else rows).flatten(0, 2)

    def rows(self, part: Part) -> int:
        """Return the number of a part's sequences."""
        return len(range(*part.segments.indices(self.segments))) * self.heads

    def empty(self, like: Tensor) -> Tensor:
        """Return new rows (B, H, m c, X) for all chunks, token by token in memory."""
        shape = self.segments, self.count * self.size, self.heads, like.shape[-1]
        return like.new_empty(shape).transpose(1, 2)

    def store(self, x: Tensor, part: Part, rows: Tensor) -> None:
        """Write the part's rows to x (B, H, m c, X)."""
        chunks = self._in_chunks(x[part.segments, :, part.chunks.start * self.size : part.chunks.stop * self.size])
        chunks.copy_(rows.view(chunks.shape))

    def at(self, states: Tensor, part: Part, later: int = 0) -> Tensor:
        """Return the part's entries (n, ...), a view, of states (m or more, B, H, ...), from `later` chunks on."""
        return states[part.chunks.start + later : part.chunks.stop + later, part.segments].flatten(0, 2)

    def _in_chunks(self, rows: Tensor) -> Tensor:
        return rows.unflatten(2, (-1, self.size)).movedim(2, 0)


def decayed_reads(directions: Directions, chunk: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """Return the outputs (B, H, T, V) of q, k (B, H, T, K), v (B, H, T, V) and decay (B, H, T, 1 or K).

    They are added over the directions. Differentiable once.
    """
    reads: Tensor
    if len(directions) == 1 and loops_sum(chunk, k, v, decay, q):
        reads = LoopedSums.apply(directions[0], chunk, q, k, v, decay)  # type: ignore[no-untyped-call]
    else:
        reads = _DecayedSums.apply(directions, chunk, True, q, k, v, decay)  # type: ignore[no-untyped-call]
    return reads


def decayed_sums(chunk: int, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """Return the sums (B, H, K, V) after the last position."""
    sums: Tensor = _DecayedSums.apply((False,), chunk, False, k, k, v, decay)  # type: ignore[no-untyped-call]
    return sums


def d_decay_of(
    directions: Directions, totals: Sequence[Tensor], after: Sequence[Tensor], d_after: Sequence[Tensor]
) -> Tensor | None:
    """Return the gradient of the decays (n, c, 1 or K) from the gradients of L and of the sums after the chunks."""
    gradient: Tensor | None = None
    for direction, (from_end, total) in enumerate(zip(directions, totals, strict=False)):
        if after:  # L at the end scales the sums after the chunk
            ends = (after[direction] * d_after[direction]).sum(2)
            total[:, 0 if from_end else -1] += ends.sum(1, keepdim=True) if total.shape[2] == 1 else ends
        more = sums_of(total, not from_end)
        gradient = more if gradient is None else gradient.add_(more)
    return gradient


class _DecayedSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, directions: Directions, chunk: int, reads: bool, *terms: Any) -> Tensor:
        ctx.how = directions, chunk, reads
        with torch.autocast(terms[1].device.type, enabled=False):
            work = _Work(ctx.how, terms)
            states = [] if reads and work.layout.count == 1 else work.sums()
            result = work.outputs(states) if reads else states[0][-1].clone()
        ctx.save_for_backward(*terms, *states)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_result: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: a checkpoint hands out what it recomputed a single time
        terms, states = saved[: DECAY + 1], saved[DECAY + 1 :]
        with torch.autocast(d_result.device.type, enabled=False):
            work = _Work(ctx.how, terms)
            d_outputs, d_last = (d_result, None) if ctx.how[2] else (torch.zeros_like(terms[2]), d_result)
            gradients = work.gradients(d_outputs, states, d_last, decays=ctx.needs_input_grad[6])
        return None, None, None, *gradients


class _Work:
    """The terms of a call in parts, and the rule of each part."""

    def __init__(self, how: tuple[Directions, int, bool], terms: Sequence[Tensor]) -> None:
        self.directions, chunk, self.reads = how
        self.terms, self.layout = terms, Layout(terms[1], chunk)
        self._fixed: dict[int, HeadDecays] = {}
        self._latest: tuple[int, Added] | None = None

    def sums(self) -> list[Tensor]:
        """Return the sums (m + 1, B, H, K, V) at the borders of chunks, by direction."""
        return self._scan(self.directions, lambda rule, _, direction: rule.written(direction))

    def outputs(self, states: Sequence[Tensor]) -> Tensor:
        """Return the outputs (B, H, T, V) from the sums at the borders of chunks, if there are any."""
        outputs = self.layout.empty(self.terms[2])
        for part, rule in self._rules():
            self.layout.store(outputs, part, rule.read(self._at(states, part)))
        return outputs[:, :, : self.layout.length]

    def gradients(
        self, d_outputs: Tensor, states: Sequence[Tensor], d_last: Tensor | None, *, decays: bool
    ) -> list[Tensor | None]:
        """Return the gradients of all terms from the gradients of the outputs and of the last sums."""
        layout = self.layout
        d_states: list[Tensor] = []
        if states:
            back = tuple(not from_end for from_end in self.directions)
            d_states = self._scan(
                back, lambda rule, part, direction: rule.entering(direction, layout.load(d_outputs, part)), d_last
            )
        results = [None if term == DECAY and not decays else layout.empty(x) for term, x in enumerate(self.terms)]
        for part, rule in self._rules():
            d_after = self._at(d_states, part, after=True)
            of_part = rule.gradients(layout.load(d_outputs, part), self._at(states, part), d_after, decays)
            d_decay = d_decay_of(self.directions, of_part.totals, self._at(states, part, after=True), d_after)
            for result, rows in zip(results, (of_part.q, of_part.k, of_part.v, d_decay), strict=True):
                if result is not None and rows is not None:
                    layout.store(result, part, rows)
        return [None if x is None else x[:, :, : layout.length] for x in results]

    def _rules(self) -> Iterator[tuple[Part, Added]]:
        """Yield all parts with their rules; from the last one back if its rule exists, which then serves two passes."""
        parts = list(enumerate(self.layout.parts))
        if self._latest is not None and self._latest[0] == len(parts) - 1:
            parts.reverse()
        for number, part in parts:
            if self._latest is None or self._latest[0] != number:
                rows = Rows(partial(self.layout.load, part=part), *self.terms[:DECAY])
                decays = self._decays(part, (part.chunks.stop - part.chunks.start) * self.layout.rows(part))
                self._latest = number, Added(rows, decays)
            yield part, self._latest[1]

    def _decays(self, part: Part, chunks: int) -> Decays:
        """Return a part's decays; decays of heads at fixed rates are computed once for all parts of as many chunks."""
        decay, layout = self.terms[DECAY], self.layout
        if decay.shape[3] > 1:
            return ChannelDecays(layout.load(decay, part), self.directions)
        fixed = decay.stride(2) == 0 and (decay.stride(0) == 0 or len(decay) == 1)
        if not (fixed and self.reads):  # sums after the last chunk do not decay at positions that fill it up
            return HeadDecays(layout.load(decay, part), self.directions, chunks)
        if chunks not in self._fixed:
            self._fixed[chunks] = HeadDecays(decay[0, :, : layout.size], self.directions, chunks)
        return self._fixed[chunks].fresh()

    def _at(self, states: Sequence[Tensor], part: Part, *, after: bool = False) -> list[Tensor]:
        """Return the sums (n, K, V) before or after the part's chunks, by direction."""
        return [
            self.layout.at(x, part, int(from_end != after))
            for x, from_end in zip(states, self.directions, strict=False)
        ]

    def _scan(self, directions: Directions, move: Move, first: Tensor | None = None) -> list[Tensor]:
        """Return the sums (m + 1, B, H, K, V) at the borders of chunks, by direction, from `first` or 0 on."""
        k, v = self.terms[1], self.terms[2]
        count = self.layout.count
        states = [k.new_empty(count + 1, *k.shape[:2], k.shape[3], v.shape[3]) for _ in directions]
        shares: list[Tensor] = []
        for part, rule in self._rules():
            for direction, from_end in enumerate(directions):
                share, added = move(rule, part, direction)
                if len(shares) == direction:
                    shares.append(k.new_empty(count, *k.shape[:2], share.shape[1]))
                self.layout.at(shares[direction], part).copy_(share)
                self.layout.at(states[direction], part, int(not from_end)).copy_(added)
        for from_end, sums, share in zip(directions, states, shares, strict=True):
            sums[-1 if from_end else 0] = 0.0 if first is None else first
            for chunk in reversed(range(count)) if from_end else range(count):
                sums[chunk + (not from_end)].addcmul_(share[chunk].unsqueeze(-1), sums[chunk + from_end])
        return states
