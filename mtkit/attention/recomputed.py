"""Discrete choices that a recomputed forward pass repeats from the first pass.

Reversible layers and checkpoints run a forward pass again during the backward pass, on inputs that are equal up to
rounding. A choice between near equals (a bucket, a cluster, an edge) could then differ, and the gradient would be that
of another function. A mechanism therefore passes every such choice through `as_first`. The code that runs a pass twice
keeps the choices of the first one; any number of passes may be in progress. Otherwise nothing is kept.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
Pass = Callable[[Tensor, int], Tensor]

_passes: ContextVar[tuple[Pass, ...]] = ContextVar("passes", default=())
"""What choices go through now, in this thread."""


def as_first(choice: Tensor, below: int) -> Tensor:
    """The choice, or the one of the first time where this is the second; integers from 0 to `below` - 1, or booleans.

    Both times a mechanism must make the same choices in the same order.
    """
    for each in _passes.get():
        choice = each(choice, below)
    return choice


@contextmanager
def keeping() -> Iterator[list[Tensor]]:
    """A first pass: the list fills with its choices, in the smallest integers that hold them."""
    kept: list[Tensor] = []

    def keep(choice: Tensor, below: int) -> Tensor:
        kept.append(choice.to(_smallest(below)))
        return choice

    # inside the second run of something larger, what that repeats is what this keeps
    token = _passes.set((*_passes.get(), keep))
    try:
        yield kept
    finally:
        _passes.reset(token)


@contextmanager
def repeating(kept: Iterable[Tensor]) -> Iterator[None]:
    """A second pass, which chooses what the first one kept."""
    left = iter(kept)
    token = _passes.set((lambda choice, below: next(left).type_as(choice),))
    try:
        yield
    finally:
        _passes.reset(token)


def choosing_once(run: Callable[P, R]) -> Callable[P, R]:
    """`run` for one checkpoint: its first call keeps its choices, and every later one repeats them.

    They live as long as what is returned here, which autograd lets go of with what it saved.
    """
    first: list[Tensor] | None = None

    @wraps(run)
    def again(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal first
        if first is not None:
            with repeating(first):
                return run(*args, **kwargs)
        with keeping() as first:
            return run(*args, **kwargs)

    return again


def _smallest(below: int) -> torch.dtype:
    if below <= 2**8:
        return torch.uint8
    return torch.int16 if below <= 2**15 else torch.int32
