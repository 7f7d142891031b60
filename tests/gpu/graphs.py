"""Speed of decoding on a GPU with steps recorded as CUDA graphs, and without."""

import time
from collections.abc import Iterator
from typing import Any

import torch

from mtkit.decoding.engines import model_engine
from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.step_graphs import StepGraphs
from mtkit.decoding.translate import translate_lines
from mtkit.recipe import DecodingSettings, make_recipe
from tests.gpu.check import Result, Setup, guarded
from tests.gpu.machine import wait
from tests.gpu.speed import news
from tests.gpu.training import model_of

CASES: list[tuple[dict[str, str], int, torch.dtype | None]] = [
    ({}, 1, torch.bfloat16),
    ({}, 4, torch.bfloat16),
    ({}, 4, None),
    ({"decoder": "gla"}, 4, torch.bfloat16),
    ({"decoder": "linear", "cross": "linear"}, 4, torch.bfloat16),
    ({"decoder": "sigmoid"}, 4, torch.bfloat16),
]


def step_graphs(setup: Setup) -> Iterator[Result]:
    """Seconds of 600 lines by an untrained model, which ends hardly any before its 100th piece."""
    for attention, beam, dtype in CASES[:2] if setup.tiny else CASES:
        name = f"{attention or 'full'} beam {beam} {dtype or torch.float32}"
        yield guarded(name, lambda a=attention, b=beam, d=dtype: _measured(setup, a, b, d))


def _measured(setup: Setup, attention: dict[str, str], beam: int, dtype: torch.dtype | None) -> Result:
    prepared = news(setup)
    recipe = make_recipe({"preset": "tiny" if setup.tiny else "base", "attention": attention})
    given: dict[str, Any] = {"method": "beam" if beam > 1 else "greedy", "beam": beam}
    settings = DecodingSettings.model_validate(given | {"max_pieces": 5 if setup.tiny else 100})
    engine = ModelEngine(model_of(recipe, prepared, setup.device), settings, dtype)
    lines = prepared.tests["test"].source_text[: 8 if setup.tiny else 600]
    result: Result = {}
    for way, graphs in (("graphs", StepGraphs), ("without", lambda model: model)):
        model_engine.StepGraphs = graphs  # type: ignore[misc, assignment]
        for _ in range(2):  # the first allocates memory
            wait(setup.device)
            begin = time.perf_counter()
            found = [each[0] for each in translate_lines(engine, prepared.tokenizers, lines)]
            wait(setup.device)
            result[way] = round(time.perf_counter() - begin, 3)
        result[f"{way}_pieces"] = sum(len(each.pieces) for each in found)
    return result
