"""Averages of weights: a moving one during training, and one of the last checkpoints at its end."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class MovingAverage:
    """The exponential moving average of a model's trained parameters (Polyak and Juditsky, 1992).

    Early on the decay is (1 + u) / (10 + u) at update u where that is less, so that the random start is forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.weights = {name: parameter.detach().clone() for name, parameter in self._named.items()}

    @torch.no_grad()
    def follow(self, update: int) -> None:
        """Move towards the parameters after an update; one pass over them."""
        decay = min(self._decay, (1 + update) / (10 + update))
        parameters = [parameter.detach() for parameter in self._named.values()]
        torch._foreach_lerp_(list(self.weights.values()), parameters, 1.0 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the averaged weights inside the block; nothing is copied where weights are whole."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self._named.items():
            averaged = self.weights[name]
            if isinstance(parameter, DTensor) and isinstance(
                averaged, DTensor
            ):  # a part, which stays where it is: whole weights are gathered from there
                here, there = parameter.to_local().detach(), averaged.to_local()
                before = here.clone()
                here.copy_(there)
                there.copy_(before)
            else:
                self.weights[name] = parameter.data
                parameter.data = averaged


def mean_weights(checkpoints: Iterable[Mapping[str, Tensor]], parameters: Collection[str]) -> dict[str, Tensor]:
    """The mean over checkpoints of each tensor that `parameters` names, summed in float64; others are the last one's.

    The mean of what is no parameter, as of numbers drawn at random, may be none of its kind. One checkpoint is in
    memory at a time.
    """
    total: dict[str, Tensor] = {}
    last: Mapping[str, Tensor] = {}
    count = 0
    for count, last in enumerate(checkpoints, 1):  # noqa: B007
        for name in parameters:
            total[name] = total[name] + last[name] if name in total else last[name].double()
    return {name: (total[name] / count).to(last[name].dtype) if name in total else last[name] for name in last}
