"""Damped exponential moving averages with several states for each channel, in chunks, in O(T) time and memory.

Ma et al. 2022, arXiv 2209.10655, section 3.1: for each channel, n states follow

    h_t = q h_(t-1) + p beta x_t        q = 1 - p d        e_t = eta . h_t / sqrt(n)

with p = sigmoid(alpha) and d = sigmoid(delta). In a chunk of c tokens, e is a sum over the chunk with taps
eta . (p beta q^i) / sqrt(n), plus what is left of the states before it, eta . q^(i + 1) h / sqrt(n). The states before
all chunks follow from the sums of the chunks by log2(T / c) doublings. Unlike an FFT over T, no rounding error, and no
infinite number, reaches a chunk from a later one. Powers of q are exponentials of multiples of log q, which are 0 at
most.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.kernels.dot_product import upcast

CHUNK = 64
"""Positions of a chunk.

On one core of a busy Intel Xeon, an average from the left over 16,384 tokens of width 512 with 16 states took 1.6 s
forward and backward with 64, 2.6 s with 32, 1.5 s with 128, and 3.0 s by an FFT; over 4,096 tokens 0.50, 0.56, 0.67 and
0.55 s. To repeat: time `MovingAverage(512, 16, both_ways=False)(x).sum().backward()`.
"""


class MovingAverage(nn.Module):
    """silu(e + omega x) of tokens x; with `both_ways`, e is the sum of an average from the left and one from the right.

    Both include the token itself. Computed in float32 at least, with weights that are not rounded to bfloat16.
    """

    unrounded = True
    undecayed = ("alpha", "delta", "beta", "eta")

    def __init__(self, width: int, states: int, *, both_ways: bool) -> None:
        super().__init__()
        shape = 1 + both_ways, width, states
        self.alpha, self.delta = (nn.Parameter(torch.empty(shape).normal_(std=0.2)) for _ in range(2))
        signs = 1.0 - 2 * (torch.arange(states) % 2)
        self.beta = nn.Parameter(torch.empty(shape).normal_(std=0.02) + signs)
        self.eta = nn.Parameter(torch.randn(shape))
        self.omega = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Map x (B, T, D) to (B, T, D); tokens that are not real, with valid (B, T) False, count as zeros."""
        with torch.autocast(x.device.type, enabled=False):
            tokens = upcast(x)
            if valid is not None:
                tokens = tokens.masked_fill(~valid.unsqueeze(-1), 0.0)
            moved = F.silu(self._averages(tokens) + upcast(self.omega) * tokens)
        return moved.type_as(x)

    def empty(self, *rows: int) -> Tensor:
        """Return the states (*rows, D, n) before the first token."""
        return upcast(self.alpha).new_zeros(*rows, *self.alpha.shape[1:])

    def step(self, x: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (..., D) for the next token x (..., D), and the states (..., D, n) after it."""
        with torch.autocast(x.device.type, enabled=False):
            log_kept, written, read = (coefficients[0] for coefficients in self._coefficients())
            token = upcast(x)
            states = torch.addcmul(states * log_kept.exp(), token.unsqueeze(-1), written)
            average = (states * read).sum(-1)
            return F.silu(average + upcast(self.omega) * token).type_as(x), states

    def kept(self) -> Tensor:
        """Return q, the share of a state that is left after a token, (directions, D, n)."""
        return self._coefficients()[0].exp()

    def _coefficients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return log q, p beta, and eta / sqrt(n), (directions, D, n) each."""
        alpha, delta = upcast(self.alpha), upcast(self.delta)
        # q = (1 - p) + p (1 - d), which is finite and has a logarithm also if p d rounds to 1
        log_kept = torch.logaddexp(F.logsigmoid(-alpha), F.logsigmoid(alpha) + F.logsigmoid(-delta))
        return log_kept, alpha.sigmoid() * upcast(self.beta), upcast(self.eta) * self.eta.shape[-1] ** -0.5

    def _averages(self, x: Tensor) -> Tensor:
        """Return e (B, T, D), the sum over both directions if there are two, of x (B, T, D)."""
        batch, length, width = x.shape
        size = min(CHUNK, length)
        chunks = -(-length // size)
        rows = F.pad(x, (0, 0, 0, chunks * size - length)).view(batch, chunks, size, width)
        rows = rows.permute(3, 0, 1, 2).reshape(width, -1, size)  # (D, B * chunks, c)
        log_kept, written, read = self._coefficients()
        # (directions, D, n, c + 1)
        powers = (log_kept.unsqueeze(-1) * torch.arange(size + 1, device=x.device)).exp()
        taps = ((written * read).unsqueeze(-2) @ powers[..., :size]).squeeze(-2)  # (directions, D, c)
        e = rows @ _within(taps)
        if chunks > 1:
            for way in range(len(taps)):
                # what a token adds to the states at the end of its chunk, and a state to each token of its chunk
                added = (written[way].unsqueeze(-1) * powers[way, ..., :size]).flip(-1).mT
                left = read[way].unsqueeze(-1) * powers[way, ..., 1:]
                sums = (rows @ (added.flip(1) if way else added)).unflatten(1, (batch, chunks))
                states = _before(sums, log_kept[way] * size, from_right=bool(way))
                e = torch.baddbmm(e, states.flatten(1, 2), left.flip(2) if way else left)
        return e.unflatten(1, (batch, chunks)).permute(1, 2, 3, 0).reshape(batch, -1, width)[:, :length]


def _within(taps: Tensor) -> Tensor:
    """Return what token i of a chunk gets from token j, (D, c, c) at [j, i], of taps by distance (directions, D, c)."""
    size = taps.shape[-1]
    from_left = F.pad(taps[0], (size - 1, 0))  # at distance i - j from -(c - 1) on
    if len(taps) > 1:
        from_left = from_left + F.pad(taps[1].flip(-1), (0, size - 1))
    return from_left.unfold(-1, size, 1).flip(1)


def _before(sums: Tensor, log_kept: Tensor, *, from_right: bool) -> Tensor:
    """Return the states (D, B, chunks, n) before each chunk from the chunks' own sums, with log q^c (D, n).

    from_right: before means to the right.
    """
    chunks = sums.shape[2]
    states = F.pad(sums.flip(2) if from_right else sums, (0, 0, 1, -1))
    reach = 1
    while reach < chunks:  # each state holds the sums of `reach` chunks
        share = (log_kept * reach).exp()[:, None, None]
        states = states + share * F.pad(states, (0, 0, reach, -reach))
        reach *= 2
    return states.flip(2) if from_right else states
