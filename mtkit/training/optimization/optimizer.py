"""The optimisers and their state, clipping, and steps."""

import math
from collections.abc import Mapping, Sequence
from inspect import unwrap
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtkit.errors import RunError
from mtkit.recipe import TrainingSettings
from mtkit.training.optimization.gradient_reduction import complete_tensor, shard_like
from mtkit.training.precision import Precision

MOMENTUM = 0.95
"""m."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Factors of s, s^3 and s^5 in the polynomial that moves each singular value s towards 1, steep at 0."""

STEPS = 5
"""Applications of the polynomial: singular values of 0.002 to 1 times the norm end between 0.68 and 1.21."""


class _Uncompiled(torch.optim.Optimizer):
    """An optimiser that does not import torch._dynamo, which takes 0.8 s and 76 MB.

    Decorators of PyTorch's methods import it at the first call, to exclude the methods from compilation.
    """

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(_Uncompiled, torch.optim.AdamW):
    """PyTorch's AdamW."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update."""
        unwrap(torch.optim.AdamW.step)(self)


class Muon(_Uncompiled):
    """Muon over matrices, and AdamW over all other parameters: updates of matrices with singular values near 1.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024
    (kellerjordan.github.io/posts/muon). With the momentum M <- m M + (1 - m) G of a matrix's gradients G, and
    Nesterov's m M + (1 - m) G = U S V^T, the update is nearly U V^T: directions with small gradients are learned as
    fast as directions with large ones. It takes 15 products of the matrix's size, which processes that train together
    share.

    `torch.optim.Muon` always multiplies in bfloat16, one matrix at a time, and cannot skip a step by `found_inf`.
    """

    _step_supports_amp_scaling = True
    """Gradient scaling sets `found_inf`, as for a fused optimiser."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    """A scalar; if it is not 0, the step changes nothing."""

    def __init__(
        self, matrices: Sequence[Tensor], others: AdamW, *, rate: float, decay: float, processes: int = 1
    ) -> None:
        """`rate` is the matrices' rate at a learning rate of 1; `decay` the weight decay, in learning rates.

        `processes` is the number of processes that train together; all call `step` with the same gradients.

        A matrix (A, B) moves by its rate times sqrt(max(1, A / B)) along each singular direction.
        """
        super().__init__([{"params": list(matrices), "lr": 1.0, "decay": decay}], {})
        self._matrices, self._others, self._rate, self._processes = self.param_groups[0], others, rate, processes
        self.param_groups += others.param_groups  # the same objects, so that both read the learning rate
        others.state = self.state

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update, unless `found_inf` is set. Does not wait for the device."""
        self._others.grad_scale, self._others.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
        self._others.step()
        assert self.found_inf is not None
        applied, rate, decay = self.found_inf == 0, self._matrices["lr"], self._matrices["decay"]
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for matrix in self._matrices["params"]:
            if matrix.grad is not None:
                by_shape.setdefault(matrix.shape, []).append(matrix)
        for (rows, columns), matrices in by_shape.items():
            momenta = [self._momentum(matrix) for matrix in matrices]
            pairs = zip((matrix.grad for matrix in matrices), momenta, strict=True)
            gradients = [torch.where(applied, grad, momentum) for grad, momentum in pairs if grad is not None]
            torch._foreach_lerp_(momenta, gradients, 1.0 - MOMENTUM)
            nesterov = torch.stack(torch._foreach_lerp(gradients, momenta, MOMENTUM))
            if decay:
                torch._foreach_mul_(matrices, 1.0 - applied * (rate * decay))
            step = applied * (-rate * self._rate * max(1.0, rows / columns) ** 0.5)
            updates = orthogonalize_together(nesterov, self._processes).to(matrices[0].dtype)
            torch._foreach_add_(matrices, list((updates * step).unbind()))

    def _momentum(self, matrix: Tensor) -> Tensor:
        state: dict[str, Tensor] = self.state[matrix]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix)
        return state["momentum"]


def orthogonalize(matrices: Tensor) -> Tensor:
    """U p(p(... S)) V^T, near U V^T, of matrices U S V^T (N, A, B), each divided by its norm first (Newton-Schulz).

    p is the polynomial of `COEFFICIENTS`, applied `STEPS` times. Under autocast its products run in autocast's type.
    """
    one, three, five = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    x = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=three, alpha=five), x, beta=one)
    return x.mT if tall else x


def orthogonalize_together(matrices: Tensor, processes: int) -> Tensor:
    """`orthogonalize` of the same matrices (N, A, B) in all processes; each process computes an equal part."""
    if processes == 1:
        return orthogonalize(matrices)
    share = math.ceil(len(matrices) / processes)
    part = matrices[share * dist.get_rank() :][:share]
    part = orthogonalize(nn.functional.pad(part, (0, 0, 0, 0, 0, share - len(part))))  # gathered parts have equal sizes
    gathered = part.new_empty(share * processes, *part.shape[1:])
    dist.all_gather(list(gathered.split(share)), part.contiguous())
    return gathered[: len(matrices)]


def matrices_of(model: nn.Module) -> list[Tensor]:
    """Return the trained weights of a network's linear layers, except the output projection."""
    output = getattr(model, "output", None)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not output]
    unique = {id(layer.weight): layer.weight for layer in layers}  # layers may share one
    return [weight for weight in unique.values() if weight.requires_grad and min(weight.shape) > 1]


Optimizer = AdamW | Muon


def build_optimizer(
    model: nn.Module, settings: TrainingSettings, processes: int = 1, *, peak: float | None = None
) -> Optimizer:
    """AdamW (Loshchilov and Hutter, 2019) over the trained parameters, or Muon and AdamW.

    `processes` is the number of processes that train together, `peak` the schedule's highest rate; None: `peak_rate`.

    Matrices decay; vectors and scalars do not, nor do parameters that a module names as `undecayed`
    (`mtkit.attention.contract`). Fused: one pass over parameters, gradients and moments, on the CPU too.
    """
    named = ((module, name) for module in model.modules() for name in getattr(module, "undecayed", ()))
    undecayed = {id(getattr(module, name, None)) for module, name in named}
    matrices = matrices_of(model) if settings.optimizer == "muon" else []
    by_muon = set(map(id, matrices))
    trained = [weight for weight in model.parameters() if weight.requires_grad and id(weight) not in by_muon]
    undecayed |= {id(weight) for weight in trained if weight.dim() < 2}
    decayed = [weight for weight in trained if id(weight) not in undecayed]
    others = [weight for weight in trained if id(weight) in undecayed]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adamw = AdamW(
        [group for group in groups if group["params"]],
        lr=settings.peak_rate,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )
    if not matrices:
        return adamw
    rate = settings.muon_rate / (settings.peak_rate if peak is None else peak)
    return Muon(matrices, adamw, rate=rate, decay=settings.weight_decay, processes=processes)


def clip_gradients(optimizer: Optimizer, precision: Precision, clip_norm: float) -> Tensor:
    """Unscale the gradients and scale their norm down to `clip_norm`, if not 0; returns the norm before clipping."""
    if precision.scaler is not None:
        precision.scaler.unscale_(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if clip_norm > 0:
        nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return complete_tensor(norm)


def take_step(optimizer: Optimizer, precision: Precision, *, rate: float, norm: Tensor, finite: Tensor) -> Tensor:
    """Make one step at this learning rate, unless the loss or the gradients' `norm` is not finite; return `applied`.

    `finite` is a boolean scalar on the device, False if the loss is not finite. The fused kernel reads the flag, so
    nothing waits for the device, and a skipped step is not counted. `applied` is that flag; in float16 it is `finite`,
    because an overflow of the scaled gradients is not a fault.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    if precision.scaler is not None:
        with precision.autocast():
            precision.scaler.step(optimizer)
        precision.scaler.update()
        return finite
    applied = finite & norm.isfinite()
    optimizer.grad_scale, optimizer.found_inf = None, (~applied).float()  # type: ignore[union-attr]
    with precision.autocast():  # for Muon's products
        optimizer.step()
    return applied


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state as tensors, named "exp_avg/encoder.0.weight": exact, for safetensors."""
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
        parameter = parameters.get(name)
        if parameter is None or value.shape != (torch.Size() if key == "step" else parameter.shape):
            raise _foreign(origin, f"{full_name}, which this model does not have")
        if value.dtype != parameter.dtype:
            raise _foreign(origin, f"{full_name} as {value.dtype} and not as {parameter.dtype}")
        optimizer.state[parameter][key] = shard_like(value.to(parameter.device), parameter)
    by_muon = set(map(id, optimizer.param_groups[0]["params"] if isinstance(optimizer, Muon) else []))
    for name, parameter in parameters.items():
        expected = {"momentum"} if id(parameter) in by_muon else {"step", "exp_avg", "exp_avg_sq"}
        # a parameter that never had a gradient has no state
        if (keys := optimizer.state.get(parameter, {}).keys()) and keys != expected:
            raise _foreign(origin, f"{', '.join(sorted(keys))} of {name} instead of {', '.join(sorted(expected))}")


def _foreign(origin: Path, what: str) -> RunError:
    return RunError(
        f"the optimiser state in {origin} holds {what}; remove {origin} and the same command resumes from the "
        "checkpoint before it"
    )
