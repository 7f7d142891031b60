"""The places of hypotheses in the model's state, so that moving them copies little.

The beam orders hypotheses by rank, which changes at every step. Their rows in the state keep their places: only a
hypothesis that shares its parent with another one is copied, to the place of one that has no children.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mtkit.attention.states import overwrite, reorder
from mtkit.model.network import Logits, Model


class Places:
    """The places of the N hypotheses of each unfinished segment; on an accelerator they are always in order."""

    def __init__(self) -> None:
        self._place: Tensor | None = None
        """(B', N), by rank; None: in order."""
        self._rank: Tensor | None = None
        """(B', N), by place."""

    def step(self, model: Model, token: Tensor, state: Any, *, need_weights: bool) -> tuple[Logits, Any, Tensor | None]:
        """Return the result of `model.step` by rank, for token (B', N) by rank."""
        if self._place is None or self._rank is None:
            return model.step(token, state, need_weights=need_weights)
        logits, state, weights = model.step(token.gather(1, self._rank), state, need_weights=need_weights)
        logits = replace(logits, hidden=_rows(logits.hidden, self._place))
        return logits, state, None if weights is None else _rows(weights, self._place)

    def keep(self, running: Tensor) -> None:
        """Drop the finished segments."""
        if self._place is not None and self._rank is not None:
            self._place, self._rank = self._place[running], self._rank[running]

    def follow(self, state: Any, parents: Tensor, hypotheses: int) -> Any:
        """Return the state of hypotheses whose parents are (B', N'), by rank; the given one has N = `hypotheses`."""
        if parents.device.type != "cpu" or parents.shape[1] != hypotheses:
            place, self._place = self._place, None
            return reorder(state, parents if place is None else place.gather(1, parents))
        if self._place is None or self._rank is None:
            self._place = torch.arange(hypotheses).repeat(len(parents), 1)
            self._rank = self._place.clone()
        from mtkit.attention.kernels.cpu.decoding_loops import settle

        moves, count = torch.empty(2, parents.numel(), dtype=torch.long), torch.empty(1, dtype=torch.long)
        settle(*(x.numpy() for x in (parents.contiguous(), self._place, self._rank, moves, count)))
        source, target = moves[:, : int(count)]
        return overwrite(state, source, target) if len(source) else state


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows (B, N, X) of x that `index` (B, N) selects within each segment."""
    first = torch.arange(0, index.numel(), index.shape[1]).unsqueeze(1)
    return x.flatten(0, 1).index_select(0, (first + index).flatten()).view_as(x)
