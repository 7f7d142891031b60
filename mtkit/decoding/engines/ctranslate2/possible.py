"""What CTranslate2 can do as mtkit does it: the first reason against it, by its name in recipe or command."""

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from mtkit.decoding.engines.weights import unlike_plain
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run

COMPUTE_TYPES = {
    None: "float32",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int8: "int8",
}
"""CTranslate2's name of each number type; None stands for float32."""


def why_not(
    runs: Sequence[Run], settings: DecodingSettings, dtype: torch.dtype | None, device: torch.device
) -> str | None:
    """The first reason why CTranslate2 cannot decode these runs so; None: it can."""
    if find_spec("ctranslate2") is None:
        return "the package is not installed (pip install 'mtkit[ctranslate2]')"
    if len(runs) > 1:
        return "several runs form an ensemble, and it decodes single models"
    part = unlike_plain(runs[0].recipe, grouped=True)
    if part is not None:
        return f"its format has no {part}"
    return _of_settings(settings) or _of_arithmetic(dtype, device)


def _of_settings(settings: DecodingSettings) -> str | None:
    if settings.method == "sample":
        return "decoding.method = sample: its random numbers are others, and not repeatable"
    if settings.coverage_penalty:
        return f"decoding.coverage_penalty = {settings.coverage_penalty}: it does not tell the penalty from the score"
    if settings.no_repeat_ngram:
        return (
            f"decoding.no_repeat_ngram = {settings.no_repeat_ngram}: "
            "it divides the probability of forbidden pieces among the others"
        )
    return None


def _of_arithmetic(dtype: torch.dtype | None, device: torch.device) -> str | None:
    import ctranslate2

    if device.type == "cuda" and not ctranslate2.get_cuda_device_count():
        return "it finds no CUDA device"
    if device.type not in ("cpu", "cuda"):
        return f"it has no device {device.type}"
    name = COMPUTE_TYPES[dtype]
    if name not in ctranslate2.get_supported_compute_types(device.type):
        return f"it has no {name} on this {device.type.upper()}"
    return None
