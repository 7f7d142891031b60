"""The process's arithmetic in training: fast, and the same each time.

Copies of the float32 weights in bfloat16, with which the passes of training compute.

Autocast alone rounds the factors of each product, but what passes between products stays in float32 and is rounded
again by every product that reads it. If the matrices are bfloat16, so are the tokens' vectors from the embedding on
(Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1: float32 master weights and low copies).
The biases of linear layers are copied too: a product has one type for matrix and bias. Other vectors, such as norms,
stay in float32, and so do buffers and the weights of attentions that must not round (`unrounded`).
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from mtkit.attention.contract import unrounded_parts
from mtkit.device import autocast, autocast_disabled, varied_shapes
from mtkit.errors import RunError

WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"
"""Where cuBLAS reads, when it starts, how large its workspaces are; of a fixed size, they make it sum in one order."""


@contextmanager
def fixed_workspaces(deterministic: bool) -> Iterator[None]:
    """Around all that CUDA does, its start too: what `fast_and_repeatable` needs of cuBLAS to be deterministic."""
    before = os.environ.get(WORKSPACES)
    if deterministic and before is None:
        os.environ[WORKSPACES] = ":4096:8"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(WORKSPACES, None)


@contextmanager
def fast_and_repeatable(device: torch.device, *, deterministic: bool = False) -> Iterator[None]:
    """The process's arithmetic as training wants it, and as it was afterwards.

    That a caller records no gradients, computes in inference mode or by autocast, or has seeded the generators, changes
    nothing inside.

    On a GPU, sums by atomic additions differ from run to run. They are avoided where PyTorch can, and where
    `deterministic` altogether; what cannot be done without them is then refused.

    Raises: RunError naming what is refused.
    """
    modes = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )
    flushing = not torch.tensor(1e-40) * 1.0
    # numbers below 1e-38, as old Adam moments become, take a hundred times longer than zeros
    torch.set_flush_denormal(True)
    # setting it makes MKL keep to it for good; validation does so, and what comes after must equal what a resume makes
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
                _ask(True, not deterministic, False)
                if not deterministic:  # `why_not_exact` has said it, once for all operations
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
        _ask(*modes)


def why_not_exact(device: torch.device, *, deterministic: bool) -> str | None:
    """Why a resumed run may not equal an uninterrupted one, as a line for people; None where it does."""
    if device.type != "cuda" or deterministic:
        return None
    return (
        "on a GPU some sums differ in their last digits from run to run, so that a resumed run may differ from an "
        "uninterrupted one; training.deterministic: true prevents it, and takes longer"
    )


def _ask(deterministic: bool, warn_only: bool, fill_memory: bool) -> None:
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill_memory  # type: ignore[attr-defined]


class LowWeights:
    """Copies of a model's matrices and linear biases in bfloat16, for its passes under autocast in that type."""

    def __init__(self, model: nn.Module) -> None:
        unrounded = {each for part in unrounded_parts(model) for each in part.parameters()}
        biases = {each.bias for each in model.modules() if isinstance(each, nn.Linear)}
        self._parameters = [
            each
            for each in model.parameters()
            if (each.dim() >= 2 or each in biases) and each.dtype == torch.float32 and each not in unrounded
        ]
        self._copies: list[Tensor] = []

    def refresh(self) -> None:
        """Round the weights, anew after they have changed."""
        if not self._copies:
            self._copies = [torch.empty_like(each, dtype=torch.bfloat16) for each in self._parameters]
        if self._copies:
            torch._foreach_copy_(self._copies, [each.detach() for each in self._parameters])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the parameters hold the copies; afterwards the float32 weights, and float32 gradients.

        Gradients that passes made inside have then been added to those from before. For one thread at a time.
        """
        if not self._copies:
            self.refresh()
        weights, before = [each.data for each in self._parameters], [each.grad for each in self._parameters]
        try:
            for parameter, copy in zip(self._parameters, self._copies, strict=True):
                parameter.grad, parameter.data = None, copy
            yield
        finally:
            passes = [each.grad for each in self._parameters]
            for parameter, weight in zip(self._parameters, weights, strict=True):
                parameter.grad, parameter.data = None, weight
            _add_gradients(self._parameters, before, passes)


def _add_gradients(
    parameters: Sequence[nn.Parameter], before: Sequence[Tensor | None], passes: Sequence[Tensor | None]
) -> None:
    """Sets each parameter's gradient to the sum in float32 of the one `before` and the one of the `passes`."""
    for parameter, total in zip(parameters, before, strict=True):
        parameter.grad = total
    reached = [(each, low) for each, low in zip(parameters, passes, strict=True) if low is not None]
    first = [(each, low) for each, low in reached if each.grad is None]
    again = [(each.grad, low) for each, low in reached if each.grad is not None]
    for parameter, _ in first:
        parameter.grad = torch.empty_like(parameter)
    # one call for all: a GPU needs longer to start a kernel than to run it
    if first:
        torch._foreach_copy_([cast(Tensor, each.grad) for each, _ in first], [low for _, low in first])
    for total, low in again:
        total.add_(low)


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
        """Whether passes run on copies of the weights in the lower type (`mtkit.training.precision`)."""
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
