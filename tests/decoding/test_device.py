"""Where to decode, and in which arithmetic."""

from collections.abc import Callable

import pytest
import torch

from mtkit.decoding.device import decoding_with, find_device, find_dtype
from mtkit.errors import MtkitError
from tests.decoding.tiny import TinyModel


def test_devices_by_name() -> None:
    assert find_device("cpu").type == "cpu"
    assert find_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    for wrong in ("gpu", "cuda:99", "abacus"):
        with pytest.raises(MtkitError, match=f"'{wrong}'"):
            find_device(wrong)


def test_types_by_name() -> None:
    assert find_dtype("auto") is None
    assert find_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(MtkitError, match="float32"):
        find_dtype("int4")


def cuda_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("fails", [cuda_out_of_memory, lambda: torch.empty(1 << 50)])
def test_a_batch_that_memory_does_not_hold_is_one_clear_error(fails: Callable[[], object]) -> None:
    model = TinyModel().train()
    with pytest.raises(MtkitError, match=r"lower decoding\.batch_tokens"), decoding_with(model, None):
        fails()
    assert model.training


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="size of tensor"), decoding_with(TinyModel(), None):
        torch.ones(2) + torch.ones(3)


def test_decoding_leaves_the_model_as_it_was() -> None:
    model = TinyModel().train()
    with decoding_with(model, torch.bfloat16):
        assert not model.training
        assert (model.weight @ model.weight.T).dtype == torch.bfloat16
        assert not (model.weight * 2).requires_grad
    assert model.training
    with decoding_with(model, None):
        assert (model.weight @ model.weight.T).dtype == torch.float32
