"""Decayed sums under the delta rule, chunk by chunk: outputs, the last sums and all gradients, in O(T) memory.

Let S be the sums before a chunk, B = diag(beta), and M = E * K K^T below the diagonal. The chunk writes the rows B Z:

    (I + M B) Z = V - (e^L * K) S     O = (e^L * Q) S + (E * Q K^T) B Z     S_after = e^L_c S + (e^(L_c - L) * K)^T B Z

A part of the chunks first forms all products without S, and inverts its systems (Yang et al. 2024, arXiv 2406.06484).
Then S passes its chunks in order, with the products of all heads at once. Z, the inverses and the sums before chunks
are kept for the backward pass, which goes through the parts in the other direction.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtkit.attention.linear._chunk_decays import ChannelDecays, HeadDecays, Read
from mtkit.attention.linear._chunked_sums import Layout, Part, d_decay_of
from mtkit.attention.linear._looped_sums import LoopedSums, loops_sum

TINY = 1e-30
"""Least beta in a quotient. A sigmoid's gradient is 0 if beta is lower, so the quotient does not matter there."""


def corrected_reads(from_end: bool, chunk: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs (B, H, T, V) of q, k (B, H, T, K), v (B, H, T, V), decay (B, H, T, 1 or K), beta (B, H, T, 1).

    Differentiable once.
    """
    function = LoopedSums if loops_sum(chunk, k, v, decay, q, beta) else _CorrectedSums
    reads: Tensor = function.apply(from_end, chunk, q, k, v, decay, beta)  # type: ignore[no-untyped-call]
    return reads


def corrected_sums(chunk: int, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Return the sums (B, H, K, V) after the last position."""
    sums: Tensor = _CorrectedSums.apply(False, chunk, None, k, v, decay, beta)  # type: ignore[no-untyped-call]
    return sums


class _CorrectedSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, from_end: bool, chunk: int, q: Tensor | None, *others: Tensor) -> Tensor:
        """Return the outputs; without queries, the last sums."""
        k, v, decay, beta = others
        ctx.how = from_end, chunk
        with torch.autocast(k.device.type, enabled=False):
            layout, saved = Layout(k, chunk), []
            outputs = layout.empty(v)
            states = None
            if q is None or layout.count > 1:
                states = k.new_empty(layout.count + 1, *k.shape[:2], k.shape[3], v.shape[3])
                states[-1 if from_end else 0] = 0.0
            for part in _in_order(layout, from_end):
                rows, borders = _Rows(layout, part, from_end, k, decay, beta), _borders(states, part)
                z = rows.corrections(layout.load(v, part), borders)
                if q is not None:
                    layout.store(outputs, part, rows.read(layout.load(q, part), z, borders))
                saved += [z, rows.inverse]
        ctx.save_for_backward(q, *others, states, *saved)
        return outputs[:, :, : layout.length] if states is None or q is not None else states[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_result: Tensor) -> tuple[Tensor | None, ...]:
        (from_end, chunk), saved = ctx.how, ctx.saved_tensors  # read once: a checkpoint hands out tensors a single time
        q, k, _, decay, beta, states, *of_parts = saved
        with torch.autocast(d_result.device.type, enabled=False):
            layout = Layout(k, chunk)
            results = [None if x is None else layout.empty(x) for x in saved[:5]]
            d_sums = d_result.clone() if q is None else None if states is None else torch.zeros_like(states[0])
            for number, part in reversed(list(enumerate(_in_order(layout, from_end)))):
                z, inverse = of_parts[2 * number : 2 * number + 2]
                rows = _Rows(layout, part, from_end, k, decay, beta, inverse)
                outer = None if q is None else (layout.load(q, part), layout.load(d_result, part))
                d_part = None if d_sums is None else d_sums[part.segments]
                gradients = rows.gradients(outer, z, _borders(states, part), d_part)
                for result, rows_of in zip(results, gradients, strict=True):
                    if result is not None and rows_of is not None:
                        layout.store(result, part, rows_of)
        return None, None, *(None if x is None else x[:, :, : layout.length] for x in results)


def _in_order(layout: Layout, from_end: bool) -> Sequence[Part]:
    return layout.parts[::-1] if from_end else layout.parts


def _borders(states: Tensor | None, part: Part) -> Tensor | None:
    """Return the sums (chunks + 1, heads of all segments, K, V) at the borders of a part's chunks, a view, if any."""
    if states is None:
        return None
    return states[part.chunks.start : part.chunks.stop + 1, part.segments].flatten(1, 2)


class _Rows:
    """Keys, decays and beta of a part's chunks, (n, c, ...), chunk after chunk, with the inverses of their systems."""

    def __init__(
        self,
        layout: Layout,
        part: Part,
        from_end: bool,
        k: Tensor,
        decay: Tensor,
        beta: Tensor,
        inverse: Tensor | None = None,
    ) -> None:
        self.from_end, self.heads = from_end, layout.rows(part)
        self.k, self.beta, decay = (layout.load(x, part) for x in (k, beta, decay))
        directions = (from_end,)
        self.decays = (
            ChannelDecays(decay, directions) if decay.shape[2] > 1 else HeadDecays(decay, directions, len(self.k))
        )
        self.carried = self.decays.carried[0].unsqueeze(-1)
        if inverse is None:
            system = _strict(self.decays.products(self.k, self.k), from_end).mul_(self.beta.mT)
            one = torch.eye(system.shape[1], dtype=system.dtype, device=system.device).expand_as(system)
            inverse = torch.linalg.solve_triangular(system, one, upper=from_end, unitriangular=True)
        self.inverse = inverse

    @cached_property
    def read_keys(self) -> Tensor:
        """e^L * K, (n, c, K)."""
        return self.decays.read_rows(self.k, 0)

    @cached_property
    def writes(self) -> Tensor:
        """e^(L_c - L) * B K, (n, c, K)."""
        return self.decays.write_rows(self.k, 0).mul_(self.beta)

    def corrections(self, v: Tensor, states: Tensor | None) -> Tensor:
        """Return Z (n, c, V), and fill in the sums at the borders of the chunks, in order.

        states: the sums; None if the only chunk is read, so that there are none before it, and none after it count.
        """
        if states is None:
            return self.inverse @ v
        z, difference = torch.empty_like(v), torch.empty_like(v[: self.heads])
        for here, before, after in self._chunks(states):
            torch.baddbmm(v[here], self.read_keys[here], before, alpha=-1, out=difference)
            torch.bmm(self.inverse[here], difference, out=z[here])
            torch.mul(before, self.carried[here], out=after).baddbmm_(self.writes[here].mT, z[here])
        return z

    def read(self, q: Tensor, z: Tensor, states: Tensor | None) -> Tensor:
        """Return the outputs (n, c, V)."""
        outputs = self.decays.products(q, self.k).mul_(self.beta.mT) @ z
        if states is None:
            return outputs
        return outputs.baddbmm_(self.decays.read_rows(q, 0), self._of_chunks(states, late=False))

    def gradients(
        self, outer: tuple[Tensor, Tensor] | None, z: Tensor, states: Tensor | None, d_sums: Tensor | None
    ) -> Sequence[Tensor | None]:
        """Return the gradients of q, k, v, decay and beta.

        outer: queries and the gradients of outputs. d_sums: the gradient (B, H, K, V) of the sums after the part; it is
        replaced by the gradient of the sums before it.
        """
        columns, d_z, reads = self.beta.mT, torch.zeros_like(z), []
        before, after = ([] if states is None else [self._of_chunks(states, late=late)] for late in (False, True))
        if outer is not None:
            q, d_outputs = outer
            torch.bmm(self.decays.products(q, self.k).mul_(columns).mT, d_outputs, out=d_z)
            reads = [Read(q, None, (d_outputs @ z.mT).mul_(columns), [d_outputs @ sums.mT for sums in before])]
        d_v, d_after = self._d_values(outer, d_z, d_sums)
        d_beta = (z * d_v).sum(-1, keepdim=True).div_(self.beta.clamp(min=TINY))
        d_overlap = _strict((d_v @ z.mT).mul_(-columns), self.from_end)
        reads.append(Read(self.k, None, d_overlap, [(d_v @ sums.mT).neg_() for sums in before]))
        d_writes = [(z @ d_sums_after.mT).mul_(self.beta) for d_sums_after in d_after]
        d_rows, d_k, d_totals = self.decays.gradients(reads, self.k, d_writes, True)
        d_decay = d_decay_of((self.from_end,), d_totals, after, d_after)
        return None if outer is None else d_rows[0], d_k.add_(d_rows[-1]), d_v, d_decay, d_beta

    def _d_values(
        self, outer: tuple[Tensor, Tensor] | None, d_z: Tensor, d_sums: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of V, from gradients of Z by the outputs, and of sums after chunks, if there are any."""
        if d_sums is None:
            return self.inverse.mT @ d_z, []
        d_states, d_v = d_z.new_zeros(len(d_z) // self.heads + 1, self.heads, *d_sums.shape[2:]), torch.empty_like(d_z)
        d_states[0 if self.from_end else -1] = d_sums.flatten(0, 1)
        if outer is not None:
            torch.bmm(self.decays.read_rows(outer[0], 0).mT, outer[1], out=self._of_chunks(d_states, late=False))
        for here, d_before, d_after in reversed(list(self._chunks(d_states))):
            d_z[here].baddbmm_(self.writes[here], d_after)
            torch.bmm(self.inverse[here].mT, d_z[here], out=d_v[here])
            d_before.addcmul_(d_after, self.carried[here]).baddbmm_(self.read_keys[here].mT, d_v[here], alpha=-1)
        d_sums.copy_(d_states[-1 if self.from_end else 0].view_as(d_sums))
        return d_v, [self._of_chunks(d_states, late=True)]

    def _chunks(self, states: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the rows of the chunks in order, with states (chunks + 1, ...) before and after them."""
        order = range(len(states) - 1)
        for chunk in reversed(order) if self.from_end else order:
            here = slice(chunk * self.heads, (chunk + 1) * self.heads)
            yield here, states[chunk + self.from_end], states[chunk + (not self.from_end)]

    def _of_chunks(self, states: Tensor, late: bool) -> Tensor:
        """Return the states (n, K, V) before or after all chunks, a view."""
        return states[1:].flatten(0, 1) if late != self.from_end else states[:-1].flatten(0, 1)


def _strict(products: Tensor, from_end: bool) -> Tensor:
    """Set products (n, c, c) of a position with itself and later ones to 0, in place."""
    return products.triu_(1) if from_end else products.tril_(-1)
