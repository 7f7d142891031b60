"""mtkit from Python: `prepare`, `train`, `load`, `score` and `compare`, which do what the commands do."""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mtkit.data.encode import usable_cores
from mtkit.data.place import changed_settings
from mtkit.data.prepare import Report
from mtkit.data.prepare import prepare as prepare_data
from mtkit.data.prepared import open_prepared
from mtkit.decoding.alignment import Alignment
from mtkit.decoding.translated_text import with_translations
from mtkit.decoding.translation import Translation
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError
from mtkit.evaluation.metrics import METRICS
from mtkit.evaluation.scores import RESAMPLES, Score, score_corpus
from mtkit.experiments.compare import compare as run_trials
from mtkit.experiments.compare import outcome_of
from mtkit.experiments.entries import split
from mtkit.experiments.folder import Folder
from mtkit.experiments.outputs import write_outputs
from mtkit.experiments.place import Place
from mtkit.experiments.pruning import Pruning
from mtkit.experiments.setup import set_up
from mtkit.experiments.study import make_study, read_study
from mtkit.forking import new_turn
from mtkit.model.build import label_attention
from mtkit.recipe import Recipe, load_recipe, merged, overridden
from mtkit.recipe.file import with_variables
from mtkit.recipe.settings import with_method
from mtkit.runs import find_run, initial_run, named_run, resumable_folder, run_folder
from mtkit.terminal import Say, quiet
from mtkit.text.languages import language_of
from mtkit.text.text_files import Lines, checked_lines
from mtkit.text.tokenizer import EOS
from mtkit.training.metrics import ignoring_write_errors
from mtkit.training.progress import Outcome
from mtkit.training.train import train as run_training

Settings = Recipe | Mapping[str, Any] | Path | str | None
"""A recipe: nested settings, the path of a YAML file, the name of a recipe that comes with mtkit, or None for the
defaults."""

Text = Path | Iterable[str]
"""Lines: a file (.gz too), or an iterable of lines."""


@dataclass(frozen=True)
class TranslatedLine:
    """The translation of a line, and its alternatives."""

    source: str
    text: str
    """Translation, without line ends; empty for a blank line."""
    score: float
    """Score that ranks hypotheses: log-probability / length^alpha, plus the coverage penalty."""
    log_prob: float
    pieces: list[str]
    """Target pieces as sentencepiece spells them, without the end mark."""
    parts: int
    """Number of parts in which the line was translated: more than 1 for a line that is too long, 0 for a blank one."""
    cut: bool
    """Whether the translation has the maximum number of pieces, so that its end may be missing."""
    alternatives: "list[TranslatedLine]"
    """The `n_best` - 1 other hypotheses, best first."""
    _align: InitVar[Callable[[], Alignment] | None] = None

    def __post_init__(self, _align: Callable[[], Alignment] | None) -> None:
        # an attribute, not a field: it holds the model, which copies and pickles leave out
        vars(self)["_align"] = _align

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_align"}

    @cached_property
    def alignment(self) -> Alignment:
        """Attention to the source at the prediction of each piece, computed at first use.

        A copied or pickled line has it only if it was computed before.

        Raises: MtkitError if the cross attention has no weights, and for a copy without alignment; DataError for a line
        that is blank or too long.
        """
        align: Callable[[], Alignment] | None = vars(self).get("_align")
        if align is None:
            raise MtkitError("a copied or pickled line has no model to align with; read its alignment before the copy")
        return align()


class LoadedRun:
    """The model of a run, ready to translate. Threads that share it take turns; its `translator` serves one thread."""

    def __init__(self, translator: Translator) -> None:
        self.translator = translator
        """Translator with the decoding settings of the run's recipe."""
        self._turn = new_turn()  # bfloat16 and int8 replace layers of the model while it translates

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.translator,)  # a copy has a lock of its own

    @property
    def directions(self) -> list[str]:
        """Translation directions, e.g. `en-de`; most runs have one."""
        return self.translator.runs[0].directions

    def translate(self, lines: Iterable[str], *, direction: str | None = None, **settings: Any) -> list[TranslatedLine]:
        """Translate N lines into N objects, in order. Line ends are removed.

        A run with several directions requires `direction`. `settings` are the recipe's `decoding` settings, such as
        `beam=5` and `n_best=2`; their defaults come from the run's recipe. `beam` without `method` selects beam search.

        Each line is translated separately, also by a run that was trained on documents; `mtkit.translate_file` joins
        the lines of documents.

        Raises: RecipeError for an unknown setting or an invalid value; MtkitError for an unknown direction, for a line
        that is not text, and for a setting that the search ignores.
        """
        if isinstance(lines, str):
            raise MtkitError("translate takes a list of lines, not one string; write [text]")
        if isinstance(lines, Path):
            raise MtkitError("translate takes a list of lines, not a file; mtkit.translate_file translates files")
        lines = list(checked_lines(lines))
        translator = self.translator
        if settings:
            for name in ("context", "document_pieces"):
                if name in settings:
                    raise MtkitError(f"{name} has no effect on separate lines; mtkit.translate_file joins lines")
            settings = with_method(settings)
            chosen = translator.runs[0].recipe.with_decoding(settings).decoding
            if ignored := chosen.without_effect(settings):
                raise MtkitError(f'{ignored[0]} has no effect with method="{chosen.method}"; add method="{ignored[1]}"')
            translator = translator.with_settings(chosen)
        with self._turn:
            translations = translator.translate(lines, direction=direction)
        results = []
        for source, hypotheses in zip(lines, translations, strict=True):
            best, *others = (self._line(source, hypothesis, direction) for hypothesis in hypotheses)
            best.alternatives.extend(others)
            results.append(best)
        return results

    def _line(self, source: str, hypothesis: Translation, direction: str | None) -> TranslatedLine:
        translator = self.translator
        target = translator.tokenizers.target

        def alignment() -> Alignment:
            with self._turn:
                return translator.align(source, hypothesis, direction=direction)

        return TranslatedLine(
            source,
            hypothesis.text,
            hypothesis.score,
            hypothesis.log_prob,
            [target.piece(piece) for piece in hypothesis.pieces if piece != EOS],
            hypothesis.parts,
            hypothesis.cut,
            [],
            alignment,
        )


def load(
    run: Path | str | None = None,
    *,
    checkpoint: str = "best",
    device: str = "auto",
    dtype: str = "auto",
    engine: str = "mtkit",
) -> LoadedRun:
    """Load the model of a run: its folder, its name in ./mtkit-runs, or None for the latest run there.

    The model and the tokenizers are read now: the run's folder may be moved or changed afterwards.

    Raises: RunError or DataError if the run does not exist or is damaged; MtkitError if the device, dtype or engine is
    not available.
    """
    opened = named_run(Path(run)) if isinstance(run, str) else find_run(run)
    return LoadedRun(Translator([opened], checkpoint=checkpoint, device=device, dtype=dtype, engine=engine))


def prepare(
    recipe: Settings = None,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    say: Say = quiet,
) -> Report:
    """Prepare the data of the recipe's section `data`, as `mtkit prepare` does.

    If the same data exists, this does nothing. Other data is replaced only with `overwrite`. `workers` is the number of
    encoding processes; None means one per core. `say` receives messages for people.

    Raises: RecipeError for an invalid setting; DataError for text that cannot be used.
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
    say: Say = quiet,
) -> Outcome:
    """Train the recipe's model on prepared data, or resume its training, as `mtkit train` does.

    The run's folder is `name` in ./mtkit-runs (None: the name of the attention); `Outcome.folder` is its path.
    `init_from` is a run (name or folder) whose best weights initialise a new run. Its model and attentions are the
    defaults of the recipe, except for a `Recipe` object, which is complete. `say` receives lines for people.

    Raises: as `mtkit.training.train.train`; DataError if the data is not prepared; KeyboardInterrupt on Ctrl-C, after a
    checkpoint. Other signals that stop the training are raised again too.
    """
    settings = _recipe(recipe, init_from, resumable_folder(name))
    folder = run_folder(label_attention(settings) if name is None else name)
    source = initial_run(settings.training.init_from if init_from is None else Path(init_from), folder)
    prepared = open_prepared(settings.data.folder)
    changed = [] if recipe is None else changed_settings(prepared.settings, settings.data)
    if changed and os.environ.get("RANK", "0") == "0":  # only one process of torchrun
        ignoring_write_errors(say)(
            f"note: {prepared.folder} was prepared with other settings than the recipe has "
            f"({'; '.join(changed[:3])}) and is not changed; to replace it: mtkit.prepare(recipe, overwrite=True)"
        )
    command = ["python", *map(str, getattr(sys, "argv", []))]  # a program that embeds Python may have none
    outcome = run_training(settings, prepared, folder, command=command, device=device, init_from=source, say=say)
    if outcome.signal is not None:
        signal.raise_signal(outcome.signal)  # for the handlers of the caller
    return outcome


def compare(
    entries: str | Sequence[str | Mapping[str, Any]] = (),
    recipe: Mapping[str, Any] | Path | str | None = None,
    *,
    out: Path | str = "mtkit-compare",
    study: Mapping[str, Any] | Path | str | None = None,
    jobs: int = 1,
    ray: str | None = None,
    device: str = "auto",
    threads: int | None = None,
    say: Say = quiet,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Train and compare entries as `mtkit compare` does; return a flat record per entry and task, the best first.

    `pandas.DataFrame(mtkit.compare(...))` is the table. `entries` are texts such as "band[window_radius=16]@encoder",
    in a list or with commas between them, or settings over the recipe. `settings` belong to a study: seeds, tasks,
    search, match, sides, columns; `study` is a study with such settings, a YAML file or a name from `mtkit studies`.
    The folder `out` has the rows of all trials; the same call resumes. Each of `jobs` processes has `threads` threads.
    `ray` is the address of a Ray cluster that runs the trials, or "auto". `say` receives a line for each trial that has
    ended.

    Raises: MtkitError for an invalid setting, if the folder has other settings, and if there is no such cluster;
    KeyboardInterrupt on Ctrl-C.
    """
    if out == "":
        raise MtkitError('out = "" is no folder; give one, as in out="mtkit-compare", or Path(".") for this folder')
    study_settings: dict[str, Any] = {}
    origin = None
    if isinstance(study, Mapping):
        study_settings = dict(study)
    elif study is not None:
        study_settings, origin = read_study(Path(study))
    if isinstance(recipe, Mapping):
        settings["settings"] = merged(recipe, settings.get("settings", {}))
    elif recipe is not None:
        settings["recipe"] = str(recipe)
    if entries:
        settings["entries"] = split(entries) if isinstance(entries, str) else list(entries)
    chosen, folder = make_study(merged(study_settings, settings), origin=origin), Folder(Path(out))
    place = Place(device, threads, jobs, ray)
    plan, data = set_up(chosen, folder, say=say)
    folder.open(chosen)
    with place.runner(folder, plan) as runner:
        stopped = run_trials(
            folder,
            plan,
            data,
            runner,
            show=quiet,
            done=lambda name: say(outcome_of(folder, name)),
            pruning=Pruning(chosen, folder),
        )
    if stopped is not None:
        signal.raise_signal(stopped)  # for the handlers of the caller
    return write_outputs(folder)[0].records()


def score(
    hypotheses: Text,
    *references: Text,
    metrics: str | Iterable[str] = METRICS,
    language: str | None = None,
    tokenize: str | None = None,
    lowercase: bool = False,
    bootstrap: int = RESAMPLES,
) -> list[Score]:
    """Score translations against one or several references with the same lines.

    `metrics` are one or several of BLEU, chrF, TER, exact and token. `language` is the target language, which selects
    the tokenizers of BLEU and TER; by default it is taken from the name of the first reference's file, else from its
    script. `tokenize` selects BLEU's directly. `bootstrap` is the number of resamples for intervals (`score_corpus`), 0
    for none.

    Raises: as `mtkit.evaluation.scores.score_corpus`; DataError for a file that cannot be read; MtkitError for a line
    that is not text.
    """
    lines = _lines(hypotheses, "the hypothesis")
    others = [_lines(reference, f"reference {number}") for number, reference in enumerate(references, start=1)]
    if language is None and others:
        language = language_of(references[0].name if isinstance(references[0], Path) else "", others[0])
    return score_corpus(
        lines,
        others,
        metrics=metrics,
        bootstrap=bootstrap,
        tokenize=tokenize,
        lowercase=lowercase,
        languages=None if language is None else [language] * len(lines),
    )


def _recipe(recipe: Settings, init_from: Path | str | None = None, begun: Path | None = None) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    overrides = {} if init_from is None else {"training": {"init_from": Path(init_from)}}
    if isinstance(recipe, Mapping):
        return load_recipe(None, overridden(with_variables(recipe, Path("recipe")), overrides), begun)
    return load_recipe(None if recipe is None else Path(recipe), overrides, begun)


def _lines(text: Text, name: str) -> list[str]:
    if isinstance(text, str):
        raise MtkitError("give a list of lines, or a Path for a file, not one string")
    return list(Lines(text)) if isinstance(text, Path) else list(checked_lines(text, f" of {name}"))
