"""Decayed sums of key-value products, in decoding: the latest rows, and the sums over all earlier ones.

A step that changes the sums S = sum_j e^a_j k_j v_j^T reads and writes M V numbers per head and hypothesis, and moving
a hypothesis copies them. Over few rows, q S = sum_j e^a_j (q . k_j) v_j costs less. So the latest rows are kept, in a
cache that hypotheses share (`shared_rows`), and they are summed up when they have as many numbers as the sums. The sums
then stay as they are for that many steps, and hypotheses refer to them by number.

Where sums fade, "faded" (B, N, G, 1) is the logarithm of what is left since rows were last summed up, and a row's "log"
is its own scale minus what had faded before it. Both are float64, because small differences of large numbers count.
Without gradients only.
"""

import torch
from torch import Tensor

from mtkit.attention.bases.shared_rows import append_rows, has_one_row_per_position, start_rows
from mtkit.attention.contract import State
from mtkit.attention.kernels.cached_rows import attend_cached, cached_is_faster, supports_cached
from mtkit.attention.kernels.chunks import rows_at
from mtkit.attention.kernels.dot_product import numbers, upcast

SHARING = 16
"""Hypotheses up to which rows are kept as long: each computes scores for the rows of all."""


def start_recent(
    batch_size: int, hypotheses: int, like: Tensor, *, groups: int, features: int, width: int, fading: bool
) -> State:
    """Return empty sums of keys of width M = `features` and values of `width` V for G `groups` of heads.

    fading: whether rows have scales or sums fade.
    """
    state = start_rows(batch_size, hypotheses, like, keys=(groups, features), values=(groups, width))
    if fading:
        room = state["seen"].shape[2]
        state["shared"]["log"] = like.new_empty(batch_size, groups, room, 1, dtype=torch.float64)
        state["faded"] = like.new_zeros(batch_size, hypotheses, groups, 1, dtype=torch.float64)
    return {**state, "past": None}


def fade(state: State, log_share: Tensor) -> State:
    """Multiply the sums by e^kept, (B, G, N, 1)."""
    log_share = log_share.transpose(1, 2)
    if "top" in state:
        return {**state, "top": state["top"] + log_share}
    if "sums" in state:
        return {**state, "sums": state["sums"].mul_(log_share.exp().unsqueeze(-1))}
    return {**state, "faded": state["faded"] + log_share}


def add_recent(state: State, keys: Tensor, values: Tensor, scale: Tensor | None = None) -> State:
    """Add e^scale k v^T: keys (B, G, N, M), values (B, G, N, V), scale (B, G, N, 1), 0 if None."""
    if "sums" in state:
        return _added(state, keys, values, scale)
    features, width = keys.shape[-1], values.shape[-1]
    most = max(features * width // (features + width), 1)
    if state["count"] >= max(most * SHARING // max(SHARING, keys.shape[2]), 1):
        state = _summed_up(state, scaled=scale is not None)
    if "faded" not in state:
        return append_rows(state, keys=keys, values=values)
    log = -state["faded"].transpose(1, 2)
    return append_rows(state, keys=keys, values=values, log=log if scale is None else log + scale)


def read_recent(state: State, q: Tensor, *, scaled: bool = False) -> Tensor:
    """Return q S, (B, G, R, N, V), of R queries q (B, G, R, N, M) for each hypothesis.

    scaled: relative to the largest e^a_j, as exponentials of scales may overflow.
    """
    if "sums" in state:
        return (q.movedim(3, 1) @ state["sums"]).movedim(1, 3)
    weights, of_past, _ = _weights(state, scaled)
    total = _read_rows(state, q, weights)
    if state["past"] is None:
        return total
    read = read_sums_of(state["past"]["shared"]["sums"], state["past"]["ancestor"], q)
    return total + (read if of_past is None else read * of_past.unsqueeze(2))


def corrected_next(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: State) -> tuple[Tensor, State]:
    """Add the correction k u^T, u = beta (v - S^T k), and return q S after it, (B, G, R, N, V), with the state.

    q (B, G, R, N, M), k (B, G, N, M), v (B, G, N, V), beta (B, G, N, 1).
    """
    held = read_recent(state, torch.cat([q, k.unsqueeze(2)], 2))
    added = beta * (v - held[:, :, -1])
    overlap = (q * k.unsqueeze(2)).sum(-1, keepdim=True)
    return torch.addcmul(held[:, :, :-1], overlap, added.unsqueeze(2)), add_recent(state, k, added)


def fixed_recent(state: State, *, scaled: bool = False) -> State:
    """Return the state after a step in a form whose shapes stay the same: "sums" (B, N, G, M, V), which steps change.

    If scaled, they are relative to e^top, with "top" (B, N, G, 1).
    """
    if "sums" in state:
        return state
    past = _summed_up(state, scaled)["past"] if state["count"] else state["past"]
    of_each = {name: _of_ancestors(x, past["ancestor"]).contiguous() for name, x in past["shared"].items()}
    return {**of_each, "top": of_each["top"].type_as(of_each["sums"])} if scaled else {"sums": of_each["sums"]}


def _added(state: State, keys: Tensor, values: Tensor, scale: Tensor | None) -> State:
    """`add_recent` for a state in the form of `fixed_recent`."""
    sums, k, v = state["sums"], keys.transpose(1, 2).unsqueeze(-1), values.transpose(1, 2).unsqueeze(-2)
    if scale is None:
        return {"sums": sums.addcmul_(k, v)}
    top = state["top"].maximum(scale.transpose(1, 2))
    sums.mul_((state["top"] - top).exp().unsqueeze(-1)).addcmul_(
        k, v * (scale.transpose(1, 2) - top).exp().unsqueeze(-1)
    )
    return {"sums": sums, "top": top}


def _weights(state: State, scaled: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the factors of the rows (B, G, N, rows) and of the past (B, G, N, 1), and what they are relative to.

    The factors of rows that a hypothesis does not see may be any number. None: 1, or no past.
    """
    if "faded" not in state:
        return None, None, None
    rows, faded = state["rows"], state["faded"].transpose(1, 2)
    log = state["shared"]["log"][:, :, :rows].mT + faded
    past = state["past"]
    of_past = None if past is None else _of_ancestors(past["shared"]["top"], past["ancestor"]).transpose(1, 2) + faded
    top = None
    if scaled:
        seen = log if has_one_row_per_position(state) else log.where(state["seen"][:, None, :, :rows], -torch.inf)
        top = seen.amax(-1, keepdim=True) if of_past is None else seen.amax(-1, keepdim=True).maximum(of_past)
        log, of_past = log - top, None if of_past is None else of_past - top
    like = torch.promote_types(state["shared"]["keys"].dtype, torch.float32)
    return log.exp().to(like), None if of_past is None else of_past.exp().to(like), top


def read_sums_of(sums: Tensor, ancestor: Tensor | None, q: Tensor) -> Tensor:
    """Return what q (B, G, R, N, M) reads from the sums (B, N', G, M, V) of ancestors (B, N), (B, G, R, N, V).

    Without ancestors, N' is 1.
    """
    flat, shape = q.flatten(2, 3), q.shape[2:4]
    shared = sums.shape[1] == 1
    # the loop runs on one thread; all threads compute a product with sums that the hypotheses share
    if supports_cached(q, sums, sums) and (not shared or torch.get_num_threads() == 1):
        from mtkit.attention.kernels.cpu.state_loops import read_sums

        heads = _by_hypothesis(q)
        ancestor = torch.zeros(heads.shape[:2], dtype=torch.long) if ancestor is None else ancestor
        out = heads.new_empty(*heads.shape[:3], sums.shape[-1])
        read_sums(*(x.numpy() for x in (heads, sums.contiguous(), ancestor.contiguous(), out)))
        return _by_group(out, q)
    if shared:
        return (flat @ sums.squeeze(1)).unflatten(2, shape)
    by_sums = (flat.unsqueeze(1) @ sums).unflatten(3, shape)  # (B, N', G, R, N, V)
    segment, hypothesis = numbers(0, len(sums), q.device).unsqueeze(1), numbers(0, shape[1], q.device)
    return by_sums.movedim(4, 2)[segment, ancestor, hypothesis].movedim(1, 3)


def _by_hypothesis(q: Tensor) -> Tensor:
    """Return q (B, G, R, N, M) as (B, N, H, M)."""
    return q.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _by_group(heads: Tensor, q: Tensor) -> Tensor:
    """Return heads (B, N, H, V) as (B, G, R, N, V), for q (B, G, R, N, M)."""
    return heads.unflatten(2, q.shape[1:3]).permute(0, 2, 3, 1, 4)


def _read_rows(state: State, q: Tensor, weights: Tensor | None) -> Tensor:
    """Return what q (B, G, R, N, M) reads from the rows with their factors (B, G, N, rows), (B, G, R, N, V)."""
    rows, (each, hypotheses) = state["rows"], q.shape[2:4]
    keys, values = (state["shared"][name][:, :, :rows] for name in ("keys", "values"))
    seen = None if has_one_row_per_position(state) else state["seen"][:, :, None, :rows]  # (B, N, 1, rows)
    if supports_cached(q, keys, values) and cached_is_faster(q, keys, each * hypotheses, hypotheses):
        factors = q.new_ones(1)
        if weights is not None:
            factors = weights.transpose(1, 2).unsqueeze(3).expand(-1, -1, -1, each, -1).flatten(2, 3)
        past = keys.unsqueeze(1), values.unsqueeze(1)
        heads = attend_cached(_by_hypothesis(q), *past, scale=1.0, visible=seen, factors=factors)
        return _by_group(heads, q)
    keys, values = upcast(keys), upcast(values)
    scores = (q.flatten(2, 3) @ keys.mT).unflatten(2, (each, hypotheses))  # (B, G, R, N, rows)
    if weights is not None:
        scores = scores * weights.unsqueeze(2)
    if seen is not None:
        scores = scores.where(seen.permute(0, 2, 1, 3).unsqueeze(2), 0.0)
    return (scores.flatten(2, 3) @ values).unflatten(2, (each, hypotheses))


def _summed_up(state: State, scaled: bool) -> State:
    """Return the state with the rows added to the sums of each hypothesis."""
    weights, of_past, top = _weights(state, scaled)
    rows, hypotheses, past = state["rows"], state["seen"].shape[1], state["past"]
    weights = None if weights is None else weights.transpose(1, 2)  # (B, N, G, rows)
    caches = [upcast(state["shared"][name]).unsqueeze(1) for name in ("keys", "values")]
    if has_one_row_per_position(state):
        keys, values = (x[:, :, :, :rows] for x in caches)
    else:  # each hypothesis sees one row for each position
        place = state["seen"][:, :, :rows].nonzero()[:, 2].view(len(caches[0]), hypotheses, 1, 1, state["count"])
        keys, values = (rows_at(x, place).squeeze(3) for x in caches)
        weights = None if weights is None else weights.take_along_dim(place.squeeze(3), -1)
    if weights is not None:
        values = values * weights.unsqueeze(-1)
    sums = keys.mT @ values  # (B, N, G, M, V), or N = 1 if all hypotheses have the same
    if past is not None:
        past_sums = _of_ancestors(past["shared"]["sums"], past["ancestor"])
        sums = sums.expand_as(past_sums).contiguous()
        sums.add_(past_sums) if of_past is None else sums.addcmul_(past_sums, of_past.transpose(1, 2).unsqueeze(-1))
    shared = {"sums": sums}
    if "faded" in state:
        faded = state["faded"]
        shared["top"] = torch.zeros_like(faded) if top is None else top.transpose(1, 2).contiguous()
        state = {**state, "faded": torch.zeros_like(faded)}
    ancestor = numbers(0, hypotheses, sums.device) if sums.shape[1] > 1 else sums.new_zeros(hypotheses).long()
    past = {"shared": shared, "ancestor": ancestor.repeat(len(sums), 1)}
    return {**state, "past": past, "rows": 0, "count": 0}


def _of_ancestors(x: Tensor, ancestor: Tensor) -> Tensor:
    """Return x (B, N', ...) of the ancestors (B, N) of hypotheses, (B, N, ...)."""
    if x.shape[1] == 1:
        return x.expand(-1, ancestor.shape[1], *[-1] * (x.dim() - 2))
    return x[numbers(0, len(x), x.device).unsqueeze(1), ancestor]
