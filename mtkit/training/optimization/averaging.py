"""Averages of weights: the moving average of a training, and the mean of checkpoints."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mtkit.training.optimization.gradient_reduction import is_sharded


class MovingAverage:
    """The exponential moving average of a model's trained parameters (Polyak and Juditsky, 1992).

    The decay at update u is at most (1 + u) / (10 + u), so that the random start is forgotten early.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.weights = {name: parameter.detach().clone() for name, parameter in self._named.items()}

    @torch.no_grad()
    def follow(self, update: int) -> None:
        """Move towards the parameters after an update."""
        decay = min(self._decay, (1 + update) / (10 + update))
        parameters = [parameter.detach() for parameter in self._named.values()]
        torch._foreach_lerp_(list(self.weights.values()), parameters, 1.0 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with the averaged weights; unsharded weights are not copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self._named.items():
            average = self.weights[name]
            if is_sharded(parameter):
                # full weights are gathered from the shard's memory, so its values are exchanged
                weights, averages = (tensor.to_local().detach() for tensor in (parameter, average))  # type: ignore[attr-defined]
                copy = weights.clone()
                weights.copy_(averages)
                averages.copy_(copy)
            else:
                self.weights[name] = parameter.data
                parameter.data = average


def mean_weights(checkpoints: Iterable[Mapping[str, Tensor]], parameters: Collection[str]) -> dict[str, Tensor]:
    """Average over checkpoints each tensor that `parameters` names, in float64; other tensors are the last one's.

    The mean of other tensors, such as random numbers, may be invalid. One checkpoint is in memory at a time.
    """
    total: dict[str, Tensor] = {}
    for count, last in enumerate(checkpoints, 1):  # noqa: B007
        for name in parameters:
            total[name] = total[name] + last[name] if name in total else last[name].double()
    return {name: (total[name] / count).to(last[name].dtype) if name in total else last[name] for name in last}
