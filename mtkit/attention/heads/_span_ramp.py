"""The learned spans of heads, as a ramp over distances whose logarithm is added to scores."""

import math
from copy import copy

import torch
from torch import Tensor, nn

from mtkit.attention.contract import Site
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.slots import Positions


class SpanRamp(Positions):
    """A factor of exp(score) by distance: 1 up to a learned span, then down to 0 over `ramp` positions.

    The span is a learned `fraction` of `longest`, from 0 to 1, one for each of `spans` heads, or one for all. Other
    relative positions `beside` it have their effect as well.
    """

    def __init__(
        self, site: Site, width: int, *, longest: int, ramp: int, start: float, spans: int, beside: Positions | None
    ) -> None:
        super().__init__(site, width)
        self.longest, self.ramp = longest, ramp
        self.fraction = nn.Parameter(torch.full((spans,), float(start)))
        self.some = slice(None)
        self._beside = (beside,)  # not as a part: its weights are those of the attention's own slot
        self._known: tuple[Tensor, tuple[int, int], int] | None = None

    @property
    def on_values(self) -> bool:  # type: ignore[override]
        """Whether what stands beside gives anything."""
        [beside] = self._beside
        return beside is not None and beside.on_values

    def of_heads(self, some: range) -> Positions:
        """With the spans of these heads."""
        group, [beside] = copy(self), self._beside
        group.some = slice(some.start, some.stop) if len(self.fraction) > 1 else slice(None)
        group._beside = (None if beside is None else beside.of_heads(some),)
        return group

    @property
    def lengths(self) -> Tensor:
        """The spans z, (H or 1,), in positions. Whatever the fractions are, a token sees itself, and z <= `longest`."""
        return (upcast(self.fraction)[self.some] * self.longest).clamp(min=1 - self.ramp, max=self.longest)

    @property
    def reach(self) -> int:
        """The largest distance at which any head sees a key; training on an accelerator takes the largest possible.

        It is read from the device when the fractions have changed, and not in between: a step never waits for it. In
        training they change with every update, and reading them would make the host wait in each.
        """
        here = self.fraction
        if self.training and here.device.type != "cpu":
            return self.longest + self.ramp - 1
        state = here.data_ptr(), here._version
        if self._known is None or self._known[0] is not here or self._known[1] != state:
            with torch.no_grad():  # a graph made in some passes only is one that a checkpoint cannot make again
                widest = float(self.lengths.max().nan_to_num())  # what diverged is reported elsewhere
            self._known = here, state, max(math.ceil(self.ramp + widest) - 1, 0)
        return self._known[2]

    def factor(self, distance: Tensor) -> Tensor:
        """m_z(x) = clamp((R + z - x) / R, 0, 1) of distances (..., T, S): (H or 1, ..., T, S)."""
        z = self.lengths.view(-1, *[1] * distance.dim())
        return ((self.ramp + z - distance) / self.ramp).clamp(0.0, 1.0)

    def bias(self, q: Tensor, query_position: Tensor, key_position: Tensor, scale: float) -> Tensor:
        """log m_z, beside the other bias; beyond the span as low as the type of the queries goes.

        Not infinite: a row of padding may see keys beyond its span alone, and must not become NaN.
        """
        factor = self.factor((query_position.unsqueeze(-1) - key_position.unsqueeze(-2)).abs())
        seen = factor > 0.0
        log = factor.where(seen, 1.0).log().where(seen, torch.finfo(q.dtype).min / 2)
        [beside] = self._beside
        other = None if beside is None else beside.bias(q, query_position, key_position, scale)
        return log if other is None else log + other

    def values(self, weights: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor | None:
        """Those of what stands beside."""
        [beside] = self._beside
        return None if beside is None else beside.values(weights, query_position, key_position)

    @torch.no_grad()
    def after_update(self, update: int, total_updates: int) -> None:
        """Clamps the fractions to [0, 1]."""
        self.fraction.clamp_(0.0, 1.0)
