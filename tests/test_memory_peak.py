import subprocess
import sys

import pytest

HELD = """
import torch
from mtkit.memory import forget_peak, peak_bytes

cpu = torch.device("cpu")
forget_peak()
before = peak_bytes(cpu)
held = torch.ones(64 << 20)  # 256 MiB
del held
print(peak_bytes(cpu) - before)
forget_peak()
print(peak_bytes(cpu) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not forget")
def test_the_peak_is_kept_until_it_is_forgotten() -> None:
    """In a process of its own: where others have freed memory that is kept, the tensor takes no more."""
    made = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True)
    kept, forgotten = map(int, made.stdout.split())
    assert kept > 200 << 20
    assert forgotten < 100 << 20
