"""Decoding steps on a GPU, recorded as CUDA graphs and repeated.

A step is hundreds of kernels, and the host needs several times as long to start them as the GPU to run them. A graph
starts as one. It repeats the same kernels on the same memory, so that it needs a state whose shapes stay the same
(`mtkit.attention.Attention.fixed_state`). Shapes change if segments are dropped and if caches have no more room: then
a step is computed as usual, and the next one is recorded.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtkit.attention import State
from mtkit.model.network import Logits, Network

STEPS = 32
"""Steps for which a state has room at least; later ones have room for as many steps as there were."""

Recorder = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]
"""Records a computation without making it; returns its results' memory, and the function that fills it."""


def record_graph(compute: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Record a computation as a CUDA graph; it must have been made before, which loads its kernels.

    All that it computes has memory of its own, which is free again once nothing refers to the graph and its results.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")  # other threads may use the device
        try:
            results = compute()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return results, graph.replay


class Repeated:
    """A function of tensors and states, which is recorded at the second call with the same shapes, and then repeated.

    It takes over the memory of its arguments when it records, and overwrites its results at the next call.
    """

    def __init__(self, compute: Callable[..., Any], record: Recorder) -> None:
        self._compute, self._record = compute, record
        self._shapes: Any = None
        self._inputs: list[Tensor] = []
        self._results: Any = None
        self._run: Callable[[], None] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """The function's results."""
        inputs = list(tensors_of(arguments))
        shapes = [(x.shape, x.stride(), x.dtype) for x in inputs]
        if shapes != self._shapes:
            self._shapes, self._inputs, self._results, self._run = shapes, [], None, None
            return self._compute(*arguments)
        if self._run is None:
            self._inputs = inputs
            self._results, self._run = self._record(lambda: self._compute(*arguments))
        else:
            moved = [(to, x) for to, x in zip(self._inputs, inputs, strict=True) if to.data_ptr() != x.data_ptr()]
            if moved:
                torch._foreach_copy_([to for to, _ in moved], [x for _, x in moved])
        self._run()
        return self._results


class StepGraphs:
    """A network whose steps, and searches for the best next pieces, are recorded and repeated; else the same `Model`.

    It serves one batch at a time: what a step returns is overwritten by the next one, and `start` begins a batch.
    """

    def __init__(self, network: Network, record: Recorder = record_graph) -> None:
        self._network, self._record = network, record
        self._repeated: dict[Hashable, Repeated] = {}
        self._possible = True
        self.has_weights, self.training = network.has_weights, network.training
        self.longest_source, self.longest_target = network.longest_source, network.longest_target

    def parameters(self) -> Iterator[Any]:
        """The network's parameters."""
        return self._network.parameters()

    def train(self, mode: bool = True) -> Any:
        """Set the network's mode."""
        return self._network.train(mode)

    def encode(self, source: Tensor, source_valid: Tensor | None = None, *, task: Tensor | None = None) -> Any:
        """The network's `encode`."""
        return self._network.encode(source, source_valid, task=task)

    def start(self, encoded: Any, *, hypotheses: int = 1, pieces: Tensor | None = None) -> State:
        """The network's `start`, with the number of steps made, and of steps for which there is room."""
        self._repeated.clear()
        return {"of": self._network.start(encoded, hypotheses=hypotheses, pieces=pieces), "steps": 0, "room": 0}

    def step(self, token: Tensor, state: State, *, need_weights: bool = False) -> tuple[Logits, State, Tensor | None]:
        """The network's `step`, recorded if its attentions have a state of fixed shapes."""
        inner, steps, room = state["of"], state["steps"], state["room"]
        if steps and not room and self._possible:  # the first step shows the types of the caches
            room = max(STEPS, steps)
            fixed = self._network.fixed_state(inner, token.shape[0], token.shape[1], room)
            self._possible = fixed is not None
            inner = inner if fixed is None else fixed
        if not (room and self._possible):
            logits, inner, weights = self._network.step(token, inner, need_weights=need_weights)
            return logits, {"of": inner, "steps": steps + 1, "room": 0}, weights
        step = partial(self._network.step, need_weights=need_weights)
        logits, inner, weights = self._repeat(("step", need_weights), step, token, inner)
        return replace(logits, repeat=self._repeat), {"of": inner, "steps": steps + 1, "room": room - 1}, weights

    def _repeat(self, name: Hashable, compute: Callable[..., Any], *inputs: Any) -> Any:
        """compute(*inputs), recorded; a name stands for the same function until the next `start`."""
        if name not in self._repeated:
            self._repeated[name] = Repeated(compute, self._record)
        return self._repeated[name](*inputs)


def tensors_of(state: Any) -> Iterator[Tensor]:
    """The tensors in nested dicts, lists and tuples, always in the same order."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_of(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_of(value)
