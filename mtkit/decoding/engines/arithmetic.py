"""The context of decoding: number type, evaluation mode and inference mode."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from mtkit.device import autocast, check_default_type, varied_shapes
from mtkit.errors import MtkitError, shown
from mtkit.memory.out_of_memory import GIVES_OUT, gave_out
from mtkit.model.network import Model
from mtkit.model.products import is_low, products

DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
"""The arithmetic by name; auto is float32, whose results do not depend on the batch. In int8, and in bfloat16 on the
CPU, linear layers alone compute (`mtkit.model.products`); the rest is in float32."""


def find_dtype(name: str) -> torch.dtype | None:
    """The number type of that name, None for auto. Raises: MtkitError for an unknown name."""
    if name not in DTYPES:
        raise MtkitError(f"no dtype {shown(name)}; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


@contextmanager
def decoding_with(model: Model, dtype: torch.dtype | None) -> Iterator[torch.device]:
    """A context with the model in evaluation mode, inference mode and computation in `dtype`; gives its device.

    The model is restored on exit and serves one call at a time. None stands for float32.

    Raises: MtkitError for int8 on a GPU, where memory runs out although batches have been halved (`Halving`), and as
    `mtkit.device.check_default_type`.
    """
    check_default_type()
    training, device = model.training, next(model.parameters()).device
    model.train(False)
    try:
        # weights are rounded outside inference mode, as normal tensors
        with varied_shapes(), _computing(model, dtype, device), torch.inference_mode():
            yield device
    except GIVES_OUT as error:
        if not gave_out(error):
            raise
        raise MtkitError(
            f"the memory of {device} does not hold the model and a single segment to translate; lower decoding.beam "
            "or decoding.max_pieces, or take another --device"
        ) from error
    finally:
        model.train(training)


@contextmanager
def _computing(model: Model, dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """The linear layers in `dtype`; on a GPU, in types below float32, all that autocast knows."""
    dtype = dtype or torch.float32
    automatic = dtype not in (torch.float32, torch.int8) and not is_low(dtype, device)
    with (
        products(cast(nn.Module, model), dtype),
        autocast(device, dtype if automatic else None),
    ):
        yield
