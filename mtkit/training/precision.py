"""Arithmetic of training: autocast, loss scaling, bfloat16 copies of the weights, and repeatable results."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from mtkit.attention.contract import unrounded_parts
from mtkit.device import autocast, autocast_disabled, has_triton, varied_shapes
from mtkit.errors import RunError
from mtkit.model.sublayers import LayerNorm

WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable of cuBLAS: with workspaces of a fixed size, it always sums in the same order."""


@contextmanager
def fixed_workspaces(deterministic: bool) -> Iterator[None]:
    """The cuBLAS setting that `fast_and_repeatable` needs to be deterministic; enter it before CUDA starts."""
    setting = os.environ.get(WORKSPACES)
    if deterministic and setting is None:
        os.environ[WORKSPACES] = ":4096:8"
    try:
        yield
    finally:
        if setting is None:
            os.environ.pop(WORKSPACES, None)


@contextmanager
def fast_and_repeatable(device: torch.device, *, deterministic: bool = False) -> Iterator[None]:
    """Set the process's arithmetic for training, and restore it afterwards.

    The caller's gradient mode, inference mode, autocast and random generators do not affect anything inside.

    On a GPU, sums by atomic additions differ from run to run. PyTorch avoids them if it can; with `deterministic`,
    operations that cannot avoid them raise an error.

    Raises: RunError naming such an operation.
    """
    modes = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )
    flushing = not torch.tensor(1e-40) * 1.0
    # numbers below 1e-38, as old Adam moments become, take a hundred times longer than zeros
    torch.set_flush_denormal(True)
    # setting it is permanent for MKL; validation sets it too, and the results before and after must be the same
    torch.set_num_threads(torch.get_num_threads())
    try:
        with (
            warnings.catch_warnings(),
            torch.inference_mode(False),
            torch.enable_grad(),
            autocast_disabled(device),
            varied_shapes(),
            torch.random.fork_rng([device] if device.type == "cuda" and torch.cuda.is_available() else []),
        ):
            if device.type == "cuda":
                _set_deterministic(True, not deterministic, False)
                if not deterministic:  # `why_not_exact` warns once for all operations
                    warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    except RuntimeError as error:
        if not deterministic or "use_deterministic_algorithms" not in str(error):
            raise
        reason = " ".join(str(error).partition(", but you set")[0].split())
        raise RunError(
            f"training cannot be deterministic on {device.type}: {reason}; "
            "set training.deterministic: false, or choose other attentions"
        ) from error
    finally:
        torch.set_flush_denormal(flushing)
        _set_deterministic(*modes)


def why_not_exact(device: torch.device, *, deterministic: bool) -> str | None:
    """A line on why a resumed run may not equal an uninterrupted one; None if it does."""
    if device.type != "cuda" or deterministic:
        return None
    return (
        "on a GPU some sums differ in their last digits from run to run, so a resumed run may differ from an "
        "uninterrupted one; training.deterministic: true prevents this, and is slower"
    )


def _set_deterministic(deterministic: bool, warn_only: bool, fill_memory: bool) -> None:
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill_memory  # type: ignore[attr-defined]


class LowWeights:
    """Copies of a model's matrices, linear biases and norms in bfloat16, for passes under autocast in that type.

    Autocast only rounds the factors of each product; the tensors between products stay in float32 and are rounded again
    by every product that reads them. With bfloat16 matrices, the tokens' vectors are bfloat16 from the embedding on
    (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1: float32 master weights and low copies).
    Biases of linear layers are copied too, because a product has one type for matrix and bias, and on CUDA, whose norms
    have one type for input and weights, the norms between sub-layers. Other vectors stay in float32, and so do buffers
    and the weights of attentions that must not round (`unrounded`).
    """

    def __init__(self, model: nn.Module) -> None:
        unrounded = {parameter for part in unrounded_parts(model) for parameter in part.parameters()}
        vectors = {module.bias for module in model.modules() if isinstance(module, nn.Linear)}
        norms = [module for module in model.modules() if isinstance(module, LayerNorm)]
        vectors |= {vector for norm in norms if norm.weight.is_cuda for vector in norm.parameters()}
        self._parameters = [
            parameter
            for parameter in model.parameters()
            if (parameter.dim() >= 2 or parameter in vectors)
            and parameter.dtype == torch.float32
            and parameter not in unrounded
        ]
        self._copies: list[Tensor] = []

    def refresh(self) -> None:
        """Copy the weights again after they have changed."""
        if not self._copies and self._parameters:
            self._copies = _side_by_side(self._parameters)
        if self._copies:
            torch._foreach_copy_(self._copies, [parameter.detach() for parameter in self._parameters])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the parameters hold the copies; afterwards the float32 weights, and float32 gradients.

        Gradients of the passes inside are then added to the earlier ones. Only one thread may use it at a time.
        """
        if not self._copies:
            self.refresh()
        weights = [parameter.data for parameter in self._parameters]
        earlier = [parameter.grad for parameter in self._parameters]
        try:
            for parameter, copy in zip(self._parameters, self._copies, strict=True):
                parameter.grad, parameter.data = None, copy
            yield
        finally:
            low = [parameter.grad for parameter in self._parameters]
            for parameter, weight in zip(self._parameters, weights, strict=True):
                parameter.grad, parameter.data = None, weight
            _add_gradients(self._parameters, earlier, low)


ALIGNED = 64
"""Copies begin at multiples of this many numbers, so that products read them fast."""


def _side_by_side(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like the parameters, in bfloat16: matrices that follow each other do so in memory, and so do vectors.

    The maps of queries, keys and values can then be one factor of a product.
    """
    sizes = [-(-parameter.numel() // ALIGNED) * ALIGNED for parameter in parameters]
    memory, place = parameters[0].new_empty(sum(sizes), dtype=torch.bfloat16), 0
    copies: dict[int, Tensor] = {}
    for number in sorted(range(len(parameters)), key=lambda number: parameters[number].dim() < 2):
        parameter = parameters[number]
        copies[number] = memory[place : place + parameter.numel()].view(parameter.shape)
        place += sizes[number]
    return [copies[number] for number in range(len(parameters))]


def _add_gradients(
    parameters: Sequence[nn.Parameter], earlier: Sequence[Tensor | None], low: Sequence[Tensor | None]
) -> None:
    """Set each parameter's gradient to the float32 sum of its earlier gradient and the bfloat16 one."""
    first: list[tuple[Tensor, Tensor]] = []
    for parameter, total, gradient in zip(parameters, earlier, low, strict=True):
        parameter.grad = total
        if gradient is None:
            continue
        if total is None:
            parameter.grad = torch.empty_like(parameter)
            first.append((parameter.grad, gradient))
        else:
            total.add_(gradient)
    # one call for all: a GPU needs longer to start a kernel than to run it
    if first:
        torch._foreach_copy_([total for total, _ in first], [gradient for _, gradient in first])


LEAST_SCALE = 2.0**-10
"""Loss scale of float16 below which overflows are not caused by the scale."""


class Precision:
    """The precision of training: float32, or autocast in bfloat16 (`LowWeights`) or float16 (with loss scaling)."""

    def __init__(self, setting: str, device: torch.device, *, kernels: bool = False) -> None:
        """`setting` is `training.precision`; `kernels`: whether updates use kernels in Triton.

        Raises: RunError if the hardware does not support the precision.
        """
        self.device, self.kernels = device, kernels
        self.name = best_precision(device) if setting == "auto" else setting
        if self.name == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise RunError(f"{torch.cuda.get_device_name(device)} has no bfloat16; use --precision float16 or float32")
        self.scaler = torch.amp.GradScaler(device.type) if self.name == "float16" else None
        """float16 has no numbers below 6e-8: the loss is scaled up before backward, gradients down before clipping."""

    def autocast(self) -> AbstractContextManager[object]:
        """The context of forward passes and losses."""
        return autocast(self.device, None if self.name == "float32" else getattr(torch, self.name))

    def __str__(self) -> str:
        return f"{self.name} with Triton" if self.kernels else self.name

    @property
    def lowers_weights(self) -> bool:
        """Whether passes compute with `LowWeights`."""
        return self.name == "bfloat16" and self.device.type in ("cpu", "cuda")

    @property
    def exhausted(self) -> bool:
        """Whether float16 gradients overflow at every scale, so that no update is made. Waits for the device."""
        return self.scaler is not None and self.scaler.get_scale() < LEAST_SCALE

    def scaled(self, objective: Tensor) -> Tensor:
        """The scalar for the backward pass: the objective, scaled up in float16."""
        return objective if self.scaler is None else self.scaler.scale(objective)


def update_precisions(setting: str, device: torch.device) -> list[Precision]:
    """The candidates for computing updates with `training.precision` on this device; the fastest is to be measured."""
    candidates = [Precision(setting, device)]
    if setting == "auto" and device.type == "cpu" and candidates[0].name != "float32":
        candidates.insert(0, Precision("float32", device))
    if device.type == "cuda" and has_triton():
        candidates.append(Precision(setting, device, kernels=True))
    return candidates


def best_precision(device: torch.device) -> str:
    """bfloat16 if the hardware has units for it, float16 on older GPUs, float32 on other CPUs."""
    if device.type == "cuda":
        # before Ampere bfloat16 is emulated, slower than float32
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
    if device.type == "cpu":
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return "bfloat16" if fast else "float32"
    return "float32"
