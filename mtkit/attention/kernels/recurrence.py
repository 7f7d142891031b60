"""Recurrences over a sequence, part by part, in O(T) memory, and products of queries with prefix sums within a part.

A mechanism defines one part in differentiable operations: its outputs and the next state, from its inputs and the state
before it. The backward pass recomputes each part from its inputs and the state before it, which are kept; intermediate
results of one part fit the processor's cache. A sequence of one part is computed once: autograd keeps what it needs.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

NUMBERS_AT_ONCE = {"cpu": 1 << 18}
"""Numbers of state, or of a sequence's part, worked on at a time, by kind of device; 2^26 on others."""


class Part(NamedTuple):
    """A range of positions in a few streams."""

    streams: slice
    positions: slice
    is_whole: bool = False
    """Whether these are all positions: there is nothing before them, and the step need not give a state after them."""


Step = Callable[[Part, list[Tensor], list[Tensor], list[Tensor]], tuple[Tensor, list[Tensor]]]
"""Maps a part, its sequences, constants and the state before it to its outputs (n, ..., c, Z) and the state after."""


def recur(
    step: Step, sequences: Sequence[Tensor], state: Sequence[Tensor], *, constants: Sequence[Tensor] = (), chunk: int
) -> tuple[Tensor, list[Tensor]]:
    """The outputs (N, ..., T, Z) of all parts, of `chunk` positions each, and the state after the last.

    Sequences are (N, ..., T, X), constants and the initial state (N, ...), of N independent streams; the state may be
    empty. A step called again for a part must give the same results. The initial state gets no gradient.
    """
    streams, length = len(sequences[0]), sequences[0].shape[-2]
    with torch.autocast(sequences[0].device.type, enabled=False):
        if length <= chunk:
            return step(Part(slice(0, streams), slice(0, length), True), list(sequences), list(constants), list(state))
        outputs, *after = _Recurrence.apply(  # type: ignore[no-untyped-call]
            step, chunk, len(sequences), state, *sequences, *constants
        )
    return outputs, after


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, step: Step, chunk: int, sequences: int, state: Sequence[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.step, ctx.chunk, ctx.sequences = step, chunk, sequences
        length = inputs[0].shape[-2]
        last, earlier_states, outputs = [tensor.clone() for tensor in state], [], inputs[0].new_empty(0)
        for part in _parts(inputs[0], state, chunk):
            if part.positions.start == 0:
                now = [tensor[part.streams] for tensor in state]
            if any(ctx.needs_input_grad):
                earlier_states += now
            output, now = step(part, *_given(part, inputs, sequences), now)
            if not len(outputs):
                outputs = output.new_empty(len(inputs[0]), *output.shape[1:-2], length, output.shape[-1])
            _at(outputs, part).copy_(output)
            if part.positions.stop >= length:
                for tensor, part_rows in zip(last, now, strict=True):
                    tensor[part.streams] = part_rows
        ctx.save_for_backward(*inputs, *earlier_states)
        return outputs, *last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor, *d_last: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_outputs.device.type, enabled=False):  # a caller's own must not change the types in here
            return None, None, None, None, *_Recurrence._gradients(ctx, d_outputs, d_last)

    @staticmethod
    def _gradients(ctx: Any, d_outputs: Tensor, d_last: tuple[Tensor, ...]) -> list[Tensor | None]:
        needed, states = ctx.needs_input_grad[4:], len(d_last)
        saved = ctx.saved_tensors  # read once: a checkpoint hands out what it recomputed a single time
        inputs, earlier_states = saved[: len(needed)], saved[len(needed) :]
        gradients = [torch.zeros_like(x) if need else None for x, need in zip(inputs, needed, strict=True)]
        length = d_outputs.shape[-2]
        for number, part in reversed(list(enumerate(_parts(inputs[0], d_last, ctx.chunk)))):
            if part.positions.stop >= length:
                d_after: list[Tensor | None] = [gradient[part.streams] for gradient in d_last]
            state = [x.detach().requires_grad_() for x in earlier_states[number * states : (number + 1) * states]]
            part_inputs = [[x.detach() for x in tensors] for tensors in _given(part, inputs, ctx.sequences)]
            wanted = [x.requires_grad_() for x, need in zip(chain(*part_inputs), needed, strict=True) if need]
            with torch.enable_grad():
                output, after = ctx.step(part, *part_inputs, state)
            ends = [
                (x, d)
                for x, d in zip((output, *after), (_at(d_outputs, part), *d_after), strict=True)
                if x.requires_grad and d is not None
            ]
            made_ends, d_ends = zip(*ends, strict=True)
            part_gradients = torch.autograd.grad(made_ends, [*wanted, *state], d_ends, allow_unused=True)
            totals, d_after = _given(part, gradients, ctx.sequences), list(part_gradients[len(wanted) :])
            for total, part_rows in zip((x for x in chain(*totals) if x is not None), part_gradients, strict=False):
                if part_rows is not None:
                    total.add_(part_rows)
        return gradients


def _parts(sequence: Tensor, state: Sequence[Tensor], chunk: int) -> list[Part]:
    """All positions of a few streams, then of the next."""
    streams, length = len(sequence), sequence.shape[-2]
    size = max(sum(tensor[0].numel() for tensor in state), sequence[0].numel() // length * chunk)
    several = max(NUMBERS_AT_ONCE.get(sequence.device.type, 1 << 26) // size, 1)
    return [
        Part(slice(stream, stream + several), slice(first, first + chunk))
        for stream in range(0, streams, several)
        for first in range(0, length, chunk)
    ]


def _given(part: Part, inputs: Sequence[Any], sequences: int) -> tuple[list[Any], list[Any]]:
    """The share of a part in sequences and constants; None stays None."""
    part_rows = [None if x is None else _at(x, part) for x in inputs[:sequences]]
    return part_rows, [None if x is None else x[part.streams] for x in inputs[sequences:]]


def _at(sequence: Tensor, part: Part) -> Tensor:
    return sequence[part.streams][..., part.positions, :]


class Factors(NamedTuple):
    """The factors of rows and sums: decays, and scales that keep exponentials in range."""

    pairs: Tensor
    """(N, R, C) of what row t reads of position j; zero where j comes after t."""
    read: Tensor
    """(N, R, 1) of what row t reads of the sums before."""
    kept: Tensor
    """(N, 1, 1) of the sums before in the sums after."""
    added: Tensor
    """(N, C, 1) of position j in the sums after."""


def prefix_products(
    x: Tensor, y: Tensor, z: Tensor, sums: Tensor, factors: Factors | None = None
) -> tuple[Tensor, Tensor]:
    """x_t (sums + sum_{j<=t} y_j^T z_j) for all t, (N, R, Z), and sums + sum_j y_j^T z_j, (N, Y, Z), after the part.

    y (N, C, Y), z (N, C, Z), x (N, R, Y); R is C or a multiple of it: C rows of each of several queries, one
    query after the other. Products within the part are formed under the triangle.
    """
    rows, after = _PrefixProducts.apply(x, y, z, sums, *(factors or ()))  # type: ignore[no-untyped-call]
    return rows, after


def triangle_products(x: Tensor, y: Tensor, z: Tensor, pairs: Tensor | None = None) -> Tensor:
    """The rows of `prefix_products` without sums before or after; `pairs` as in `Factors`."""
    products = torch.bmm(x, y.mT)
    if pairs is not None:
        return torch.bmm(products * pairs, z)
    return torch.bmm(products.unflatten(1, (-1, products.shape[-1])).tril().flatten(1, 2), z)


class _PrefixProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, z: Tensor, sums: Tensor, *factors: Tensor) -> tuple[Tensor, Tensor]:
        pairs = _under_triangle(torch.bmm(x, y.mT), factors)
        ctx.save_for_backward(x, y, z, sums, pairs, *factors)
        rows = torch.bmm(x, sums)
        if not factors:
            return rows.baddbmm_(pairs, z), torch.baddbmm(sums, y.mT, z)
        _, read, kept, added = factors
        return rows.mul_(read).baddbmm_(pairs, z), (sums * kept).baddbmm_(y.mT, z * added)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
        x, y, z, sums, pairs, *factors = ctx.saved_tensors
        d_products, d_z = torch.bmm(d_rows, z.mT), torch.bmm(y, d_after)
        d_factors: list[Tensor | None] = [None] * len(factors)
        if any(ctx.needs_input_grad[4:]):
            d_factors = [
                d_products * torch.bmm(x, y.mT),
                (torch.bmm(x, sums) * d_rows).sum(-1, keepdim=True),
                (sums * d_after).sum((1, 2), keepdim=True),
                (d_z * z).sum(-1, keepdim=True),
            ]
        d_pairs = _under_triangle(d_products, factors)
        if not factors:
            d_read, written = d_rows, z
            d_sums = torch.baddbmm(d_after, x.mT, d_rows)
        else:
            d_read, written = d_rows * factors[1], z * factors[3]
            d_z.mul_(factors[3])
            d_sums = (d_after * factors[2]).baddbmm_(x.mT, d_read)
        d_x = torch.bmm(d_read, sums.mT).baddbmm_(d_pairs, y)
        d_y = torch.bmm(written, d_after.mT).baddbmm_(d_pairs.mT, x)
        return d_x, d_y, d_z.baddbmm_(pairs.mT, d_rows), d_sums, *d_factors


def _under_triangle(products: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Products (N, R, C) of rows with positions, zero if the position is after the row's; in place."""
    if factors:
        return products.mul_(factors[0])
    products.unflatten(1, (-1, products.shape[-1])).tril_()
    return products
