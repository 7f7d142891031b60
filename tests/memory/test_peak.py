import sys

import pytest
import torch

from mtkit.memory.peak import forget_peak, peak_bytes

CPU = torch.device("cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not forget")
def test_the_peak_is_kept_until_it_is_forgotten() -> None:
    forget_peak()
    before = peak_bytes(CPU)
    held = torch.ones(64 << 20)  # 256 MiB
    del held
    assert peak_bytes(CPU) > before + (200 << 20)
    forget_peak()
    assert peak_bytes(CPU) < before + (100 << 20)
