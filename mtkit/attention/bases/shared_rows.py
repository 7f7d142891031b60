"""Rows of keys and values that the hypotheses of a segment share in beam search.

Each step appends one row per hypothesis to a cache of the segment, and a boolean mask marks the rows that belong to a
hypothesis's own past. `reorder` copies only these masks, not the rows. Before a large cache grows, rows that no
hypothesis descends from are removed. A mechanism reads all M rows for each hypothesis, and masks the rows of others.
"""

import torch
from torch import Tensor

from mtkit.attention.bases.caches import capacity_for
from mtkit.attention.contract import State
from mtkit.attention.kernels.chunks import rows_at
from mtkit.attention.kernels.dot_product import numbers

FIRST_CAPACITY = 32
"""Rows that a new cache can hold; it grows by half."""

COMPACTED = 128
"""Capacity from which unseen rows are removed; in a smaller cache, reading them costs less than removing them."""


def start_rows(batch_size: int, hypotheses: int, like: Tensor, **shapes: tuple[int, int]) -> State:
    """Return an empty cache with a tensor (B, heads, capacity, width) for each name, of `like`'s type.

    Each position has N rows, or one before hypotheses branch off; "rows" of them are written, for "count" positions.
    "seen" (B, N, capacity) are the masks, unless there is one row per position. "position" (B, capacity) is the same in
    all segments. New tensors are uninitialized: no row is read before it is written.
    """
    capacity = capacity_for(0, FIRST_CAPACITY)
    shared = {name: like.new_empty(batch_size, heads, capacity, width) for name, (heads, width) in shapes.items()}
    shared["position"] = like.new_empty(batch_size, capacity, dtype=torch.long)
    seen = like.new_empty(batch_size, hypotheses, capacity, dtype=torch.bool)
    return {"shared": shared, "seen": seen, "rows": 0, "count": 0}


def append_rows(state: State, *, keys: Tensor, values: Tensor, **others: Tensor) -> State:
    """Append one row per hypothesis to the state: keys (B, G, N, K), values (B, G, N, V), and others by name."""
    if is_fixed(state):
        return _write_rows(state, keys, values)
    hypotheses = keys.shape[2]
    state = with_rows(state, hypotheses)
    shared, end = state["shared"], state["rows"]
    if keys.element_size() < shared["keys"].element_size():  # only the first step under autocast shows that type
        shared = {**shared, "keys": shared["keys"].to(keys.dtype), "values": shared["values"].to(values.dtype)}
    if hypotheses > 1 and not _known_finite(values):
        keys, values = _harmless(keys, values)
    for name, row in {"keys": keys, "values": values, **others}.items():
        shared[name][:, :, end - hypotheses : end] = row
    return {**state, "shared": shared}


def with_rows(state: State, hypotheses: int) -> State:
    """Return the state with one more row per hypothesis, the last ones, whose keys and values are not written yet."""
    state = _ensure_capacity(state, hypotheses)
    seen, rows = state["seen"], state["rows"]
    end = rows + hypotheses
    state["shared"]["position"][:, rows:end] = state["count"]
    after = {**state, "rows": end, "count": state["count"] + 1}
    if has_one_row_per_position(after):  # every hypothesis sees every row; the mask is not read
        return after
    if has_one_row_per_position(state):
        seen[:, :, :rows] = True
    hypothesis = numbers(0, hypotheses, seen.device)
    seen[:, :, rows:end] = hypothesis.unsqueeze(1) == hypothesis
    return after


def make_harmless(state: State, hypotheses: int) -> None:
    """Change the last rows, one per hypothesis, as `append_rows` does if a value is not finite."""
    keys, values = (
        state["shared"][name][:, :, state["rows"] - hypotheses : state["rows"]] for name in ("keys", "values")
    )
    if hypotheses > 1 and not _known_finite(values):
        for rows, harmless in zip((keys, values), _harmless(keys, values), strict=True):
            rows.copy_(harmless)


def _known_finite(values: Tensor) -> bool:
    """Whether all values are finite; False on an accelerator, which the test would stall."""
    return values.device.type == "cpu" and bool(values.sum().isfinite())


def _harmless(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Move what is not finite in values (B, G, N, V) to the keys of their rows, whose scores are masked.

    0 * NaN would reach hypotheses that do not see the row.
    """
    zero = v.sum((1, 3), dtype=torch.float32) * 0.0  # (B, N), NaN for a row that is not finite
    return k + zero[:, None, :, None].type_as(k), v.nan_to_num(0.0, 0.0, 0.0)


def is_fixed(state: State) -> bool:
    """Whether the state is in the form of `with_room_for`."""
    return isinstance(state["count"], Tensor)


def with_room_for(state: State, steps: int) -> State:
    """Return the state with room for `steps` rows of each hypothesis, hidden until they are written.

    "rows" and "count" are tensors (B, N) in it, so that steps are the same operations each time.
    """
    seen: Tensor = state["seen"]
    if is_fixed(state):
        state = {**state, "rows": int(state["rows"][0, 0]), "count": int(state["count"][0, 0])}
    elif has_one_row_per_position(state):
        seen[:, :, : state["rows"]] = True
    if state["rows"] >= COMPACTED and not has_one_row_per_position(state):
        state = _remove_unseen(state)
    counters = {name: torch.full_like(seen[:, :, 0], state[name], dtype=torch.long) for name in ("rows", "count")}
    return {**_grown(state, state["rows"] + steps * seen.shape[1], cleared=True), **counters}


def _write_rows(state: State, k: Tensor, v: Tensor) -> State:
    """`append_rows` for a state in the form of `with_room_for`."""
    shared, seen, hypotheses = state["shared"], state["seen"], k.shape[2]
    hypothesis = numbers(0, hypotheses, seen.device)
    place = state["rows"][0, :1] + hypothesis  # (N,)
    k, v = _harmless(k, v)
    shared["keys"].index_copy_(2, place, k)
    shared["values"].index_copy_(2, place, v)
    shared["position"].index_copy_(1, place, state["count"][:, :1].expand(-1, hypotheses))
    seen.index_copy_(2, place, (hypothesis.unsqueeze(1) == hypothesis).expand(len(seen), -1, -1))
    return {"shared": shared, "seen": seen, "rows": state["rows"] + hypotheses, "count": state["count"] + 1}


def _ensure_capacity(state: State, hypotheses: int) -> State:
    """Return the state with capacity for one more row per hypothesis; a full cache grows by half."""
    room = state["seen"].shape[2]
    if state["rows"] + hypotheses <= room:
        return state
    if room >= COMPACTED and len(state["seen"]) and not has_one_row_per_position(state):
        state = _remove_unseen(state)
    end = state["rows"] + hypotheses
    return _grown(state, max(room, capacity_for(end, 2 * end if room < COMPACTED else end + end // 2)))


def _remove_unseen(state: State) -> State:
    """Return the state without the rows that no hypothesis sees any more.

    Each position keeps as many rows as the segment with the most seen rows there needs, so that all segments keep rows
    of the same positions.
    """
    rows = state["rows"]
    seen = state["seen"][:, :, :rows]
    position, unseen = state["shared"]["position"][0, :rows], ~seen.any(1)  # (M,), ascending, and (B, M)
    needed = torch.zeros(len(seen), state["count"], dtype=torch.long, device=seen.device)
    needed = needed.index_add_(1, position, (~unseen).long()).amax(0)  # (L,)
    within = torch.arange(rows, device=seen.device) - torch.searchsorted(position, position)
    stays = (within < needed[position]).nonzero().squeeze(1)  # (M',)
    chosen = (2 * position + unseen).argsort(dim=1, stable=True)[:, stays]  # (B, M'), seen rows first

    place = chosen[:, None, None]
    shared = {
        name: value.take_along_dim(chosen, 1) if name == "position" else rows_at(value, place).squeeze(2)
        for name, value in state["shared"].items()
    }
    return {**state, "shared": shared, "seen": seen.take_along_dim(chosen.unsqueeze(1), 2), "rows": len(stays)}


def has_one_row_per_position(state: State) -> bool:
    """Whether no hypothesis has branched off yet, so that every hypothesis sees every row."""
    return not is_fixed(state) and bool(state["rows"] == state["count"])


def _grown(state: State, room: int, *, cleared: bool = False) -> State:
    """Return the state with its rows in tensors that hold `room` rows; with `cleared`, the other rows are zero."""
    rows = state["rows"]

    def grown(x: Tensor, dim: int) -> Tensor:
        wider = x.new_empty([room if number == dim else size for number, size in enumerate(x.shape)])
        wider.narrow(dim, 0, rows).copy_(x.narrow(dim, 0, rows))
        if cleared:
            wider.narrow(dim, rows, room - rows).zero_()
        return wider

    shared = {name: grown(value, 1 if name == "position" else 2) for name, value in state["shared"].items()}
    return {**state, "shared": shared, "seen": grown(state["seen"], 2)}
