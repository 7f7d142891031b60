"""Measured tasks of an attention: forward and backward over a sequence, and decoding steps."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mtkit.attention import Attention, State, reorder
from mtkit.benchmark.cost import Cost, cost_of
from mtkit.device import seconds_of
from mtkit.memory import held_bytes

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj", "context_proj")

STEPS = 64
"""Number of timed steps, and of counted steps, at each length: enough to average over work done once per block."""
BEYOND = 2 * STEPS + 1
"""Number of positions after a length that its measurement of steps visits."""


class _Through(nn.Module):
    """Projection that returns the first `width` features unchanged."""

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        # mechanisms read its type, device and shape
        self.weight, self.bias = projection.weight, projection.bias
        self.in_features, self.out_features = projection.in_features, projection.out_features

    def forward(self, x: Tensor) -> Tensor:
        return x[..., : self.out_features]


def without_projections(attention: Attention) -> Attention:
    """Replace the query, key, value and output projections by ones that return their input.

    A projection to fewer features returns the first ones; a projection to more features is not replaced.
    """
    for owner in list(attention.modules()):
        for name, child in list(owner.named_children()):
            if name.endswith(PROJECTIONS) and isinstance(child, nn.Linear) and child.out_features <= child.in_features:
                setattr(owner, name, _Through(child))
    return attention


def training(attention: Attention, query: Tensor, memory: Tensor | None, gradient: Tensor) -> Callable[[], None]:
    """Return a function that runs forward and backward as in training, with gradients of inputs and weights."""
    attention.train()
    inputs = [tensor.detach().requires_grad_() for tensor in (query, memory) if tensor is not None]

    def work() -> None:
        attended = attention(*inputs)
        extra = [*attended.losses.values(), *([] if attended.log_prob is None else [attended.log_prob])]
        extra = [tensor for tensor in extra if tensor.requires_grad]
        torch.autograd.backward([attended.output, *extra], [gradient, *map(torch.ones_like, extra)])
        for tensor in (*inputs, *attention.parameters()):
            tensor.grad = None

    return work


class Walk:
    """Decoding with one attention over growing positions or a growing memory; steps are measured on request."""

    @torch.no_grad()
    def __init__(self, attention: Attention, query: Tensor, memory: Tensor | None) -> None:
        self.attention, self.memory = attention.eval(), memory
        self.device = query.device
        self.token = query[:, :1].contiguous()
        self.segments = torch.arange(len(query), device=query.device)
        self.position = 0
        self.state: State = {}
        if memory is None:
            self.state = attention.start(len(query))[0]

    @torch.no_grad()
    def measure(self, length: int) -> tuple[float, Cost]:
        """Return mean time, mean FLOPs and peak memory of steps from position `length` on, or over that memory."""
        if self.memory is not None:
            self.state = self.attention.start(len(self.token), self.memory[:, :length])[0]
        else:
            for _ in range(self.position, length):
                self.state = self._next(self.state)
            self.position = length
        state = self._next(reorder(self.state, self.segments))  # a copy: the walk goes on from `length`

        def walk() -> None:
            nonlocal state
            for _ in range(STEPS):
                state = self._next(state)

        def step() -> None:
            nonlocal state
            state = self._next(state)

        seconds = seconds_of(walk, self.device, clock_of(self.device)) / STEPS
        flops, peak = 0, 0
        for _ in range(STEPS):
            held = held_bytes(state)
            cost = cost_of(step, self.device)
            flops, peak = flops + cost.flops, max(peak, held + cost.peak_bytes)
        return seconds, Cost(round(flops / STEPS), peak)

    def _next(self, state: State) -> State:
        return self.attention.step(self.token, state)[1]


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return the processor's time for one thread on the CPU, which other processes disturb less; else the wall's."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
