"""Random draws and discrete choices that a second computation repeats exactly.

`hashed` draws patterns as pure functions of seed, role, layer and position. `seeded_dropout` draws dropout again in a
backward pass that recomputes weights.

Reversible layers and checkpoints run a forward pass again during the backward pass, on inputs that are equal up to
rounding. A choice between near equals (a bucket, a cluster, an edge) could then differ, and the gradient would belong
to another function. A mechanism therefore passes every such choice through `replay_choice`. The code that runs a pass
twice records the choices of the first one; any number of passes may be in progress. Otherwise nothing is recorded.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_passes: ContextVar[tuple[Callable[[Tensor, int], Tensor], ...]] = ContextVar("passes", default=())
"""The functions that record or replace choices in this thread."""


def random_key(*parts: int) -> int:
    """One 32-bit key from several numbers: seed, role, layer."""
    # `hashed` reads 32 bits, and a tensor holds no integer from 2^63 on
    return reduce(lambda key, part: int(hashed(torch.tensor((key + part) & 0xFFFFFFFF))), parts, 0)


def hashed(x: Tensor) -> Tensor:
    """32 pseudo-random bits of each integer, the same on every device (the finaliser of MurmurHash3)."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def seeded_dropout(dropout: float, seed: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Dropout that the same seed and sequence of calls repeat exactly, for backward passes that recompute weights."""
    if not dropout:
        return lambda x: x
    generator = torch.Generator(device).manual_seed(seed)
    return lambda x: x * torch.empty_like(x).bernoulli_(1 - dropout, generator=generator).div_(1 - dropout)


def replay_choice(choice: Tensor, below: int) -> Tensor:
    """The choice in a first pass, the recorded one in a second; integers from 0 to `below` - 1, or booleans.

    A mechanism must make the same choices in the same order in both passes.
    """
    for pass_through in _passes.get():
        choice = pass_through(choice, below)
    return choice


@contextmanager
def record_choices() -> Iterator[list[Tensor]]:
    """Run a first pass: the list fills with its choices, in the smallest integers that hold them."""
    recorded: list[Tensor] = []

    def record(choice: Tensor, below: int) -> Tensor:
        dtype = torch.uint8 if below <= 2**8 else torch.int16 if below <= 2**15 else torch.int32
        recorded.append(choice.to(dtype))
        return choice

    # within the second run of an outer pass, its replayed choices are recorded here
    token = _passes.set((*_passes.get(), record))
    try:
        yield recorded
    finally:
        _passes.reset(token)


@contextmanager
def replay_choices(recorded: Iterable[Tensor]) -> Iterator[None]:
    """Run a second pass with the recorded choices of the first."""
    remaining = iter(recorded)
    token = _passes.set((lambda choice, below: next(remaining).type_as(choice),))
    try:
        yield
    finally:
        _passes.reset(token)


def with_recorded_choices(run: Callable[P, R]) -> Callable[P, R]:
    """`run` for one checkpoint: its first call records its choices, and every later one replays them.

    They live as long as the returned function, which autograd frees with the tensors it saved.
    """
    first: list[Tensor] | None = None

    @wraps(run)
    def rerun(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal first
        if first is not None:
            with replay_choices(first):
                return run(*args, **kwargs)
        with record_choices() as first:
            return run(*args, **kwargs)

    return rerun
