"""Keys and values that stay in place while beam search moves hypotheses: only the masks of visible rows move.

Each step appends one row per hypothesis of a segment. A hypothesis sees only the rows of its own past, by a mask of
booleans. `reorder` copies the masks alone, where a cache per hypothesis would be copied whole at every step. The
hypotheses of a segment read all its rows in one product, in which rows of other pasts are masked. Before a large cache
grows, rows that no hypothesis descends from are removed.
"""

from typing import Any

import torch
from torch import Tensor

from mtkit.attention.bases.score_attention import Pairs, ScoreAttention
from mtkit.attention.contract import Attended, Beginning, Inputs, State

MOST = 16
"""Hypotheses of a segment that share, at most; each looks at the rows of all, which many of them would pay for."""

FIRST_CAPACITY = 32
"""Rows there is room for at first; it grows by half."""

SIFTED = 128
"""Rows of room from which on those that nobody sees are looked for: to read a few for nothing costs less."""


class SharedPast(ScoreAttention):
    """Attention whose decoder state holds the pasts of all hypotheses of a segment in one cache."""

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """An empty cache with capacity for later rows; in the cross role the projected source, for all hypotheses.

        No row is read before it is written.
        """
        batch_size = inputs.batch_size
        if inputs.memory is not None:
            return super().begin(inputs)
        p, like = self.projection, self.q_proj.weight
        shared = {
            "keys": like.new_empty(batch_size, p.key_heads, FIRST_CAPACITY, p.key_width),
            "values": like.new_empty(batch_size, p.value_heads, FIRST_CAPACITY, p.value_width),
            "position": like.new_empty(batch_size, FIRST_CAPACITY, dtype=torch.long),  # the same in all segments
        }
        seen = like.new_empty(batch_size, inputs.hypotheses, FIRST_CAPACITY, dtype=torch.bool)
        return {"shared": shared, "seen": seen, "rows": 0, "count": 0}, None

    def newest(self, query: Tensor, state: State) -> tuple[Pairs, State]:
        """The pairs of a step with query (B, N, D), N queries of one segment, and the state with its rows added.

        The keys are the M rows written so far; `valid` is (B, N, M), or None where there is one row per position.
        `key_position` is correct where a slot reads it. More than `MOST` hypotheses that start or branch off from one
        have a cache each from then on.
        """
        if "seen" in state and query.shape[1] > MOST and _is_one_row_a_position(state):
            state = _apart(state, query.shape[1])
        if "seen" not in state:
            return super().newest(query, state)
        here = torch.full((1,), state["count"], device=query.device)
        q, k, v = self.queries_keys_values(query, here)
        state = _with_rows(state, k, v)
        shared, rows = state["shared"], state["rows"]
        # of the first segment; there may be none left
        positions = here if self.positions is None else shared["position"][:1, :rows].sum(0)
        columns = {name: shared[name][:, :, :rows] for name in ("keys", "values")}
        seen = None if _is_one_row_a_position(state) else state["seen"][:, :, :rows]
        return Pairs(q, columns, here, positions, seen, state=state, hypotheses=query.shape[1]), state

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """The step of score attention, at O(N t) per hypothesis; weights are (B, H, N, t), by position."""
        attended, state = super().advance(inputs, state)
        if attended.weights is not None and "seen" in state and not _is_one_row_a_position(state):
            weights, seen = attended.weights, state["seen"][:, None, :, : state["rows"]]
            attended.weights = weights[seen.expand_as(weights)].view(*weights.shape[:3], state["count"])
        return attended, state


def _with_rows(state: State, k: Tensor, v: Tensor) -> State:
    """The state with one more row per hypothesis: k (B, G, N, K), v (B, G, N, V)."""
    hypotheses = k.shape[2]
    state = _with_room(state, hypotheses)
    shared, seen, rows = state["shared"], state["seen"], state["rows"]
    end = rows + hypotheses
    if shared["keys"].dtype != k.dtype:  # the first step under autocast shows the actual type of the keys
        shared = {**shared, "keys": shared["keys"].to(k.dtype), "values": shared["values"].to(v.dtype)}
    if hypotheses > 1 and not _surely_finite(v):
        # zero times NaN would reach hypotheses that do not see the row; its key passes NaN to those that do
        broken = ~v.isfinite().all(-1).all(1)  # (B, N)
        k, v = k.masked_fill(broken[:, None, :, None], torch.nan), v.nan_to_num(0.0, 0.0, 0.0)
    shared["keys"][:, :, rows:end] = k
    shared["values"][:, :, rows:end] = v
    shared["position"][:, rows:end] = state["count"]
    after = {"shared": shared, "seen": seen, "rows": end, "count": state["count"] + 1}
    if _is_one_row_a_position(after):  # every hypothesis sees every row, and no mask is read
        return after
    if _is_one_row_a_position(state):
        seen[:, :, :rows] = True
    seen[:, :, rows:end] = torch.eye(hypotheses, dtype=torch.bool, device=seen.device)
    return after


def _with_room(state: State, hypotheses: int) -> State:
    """The state with capacity for one more row per hypothesis; a full cache grows by half."""
    room = state["seen"].shape[2]
    if state["rows"] + hypotheses <= room:
        return state
    if room >= SIFTED and len(state["seen"]) and not _is_one_row_a_position(state):
        state = _without_unseen(state)
    end = state["rows"] + hypotheses
    room = max(room, end + end // 2)
    shared = {name: _wider(value, 1 if name == "position" else 2, room) for name, value in state["shared"].items()}
    return {**state, "shared": shared, "seen": _wider(state["seen"], 2, room)}


def _without_unseen(state: State) -> State:
    """The state without the rows that no hypothesis sees any more.

    The number of rows kept per position is the largest that any segment needs, so that all segments have rows of the
    same positions.
    """
    rows = state["rows"]
    seen = state["seen"][:, :, :rows]
    position, unseen = state["shared"]["position"][0, :rows], ~seen.any(1)  # (M,), rising, and (B, M)
    needed = torch.zeros(len(seen), state["count"], dtype=torch.long, device=seen.device)
    needed = needed.index_add_(1, position, (~unseen).long()).amax(0)  # (L,)
    within = torch.arange(rows, device=seen.device) - torch.searchsorted(position, position)
    stays = (within < needed[position]).nonzero().squeeze(1)  # (M',)
    chosen = (2 * position + unseen).argsort(dim=1, stable=True)[:, stays]  # (B, M'), those that are seen first

    def gathered(x: Tensor, dim: int) -> Tensor:
        index = chosen.view(len(seen), *[1] * (dim - 1), -1, *[1] * (x.dim() - dim - 1))
        return x.narrow(dim, 0, rows).take_along_dim(index, dim)

    shared = {name: gathered(value, 1 if name == "position" else 2) for name, value in state["shared"].items()}
    return {**state, "shared": shared, "seen": gathered(seen, 2), "rows": len(stays)}


def _surely_finite(x: Tensor) -> bool:
    """Whether x is known to be finite: tested on a CPU, but not on an accelerator, which the test would stall."""
    return x.device.type == "cpu" and bool(x.sum().isfinite())


def _apart(state: State, hypotheses: int) -> State:
    """The rows of a past common to all hypotheses, as a cache per hypothesis (`step_cache`).

    The cache is full, so that `append` copies it before anything is written.
    """
    rows = {name: state["shared"][name][:, None, :, : state["rows"]] for name in ("keys", "values")}
    return {**{name: x.expand(-1, hypotheses, -1, -1, -1) for name, x in rows.items()}, "count": state["count"]}


def _is_one_row_a_position(state: State) -> bool:
    """Whether no hypothesis has branched off yet, so that every row is seen."""
    return bool(state["rows"] == state["count"])


def _wider(x: Tensor, dim: int, room: int) -> Tensor:
    """x with this length along a dimension; the entries behind x are undefined."""
    wider = x.new_empty([room if number == dim else size for number, size in enumerate(x.shape)])
    wider.narrow(dim, 0, x.shape[dim]).copy_(x)
    return wider
