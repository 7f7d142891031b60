"""Devices by name, copies to them, and autocast on them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from platform import machine

import torch
from torch import Tensor

from mtkit.errors import MtkitError, shown
from mtkit.recording import recording


def find_device(name: str = "auto") -> torch.device:
    """The device of that name; auto is the GPU if there is one.

    Raises: MtkitError if it does not exist, and like `check_default_type`.
    """
    check_default_type()
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # which `meta` cannot do
    except (RuntimeError, AssertionError, ImportError, ValueError) as error:
        raise MtkitError(f"no device {shown(name)} here; use --device auto or --device cpu") from error
    return device


def hardware(device: torch.device) -> str:
    """Return "cpu (x86_64), 2 thread(s)", or the name of the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device} ({machine()}), {torch.get_num_threads()} thread(s)"


def check_default_type() -> None:
    """Raises: MtkitError if the default type of new tensors is not float32."""
    if (dtype := torch.get_default_dtype()) != torch.float32:
        raise MtkitError(f"PyTorch makes tensors of {dtype} here; call torch.set_default_dtype(torch.float32) first")


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy x from the CPU to a device, without waiting for the device.

    Raises: RuntimeError in a recording, which would read x's memory again at each repetition.
    """
    if recording() is not None:
        raise RuntimeError("a copy from the CPU cannot be recorded")
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


@cache
def has_triton() -> bool:
    """Whether Triton can compile kernels for the GPU here, which needs a C compiler too."""
    try:
        from triton.runtime import driver

        return driver.active.get_current_target() is not None
    except Exception:
        return False


_kernels_enabled = [False]


@contextmanager
def triton_kernels(enabled: bool) -> Iterator[None]:
    """Set whether `runs_kernels` may return True inside, in all threads."""
    previous, _kernels_enabled[0] = _kernels_enabled[0], enabled
    try:
        yield
    finally:
        _kernels_enabled[0] = previous


def runs_kernels(*tensors: Tensor) -> bool:
    """Return whether kernels in Triton are enabled (`triton_kernels`) and take these tensors.

    All are on the present GPU, not empty, and of one type: bfloat16, float16 or float32.
    """
    first = tensors[0]
    return (
        _kernels_enabled[0]
        and first.is_cuda
        and first.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and all(tensor.dtype == first.dtype and tensor.numel() for tensor in tensors)
        and has_triton()
        and first.device.index == torch.cuda.current_device()  # where Triton runs kernels
    )


@contextmanager
def autocast(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast to `dtype` on the device; None disables autocast.

    PyTorch caches the low-precision copies of weights until the outermost autocast ends. This one clears the cache when
    it ends, so that the next pass reads the current weights even inside a caller's autocast.
    """
    try:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def autocast_disabled(device: torch.device) -> Iterator[None]:
    """Disable the caller's autocast without a nesting level, so that an autocast inside is the outermost."""
    enabled = torch.is_autocast_enabled(device.type)
    torch.set_autocast_enabled(device.type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device.type, enabled)


@contextmanager
def tf32_products(enabled: bool) -> Iterator[None]:
    """Whether a GPU rounds the factors of products in float32 to tf32; False leaves the process's setting."""
    if not enabled:
        yield
        return
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)


@contextmanager
def varied_shapes() -> Iterator[None]:
    """Disable the cuDNN kernels of PyTorch's fused attention, which are compiled for each shape of a batch.

    Translation batches have hundreds of shapes. A new shape costs cuDNN more time than an update; the other kernels
    work for all shapes.
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def wait(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], None], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the time of `work()`, by default the wall-clock time; waits for the device before and after."""
    wait(device)
    begin = clock()
    work()
    wait(device)
    return clock() - begin
