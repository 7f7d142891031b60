"""The process's arithmetic in training: fast, and the same each time."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fast_and_repeatable(device: torch.device) -> Iterator[None]:
    """The process's arithmetic as training wants it, and as it was afterwards."""
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    # numbers below 1e-38, as old Adam moments become, take a hundred times longer than zeros
    torch.set_flush_denormal(True)
    # setting it makes MKL keep to it for good; validation does so, and what comes after must equal what a resume makes
    torch.set_num_threads(torch.get_num_threads())
    if device.type == "cuda":
        # sums by atomic additions differ from run to run, and a resumed run is to equal an uninterrupted one
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        warnings.filterwarnings("ignore", message=".*deterministic.*")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
