"""Devices by name, and what is sent to them."""

import torch
from torch import Tensor

from mtkit.errors import MtkitError


def find_device(name: str = "auto") -> torch.device:
    """The device of that name; auto is the GPU where there is one.

    Raises: MtkitError where there is none such, and as `check_default_type`.
    """
    check_default_type()
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # which `meta` cannot do
    except (RuntimeError, AssertionError, ImportError, ValueError) as error:
        raise MtkitError(f"no device '{name}' here; use --device auto or --device cpu") from error
    return device


def check_default_type() -> None:
    """Raises: MtkitError where new tensors are of another type than float32, which all here takes them for."""
    if (dtype := torch.get_default_dtype()) != torch.float32:
        raise MtkitError(f"PyTorch makes tensors of {dtype} here; call torch.set_default_dtype(torch.float32) first")


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """x, made on the CPU, on a device, without waiting for what the device still has to do."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
