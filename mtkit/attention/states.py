"""The decoding states of attentions: their segments and hypotheses reordered, and their tensors."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]
"""State of incremental decoding: tensors (B, N, ...) and plain numbers; tensors (B, ...) under "shared"."""


def reorder(state: State, index: Tensor) -> State:
    """Return the state of the segments or hypotheses chosen by `index`; the given state must not be used afterwards.

    index (B',): the segments kept, in this order. index (B, N'): for each segment, the hypothesis that each of the new
    N' continues; tensors under "shared" stay as they are.
    """
    within_segments = index.dim() == 2
    rows: dict[int, Tensor] = {}  # the indices of the chosen among all B * N rows, by N

    def chosen(value: Tensor) -> Tensor:
        if not within_segments:
            return value.index_select(0, index)
        segments, hypotheses = value.shape[:2]
        if hypotheses not in rows:
            first = torch.arange(0, segments * hypotheses, hypotheses, device=index.device)
            rows[hypotheses] = (first.unsqueeze(1) + index).flatten()
        return value.flatten(0, 1).index_select(0, rows[hypotheses]).unflatten(0, index.shape)

    reordered: State = _map_tensors(state, chosen, skip="shared" if within_segments else None)
    return reordered


def overwrite(state: State, source: Tensor, target: Tensor) -> State:
    """Return the state in which hypotheses `target` (M,) are copies of `source` (M,), counted over (B, N).

    They are copied in the tensors of the given state, so nothing else may use these tensors. No target is a source.
    """

    def overwritten(value: Tensor) -> Tensor:
        value = _writable(value)
        if value.device.type == "cpu" and value.is_contiguous() and value.numel():
            from mtkit.attention.kernels.cpu.state_loops import copy_rows

            rows = value.view(value.shape[0] * value.shape[1], -1).view(torch.uint8)
            copy_rows(rows.numpy(), source.numpy(), target.numpy())
            return value
        if value.stride(0) != value.shape[1] * value.stride(1):
            value = value.contiguous()
        rows = value.flatten(0, 1)  # a view
        rows.index_copy_(0, target, rows.index_select(0, source))
        return value

    result: State = _map_tensors(state, overwritten, skip="shared")
    return result


def close_gaps(state: State, index: Tensor) -> State:
    """Return the state of B' segments as `reorder` does, copying few: index[i] is either i or at least B'.

    Only segments from B' on are copied, into the tensors of the given state; the new tensors are views of them. So
    nothing else may use these tensors.
    """
    count = len(index)
    gaps = (index >= count).nonzero().squeeze(1)
    fillers = index[gaps]

    def closed(value: Tensor) -> Tensor:
        value = _writable(value)
        if len(gaps):
            value.index_copy_(0, gaps, value.index_select(0, fillers))
        return value[:count]

    reordered: State = _map_tensors(state, closed)
    return reordered


def _writable(value: Tensor) -> Tensor:
    """Return the tensor, or a copy if it is expanded: elements that share memory cannot be written."""
    expanded = any(step == 0 and size > 1 for step, size in zip(value.stride(), value.shape, strict=True))
    return value.contiguous() if expanded else value


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor], skip: str | None = None) -> Any:
    """Return the state, or a part of it, with `change` applied to all tensors except those under the name `skip`."""
    if isinstance(value, dict):
        return {name: item if name == skip else _map_tensors(item, change, skip) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(item, change, skip) for item in value)
    return change(value) if isinstance(value, Tensor) else value


def counted(state: State, hypotheses: int) -> State:
    """Return the state with its "count" as a tensor (B, N), which a GPU can increase by itself."""
    if "count" not in state or isinstance(state["count"], Tensor):
        return state
    first = next(tensors_of(state))
    return {**state, "count": torch.full((len(first), hypotheses), state["count"], device=first.device)}


def tensors_of(state: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and tuples, always in the same order: by name."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for name in sorted(state):
            yield from tensors_of(state[name])
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_of(value)
