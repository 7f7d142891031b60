"""A window and a list of global keys for each segment, in one softmax; the keys are chosen by the marks of tokens."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.bases.caches import append, start_cache, written
from mtkit.attention.contract import State
from mtkit.attention.kernels.dot_product import attend, attend_step

BLOCK = 64
"""Queries at a time, at least; with large windows as many as a window holds."""


def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of the chosen tokens (B, T) as a padded list (B, G), and which of its entries count.

    The other entries are positions of tokens that are not chosen; no position occurs twice.
    """
    counts = chosen.sum(1)
    most = int(counts.max())  # on an accelerator this waits: the list is as long as the segment with most needs
    index = chosen.long().argsort(dim=1, descending=True, stable=True)[:, :most]
    return index, torch.arange(most, device=chosen.device) < counts.unsqueeze(1)


def at(x: Tensor, index: Tensor) -> Tensor:
    """Return rows (B, H, G, K) of x (B, H, T, K) at positions (B, G)."""
    return x.take_along_dim(index[:, None, :, None], 2)


def replace_rows(x: Tensor, rows: Tensor, index: Tensor, some: Tensor) -> Tensor:
    """Return x (B, H, T, K) with rows (B, H, G, K) at positions (B, G), if the entries count."""
    rows = rows.type_as(x).where(some[:, None, :, None], at(x, index))
    return x.scatter(2, index[:, None, :, None].expand_as(rows), rows)


def window_and_globals(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    *,
    radius: int,
    dilation: int,
    scale: float,
    valid: Tensor | None,
    dropout: float,
    causal: bool = False,
) -> Tensor:
    """Return the outputs (B, H, T, V) of softmaxes over a window and the chosen keys (B, T), each key counted once.

    q (B, H, T, K), k (B, G, T, K), v (B, G', T, V), valid (B, T); queries go through `attend` in blocks. If `causal`,
    queries see no later key.
    """
    index, some = listed(chosen)
    global_k, global_v = at(k, index), at(v, index)
    length, reach = q.shape[2], radius * dilation
    position = torch.arange(length, device=q.device)
    near = ~chosen if valid is None else ~chosen & valid
    heads = []
    size = max(BLOCK, 2 * reach)
    for start in range(0, length, size):
        queries, keys = slice(start, start + size), slice(max(start - reach, 0), start + size + reach)
        distance = position[keys] - position[queries].unsqueeze(1)
        seen = (distance.abs() <= reach) & (distance % dilation == 0) & near[:, None, keys]
        listed_seen = some.unsqueeze(1).expand(-1, seen.shape[1], -1)
        if causal:
            seen = seen & (distance <= 0)
            listed_seen = listed_seen & (index.unsqueeze(1) <= position[queries].unsqueeze(1))
        seen = torch.cat([listed_seen, seen], 2)
        k_block, v_block = torch.cat([global_k, k[:, :, keys]], 2), torch.cat([global_v, v[:, :, keys]], 2)
        heads.append(attend(q[:, :, queries], k_block, v_block, scale=scale, valid=seen, dropout=dropout)[0])
    return torch.cat(heads, 2)


def start_steps(batch_size: int, hypotheses: int, like: Tensor, **shapes: tuple[int, int]) -> State:
    """Return the state before the first step of causal `window_and_globals`: a window, and a list of chosen keys.

    shapes: (heads, width) of keys and values. The list has a number of entries for each hypothesis, "held" (B, N), and
    the position of each entry, "place" (B, N, capacity).
    """
    rows = batch_size, hypotheses
    listed_rows = {name: like.new_zeros(*rows, heads, 0, width) for name, (heads, width) in shapes.items()}
    numbers = {"held": torch.zeros(rows, dtype=torch.long, device=like.device)}
    numbers["place"] = numbers["held"].new_zeros(*rows, 0)
    return {"window": start_cache(batch_size, hypotheses, like, **shapes), "listed": {**listed_rows, **numbers}}


def step_window_and_globals(
    state: State,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor | None,
    *,
    radius: int,
    dilation: int,
    scale: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None, State]:
    """Return the outputs (B, N, H, V) of the newest tokens, their weights (B, H, N, t) if needed, and the next state.

    q (B, N, H, K), k (B, N, G, K), v (B, N, G', V); chosen (B, N): the newest tokens that later queries see at any
    distance, None if there are none.
    """
    t, size = state["window"]["count"], radius * dilation + 1
    marked = q.new_zeros(q.shape[:2], dtype=torch.bool) if chosen is None else chosen
    window = append(state["window"], window=size, keys=k, values=v, listed=marked[:, :, None, None])
    chosen_keys = state["listed"] if chosen is None else _add_chosen(state["listed"], k, v, chosen, t)
    near_k, near_v, in_list = (written(window, name, window=size) for name in ("keys", "values", "listed"))
    distance = (t - torch.arange(near_k.shape[3], device=q.device)) % size
    seen = (distance % dilation == 0) & ~in_list[:, :, 0, :, 0]
    entries = torch.arange(chosen_keys["keys"].shape[3], device=q.device) < chosen_keys["held"].unsqueeze(-1)
    heads, weights = attend_step(
        q,
        torch.cat([chosen_keys["keys"].type_as(near_k), near_k], 3),
        torch.cat([chosen_keys["values"].type_as(near_v), near_v], 3),
        scale=scale,
        visible=torch.cat([entries, seen], -1).unsqueeze(2),
        need_weights=need_weights,
    )
    if weights is not None:  # in the order of positions; entries that do not count have weight 0
        place = torch.cat([chosen_keys["place"], (t - distance).expand(*q.shape[:2], -1)], -1)
        place = place.unsqueeze(1).expand_as(weights)
        weights = weights.new_zeros(*weights.shape[:3], t + 1).scatter_add(3, place, weights)
    return heads, weights, {"window": window, "listed": chosen_keys}


def _add_chosen(chosen_keys: State, k: Tensor, v: Tensor, chosen: Tensor, position: int) -> State:
    """Return the list with the keys and values of the chosen newest tokens (B, N) at the end of each hypothesis's."""
    if not bool(chosen.any()):  # on an accelerator this waits, as the growth of the list does
        return chosen_keys
    held, room = chosen_keys["held"], chosen_keys["keys"].shape[3]
    more = max(0, int(held.max()) + 1 - room)
    more = max(more, room // 2) if more else 0
    place = F.pad(chosen_keys["place"], (0, more))
    after: State = {"held": held + chosen}
    after["place"] = place.scatter(2, held.unsqueeze(-1), position)  # overwritten later where no token is chosen
    for name, row in (("keys", k), ("values", v)):
        rows = F.pad(chosen_keys[name], (0, 0, 0, more)).to(row.dtype)
        index = held[:, :, None, None, None].expand(*row.shape[:3], 1, row.shape[3])
        after[name] = rows.scatter(3, index, row.unsqueeze(3))
    return after
