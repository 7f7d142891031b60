"""The machine: versions, back ends of attention, rates of products and copies."""

import platform
import time
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.gpu.check import Result, Setup, guarded

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def wait(device: str) -> None:
    """Waits until the device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def median_seconds(compute: Callable[[], object], device: str, repeats: int = 10, warmup: int = 3) -> float:
    """Median time of a call, the device waited for."""
    times = []
    for number in range(warmup + repeats):
        wait(device)
        begin = time.perf_counter()
        compute()
        wait(device)
        if number >= warmup:
            times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]


def machine(setup: Setup) -> Iterator[Result]:
    """Versions, SDPA's back ends with and without a mask, the rates that speed is compared with."""
    device = setup.device
    about = {"torch": torch.__version__, "python": platform.python_version()}
    if device == "cuda":
        about |= {"card": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    yield {"check": "versions", **about}
    for name, backend in BACKENDS.items():
        for masked in (False, True):
            yield guarded(
                f"sdpa {name} {'mask' if masked else 'no mask'}", lambda b=backend, m=masked: _sdpa(setup, b, m)
            )
    side = 256 if setup.tiny else 8192
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, y = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        seconds = median_seconds(lambda x=x, y=y: x @ y, device)
        yield {"check": f"product {str(dtype)[6:]} {side}", "tflops": round(2 * side**3 / seconds / 1e12, 1)}
    x = torch.empty(1 << (20 if setup.tiny else 29), device=device)
    y = torch.empty_like(x)
    seconds = median_seconds(lambda: y.copy_(x), device)
    yield {"check": "copy", "gb_per_s": round(2 * x.nbytes / seconds / 1e9, 1)}


def _sdpa(setup: Setup, backend: SDPBackend, masked: bool) -> Result:
    q, k, v = (torch.randn(2, 8, 64, 64, device=setup.device, dtype=torch.bfloat16) for _ in range(3))
    mask = torch.ones(2, 1, 1, 64, device=setup.device, dtype=torch.bool) if masked else None
    try:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    except RuntimeError as error:
        return {"runs": False, "reason": str(error)[:100]}
    return {"runs": True}
