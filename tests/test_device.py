"""Devices by name."""

import pytest
import torch

from mtkit.device import find_device
from mtkit.errors import MtkitError


def test_devices_by_name() -> None:
    assert find_device("cpu").type == "cpu"
    assert find_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    for wrong in ("gpu", "cuda:99", "abacus"):
        with pytest.raises(MtkitError, match=f"'{wrong}'"):
            find_device(wrong)
