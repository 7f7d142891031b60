"""Check of a recipe: prepare, train, translate and score in one folder, and compare the scores with its promises.

data/        the prepared text; data-translated/ translations by runs that the data uses
run/         a run folder: mtkit translate --run FOLDER/run
check.json   scores and promises, written last

A killed check resumes: a finished step does nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtkit.data.prepare import prepare
from mtkit.data.prepared import open_prepared
from mtkit.data.report import summary
from mtkit.decoding.files import translate_side
from mtkit.decoding.held_out import held_out, unusual
from mtkit.decoding.translated_text import with_translations
from mtkit.decoding.translator import Translator
from mtkit.errors import DiffersError, MtkitError, RecipeError
from mtkit.evaluation.metrics import metric_names
from mtkit.evaluation.report import side_object
from mtkit.evaluation.side_scores import SideScores, score_side
from mtkit.evaluation.systems import run_sides
from mtkit.recipe import Recipe, load_recipe
from mtkit.recipe.file import Head, Promise, due_after, promise, read_head
from mtkit.runs import Run, can_resume
from mtkit.storage.files import inside, write_json
from mtkit.storage.records import read_object
from mtkit.terminal import ProgressBar, Say, silent
from mtkit.training.train import train


@dataclass(frozen=True)
class Checked:
    """Scores of a recipe's training, and its promises."""

    head: Head
    sides: list[SideScores]
    """Scores of every test side; empty if a signal stopped the training."""
    promises: list[tuple[Promise, float]]
    """Promises that apply to this training, with the reached scores."""
    signal: int | None = None
    """Signal that stopped the training, or None."""

    @property
    def kept(self) -> bool:
        """Whether all promises were kept."""
        return all(promised.kept(score) for promised, score in self.promises)


def check(
    path: Path,
    folder: Path,
    limits: Mapping[str, Any],
    *,
    command: Sequence[str],
    device: str = "auto",
    workers: int = 1,
    say: Say = print,
    progress: ProgressBar = silent,
) -> Checked:
    """Prepare, train, translate every test side and score it, with the recipe at `path`.

    `limits` are training settings that override the recipe's. `say` receives each line of output.

    Raises: MtkitError as the four steps do.
    """
    head = read_head(path)
    run, record = Run(inside(folder, "run")), inside(folder, "check.json")
    overrides = {"data": {"folder": inside(folder, "data")}, "training": dict(limits)}
    recipe = load_recipe(path, overrides, run.folder if can_resume(run.folder) else None)
    try:
        data = with_translations(recipe.data, device=device, say=say, progress=progress)
        report = prepare(data, workers=workers, progress=progress)
        say(f"{summary(report, recipe.model.max_length)}\n")
        prepared = open_prepared(recipe.data.folder)
        wanted = _wanted(head, recipe, list(prepared.tests) or ["valid"])
        outcome = train(recipe, prepared, run.folder, command=command, device=device, init_from=None, say=say)
    except DiffersError as error:
        raise MtkitError(f"{error.what}; delete {folder} to start again, or give another --output") from error
    if outcome.signal is not None:
        return Checked(head, [], [], outcome.signal)
    names = _translate(run, device, say, progress)
    sides = _score(run, names, [promise.metric for promise in wanted], progress)
    for note in dict.fromkeys(note for side in sides for note in side.notes):
        say(f"note: {note}")
    scores = {(side.name, score.name): score.value for side in sides for score in side.overall.scores[0]}
    checked = Checked(head, sides, [(promised, scores[promised.side, promised.metric]) for promised in wanted])
    write_json(record, _as_object(checked, recipe))
    return checked


def _wanted(head: Head, recipe: Recipe, sides: Sequence[str]) -> list[Promise]:
    """Return the promises that apply. Raises: MtkitError for a promise with an unknown side or metric."""
    promises = [promise(text) for text in recipe.promises]
    for promised in promises:
        if promised.side not in sides:
            raise RecipeError(
                f"recipe {head.name} promises '{promised.text}', but it has the sides: {', '.join(sides)}; "
                "change that promise, or take it out"
            )
    due = due_after(promises, recipe.training.max_minutes)
    return [replace(promised, metric=metric_names([promised.metric])[0]) for promised in due]


def _translate(run: Run, device: str, say: Say, progress: ProgressBar) -> list[str]:
    """Translate the test sides, or the validation side if there are none; return their names.

    A side is skipped if the same checkpoint has translated it with the same settings.
    """
    translator = Translator([run], run.recipe.decoding, device=device, forks=True)
    prepared = open_prepared(run.recipe.data.folder)
    names = list(prepared.tests) or ["valid"]
    for name in progress(names, "translating", len(names)):
        side = held_out(prepared, name)
        together = side.documents is not None and run.recipe.decoding.n_best == 1
        record = read_object(run.folder / "translations" / f"{name}.json")
        if record.items() >= {**translator.about, "by_documents": together}.items():
            continue
        found, speed, path = translate_side(translator, side, joined=True, say=say)
        numbers, counts = speed.numbers(), unusual([best for best, *_ in found])
        say(f"{name}: {len(found):,} segments in {numbers['seconds']:.1f} s, {translator.about['checkpoint']}: {path}")
        if counts["joined"]:
            say(f"{name}: {counts['joined']:,} lines were joined; {counts['fell_back']:,} were translated one by one")
        if counts["cut"]:
            say(f"{name}: {counts['cut']:,} translations reached the maximum length")
    return names


def _score(run: Run, names: Sequence[str], promised: Sequence[str], progress: ProgressBar) -> list[SideScores]:
    settings = run.recipe.scoring
    return [
        score_side(
            name,
            files,
            metrics=tuple(dict.fromkeys([*settings.metrics, *promised])),
            language=run.target_language,
            tokenize=settings.tokenize,
            lowercase=settings.lowercase,
            progress=progress,
        )
        for name, files in run_sides([run], names).items()
    ]


def _as_object(checked: Checked, recipe: Recipe) -> dict[str, Any]:
    return {
        "recipe": checked.head.name,
        "promises": [
            {"promise": promised.text, "score": score, "kept": promised.kept(score)}
            for promised, score in checked.promises
        ],
        "sides": [side_object(side) for side in checked.sides],
        "settings": recipe.model_dump(mode="json"),
    }
