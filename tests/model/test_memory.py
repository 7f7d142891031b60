"""Telling memory that gave out from other errors."""

import pytest
import torch

from mtkit.model.memory import gave_out


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
    assert gave_out(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
        ValueError("out of memory"),
    ],
)
def test_other_errors_are_not(error: BaseException) -> None:
    assert not gave_out(error)
