"""Muon: updates of matrices with all their singular values near 1.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024
(kellerjordan.github.io/posts/muon). The momentum of a matrix's gradients G is M <- m M + (1 - m) G, and that of
Nesterov m M + (1 - m) G once more. Of the latter's singular value decomposition U S V^T the update is nearly U V^T, so
that directions with small gradients are learned as fast as those with large ones. It takes 15 products of the size of
the matrix.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
"""m."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of s, s^3 and s^5 in the polynomial that takes each singular value s to near 1, steep at 0."""

STEPS = 5
"""Times that the polynomial is applied: singular values of 0.002 to 1 times the norm come to between 0.68 and 1.21."""


class Muon(torch.optim.Optimizer):
    """Muon over matrices, and AdamW over all other parameters."""

    _step_supports_amp_scaling = True
    """Gradient scaling sets `found_inf`, as for a fused optimiser."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    """A scalar that is not 0 where the step is not to be made."""

    def __init__(self, matrices: Sequence[Tensor], others: torch.optim.AdamW, *, rate: float, decay: float) -> None:
        """`rate` is that of the matrices where the learning rate is 1; `decay` the weight decay, in learning rates.

        A matrix (A, B) moves by its rate times sqrt(max(1, A / B)) along each singular direction.
        """
        super().__init__([{"params": list(matrices), "lr": 1.0, "decay": decay}], {})
        self._matrices, self._others, self._rate = self.param_groups[0], others, rate
        self.param_groups += others.param_groups  # the same, so that both see a learning rate that is set
        others.state = self.state

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update; not made, nor counted, where `found_inf` says so. Nothing waits for the device."""
        self._others.grad_scale, self._others.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
        self._others.step()
        assert self.found_inf is not None
        made, rate, decay = self.found_inf == 0, self._matrices["lr"], self._matrices["decay"]
        trained = [each for each in self._matrices["params"] if each.grad is not None]
        for alike in _by_shape(trained):
            momenta = [self._momentum(each) for each in alike]
            pairs = zip(alike, momenta, strict=True)
            gradients = [torch.where(made, each.grad, momentum) for each, momentum in pairs if each.grad is not None]
            torch._foreach_lerp_(momenta, gradients, 1.0 - MOMENTUM)
            ahead = torch.stack(torch._foreach_lerp(gradients, momenta, MOMENTUM))
            rows, columns = ahead.shape[1:]
            if decay:
                torch._foreach_mul_(alike, 1.0 - made * (rate * decay))
            step = made * (-rate * self._rate * max(1.0, rows / columns) ** 0.5)
            torch._foreach_add_(alike, list((orthogonal(ahead).to(alike[0].dtype) * step).unbind()))

    def _momentum(self, matrix: Tensor) -> Tensor:
        state: dict[str, Tensor] = self.state[matrix]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix)
        return state["momentum"]


def orthogonal(matrices: Tensor) -> Tensor:
    """U p(p(... S)) V^T, near U V^T, of matrices U S V^T (N, A, B), each divided by its norm before.

    p is the polynomial of `COEFFICIENTS`, applied `STEPS` times by products of the matrices alone. Under autocast these
    run in its type.
    """
    one, three, five = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    x = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=three, alpha=five), x, beta=one)
    return x.mT if tall else x


def matrices_of(model: nn.Module) -> list[Tensor]:
    """The trained weights of the linear layers of a network, but for the output projection."""
    output = getattr(model, "output", None)
    layers = [each for each in model.modules() if isinstance(each, nn.Linear) and each is not output]
    found = {id(each.weight): each.weight for each in layers}  # layers may share one
    return [each for each in found.values() if each.requires_grad and min(each.shape) > 1]


def _by_shape(parameters: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Parameters of one shape together."""
    alike: dict[tuple[int, ...], list[Tensor]] = {}
    for each in parameters:
        alike.setdefault(tuple(each.shape), []).append(each)
    return alike.values()
