"""Where to decode, and in which arithmetic."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch
from torch import nn

from mtkit.decoding.search import Model
from mtkit.errors import MtkitError
from mtkit.model.int8 import int8_products
from mtkit.model.low_weights import LowWeights

DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
"""The arithmetic of matrix products by name; auto is float32, whose results do not depend on the batch. In int8 linear
layers alone compute, on the CPU."""


def find_device(name: str = "auto") -> torch.device:
    """The device of that name; auto is the GPU where there is one. Raises: MtkitError where there is none such."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise MtkitError(f"no device '{name}' here; use --device auto or --device cpu") from error
    return device


def find_dtype(name: str) -> torch.dtype | None:
    """The type of that name, None for auto. Raises: MtkitError."""
    if name not in DTYPES:
        raise MtkitError(f"no dtype '{name}'; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


@contextmanager
def decoding_with(model: Model, dtype: torch.dtype | None) -> Iterator[torch.device]:
    """Around decoding: the model in evaluation mode, no gradients, matrix products in `dtype`; gives its device.

    The model is in its own mode again afterwards. None stands for float32. Raises: MtkitError for int8 on a GPU, and
    where the GPU's memory does not hold a batch.
    """
    training, device = model.training, next(model.parameters()).device
    model.train(False)
    try:
        with torch.no_grad(), _products(model, dtype, device.type):
            yield device
    except torch.OutOfMemoryError as error:
        raise MtkitError(
            "the GPU's memory does not hold a batch to translate; lower decoding.batch_tokens "
            "(mtkit translate --batch-tokens)"
        ) from error
    finally:
        model.train(training)


def _products(model: Model, dtype: torch.dtype | None, device: str) -> AbstractContextManager[object]:
    if dtype == torch.int8:
        return int8_products(cast(nn.Module, model))
    lower = dtype not in (None, torch.float32)
    products = torch.autocast(device, dtype if lower else torch.bfloat16, enabled=lower)
    if dtype == torch.bfloat16 and device == "cpu":
        return _both(LowWeights(cast(nn.Module, model)).in_place(), products)
    return products


@contextmanager
def _both(one: AbstractContextManager[object], other: AbstractContextManager[object]) -> Iterator[None]:
    with one, other:
        yield
