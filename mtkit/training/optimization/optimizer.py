"""The learning rate of each update: warm-up, then a decay, then a cooldown where one is wanted.

noam is Vaswani et al. (2017), section 5.3: f d^-1/2 min(s^-1/2, s w^-3/2) for update s = 1, 2, ... and w warm-up
updates; with its peak f (d w)^-1/2 it is the same curve as inverse-sqrt. The cosine is Loshchilov and Hutter's (2017),
one half period down to 0. The cooldown is the linear one of Zhai et al. (2022).

Averages of weights: a moving one during training, and one of the last checkpoints at its end.

The optimiser and the arithmetic it is fed by: precision, loss scaling, clipping, and a step that can be refused.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mtkit.device import autocast
from mtkit.errors import RecipeError, RunError
from mtkit.recipe import TrainingSettings
from mtkit.training.distributed.split import split_like
from mtkit.training.optimization.muon import Muon, matrices_of

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


LEAST_SCALE = 2.0**-10
"""Loss scale of float16 below which overflows are not the scale's fault."""


class Precision:
    """Autocast in one type, with copies of the weights in bfloat16, and with loss scaling in float16.

    None of it for float32.
    """

    def __init__(self, setting: str, device: torch.device) -> None:
        """`setting` is the recipe's. Raises: RunError where the hardware cannot do it."""
        self.device = device
        self.name = best_precision(device) if setting == "auto" else setting
        if self.name == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise RunError(f"{torch.cuda.get_device_name(device)} has no bfloat16; use --precision float16 or float32")
        self.scaler = torch.amp.GradScaler(device.type) if self.name == "float16" else None
        """float16 has no room below 6e-8: the loss is scaled up before backward, gradients down before clipping."""

    def autocast(self) -> AbstractContextManager[object]:
        """The context for forward passes and losses."""
        return autocast(self.device, None if self.name == "float32" else getattr(torch, self.name))

    @property
    def lowers_weights(self) -> bool:
        """Whether passes run on copies of the weights in the lower type (`mtkit.model.low_weights`)."""
        return self.name == "bfloat16" and self.device.type in ("cpu", "cuda")

    @property
    def exhausted(self) -> bool:
        """Whether float16's gradients overflow at every scale, so that no update is made. Waits for the device."""
        return self.scaler is not None and self.scaler.get_scale() < LEAST_SCALE

    def scaled(self, objective: Tensor) -> Tensor:
        """The scalar that gradients are taken of: larger where the type needs it."""
        return objective if self.scaler is None else self.scaler.scale(objective)


def precisions(device: torch.device) -> tuple[str, ...]:
    """What `auto` can be on this device: of several, the faster one is found by measuring."""
    best = best_precision(device)
    return ("float32", best) if device.type == "cpu" and best != "float32" else (best,)


def best_precision(device: torch.device) -> str:
    """bfloat16 where it has units of its own, float16 on older GPUs, float32 on other CPUs."""
    if device.type == "cuda":
        # before Ampere bfloat16 is emulated, slower than float32
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
    if device.type == "cpu":
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return "bfloat16" if fast else "float32"
    return "float32"


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
