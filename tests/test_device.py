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


def test_another_default_type_is_one_clear_error() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(MtkitError, match=r"tensors of torch\.float64 here; call torch\.set_default_dtype"):
            find_device("cpu")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["meta", "", "gpu9", "cpu:x", "cuda:99999999999999999999"])
def test_what_computes_nothing_is_no_device(name: str) -> None:
    with pytest.raises(MtkitError, match=f"no device '{name}' here"):
        find_device(name)
