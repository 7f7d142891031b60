"""What CTranslate2 can do as mtkit does it: the first reason against it, by its name in recipe or command."""

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from mtkit.decoding.engines.weights import GROUPED, unlike_plain
from mtkit.model.build import choose_attention
from mtkit.recipe import DecodingSettings, Recipe
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
    part = not_held(runs[0].recipe)
    if part is not None:
        return f"its format has no {part}"
    return _of_settings(settings) or _of_arithmetic(dtype, device)


def not_held(recipe: Recipe) -> str | None:
    """The first part of the model that its format does not hold, as a recipe names it; None: it holds all."""
    part = unlike_plain(recipe, besides=(*GROUPED, "rotary"))
    if part is None and recipe.model.positions != "none":
        for role, (first, *_) in choose_attention(recipe).items():
            # it leaves out the absolute positions of a side whose first layer has rotary ones
            if first.options.get("positions"):
                return f"model.positions {recipe.model.positions} beside the rotary positions of {role} attention"
    return part


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
