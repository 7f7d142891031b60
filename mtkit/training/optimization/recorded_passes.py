"""Passes over batches that a GPU repeats from CUDA graphs, one for each shape of batches."""

import gc
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtkit.memory import is_oom
from mtkit.recipe import Recipe
from mtkit.recording import Graphs, Recorder, recorded
from mtkit.terminal import Say
from mtkit.training.device_batch import DeviceBatch

MOST = 256
"""Graphs that are kept. A graph takes memory for its thousands of kernels, and shares the memory of their results."""

Passes = Callable[[DeviceBatch, Tensor | float, Tensor], None]
"""passes(batch, tokens, totals): a forward and backward pass, which adds the gradient of the batch's objective, divided
by `tokens`, to each parameter's `grad`, and the batch's measurements to `totals`."""


TOO_LARGE = "they take too much memory"
"""Reason to give graphs up."""


def can_be_recorded(recipe: Recipe) -> bool:
    """Whether a graph can hold the passes of such a training, with most mechanisms.

    The recurrent network's kernels need the lengths of segments on the host. Layers that are computed again need the
    state of the random generator.
    """
    computed_again = recipe.model.reversible or recipe.training.checkpoint_activations
    return recipe.model.architecture != "rnn" and not computed_again


@dataclass(frozen=True)
class _Graph:
    """The recorded passes over batches of one shape, and the memory that they read and write."""

    batch: list[Tensor]
    tokens: Tensor
    """Scalar."""
    totals: Tensor
    trained: list[nn.Parameter]
    """The parameters that get a gradient."""
    run: Callable[[], None]


class RecordedPasses:
    """Makes passes over batches (`DeviceBatch.on_grid`), and records them if their shape is new.

    Graphs add gradients to tensors that they share; these become the `grad` of the parameters that get a gradient.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], say: Say, record: Recorder | None = None) -> None:
        self._parameters, self._say = parameters, say
        self._record: Recorder | None = record or Graphs(parameters[0].device, together=True)
        self._graphs: dict[Hashable, _Graph] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}

    def __call__(self, passes: Passes, batch: DeviceBatch, tokens: float, totals: Tensor) -> None:
        """Make the passes, which are the same function each time."""
        tensors = [tensor for tensor in vars(batch).values() if isinstance(tensor, Tensor)]
        shape = tuple(tensor.shape for tensor in tensors)
        if (graph := self._graphs.get(shape)) is not None:
            self._share_gradients(graph.trained)
            torch._foreach_copy_(graph.batch, tensors)
            graph.tokens.fill_(tokens)
            graph.run()
            totals += graph.totals
            return
        # which parameters get a gradient shows only if there is none before
        first = all(parameter.grad is None for parameter in self._parameters)
        passes(batch, tokens, totals)
        if first and len(self._graphs) < MOST and self._has_room():
            trained = [parameter for parameter in self._parameters if parameter.grad is not None]
            self._add_graph(shape, passes, batch, tensors, torch.zeros_like(totals), trained)

    @property
    def shapes(self) -> int:
        """The number of shapes that are recorded."""
        return len(self._graphs)

    @property
    def records(self) -> bool:
        """Whether passes are recorded, as far as there is room."""
        return self._record is not None

    def _has_room(self) -> bool:
        return self._record.has_room() if isinstance(self._record, Graphs) else self.records

    def _add_graph(
        self,
        shape: Hashable,
        passes: Passes,
        batch: DeviceBatch,
        tensors: list[Tensor],
        totals: Tensor,
        trained: list[nn.Parameter],
    ) -> None:
        """Record the passes that were just made over the batch, whose memory the graph takes over."""
        assert self._record is not None
        tokens = totals.new_ones(())

        def compute() -> None:
            totals.zero_()
            passes(batch, tokens, totals)

        before, reason = [parameter.grad for parameter in trained], ""
        gc.collect()  # a graph of autograd that is alive in a cycle would keep its stream
        for last in (False, True):
            try:
                for parameter in trained:
                    parameter.grad = self._shared_gradient(parameter)
                _, run = recorded(self._record, compute)
                self._graphs[shape], reason = _Graph(tensors, tokens, totals, trained, run), ""
            except RuntimeError as error:
                reason = TOO_LARGE if is_oom(error) else str(error).strip().partition("\n")[0]
            finally:
                for parameter, gradient in zip(trained, before, strict=True):
                    parameter.grad = gradient
            if reason != TOO_LARGE or last:
                break
            _release_memory()  # which recording cannot do
        if reason:
            self.give_up(reason)

    def give_up(self, reason: str) -> None:
        """Record nothing any more, and free the graphs' memory."""
        self._say(f"training continues without CUDA graphs: {reason}")
        self._record = None
        self._graphs.clear()
        self._gradients.clear()
        _release_memory()

    def _shared_gradient(self, parameter: nn.Parameter) -> Tensor:
        if parameter not in self._gradients:
            self._gradients[parameter] = torch.zeros_like(parameter)
        return self._gradients[parameter]

    def _share_gradients(self, trained: list[nn.Parameter]) -> None:
        """Let the parameters' gradients be in the tensors that graphs add to."""
        empty, filled, values = [], [], []
        for parameter in trained:
            shared, gradient = self._gradients[parameter], parameter.grad
            if gradient is None:
                empty.append(shared)
            elif gradient is not shared:
                filled.append(shared)
                values.append(gradient)
            parameter.grad = shared
        if empty:
            torch._foreach_zero_(empty)
        if filled:
            torch._foreach_copy_(filled, values)


def _release_memory() -> None:
    """Return the memory that PyTorch caches on a GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
