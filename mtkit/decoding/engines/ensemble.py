"""An ensemble: several models that translate as one, by the mean of their probabilities at each step."""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from mtkit.model.logits import Logits
from mtkit.model.network import Model, Network


class Ensemble(nn.Module):
    """One model for every search, made of models with the same pieces on both sides, of any size and attention."""

    def __init__(self, networks: Sequence[Network]) -> None:
        super().__init__()
        self._networks = nn.ModuleList(cast(Sequence[nn.Module], networks))
        self.has_weights = all(each.has_weights for each in networks)
        self.longest_source = _least(each.longest_source for each in networks)
        self.longest_target = _least(each.longest_target for each in networks)

    @property
    def networks(self) -> list[Network]:
        """The networks of the ensemble."""
        return [cast(Network, each) for each in self._networks]

    def encode(self, source: Tensor, source_valid: Tensor | None = None, *, task: Tensor | None = None) -> list[Any]:
        """The encodings of source (B, S), source_valid (B, S) and task (B,) by each model."""
        return [each.encode(source, source_valid, task=task) for each in self.networks]

    def start(self, encoded: list[Any], *, hypotheses: int = 1, pieces: Tensor | None = None) -> dict[str, Any]:
        """The states of all models as one state, which `mtkit.attention.reorder` accepts."""
        pairs = zip(self.networks, encoded, strict=True)
        states = [each.start(one, hypotheses=hypotheses, pieces=pieces) for each, one in pairs]
        return {str(number): state for number, state in enumerate(states)}

    def step(
        self, token: Tensor, state: dict[str, Any], *, need_weights: bool = False
    ) -> tuple[Logits, dict[str, Any], Tensor | None]:
        """Logarithms of the mean probabilities (B, N, V) of the piece after `token` (B, N), and the next state.

        With `need_weights`, also the mean of the models' attention to the source, (B, N, S).
        """
        log_probs, after, weights = [], {}, []
        for number, each in enumerate(self.networks):
            logits, after[str(number)], one = each.step(token, state[str(number)], need_weights=need_weights)
            log_probs.append(logits.whole().log_softmax(-1))
            if one is not None:
                weights.append(one)
        return Logits.known(mean_of(log_probs)), after, torch.stack(weights).mean(0) if weights else None


def mean_of(log_probs: Sequence[Tensor]) -> Tensor:
    """The logarithm of the mean of probabilities, from their logarithms, which have the same shape."""
    if len(log_probs) == 1:
        return log_probs[0]
    return torch.stack(list(log_probs)).logsumexp(0) - math.log(len(log_probs))


def networks_of(model: Model) -> list[Network]:
    """The networks of a model: those of an ensemble, or the model itself."""
    return model.networks if isinstance(model, Ensemble) else [cast(Network, model)]


def _least(limits: Any) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
