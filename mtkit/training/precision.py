"""Arithmetic of training: autocast, loss scaling, and repeatable results."""

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from mtkit.device import autocast, autocast_disabled, hardware, has_triton, tf32_products, varied_shapes
from mtkit.errors import RunError

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
        advice = "set training.deterministic: false, or choose other attentions"
        if WORKSPACES in str(error):
            reason, advice = "this process has multiplied on the GPU without it before", "train in a new process"
        raise RunError(f"training cannot be deterministic on {device.type}: {reason}; {advice}") from error
    finally:
        torch.set_flush_denormal(flushing)
        if device.type == "cuda":  # the call imports PyTorch's compiler
            _set_deterministic(*modes)


def why_not_exact(device: torch.device, *, deterministic: bool) -> str | None:
    """Return a line on why a resumed run may not equal an uninterrupted one; None if it does."""
    if device.type != "cuda" or deterministic:
        return None
    return (
        "on a GPU some sums differ in their last digits from run to run, so a resumed run may differ from an "
        "uninterrupted one; training.deterministic: true prevents this, and is slower"
    )


def _set_deterministic(deterministic: bool, warn_only: bool, fill_memory: bool) -> None:
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill_memory  # type: ignore[attr-defined]


AMPERE = (8, 0)
"""Compute capability of the first GPUs with bfloat16 and tf32."""

LEAST_SCALE = 2.0**-10
"""Loss scale of float16 below which overflows are not caused by the scale."""


class Precision:
    """The precision of training: float32, or autocast in bfloat16 (`LowWeights`) or float16 (with a loss scale).

    tf32 is float32, but a GPU rounds the factors of products to 11 bits.
    """

    def __init__(self, setting: str, device: torch.device, *, kernels: bool = False, graphs: bool = False) -> None:
        """`setting` is `training.precision`; `kernels`: whether updates use kernels in Triton; `graphs`: whether passes
        over batches are repeated from CUDA graphs.

        Raises: RunError if the hardware does not support the precision.
        """
        self.device, self.kernels, self.graphs = device, kernels, graphs
        self.name = best_precision(device) if setting == "auto" else setting
        if (
            self.name == "bfloat16"
            and device.type == "cuda"
            and not torch.cuda.is_bf16_supported(including_emulation=False)
        ):
            raise RunError(f"{torch.cuda.get_device_name(device)} has no bfloat16; use --precision float16 or float32")
        if self.name == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < AMPERE):
            raise RunError(f"{hardware(device)} has no tf32, which GPUs have since Ampere; use --precision float32")
        self.scaler = torch.amp.GradScaler(device.type) if self.name == "float16" else None
        """float16 has no numbers below 6e-8: the loss is scaled up before backward, gradients down before clipping."""

    def autocast(self) -> AbstractContextManager[object]:
        """The context of forward passes and losses."""
        return autocast(self.device, None if self.name in ("float32", "tf32") else getattr(torch, self.name))

    def products(self) -> AbstractContextManager[object]:
        """The context of updates."""
        return tf32_products(self.name == "tf32")

    def __str__(self) -> str:
        additions = " and ".join(["Triton"] * self.kernels + ["CUDA graphs"] * self.graphs)
        return f"{self.name} with {additions}" if additions else self.name

    @property
    def lowers_weights(self) -> bool:
        """Whether passes compute with `LowWeights`."""
        return self.name == "bfloat16" and self.device.type in ("cpu", "cuda")

    @property
    def exhausted(self) -> bool:
        """Whether float16 gradients overflow at every scale, so that no update is made. Waits for the device."""
        return self.scaler is not None and self.scaler.get_scale() < LEAST_SCALE

    def scaled(self, objective: Tensor) -> Tensor:
        """Return the scalar for the backward pass: the objective, scaled up in float16."""
        return objective if self.scaler is None else self.scaler.scale(objective)


def update_precisions(setting: str, device: torch.device, *, graphs: bool = True) -> list[Precision]:
    """Return the ways to compute updates on this device with this `training.precision`; the fastest is chosen.

    `graphs`: whether the model's passes can be repeated from CUDA graphs.
    """
    candidates = [Precision(setting, device)]
    if setting == "auto" and device.type == "cpu" and candidates[0].name != "float32":
        candidates.insert(0, Precision("float32", device))
    if device.type == "cuda":
        if has_triton():
            candidates.append(Precision(setting, device, kernels=True))
        if graphs:
            candidates.append(Precision(setting, device, kernels=candidates[-1].kernels, graphs=True))
    return candidates


def best_precision(device: torch.device) -> str:
    """bfloat16 if the hardware has units for it, float16 on older GPUs, float32 on other CPUs."""
    if device.type == "cuda":
        # before Ampere bfloat16 is emulated, slower than float32
        return "bfloat16" if torch.cuda.get_device_capability(device) >= AMPERE else "float16"
    if device.type == "cpu":
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return "bfloat16" if fast else "float32"
    return "float32"
