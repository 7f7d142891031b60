"""One run of an LSTM over all sources and the targets that it draws for each, in a loop over single draws.

A draw depends on the state, which has read the earlier draws, so that all edges x T draws are sequential. The loop does
only what depends on the previous draw and builds no autograd graph. `LstmRun` computes the gradients of the states in a
loop of its own. Scores and log-probabilities are computed elsewhere, for many sources at once.

Shapes: as in `mtkit.attention.content._edge_predictor`; the gates of the LSTM are input, forget, output and cell.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtkit.attention.kernels.reproducible import replay_choice


def drawn_in_turn(
    opened: Tensor,
    candidates: tuple[Tensor, Tensor],
    recurrent: Tensor,
    near: Tensor,
    free: Tensor,
    uniforms: Tensor | None,
    some: Tensor,
    state: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the targets (B, G, c, edges), source after source, and the states (N, 2, G, B, E) of the LSTM.

    States are hidden and cell after reading each source and each of its targets. near (G, c, S) is added to scores.
    `some` (B, G, c, edges) is True for targets that exist; the others may be any number.
    """
    batch, graphs, sources = opened.shape[:3]
    edges, width = some.shape[3], len(recurrent[0])
    keys, inputs = (x.transpose(0, 1).flatten(0, 1) for x in candidates)
    opened, some = opened.permute(2, 1, 0, 3), some.permute(2, 3, 1, 0).unsqueeze(-1)
    taken = (~free).expand(batch, graphs, -1, -1).permute(2, 1, 0, 3).flatten(1, 2).contiguous()  # (c, G B, S)
    lowest = torch.finfo(near.dtype).min
    scored = near.transpose(0, 1).repeat_interleave(batch, 1).masked_fill_(taken, lowest)
    if uniforms is not None:
        uniforms = uniforms.permute(1, 2, 0).repeat_interleave(batch, 2).type_as(scored).contiguous()
    states = opened.new_empty(sources, edges + 1, 2, graphs, batch, width)
    targets: list[Tensor] = []
    last, read = torch.stack(state), torch.empty_like(states[0, 0])
    for n in range(sources):
        last = _read_into(states[n, 0], opened[n], last, recurrent)
        for draw in range(edges):
            hidden = last[0].flatten(0, 1).unsqueeze(1)
            scores = torch.baddbmm(scored[n].unsqueeze(1), hidden, keys.mT).squeeze(1)  # (G B, S)
            target = scores.argmax(-1) if uniforms is None else drawn(scores, taken[n], uniforms[n, draw])
            target = replay_choice(target, scores.shape[-1]).unsqueeze(-1)
            targets.append(target)
            taken[n].scatter_(1, target, True)
            scored[n].scatter_(1, target, lowest)
            chosen = inputs.gather(1, target.unsqueeze(-1).expand(-1, -1, inputs.shape[2]))
            _read_into(read, chosen.view(opened[n].shape), last, recurrent)
            # a source without candidates passes its state on to the next source
            last = torch.where(some[n, draw], read, last, out=states[n, draw + 1])
    shape = (sources, edges, graphs, batch)
    return torch.stack(targets).view(shape).permute(3, 2, 0, 1), states.flatten(0, 1)


def drawn(scores: Tensor, taken: Tensor, uniform: Tensor) -> Tensor:
    """Draw a candidate that is not taken from the softmax of scores, by a uniform number.

    It is the first candidate whose cumulative probability exceeds the number times the total.
    """
    cumulative = scores.softmax(-1).cumsum(-1).masked_fill_(taken, -1.0)
    threshold = cumulative.amax(-1) * uniform.type_as(cumulative)
    return (cumulative > threshold.unsqueeze(-1)).to(torch.uint8).argmax(-1)


class LstmRun(torch.autograd.Function):
    """The hidden states (N, G, B, E) after each read of the LSTM, and hidden and cell after the last.

    The states are known: `states` (N, 2, G, B, E), from reads (N, G, B, 4E), the weights (G, E, 4E) and the first state
    (G, B, E). If `read` (N, G, B) is False, the state did not change. The backward pass computes the gates of all reads
    at once; its loop does only what depends on the gradients of later reads.
    """

    @staticmethod
    def forward(
        ctx: Any, reads: Tensor, recurrent: Tensor, hidden: Tensor, cell: Tensor, states: Tensor, read: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(reads, recurrent, hidden, cell, states, read)
        return states[:, 0].clone(), states[-1, 0].clone(), states[-1, 1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_states: Tensor, d_hidden: Tensor, d_cell: Tensor) -> tuple[Tensor | None, ...]:
        reads, recurrent, hidden, cell, states, read = ctx.saved_tensors
        earlier, read = torch.cat([torch.stack([hidden, cell]).unsqueeze(0), states[:-1]]), read.unsqueeze(-1)
        rows = earlier[:, 0].transpose(0, 1).flatten(1, 2)  # (G, N B, E)
        gates = reads + (rows @ recurrent).unflatten(1, (len(reads), -1)).transpose(0, 1)
        i, f, o = gates[..., : 3 * hidden.shape[-1]].sigmoid().chunk(3, dim=-1)
        g = gates[..., 3 * hidden.shape[-1] :].tanh()
        tanh_cell = (f * earlier[:, 1] + i * g).tanh()
        slopes = [g * i * (1 - i), earlier[:, 1] * f * (1 - f), tanh_cell * o * (1 - o), i * (1 - g * g)]
        by_gate, to_cell = torch.cat(slopes, -1) * read, o * (1 - tanh_cell * tanh_cell) * read
        to_earlier, stayed = f.where(read, 1.0), (~read).type_as(f)
        d_gates, back = torch.empty_like(gates), recurrent.mT
        nothing = torch.zeros_like(hidden)
        d_hidden = d_hidden + d_states[-1]
        for n in range(len(reads) - 1, -1, -1):
            d_cell = torch.addcmul(d_cell, d_hidden, to_cell[n])
            torch.mul(by_gate[n], torch.cat([d_cell, d_cell, d_hidden, d_cell], -1), out=d_gates[n])
            d_earlier = torch.baddbmm(d_states[n - 1] if n else nothing, d_gates[n], back)
            d_hidden = torch.addcmul(d_earlier, d_hidden, stayed[n])
            d_cell = d_cell * to_earlier[n]
        d_recurrent = rows.mT @ d_gates.transpose(0, 1).flatten(1, 2)
        return d_gates, d_recurrent, d_hidden, d_cell, None, None


def _read_into(new: Tensor, inputs: Tensor, last: Tensor, recurrent: Tensor) -> Tensor:
    """Write to `new` the hidden and cell (2, G, B, E) that follow `last` when the LSTM reads inputs (G, B, 4E)."""
    gates = torch.baddbmm(inputs, last[0], recurrent)
    i, f, o = gates[..., : 3 * last.shape[-1]].sigmoid().chunk(3, dim=-1)
    torch.addcmul(f * last[1], i, gates[..., 3 * last.shape[-1] :].tanh(), out=new[1])
    torch.mul(o, new[1].tanh(), out=new[0])
    return new
