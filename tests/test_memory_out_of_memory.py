"""Telling memory that gave out from other errors."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from mtkit.memory import Halving, is_oom


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_memory_that_gave_out_is_known_by_what_the_libraries_say(error: BaseException) -> None:
    assert is_oom(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
        ValueError("out of memory"),
    ],
)
def test_other_errors_are_not(error: BaseException) -> None:
    assert not is_oom(error)


def test_what_memory_does_not_hold_is_done_in_halves_and_what_comes_after_too() -> None:
    lengths = [4, 4, 4, 4, 4, 2, 2, 2, 2, 2]
    tried: list[list[int]] = []

    def work(rows: Sequence[int]) -> list[int]:
        tried.append(list(rows))
        if sum(lengths[row] for row in rows) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [10 * row for row in rows]

    halving = Halving(lengths)
    assert halving.run(work, [0, 1, 2, 3, 4]) == [[0, 10], [20], [30, 40]]
    assert tried == [[0, 1, 2, 3, 4], [0, 1, 2], [0, 1], [2], [3, 4]]
    tried.clear()
    assert halving.run(work, [5, 6, 7, 8, 9]) == [[50, 60, 70], [80, 90]]
    assert tried == [[5, 6, 7], [8, 9]], "ten pieces are known not to fit"


def test_a_single_row_that_memory_does_not_hold_and_other_errors_are_raised() -> None:
    tried: list[int] = []

    def work(rows: Sequence[int], error: Exception) -> None:
        tried.append(len(rows))
        raise error

    with pytest.raises(torch.OutOfMemoryError):
        Halving([1] * 4).run(partial(work, error=torch.OutOfMemoryError("CUDA out of memory")), [0, 1, 2, 3])
    assert tried == [4, 2, 1]
    with pytest.raises(RuntimeError, match="illegal"):
        Halving([1] * 4).run(partial(work, error=RuntimeError("illegal access")), [0, 1, 2, 3])
    assert tried == [4, 2, 1, 4]
