"""Child process of a comparison, which trains, translates and scores one trial.

`python -m mtkit.experiments.run FOLDER TRIAL [--threads N] [--device D] [--shared]`, as `mtkit.experiments.compare`
starts it. Each trial has its own process, so that its peak memory can be measured.
"""

import argparse
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from typing_extensions import TypedDict

from mtkit.data.prepared import Prepared, open_prepared
from mtkit.decoding.files import translate_side
from mtkit.decoding.held_out import HeldOut, held_out
from mtkit.decoding.translator import Translator
from mtkit.device import find_device, hardware
from mtkit.errors import MtkitError
from mtkit.evaluation.scores import distinct_languages, doubt, named_metrics, with_intervals
from mtkit.evaluation.statistics import gather
from mtkit.experiments.children import DECODING
from mtkit.experiments.entries import family
from mtkit.experiments.folder import Folder
from mtkit.experiments.rows import curve
from mtkit.experiments.study import trial_recipe
from mtkit.memory import peak_bytes
from mtkit.process import keep_freed_memory
from mtkit.recipe import Recipe
from mtkit.runs import Run
from mtkit.storage.files import inside, write_json
from mtkit.storage.records import Count, read_stored
from mtkit.training.metrics import read_metrics
from mtkit.training.precision import Precision
from mtkit.training.progress import Progress
from mtkit.training.train import train
from mtkit.version import __version__

LENGTHS = (100, 1_000)
"""Target tokens after which the decoding state is measured."""


def main() -> int:
    """Run the trial and return the exit status: 0 if there is a row, even the row of a failure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("trial")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shared", action="store_true")
    arguments = parser.parse_args()
    folder, name = Folder(arguments.folder), arguments.trial
    threading.Thread(target=_stop_without_parent, daemon=True).start()
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    machine: dict[str, Any] = {
        "threads": arguments.threads,
        "shared": arguments.shared,
        "hardware": "",
        "device": arguments.device,
    }
    try:
        # the child of a killed comparison may still write its checkpoint: the lock waits until it has ended
        with FileLock(folder.lock(name)):
            if "failed" not in (folder.row(name) or {"failed": ""}):
                return 0  # another process has finished it
            device = find_device(arguments.device)
            machine |= {"hardware": hardware(device), "device": str(device)}
            return run_trial(folder, name, device, machine)
    except MtkitError as error:
        folder.fail(name, str(error), **machine)
    except Exception as error:  # one trial's bug must not stop the others; its traceback is in the log
        traceback.print_exc()
        folder.fail(name, f"{type(error).__name__}: {error}", **machine)
    return 0


def run_trial(folder: Folder, name: str, device: torch.device, machine: Mapping[str, Any]) -> int:
    """Train, translate, score and write the row, with the keys of `machine`.

    Return 0, or 128 + the signal that stopped the training.

    Raises: MtkitError and other errors of training and decoding.
    """
    begin, trial = monotonic(), folder.trial(name)
    recipe = trial_recipe(trial["recipe"], "its recipe")
    prepared = open_prepared(recipe.data.folder)
    if prepared.fingerprint != trial["data"]:
        raise MtkitError(f"the prepared data in {prepared.folder} has changed since the comparison was started")
    outcome = train(
        recipe,
        prepared,
        folder.run(name),
        command=["mtkit", "compare", "--output", str(folder.path)],
        device=str(device),
        say=lambda line: print(line, flush=True),
    )
    run, cost = Run(folder.run(name)), inside(folder.run(name), "cost.json")
    earlier_cost = _cost_before(cost)
    peak, seconds = earlier_cost["peak_bytes"], earlier_cost["seconds"]
    if outcome.trained or not cost.exists():  # after a resume: over all processes
        peak, seconds = max(peak, peak_bytes(device)), seconds + monotonic() - begin
        write_json(cost, {"peak_bytes": peak, "seconds": seconds})
    if outcome.signal is not None:
        return 128 + outcome.signal
    print(DECODING, flush=True)
    begin = monotonic()
    translated, statistics = _translate(run, recipe, prepared, device, _sides(folder, trial, prepared))
    seconds += monotonic() - begin
    peak = max(peak, peak_bytes(device))  # before the costs are counted, which takes memory
    folder.keep(
        name,
        statistics,
        family=family(run.recipe),
        **translated,
        **_validations(run),
        training=_training(outcome.progress, outcome.limit) | {"precision": _precision(run, device)},
        **_costs(run, prepared),
        peak_bytes=peak,
        minutes=seconds / 60,
        **machine,
        mtkit=__version__,
        torch=torch.__version__,
    )
    return 0


class _Cost(TypedDict):
    """Content of cost.json: peak memory in bytes, and seconds of all processes so far."""

    peak_bytes: Count
    seconds: float


def _cost_before(cost: Path) -> _Cost:
    if not cost.exists():
        return {"peak_bytes": 0, "seconds": 0.0}
    return read_stored(cost, _Cost, "delete it, and the same command resumes the comparison")


def _sides(folder: Folder, trial: Mapping[str, Any], prepared: Prepared) -> list[str | None]:
    """Return the names of the test sides to translate; None is the first one, or the validation side without any."""
    if named := folder.study().settings.sides:
        return list(named)
    return list(prepared.tests) if trial["task"] and prepared.tests else [None]


def metrics_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the metrics of a comparison: the recipe's, else BLEU, chrF and exact match."""
    if "metrics" in recipe.scoring.model_fields_set:
        return tuple(recipe.scoring.metrics)
    return ("BLEU", "chrF", "exact")


def _translate(
    run: Run, recipe: Recipe, prepared: Prepared, device: torch.device, sides: list[str | None]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Translate the sides with the recipe's settings. Return a part of the row, and statistics by side and metric."""
    scores, rows = {}, dict[str, np.ndarray]()
    translator = Translator([run], recipe.decoding, device=str(device), forks=True)
    about: dict[str, Any] = {}
    for name in sides:
        side = held_out(prepared, name)
        translations, speed, _ = translate_side(translator, side, joined=True)
        scores[side.name], statistics, warning = _score(recipe, side, [best.text for best, *_ in translations])
        rows |= {f"{side.name}/{metric}": found for metric, found in statistics.items()}
        if not about:  # speed and doubts are of the first side
            about = {"side": side.name, "decoding": {**speed.numbers(), "segments": speed.segments}}
            about |= {} if warning is None else {"doubt": warning}
    parameters = sum(parameter.numel() for parameter in translator.model.parameters())
    checkpoint = translator.about["checkpoint"]
    return {"scores": scores, **about, "checkpoint": checkpoint, "parameters": parameters}, rows


def _score(
    recipe: Recipe, side: HeldOut, hypotheses: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, np.ndarray], str | None]:
    """Return scores and statistics of a side by metric, and a warning if the tokenizer does not fit the text."""
    references = [side.references]
    languages, kinds = distinct_languages(side.target_languages or [None] * len(hypotheses))
    scoring = recipe.scoring
    metrics = named_metrics(metrics_of(recipe), languages, tokenize=scoring.tokenize, lowercase=scoring.lowercase)
    statistics = gather(metrics, hypotheses, references, kinds=kinds)
    scores = with_intervals([statistics])[0][0]
    values = {
        score.name: {"value": score.value, "low": score.low, "high": score.high, "signature": score.signature}
        for score in scores
    }
    return values, {of_metric.name: of_metric.rows for of_metric in statistics}, doubt(scores, hypotheses, references)


def _validations(run: Run) -> dict[str, Any]:
    """Return the best validation, and the learning curve: a point per validation."""
    points = curve(read_metrics(run.folder / "metrics.jsonl"))
    best = int(run.checkpoint("best").name.rpartition("-")[2])
    return {"valid": next((point for point in points if point["update"] == best), {}), "curve": points}


def _costs(run: Run, prepared: Prepared) -> dict[str, Any]:
    """Return the counted costs of the model: training FLOPs per target token, bytes of decoding state."""
    from mtkit.experiments.cost import state_bytes
    from mtkit.training.flops import flops_per_token

    model = run.load_model()
    return {
        "flops_per_token": flops_per_token(run.recipe, prepared),
        "state_bytes": {str(length): state_bytes(model, length) for length in LENGTHS},
    }


def _precision(run: Run, device: torch.device) -> str:
    """Return the precision of the training; with `auto`, the measured choice if there was one."""
    return run.about.get("precision") or Precision(run.recipe.training.precision, device).name


def _training(progress: Progress, limit: str | None) -> dict[str, Any]:
    return {
        "updates": progress.update,
        "tokens": progress.tokens,
        "seconds": progress.training_seconds,
        "tokens_per_second": progress.tokens / max(progress.training_seconds, 1e-9),
        "limit": limit,
    }


def _stop_without_parent() -> None:
    """Terminate this process when the parent ends: standard input is a pipe from the parent, which then closes."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
