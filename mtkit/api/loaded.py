"""A loaded run for Python: lines in, an object for each translation out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass
from functools import cached_property, partial
from typing import Any

from mtkit.api.texts import lines_in
from mtkit.data.tokenizer import EOS
from mtkit.decoding.alignment import Alignment, align
from mtkit.decoding.translate import Translation
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError
from mtkit.recipe import make_recipe, merged
from mtkit.recipe.decoding import with_method


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
