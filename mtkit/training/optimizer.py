"""The learning rate of each update: warm-up, then a decay, then a cooldown where one is wanted.

noam is Vaswani et al. (2017), section 5.3: f d^-1/2 min(s^-1/2, s w^-3/2) for update s = 1, 2, ... and w warm-up
updates; with its peak f (d w)^-1/2 it is the same curve as inverse-sqrt. The cosine is Loshchilov and Hutter's (2017),
one half period down to 0. The cooldown is the linear one of Zhai et al. (2022).

Averages of weights: a moving one during training, and one of the last checkpoints at its end.

The optimiser and the arithmetic it is fed by: precision, loss scaling, clipping, and a step that can be refused.

Muon: updates of matrices with all their singular values near 1.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024
(kellerjordan.github.io/posts/muon). The momentum of a matrix's gradients G is M <- m M + (1 - m) G, and that of
Nesterov m M + (1 - m) G once more. Of the latter's singular value decomposition U S V^T the update is nearly U V^T, so
that directions with small gradients are learned as fast as those with large ones. It takes 15 products of the size of
the matrix.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mtkit.errors import RecipeError, RunError
from mtkit.recipe import TrainingSettings
from mtkit.training.gradient_reduction import split_like
from mtkit.training.precision import Precision

Schedule = Callable[[int, float], float]
"""The rate of update 1, 2, ..., given the share of training done before it, 0 to 1 (by updates, or by time)."""


def build_schedule(settings: TrainingSettings, d_model: int) -> Schedule:
    """The schedule of a recipe. Raises: RecipeError where it needs to know when training ends and nothing says so."""
    ends = any(limit is not None for limit in (settings.max_updates, settings.max_epochs, settings.max_minutes))
    if not ends and (settings.schedule == "cosine" or settings.cooldown > 0):
        what = "schedule = cosine" if settings.schedule == "cosine" else f"cooldown = {settings.cooldown}"
        raise RecipeError(f"training.{what} needs a limit of training: set max_updates, max_epochs or max_minutes")
    warmup, peak = settings.warmup_updates, settings.peak_rate
    if settings.schedule == "noam":
        peak *= (d_model * max(warmup, 1)) ** -0.5
    begin = 1.0 - settings.cooldown

    def rate(update: int, done: float) -> float:
        value = peak * min(1.0, update / max(warmup, 1))
        if settings.schedule == "cosine":
            value *= _half_cosine(update, done, warmup)
        else:
            value *= math.sqrt(max(warmup, 1) / max(update, warmup, 1))
        if settings.cooldown > 0:
            value *= min(1.0, (1.0 - done) / settings.cooldown) if done > begin else 1.0
        return max(value, 0.0)

    return rate


def _half_cosine(update: int, done: float, warmup: int) -> float:
    """1 at the end of the warm-up, 0 at the end of training."""
    if update <= warmup:
        return 1.0
    # the share that the warm-up took, from the pace so far: exact when training is counted in updates
    start = min(done * warmup / max(update - 1, 1), 1.0)
    return 0.5 * (1.0 + math.cos(math.pi * min((done - start) / max(1.0 - start, 1e-9), 1.0)))


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


def build_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.AdamW | Muon:
    """AdamW (Loshchilov and Hutter, 2019) over the trainable parameters, all or those that Muon leaves.

    Matrices decay; vectors and scalars do not, nor does what a module names as `undecayed`
    (`mtkit.attention.contract`). Fused: one pass over parameters, gradients and moments, on the CPU too.
    """
    named = ((module, name) for module in model.modules() for name in getattr(module, "undecayed", ()))
    kept = {id(getattr(module, name, None)) for module, name in named}
    matrices = matrices_of(model) if settings.optimizer == "muon" else []
    apart = set(map(id, matrices))
    trained = [each for each in model.parameters() if each.requires_grad and id(each) not in apart]
    kept |= {id(each) for each in trained if each.dim() < 2}
    groups = [
        {"params": [each for each in trained if id(each) not in kept], "weight_decay": settings.weight_decay},
        {"params": [each for each in trained if id(each) in kept], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.peak_rate,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )
    if not matrices:
        return adamw
    return Muon(matrices, adamw, rate=settings.muon_rate / settings.peak_rate, decay=settings.weight_decay)


def apply(
    optimizer: torch.optim.AdamW | Muon, precision: Precision, *, rate: float, clip_norm: float, finite: Tensor
) -> tuple[Tensor, Tensor]:
    """One update at this learning rate: unscale, clip, step. Gives the gradient norm before clipping, and `applied`.

    `finite` is a boolean scalar on the device, False where the loss is not finite. The step is not made, nor counted,
    where that or the gradient's norm is not: the fused kernel reads the flag itself, so that nothing waits for the
    device. `applied` is the flag it read; under float16 an overflow of the scaled gradients is not a fault, and it is
    `finite` alone.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    if precision.scaler is not None:
        precision.scaler.unscale_(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    if clip_norm > 0:
        nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    if isinstance(norm, DTensor):  # of gradients that are split over processes
        norm = norm.full_tensor()
    if precision.scaler is not None:
        with precision.autocast():
            precision.scaler.step(optimizer)
        precision.scaler.update()
        return norm, finite
    finite = finite & norm.isfinite()
    optimizer.grad_scale, optimizer.found_inf = None, (~finite).float()  # type: ignore[union-attr]
    with precision.autocast():  # for the products of matrices
        optimizer.step()
    return norm, finite


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every number that the optimiser keeps, as "exp_avg/encoder.0.weight": exact, for safetensors."""
    return {
        f"{key}/{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], origin: Path
) -> None:
    """Restore what `optimizer_tensors` returned, from the checkpoint folder `origin`.

    Raises: RunError if the tensors belong to another model or optimiser, or have another type.
    """
    parameters = dict(model.named_parameters())
    for full_name, value in tensors.items():
        key, _, name = full_name.partition("/")
        own = parameters.get(name)
        if own is None or value.shape != (torch.Size() if key == "step" else own.shape):
            raise _foreign(origin, f"{full_name}, which this model does not have")
        if value.dtype != own.dtype:
            raise _foreign(origin, f"{full_name} as {value.dtype} and not as {own.dtype}")
        optimizer.state[own][key] = split_like(value.to(own.device), own)
    matrices = optimizer.param_groups[0]["params"] if isinstance(optimizer, Muon) else []
    by_momentum = set(map(id, matrices))
    for name, own in parameters.items():
        expected = {"momentum"} if id(own) in by_momentum else {"step", "exp_avg", "exp_avg_sq"}
        # a parameter that never had a gradient has no state
        if (found := optimizer.state.get(own, {}).keys()) and found != expected:
            raise _foreign(origin, f"{', '.join(sorted(found))} of {name} in place of {', '.join(sorted(expected))}")


def _foreign(origin: Path, what: str) -> RunError:
    return RunError(
        f"the optimiser state in {origin} holds {what}; remove {origin} and the same command resumes from the "
        "checkpoint before it"
    )
