"""The process's arithmetic in training: fast, and the same each time."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mtkit.device import autocast_disabled, varied_shapes
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
