"""Devices by name."""

import pytest
import torch

from mtkit.device import autocast, autocast_disabled, find_device, varied_shapes
from mtkit.errors import MtkitError
from mtkit.training.precision import fast_and_repeatable


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


def test_attention_keeps_off_cudnn_which_compiles_each_shape() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with varied_shapes():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    with fast_and_repeatable(torch.device("cpu")):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_autocast_reads_weights_that_have_changed_inside_a_callers_autocast() -> None:
    linear, x, cpu = torch.nn.Linear(4, 4), torch.ones(1, 4), torch.device("cpu")
    with torch.autocast("cpu", torch.bfloat16), autocast_disabled(cpu):
        assert linear(x).dtype == torch.float32
        with autocast(cpu, torch.bfloat16):
            first = linear(x)
        with torch.no_grad():
            linear.weight.add_(1.0)
        with autocast(cpu, torch.bfloat16):
            assert (linear(x) - first).float().mean() > 3.5
    assert not torch.is_autocast_enabled("cpu")
