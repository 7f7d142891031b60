"""Lines of text from Python: of a list, an open file, or what else gives one after the other.

A loaded run for Python: lines in, an object for each translation out.

mtkit from Python: `mtkit.prepare`, `mtkit.train`, `mtkit.load` and `mtkit.score`, which do what the commands do.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mtkit.data.encode import usable_cores
from mtkit.data.prepare import Report
from mtkit.data.prepare import prepare as prepare_data
from mtkit.data.prepared import open_prepared
from mtkit.decoding.alignment import Alignment, align
from mtkit.decoding.translate import Translation
from mtkit.decoding.translated_text import with_translations
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError
from mtkit.evaluation.scores import METRICS, RESAMPLES, Score, score_corpus
from mtkit.model.build import label_attention
from mtkit.recipe import Recipe, load_recipe, make_recipe, merged, overridden
from mtkit.recipe.settings import with_method
from mtkit.runs import Run, beginning, begun_folder, find_run, named_run, run_folder
from mtkit.text.readers import Lines
from mtkit.text.tokenizer import EOS
from mtkit.training.loop import train as run_training
from mtkit.training.progress import Outcome


def lines_in(given: Iterable[str], of: str = "") -> list[str]:
    """The lines, each without the line end that an open file leaves at it; `of` follows the number in a message.

    Raises: MtkitError for a line that is no text.
    """
    lines = []
    for number, line in enumerate(given, start=1):
        if not isinstance(line, str):
            raise MtkitError(f"line {number}{of} is no text but {type(line).__name__}; give str")
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise MtkitError(f"line {number}{of} holds half of a surrogate pair, which is no character") from error
        lines.append(line.removesuffix("\n").removesuffix("\r"))
    return lines


@dataclass(frozen=True)
class TranslatedLine:
    """The translation of a line, with the next best ones."""

    source: str
    text: str
    """Without line ends; empty for a blank line."""
    score: float
    """What hypotheses are ranked by: log-probability / length^alpha, plus the coverage penalty."""
    log_prob: float
    pieces: list[str]
    """Target pieces as sentencepiece spells them, the end mark left out."""
    parts: int
    """In how many parts the line was translated: above 1 it was too long, 0 means it was blank."""
    cut: bool
    """Whether it has as many pieces as it may have, so that its end may be missing."""
    alternatives: "list[TranslatedLine]"
    """The other hypotheses, best first: `n_best` - 1 of them."""
    _align: InitVar[Callable[[], Alignment] | None] = None

    def __post_init__(self, _align: Callable[[], Alignment] | None) -> None:
        # no field, and left out of copies: it holds the model
        vars(self)["_align"] = _align

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_align"}

    @cached_property
    def alignment(self) -> Alignment:
        """The attention to the source when each piece was predicted; computed when first asked for.

        A copy, or what was pickled, has it if it was asked for before.

        Raises: MtkitError where the cross attention has no weights, and for a copy without it; DataError for a blank or
        too long line.
        """
        align: Callable[[], Alignment] | None = vars(self).get("_align")
        if align is None:
            raise MtkitError("a copied or pickled line has no model to align with; ask for its alignment before that")
        return align()


class LoadedRun:
    """The model of a run, ready to translate. It serves one call at a time."""

    def __init__(self, translator: Translator) -> None:
        self.translator = translator
        """The translator with the decoding settings of the run's recipe."""

    @property
    def directions(self) -> list[str]:
        """The translation directions, as en-de; most runs have one."""
        return self.translator.runs[0].directions

    def translate(self, lines: Iterable[str], *, direction: str | None = None, **settings: Any) -> list[TranslatedLine]:
        """The translation of each line: N lines in, N objects out, in order. A line end at a line's end is left out.

        `direction` is required for a run with several. `settings` are those of `decoding` in a recipe, as `beam=5` and
        `n_best=2`; the others are as in the run's recipe. `beam` without `method` selects beam search.

        Each line is translated by itself, also by a run that was trained on documents: `translate_file` of
        `run.translator` joins the lines of documents as the command does.

        Raises: RecipeError for an unknown setting or a wrong value; MtkitError for an unknown direction, for a line
        that is no text, and for a setting that says nothing to the method of decoding.
        """
        if isinstance(lines, str):
            raise MtkitError("translate takes a list of lines, not one string; write [text]")
        lines = lines_in(lines)
        translator = self.translator
        if settings:
            settings = with_method(settings)
            chosen = make_recipe(merged(translator.runs[0].recipe.model_dump(), {"decoding": settings})).decoding
            if idle := chosen.without_effect(settings):
                raise MtkitError(f'{idle[0]} has no effect with method="{chosen.method}"; add method="{idle[1]}"')
            translator = translator.with_settings(chosen)
        found = translator.lines(lines, direction=direction)
        return [self._line(source, each, direction) for source, each in zip(lines, found, strict=True)]

    def _line(self, source: str, found: Sequence[Translation], direction: str | None) -> TranslatedLine:
        best, *others = found
        return self._object(source, best, direction, [self._object(source, each, direction, []) for each in others])

    def _object(
        self, source: str, found: Translation, direction: str | None, alternatives: list[TranslatedLine]
    ) -> TranslatedLine:
        target = self.translator.tokenizers.target
        return TranslatedLine(
            source,
            found.text,
            found.score,
            found.log_prob,
            [target.piece(piece) for piece in found.pieces if piece != EOS],
            found.parts,
            found.cut,
            alternatives,
            partial(self._aligned, source, found.text, direction),
        )

    def _aligned(self, source: str, target: str, direction: str | None) -> Alignment:
        translator = self.translator
        directions = translator.directions(direction, 1)
        return align(translator.network, translator.tokenizers, source, target, directions=directions)


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
