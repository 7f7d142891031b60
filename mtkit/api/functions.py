"""mtkit from Python: `mtkit.prepare`, `mtkit.train`, `mtkit.load` and `mtkit.score`, which do what the commands do."""

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mtkit.api.loaded import LoadedRun
from mtkit.api.texts import lines_in
from mtkit.data.encode import usable_cores
from mtkit.data.prepare import Report
from mtkit.data.prepare import prepare as prepare_data
from mtkit.data.prepared import open_prepared
from mtkit.data.readers import Lines
from mtkit.decoding.translated_text import with_translations
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError
from mtkit.evaluation.metrics import METRICS
from mtkit.evaluation.scores import RESAMPLES, Score, score_corpus
from mtkit.model.build import label_attention
from mtkit.recipe import Recipe, load_recipe, overridden
from mtkit.runs import Run, beginning, begun_folder, find_run, named_run, run_folder
from mtkit.training.limits import Outcome
from mtkit.training.loop import train as run_training

Settings = Recipe | Mapping[str, Any] | Path | str | None
"""A recipe: nested settings as its file has them, the path of a file, the name of one that comes with mtkit, or None
for the defaults."""
Text = Path | Iterable[str]
"""Lines: a file (.gz too), or a list or other iterable of them."""


def load(
    run: Path | str | None = None,
    *,
    checkpoint: str = "best",
    device: str = "auto",
    dtype: str = "auto",
    engine: str = "mtkit",
) -> LoadedRun:
    """The model of a run: the run's folder, or its name in ./mtkit-runs; None: the latest run there.

    Raises: RunError where there is no such run, or it is damaged; MtkitError for a device, dtype or engine that is not
    there.
    """
    found = find_run() if run is None else _run(run)
    return LoadedRun(Translator([found], checkpoint=checkpoint, device=device, dtype=dtype, engine=engine))


def prepare(
    recipe: Settings = None,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    say: Callable[[str], object] = lambda message: None,
) -> Report:
    """Prepare the data that the recipe describes (its section `data`) in a folder, as `mtkit prepare` does.

    It does nothing where the same data is there. Other data is replaced with `overwrite` only. `workers` processes
    encode; None: one per core. `say` takes messages for people.

    Raises: RecipeError for a wrong setting; DataError for text that cannot be used.
    """
    data = _recipe(recipe).data
    if any(corpus.translated_by for corpus in data.train):
        data = with_translations(data, say=say)
    report = prepare_data(data, overwrite=overwrite, workers=workers or usable_cores())
    for note in report.notes:
        say(note)
    return report


def train(
    recipe: Settings = None,
    *,
    name: str | None = None,
    init_from: Path | str | None = None,
    device: str = "auto",
    say: Callable[[str], None] = lambda message: None,
) -> Outcome:
    """Train the recipe's model on prepared data, or resume its training, as `mtkit train` does.

    The run is the folder `name` in ./mtkit-runs (None: the name of the attention); `Outcome.folder` names it.
    `init_from` is a run, as `load` takes it, whose best weights a new run starts with. Its model and attentions are the
    defaults of the recipe, but not of a `Recipe` object, which is taken as it is. `say` takes lines for people.

    Raises: as `mtkit.training.loop.train`, and DataError where the data is not prepared.
    """
    settings = _recipe(recipe, init_from, begun_folder(name))
    folder = run_folder(label_attention(settings) if name is None else name)
    source = beginning(settings.training.init_from if init_from is None else Path(init_from), folder)
    prepared = open_prepared(settings.data.folder)
    command = ["python", *map(str, getattr(sys, "argv", []))]  # a program that embeds Python may have none
    return run_training(settings, prepared, folder, command=command, device=device, init_from=source, say=say)


def score(
    hypotheses: Text,
    *references: Text,
    metrics: str | Iterable[str] = METRICS,
    language: str | None = None,
    tokenize: str | None = None,
    lowercase: bool = False,
    bootstrap: int = RESAMPLES,
) -> list[Score]:
    """The scores of translations against one or several references, line by line.

    `metrics` are one or several of BLEU, chrF, TER and exact. `language` is the target language, which decides how BLEU
    and TER cut text; `tokenize` names BLEU's tokenizer instead. `bootstrap` is the number of resamples for intervals
    (`score_corpus`), 0 for none.

    Raises: as `mtkit.evaluation.scores.score_corpus`; DataError for a file that cannot be read; MtkitError for a line
    that is no text.
    """
    found = _lines(hypotheses, "the hypothesis")
    return score_corpus(
        found,
        [_lines(each, f"reference {number}") for number, each in enumerate(references, start=1)],
        metrics=metrics,
        bootstrap=bootstrap,
        tokenize=tokenize,
        lowercase=lowercase,
        languages=None if language is None else [language] * len(found),
    )


def _recipe(given: Settings, init_from: Path | str | None = None, begun: Path | None = None) -> Recipe:
    if isinstance(given, Recipe):
        return given
    more = {} if init_from is None else {"training": {"init_from": Path(init_from)}}
    if isinstance(given, Mapping):
        return load_recipe(None, overridden(given, more), begun)
    return load_recipe(None if given is None else Path(given), more, begun)


def _run(run: Path | str) -> Run:
    return find_run(run) if isinstance(run, Path) else named_run(Path(run))


def _lines(text: Text, name: str) -> list[str]:
    if isinstance(text, str):
        raise MtkitError("give a list of lines, or a Path for a file, not one string")
    return list(Lines(text)) if isinstance(text, Path) else lines_in(text, f" of {name}")
