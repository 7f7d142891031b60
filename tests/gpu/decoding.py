"""Translation on a GPU beside translation on the CPU."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mtkit.attention import mechanisms
from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.translate import translate_lines
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from mtkit.training.train import train
from tests.gpu.check import Result, Setup, guarded
from tests.gpu.training import builtin, own, small

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"method": "greedy"},
    "beam": {"method": "beam", "beam": 4},
    "sample": {"method": "sample"},
}


def decoding(setup: Setup) -> Iterator[Result]:
    """Translations by a model that has learned for a short time, with `full` and with each other mechanism."""
    prepared, updates = builtin(setup), 2 if setup.tiny else 60
    count, long = (4, 6) if setup.tiny else (60, 60)
    lines = [*prepared.tests["test"].source_text[:count], "", "a", "A a . " * long]
    names = [name for name in mechanisms() if name != "full" and setup.includes(name)]
    for name in ["full", *own(setup, names)]:
        with TemporaryDirectory() as folder:
            settings = {"max_updates": updates, "validate_every": updates}

            def learned(name: str = name, folder: str = folder, settings: dict[str, Any] = settings) -> Result:
                roles = mechanisms()[name].roles
                attention = {role: name if role in roles else "full" for role in ("encoder", "decoder", "cross")}
                recipe = small(training=settings, attention=attention)
                train(recipe, prepared, Path(folder) / "run", command=[], device=setup.device)
                return {"ok": True}

            trained = guarded(f"train {name}", learned)
            yield trained
            if not trained["ok"]:
                continue
            run = Run(Path(folder) / "run")
            for method in METHODS if name == "full" else ["greedy"] if setup.tiny else ["greedy", "beam"]:
                yield guarded(
                    f"decode {name} {method}", lambda run=run, method=method: _same(setup, run, method, lines)
                )
            if name == "full":
                for dtype in ("bfloat16", "float16"):
                    yield guarded(f"decode {name} {dtype}", lambda run=run, dtype=dtype: _low(setup, run, dtype, lines))


def _translated(run: Run, device: str, method: str, lines: list[str], dtype: torch.dtype | None = None) -> list[Any]:
    settings = DecodingSettings.model_validate({**METHODS[method], "batch_tokens": 4000})
    engine = ModelEngine(run.load_model(device=device), settings, dtype)
    return [each[0] for each in translate_lines(engine, run.tokenizers, lines)]


def _same(setup: Setup, run: Run, method: str, lines: list[str]) -> Result:
    here, there = (_translated(run, device, method, lines) for device in ("cpu", setup.device))
    equal = sum(cpu.pieces == gpu.pieces for cpu, gpu in zip(here, there, strict=True))
    scores = max(
        (abs(cpu.score - gpu.score) for cpu, gpu in zip(here, there, strict=True) if cpu.pieces == gpu.pieces),
        default=0.0,
    )
    return {"ok": equal == len(lines) and scores < 1e-2, "equal": equal, "of": len(lines), "scores_apart": scores}


def _low(setup: Setup, run: Run, dtype: str, lines: list[str]) -> Result:
    if setup.device == "cpu" and dtype == "float16":
        return {}
    here = _translated(run, "cpu", "greedy", lines)
    there = _translated(run, setup.device, "greedy", lines, getattr(torch, dtype))
    equal = sum(one.pieces == other.pieces for one, other in zip(here, there, strict=True))
    return {
        "ok": len(there) == len(lines) and (setup.tiny or equal >= 0.8 * len(lines)),
        "equal": equal,
        "of": len(lines),
    }
