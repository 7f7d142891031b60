"""Edges of a graph over tokens, chosen one after the other by an LSTM that is trained by reward.

The LSTM reads the vector of source i, then chooses one edge at each step t = 1, 2, ... With its state g, candidate j
has the score (U g) . (V h_j) / sqrt(E) + b[i - j]. The LSTM reads the vector of the chosen candidate next. Candidates
are all real tokens not chosen yet; the self roles leave out the source, which always has an edge to itself, and the
decoder role later tokens. Training draws an edge from the softmax of the scores; evaluation takes the best. If there
are fewer candidates than edges, all are chosen.

The vectors h are detached: only the log-probabilities of the drawn edges train the predictor.

Shapes: G graphs, E hidden width, c sources, S candidates, N = c (edges + 1) reads.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mtkit.attention.content._edge_run import LstmRun, drawn, drawn_in_turn
from mtkit.attention.kernels.chunks import rows_at
from mtkit.attention.kernels.cpu.product import loops_multiply
from mtkit.attention.kernels.reproducible import hashed, replay_choice, with_recorded_choices

CHUNK = 64
"""Sources whose scores are in memory at a time."""
REACH = 16
"""Greater distances share one bias."""

LstmState = tuple[Tensor, Tensor]
"""Hidden and cell, (B, G, c, E) each."""


class Candidates(NamedTuple):
    """The inputs of the predictor for each token that an edge can lead to."""

    keys: Tensor
    """(B, G, S, E): U^T V h_j / sqrt(E), whose product with the state is the score."""
    inputs: Tensor
    """(B, G, S, 4E): the inputs to the LSTM's gates from h_j."""


class Sources(NamedTuple):
    """c sources that choose edges."""

    opened: Tensor
    """(B, G, c, E or 4E), from `EdgePredictor.opened`."""
    i: Tensor
    """(c,) or (1,): their positions."""
    free: Tensor
    """(B or 1, 1, c, S), from `free_candidates`."""
    uniforms: Tensor | None = None
    """(G, c, edges), from `EdgePredictor.uniforms`; None: the best candidates are chosen."""


class Edges(NamedTuple):
    """The chosen edges of c sources."""

    targets: Tensor
    """(B, G, c, edges): positions in the order of choice, -1 if no candidate was left."""
    log_prob: Tensor
    """(B, G, c): the sum over the drawn edges; 0 if none was drawn."""
    entropy: Tensor
    """(B, G, c): the summed entropies of each draw's distributions; 0 unless requested."""


class EdgePredictor(nn.Module):
    """Chooses `edges` targets for each source, in `graphs` independent graphs, each with its own weights.

    With `sequence` one LSTM runs over all sources of a segment, reading each source and each target (the paper's single
    run). Otherwise the state starts at W_0 h_i for each source, and all sources run in parallel.
    """

    def __init__(
        self,
        source_width: int,
        target_width: int,
        *,
        hidden: int,
        edges: int,
        graphs: int = 1,
        sequence: bool = False,
        entropy: bool = False,
    ) -> None:
        """`entropy`: whether to compute entropies in addition to log-probabilities; they are 0 otherwise."""
        super().__init__()
        self.hidden, self.edges, self.graphs, self.sequence, self.entropy = hidden, edges, graphs, sequence, entropy
        self.source = nn.Linear(source_width, graphs * hidden * (4 if sequence else 1))  # W_0, or for the gates
        self.inputs = nn.Linear(target_width, graphs * 4 * hidden)
        self.recurrent = nn.Parameter(torch.empty(graphs, hidden, 4 * hidden).uniform_(-1, 1) * hidden**-0.5)
        self.query = nn.Parameter(torch.empty(graphs, hidden, hidden).uniform_(-1, 1) * hidden**-0.5)  # U
        self.key = nn.Linear(target_width, graphs * hidden, bias=False)  # V
        self.distance = nn.Parameter(torch.zeros(graphs, 2 * REACH + 1))  # b

    def candidates(self, tokens: Tensor) -> Candidates:
        """Return the predictor's inputs for tokens (B, S, D) that edges can lead to."""
        with torch.autocast(tokens.device.type, enabled=False):  # rounding must not choose another edge
            keys = _mapped(self._by_graph(self.key, tokens), self.query.mT * self.hidden**-0.5)
            return Candidates(keys, self._by_graph(self.inputs, tokens))

    def forward(
        self,
        query: Tensor,
        candidates: Candidates,
        *,
        role: str,
        valid: Tensor | None = None,
        noise_key: Tensor | None = None,
    ) -> Edges:
        """Choose the edges of all sources, query (B, T, D): drawn under `noise_key`, or the best if it is None.

        valid (B, S). Scores are computed for chunks of sources and recomputed in the backward pass, so that memory is
        O(chunk S).
        """
        parts: list[Edges] = []
        state: LstmState | None = None
        opened = self.opened(query)
        for first in range(0, query.shape[1], CHUNK):
            rows = opened[:, :, first : first + CHUNK]
            i = torch.arange(first, first + rows.shape[2], device=query.device)
            free = free_candidates(i, candidates.keys.shape[2], role, valid)
            sources = Sources(rows, i, free, None if noise_key is None else self.uniforms(noise_key, i))
            recompute = noise_key is not None and torch.is_grad_enabled() and query.shape[1] > CHUNK
            if self.sequence:
                edges, state = self._run(sources, candidates, state, recompute=recompute)
            elif recompute:
                chunk = with_recorded_choices(self._chunk)
                edges = checkpoint(chunk, sources, candidates, use_reentrant=False, preserve_rng_state=False)
            else:
                edges = self._chunk(sources, candidates)
            parts.append(edges)
        return Edges(*(torch.cat(field, dim=2) for field in zip(*parts, strict=True)))

    def newest(
        self, opened: Tensor, i: Tensor, candidates: Candidates, free: Tensor, state: LstmState | None = None
    ) -> tuple[Tensor, LstmState]:
        """Choose the best targets (B, G, c, edges) of independent sources; fewer if there are fewer candidates.

        opened (B, G, c, E or 4E) from `opened`, i (c,) or (1,), free as in `free_candidates`. The state (of `sequence`)
        is what the last call returned, one for each of the c.
        """
        if not self.sequence and free.shape[-1] <= self.edges:  # all are chosen, in whatever order
            targets = torch.arange(free.shape[-1], device=free.device).where(free, -1)
            return targets.expand(len(opened), self.graphs, opened.shape[2], -1), (opened, opened)
        sources = Sources(opened, i, free)
        with torch.autocast(opened.device.type, enabled=False):
            if not self.sequence:
                return self._best(sources, candidates), (opened, opened)
            edges, state = self._choose(sources, candidates, state)
        return edges.targets, state

    def opened(self, query: Tensor) -> Tensor:
        """Return the LSTM's first states or inputs for sources query (B, T, D): (B, G, T, E or 4E)."""
        with torch.autocast(query.device.type, enabled=False):
            return self._by_graph(self.source, query)

    def uniforms(self, noise_key: Tensor, i: Tensor) -> Tensor:
        """Return numbers in [0, 1) for sources at i (c,), a function of key, graph, i and draw: (G, c, edges)."""
        graph, draw = (torch.arange(count, device=i.device) for count in (self.graphs, self.edges))
        bits = hashed(hashed(hashed(noise_key + graph).unsqueeze(-1) + i).unsqueeze(-1) + draw)
        return (bits >> 8).float() * 2.0**-24

    def naive(
        self, query: Tensor, tokens: Tensor, *, role: str, graph: int, noise_key: Tensor | None = None
    ) -> tuple[list[list[int]], Tensor]:
        """Choose the targets of each source in one segment and graph, one by one, with their log-probability.

        query (T, D) and tokens (S, D), without padding.
        """
        opened = self.opened(query.unsqueeze(0))[0, graph]
        keys, inputs = (self._by_graph(linear, tokens.unsqueeze(0))[0, graph] for linear in (self.key, self.inputs))
        log_prob, chosen = opened.new_zeros(()), []
        hidden = cell = opened.new_zeros(self.hidden)
        for i, start in enumerate(opened):
            if self.sequence:
                hidden, cell = _naive_step(start + hidden @ self.recurrent[graph], cell)
            else:
                hidden, cell = start, torch.zeros_like(start)
            left = [j for j in range(len(keys)) if role == "cross" or j < i or (j > i and role == "encoder")]
            targets: list[int] = []
            while left and len(targets) < self.edges:
                j = torch.tensor(left, device=query.device)
                near = self.distance[graph, (i - j).clamp(-REACH, REACH) + REACH]
                probabilities = (keys[j] @ (hidden @ self.query[graph]) / self.hidden**0.5 + near).softmax(0)
                if noise_key is None:
                    place = int(probabilities.argmax())
                else:
                    u = self.uniforms(noise_key, torch.tensor([i]))[graph, 0, len(targets)]
                    place = min(int((probabilities.cumsum(0) <= u).sum()), len(left) - 1)
                log_prob = log_prob + probabilities[place].log()
                targets.append(left.pop(place))
                hidden, cell = _naive_step(inputs[targets[-1]] + hidden @ self.recurrent[graph], cell)
            chosen.append(targets)
        return chosen, log_prob

    def _by_graph(self, linear: nn.Linear, tokens: Tensor) -> Tensor:
        rows: Tensor = linear(tokens.detach().type_as(linear.weight))
        return rows.unflatten(-1, (self.graphs, -1)).transpose(1, 2)

    def _chunk(self, sources: Sources, candidates: Candidates) -> Edges:
        """Choose the edges of independent sources, without autocast."""
        with torch.autocast(sources.opened.device.type, enabled=False):
            return self._choose(sources, candidates, None)[0]

    def _run(
        self, sources: Sources, candidates: Candidates, state: LstmState | None, *, recompute: bool
    ) -> tuple[Edges, LstmState]:
        """Choose the edges of consecutive sources in turn; return also the state (G, B, E) after the last.

        With `recompute`, the backward pass recomputes the scores.
        """
        opened, i, free, uniforms = sources
        nothing = opened.new_zeros(self.graphs, len(opened), self.hidden)
        state = state or (nothing, nothing)
        left = free.sum(-1).unsqueeze(-1) > torch.arange(self.edges, device=i.device)  # (B or 1, 1, c, edges)
        some = left.expand(len(opened), self.graphs, -1, -1)
        with torch.autocast(opened.device.type, enabled=False):
            with torch.no_grad():
                targets, states = drawn_in_turn(
                    opened, candidates, self.recurrent, self._near(i, candidates), free, uniforms, some, state
                )
            targets = targets.masked_fill(~some, -1)
            if uniforms is None:
                zero = nothing.new_zeros(()).expand(targets.shape[:3])
                return Edges(targets, zero, zero), (states[-1, 0], states[-1, 1])
            reads = torch.cat([opened.unsqueeze(3), rows_at(candidates.inputs, targets.clamp(min=0))], 3)
            read = torch.cat([some.new_ones(*some.shape[:3], 1), some], 3)
            reads, read = (x.permute(2, 3, 1, 0, *range(4, x.dim())).flatten(0, 1) for x in (reads, read))
            hidden, *after = LstmRun.apply(reads, self.recurrent, *state, states, read)  # type: ignore[no-untyped-call]
            hidden = hidden.unflatten(0, (len(i), -1))[:, :-1].permute(3, 2, 0, 1, 4)  # (B, G, c, edges, E)
            arguments = (hidden, sources, candidates, targets)
            if recompute:
                sums = checkpoint(self._likelihood, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                sums = self._likelihood(*arguments)
        return Edges(targets, *sums), (after[0], after[1])

    def _likelihood(
        self, hidden: Tensor, sources: Sources, candidates: Candidates, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy (B, G, c) of drawing these targets, from the states before each draw.

        hidden (B, G, c, edges, E) and targets (B, G, c, edges), in order, -1 if no candidate was left.
        """
        some, count = targets >= 0, candidates.keys.shape[2]
        scores = (hidden.flatten(2, 3) @ candidates.keys.mT).unflatten(2, hidden.shape[2:4])
        scores = scores + self._near(sources.i, candidates).unsqueeze(2)
        draws = torch.arange(self.edges, device=targets.device)
        when = torch.full((*targets.shape[:3], count + 1), self.edges, device=targets.device)
        when.scatter_(-1, targets.where(some, count), draws.expand(targets.shape))  # the draw that takes each candidate
        available = sources.free.unsqueeze(3) & (when[..., :-1].unsqueeze(3) >= draws.unsqueeze(-1))
        scores = scores.masked_fill(~available, torch.finfo(scores.dtype).min)
        log_prob, entropy = self._of_draws(scores, available, targets.clamp(min=0), some)
        return log_prob.sum(-1), entropy.sum(-1)

    def _of_draws(self, scores: Tensor, available: Tensor, targets: Tensor, some: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy (...) of drawing targets (...) by scores (..., S); 0 unless `some`."""
        total = scores.logsumexp(-1)
        chosen = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        log_prob = torch.where(some, chosen - total, 0.0)
        if not self.entropy:
            return log_prob, torch.zeros_like(log_prob)
        mean = (scores.softmax(-1) * scores.masked_fill(~available, 0.0)).sum(-1)
        return log_prob, torch.where(some, total - mean, 0.0)

    def _near(self, i: Tensor, candidates: Candidates) -> Tensor:
        """Return the biases (G, c, S) of candidates by their distance from sources at i."""
        j = torch.arange(candidates.keys.shape[2], device=i.device)
        return self.distance[:, (i.unsqueeze(-1) - j).clamp(-REACH, REACH) + REACH]

    def _choose(self, sources: Sources, candidates: Candidates, state: LstmState | None) -> tuple[Edges, LstmState]:
        """Choose the edges of independent sources; return also the LSTM's states after them."""
        opened, i, free, uniforms = sources
        nothing = opened.new_zeros(*opened.shape[:3], self.hidden)
        state = self._read(opened, state or (nothing, nothing)) if self.sequence else (opened, nothing)
        near = self._near(i, candidates)
        free = free.expand(len(opened), self.graphs, opened.shape[2], -1)
        log_prob = entropy = nothing.sum(-1)
        targets = []
        for draw in range(self.edges):
            scores = state[0] @ candidates.keys.mT + near
            scores = scores.masked_fill(~free, torch.finfo(scores.dtype).min)
            some = free.any(-1)  # (B, G, c)
            target = scores.argmax(-1) if uniforms is None else drawn(scores.detach(), ~free, uniforms[..., draw])
            target = replay_choice(target, scores.shape[-1])
            if uniforms is not None:
                of_draw = self._of_draws(scores, free, target, some)
                log_prob, entropy = log_prob + of_draw[0], entropy + of_draw[1]
            targets.append(target.masked_fill(~some, -1))
            free = free.scatter(-1, target.unsqueeze(-1), False)
            if self.sequence or draw + 1 < self.edges:
                read = self._read(rows_at(candidates.inputs, target.unsqueeze(-1)).squeeze(-2), state)
                # in a single run a source without candidates passes its state on to the next source
                if self.sequence:
                    some = some.unsqueeze(-1)
                    read = torch.where(some, read[0], state[0]), torch.where(some, read[1], state[1])
                state = read
        return Edges(torch.stack(targets, dim=-1), log_prob, entropy), state

    def _best(self, sources: Sources, candidates: Candidates) -> Tensor:
        """Choose the best targets (B, G, c, edges) of independent sources, in fewer operations than `_choose`."""
        opened, i, free, _ = sources
        inputs, keys = candidates.inputs, candidates.keys.mT
        segments, graphs, count = inputs.shape[:3]
        rows = inputs.flatten(0, 2)
        first = torch.arange(0, len(rows), count, device=rows.device).view(segments, graphs, 1)
        lowest = torch.finfo(opened.dtype).min
        near = self._near(i, candidates).where(free, lowest).expand(*opened.shape[:3], -1).contiguous()
        chosen = torch.arange(self.edges, device=i.device) < free.sum(-1, keepdim=True)
        if loops_multiply(opened, *candidates):
            from mtkit.attention.kernels.cpu.edge_loops import best_edges

            return best_edges(opened, *candidates, self.weights_of_loop(), near, self.edges).masked_fill_(~chosen, -1)
        state: LstmState = opened, torch.zeros_like(opened)
        targets = []
        for draw in range(self.edges):
            target = (state[0] @ keys + near).argmax(-1)
            targets.append(target)
            if draw + 1 < self.edges:
                near.scatter_(-1, target.unsqueeze(-1), lowest)
                chosen_rows = rows.index_select(0, (first + target).flatten())
                state = self._read(chosen_rows.view(*target.shape, rows.shape[1]), state)
        return torch.stack(targets, -1).masked_fill(~chosen, -1)

    def weights_of_loop(self) -> NDArray[np.float32]:
        """Return the LSTM's weights in the loop's layout, which decoding keeps until they change."""
        from mtkit.attention.kernels.cpu.edge_loops import laid_out_recurrent

        return laid_out_recurrent(self.recurrent)

    def _read(self, inputs: Tensor, state: LstmState) -> LstmState:
        """Apply one step of the LSTM; inputs (B, G, c, 4E) are for the input, forget and output gates and the cell."""
        hidden, cell = state
        gates = inputs + _mapped(hidden, self.recurrent)
        i, f, o = gates[..., : 3 * self.hidden].sigmoid().chunk(3, dim=-1)
        cell = f * cell + i * gates[..., 3 * self.hidden :].tanh()
        return o * cell.tanh(), cell


def free_candidates(i: Tensor, count: int, role: str, valid: Tensor | None) -> Tensor:
    """Return which of `count` tokens an edge from sources i (c,) can lead to: (B or 1, 1, c, S)."""
    j, i = torch.arange(count, device=i.device), i.unsqueeze(-1)
    free = {"encoder": j != i, "decoder": j < i, "cross": (j >= 0).expand(len(i), -1)}[role]
    return free[None, None] if valid is None else free & valid[:, None, None, :]


def _mapped(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply x (B, G, c, E) by the weights (G, E, F) of its graph, in one product of all segments' rows."""
    rows = x.transpose(0, 1).flatten(1, 2) @ weights
    return rows.unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1)


def _naive_step(gates: Tensor, cell: Tensor) -> LstmState:
    """Hochreiter and Schmidhuber's LSTM with a forget gate, from its four gates (4E,)."""
    keep_new, keep_old, show, new = gates.view(4, -1)
    cell = torch.sigmoid(keep_new) * torch.tanh(new) + torch.sigmoid(keep_old) * cell
    return torch.sigmoid(show) * torch.tanh(cell), cell
