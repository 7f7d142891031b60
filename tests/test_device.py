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


@pytest.mark.parametrize("name", ["meta", "", "gpu9", "cpu:x", "cuda:99999999999999999999"])
def test_what_computes_nothing_is_no_device(name: str) -> None:
    with pytest.raises(MtkitError, match=f"no device '{name}' here"):
        find_device(name)
