"""Child process of a comparison, which trains, translates and scores one mechanism.

`python -m mtkit.experiments.run FOLDER NAME`, as `mtkit.experiments.compare` starts it. Each mechanism has its own
process, so that its peak memory can be measured.
"""

import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from typing_extensions import TypedDict

from mtkit.data.prepared import Prepared, open_prepared
from mtkit.decoding.files import translate_side
from mtkit.decoding.held_out import held_out
from mtkit.decoding.translator import Translator
from mtkit.device import find_device
from mtkit.errors import MtkitError
from mtkit.evaluation.scores import doubt, score_corpus
from mtkit.experiments.folder import Folder
from mtkit.memory import peak_bytes
from mtkit.process import keep_freed_memory
from mtkit.runs import Run
from mtkit.storage.files import inside, write_json
from mtkit.storage.records import Count, read_stored
from mtkit.training.loop import train
from mtkit.training.precision import Precision
from mtkit.training.progress import Progress


def main() -> int:
    """Run the mechanism and return the exit status: 0 if there is a result, even the result of a failure."""
    folder, name = Folder(Path(sys.argv[1])), sys.argv[2]
    threading.Thread(target=_stop_without_parent, daemon=True).start()
    keep_freed_memory()
    torch.set_num_threads(folder.settings()["threads"])
    try:
        # the child of a killed comparison may still write its checkpoint: the lock waits until it has ended
        with FileLock(inside(folder.log(name).parent, f"{name}.lock")):
            return compare_one(folder, name)
    except MtkitError as error:
        folder.fail(name, str(error))
    except Exception as error:  # one mechanism's bug must not stop the others; its traceback is in the log
        traceback.print_exc()
        folder.fail(name, f"{type(error).__name__}: {error}")
    return 0


def compare_one(folder: Folder, name: str) -> int:
    """Train, translate, score and write the result. Return 0, or 128 + the signal that stopped the training.

    Raises: MtkitError and other errors of training and decoding.
    """
    recipe, settings = folder.recipe(name), folder.settings()
    prepared = open_prepared(recipe.data.folder)
    device = find_device(settings["device"])
    outcome = train(
        recipe,
        prepared,
        folder.run(name),
        command=["mtkit", "compare", "--attention", name, "--out", str(folder.path)],
        device=str(device),
        say=lambda line: print(line, flush=True),
    )
    cost = inside(folder.run(name), "cost.json")
    previous_peak = _peak_before(cost) if cost.exists() else 0
    if outcome.trained or not cost.exists():  # after a resume: the maximum over all processes
        write_json(cost, {"peak_bytes": max(previous_peak, peak_bytes(device))})
    if outcome.signal is not None:
        return 128 + outcome.signal
    print("decoding", flush=True)
    result = _translate(Run(folder.run(name)), prepared, device)
    peak = max(peak_bytes(device), _peak_before(cost))
    training = _training(outcome.progress, outcome.limit) | {"precision": _precision(Run(folder.run(name)), device)}
    folder.keep(name, **result, training=training, peak_bytes=peak)
    return 0


class _Cost(TypedDict):
    """Content of cost.json: peak memory in bytes."""

    peak_bytes: Count


def _peak_before(cost: Path) -> int:
    return read_stored(cost, _Cost, "delete it, and the same command resumes the comparison")["peak_bytes"]


def _translate(run: Run, prepared: Prepared, device: torch.device) -> dict[str, Any]:
    """Translate the test side with the recipe's settings. Return scores, speed and number of parameters."""
    recipe, side = run.recipe, held_out(prepared)
    translator = Translator([run], recipe.decoding, device=str(device), forks=True)
    translations, speed, _ = translate_side(translator, side, joined=True)
    hypotheses, references = [candidates[0].text for candidates in translations], [side.references]
    (bleu,) = score_corpus(
        hypotheses,
        references,
        metrics=("BLEU",),
        tokenize=recipe.scoring.tokenize,
        lowercase=recipe.scoring.lowercase,
        languages=side.target_languages,
    )
    warning = doubt([bleu], hypotheses, references)
    return {
        **({} if warning is None else {"doubt": warning}),
        "bleu": {"value": bleu.value, "low": bleu.low, "high": bleu.high, "signature": bleu.signature},
        "side": side.name,
        "checkpoint": translator.about["checkpoint"],
        "decoding": {**speed.numbers(), "segments": speed.segments},
        "parameters": sum(parameter.numel() for parameter in translator.model.parameters()),
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
