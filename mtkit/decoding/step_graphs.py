"""Decoding steps on a GPU, recorded as CUDA graphs and repeated.

A step is hundreds of kernels, and the host needs several times as long to start them as the GPU to run them. A graph
starts as one. It repeats the same kernels on the same memory, so that it needs a state whose shapes stay the same
(`mtkit.attention.Attention.fixed_state`). Shapes change if segments are dropped and if caches have no more room: then
a step is computed as usual, and the next one is recorded.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mtkit.attention import State
from mtkit.attention.states import reorder, tensors_of
from mtkit.memory import is_oom
from mtkit.model.network import Logits, Model
from mtkit.recording import Graphs, Recorder, recorded

STEPS = 64
"""Steps for which a state has room at least; later ones have room for as many steps as there were."""

_GRAPHS: WeakKeyDictionary[Any, Graphs] = WeakKeyDictionary()


def graphs_of(model: Model) -> Graphs:
    """Return the graphs of a model, which serves one call at a time; the same ones until `forget_graphs`."""
    return _GRAPHS.get(model) or _GRAPHS.setdefault(model, Graphs(next(model.parameters()).device))


def forget_graphs(model: Model) -> None:
    """Let the memory of the model's graphs be used for something else."""
    _GRAPHS.pop(model, None)


class Repeated:
    """A function of tensors, which is recorded at the second call with the same shapes, and then repeated.

    It takes over the memory of its arguments when it records, and overwrites its results at the next call.
    """

    def __init__(self, compute: Callable[..., Any], record: Recorder) -> None:
        self._compute, self._record = compute, record
        self._shapes: list[torch.Size] = []
        self._inputs: tuple[Tensor, ...] = ()
        self._results: Any = None
        self._run: Callable[[], None] | None = None
        self._possible = True

    def __call__(self, *inputs: Tensor) -> Any:
        """Return the function's results."""
        shapes = [x.shape for x in inputs]
        if shapes != self._shapes or not self._possible:
            self._shapes, self._results, self._run = shapes, None, None
            return self._compute(*inputs)
        if self._run is None:
            self._inputs = tuple(x.contiguous() for x in inputs)
            try:
                self._results, self._run = recorded(self._record, lambda: self._compute(*self._inputs))
            except RuntimeError as error:
                if is_oom(error):
                    raise
                warnings.warn(f"decoding without CUDA graphs: {error}", stacklevel=2)
                self._possible = False
                return self._compute(*inputs)
        else:
            for to, x in zip(self._inputs, inputs, strict=True):
                if to.data_ptr() != x.data_ptr():
                    to.copy_(x)
        self._run()
        return self._results


class StepGraphs:
    """A model whose steps, and searches for the best next pieces, are recorded and repeated; else the same `Model`.

    It serves one batch at a time: what a step returns is overwritten by the next one, and `start` begins a batch.
    """

    def __init__(self, model: Model, record: Recorder | None = None) -> None:
        self._model, self._record = model, record or graphs_of(model)
        self._repeated: dict[Hashable, Repeated] = {}
        self._shared: State | None = None
        self._possible = True
        self.has_weights, self.training = model.has_weights, model.training
        self.longest_source, self.longest_target = model.longest_source, model.longest_target

    def parameters(self) -> Iterator[Any]:
        """Return the model's parameters."""
        return self._model.parameters()

    def train(self, mode: bool = True) -> Any:
        """Set the model's mode."""
        return self._model.train(mode)

    def encode(self, source: Tensor, source_valid: Tensor | None = None, *, task: Tensor | None = None) -> Any:
        """Return the model's `encode`."""
        return self._model.encode(source, source_valid, task=task)

    def start(self, encoded: Any, *, hypotheses: int = 1, pieces: Tensor | None = None) -> State:
        """Return the model's `start`."""
        return {"of": self._model.start(encoded, hypotheses=hypotheses, pieces=pieces), "steps": 0}

    def fixed_state(self, state: Any, segments: int, hypotheses: int, steps: int) -> None:
        """None: the states have this form already."""

    def step(self, token: Tensor, state: State, *, need_weights: bool = False) -> tuple[Logits, State, Tensor | None]:
        """Return the model's `step`, recorded if its attentions have a state of fixed shapes.

        Such a state is under "shared", which `reorder` does not change. It changes "order" (B, N), the hypotheses that
        the present ones continue, by which the recorded step reorders the state.
        """
        steps = state["steps"]
        room = state["room"] if state.get("hypotheses") == token.shape[1] else 0
        if not room:
            inner = state["of"] if "of" in state else _reordered(state["shared"], state["order"])
            room, fixed = max(STEPS, steps), None
            if steps and self._possible:  # the first step shows the types of the caches
                fixed = self._model.fixed_state(inner, token.shape[0], token.shape[1], room)
                self._possible = fixed is not None
            if fixed is None:
                logits, inner, weights = self._model.step(token, inner, need_weights=need_weights)
                return logits, {"of": inner, "steps": steps + 1}, weights
            state = {"shared": fixed, "order": torch.arange(token.shape[1], device=token.device).expand_as(token)}
        shared, order = state["shared"], state["order"]
        if shared is not self._shared:
            self._shared = shared
            self._repeated.clear()
        compute = partial(self._step_in_place, shared, need_weights)
        logits, weights = self._repeat(("step", need_weights), compute, token, order)
        order = torch.arange(token.shape[1], device=token.device).expand_as(token)
        after = {"shared": shared, "order": order, "steps": steps + 1, "room": room - 1, "hypotheses": token.shape[1]}
        return replace(logits, repeat=self._repeat), after, weights

    def _step_in_place(
        self, state: State, need_weights: bool, token: Tensor, order: Tensor
    ) -> tuple[Logits, Tensor | None]:
        """Make the model's step after the hypotheses `order` (B, N) of the state, which becomes the state after it."""
        logits, after, weights = self._model.step(token, _reordered(state, order), need_weights=need_weights)
        pairs = [pair for pair in zip(tensors_of(state), tensors_of(after), strict=True) if pair[0] is not pair[1]]
        torch._foreach_copy_([before for before, _ in pairs], [value for _, value in pairs])
        return logits, weights

    def _repeat(self, name: Hashable, compute: Callable[..., Any], *inputs: Tensor) -> Any:
        """compute(*inputs), recorded; a name means the same function while the state stays the same."""
        if name not in self._repeated:
            self._repeated[name] = Repeated(compute, self._record)
        return self._repeated[name](*inputs)


def _reordered(state: State, order: Tensor) -> State:
    """Return the state after the hypotheses `order` (B, N); a single one has no order."""
    return state if order.shape[1] == 1 else reorder(state, order)
