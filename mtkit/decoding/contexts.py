"""Context of given translations: the sentences before a line in its document, joined as in training."""

from collections.abc import Hashable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import chain
from typing import Any, Self

from mtkit.decoding.lines.segments import Segment, Source
from mtkit.runs import Run
from mtkit.text.languages import languages_of, seam
from mtkit.text.tokenizer import BREAK, EOS, Tokenizer, Tokenizers

Context = Sequence[tuple[str, str]]
"""Pairs of a source sentence and its translation that precede a line in its document, oldest first."""


@dataclass(frozen=True)
class ContextLimits:
    """Settings by which training text joined sentences: how many of them a model has learned to translate at once."""

    seams: tuple[str, str] | None
    """The text between sentences of the source and the target if a training line is a whole document; None: lines are
    joined by break pieces (`data.documents`)."""
    pieces: int
    """Maximum source pieces of a segment: breaks, or else tag and end mark, counted. With breaks, also of a target."""
    sentences: int | None = None
    """Maximum sentences of a segment; None: any number."""

    @classmethod
    def of(cls, runs: Sequence[Run], direction: str) -> "ContextLimits | None":
        """Return the limits of several runs as one model; None if one of them was trained on single sentences.

        Raises: RunError for a damaged run.
        """
        known = [limits for run in runs if (limits := _limits(run, direction)) is not None]
        if len(known) < len(runs) or len({limits.seams for limits in known}) > 1:
            return None
        sentences = [limits.sentences for limits in known if limits.sentences is not None]
        return cls(known[0].seams, min(limits.pieces for limits in known), min(sentences, default=None))


def _limits(run: Run, direction: str) -> ContextLimits | None:
    """Return the limits of one run.

    Rows of `data.documents` keep to its number of pieces on both sides. Otherwise the training lines are documents if
    one in twenty has several sentences.
    """
    if run.document_pieces is not None:
        documents = run.recipe.data.documents
        return ContextLimits(None, max(run.document_pieces, documents.pieces if documents else 0))
    lengths = run.lengths[run.directions.index(direction)] if run.lengths else None
    if lengths is None or not lengths.bins or lengths.sentences_at_once == 1:
        return None
    source, target = map(seam, languages_of(direction))
    return ContextLimits((source, target), lengths.pieces_at_once, lengths.sentences_at_once)


@dataclass(frozen=True, kw_only=True)
class WithContext:
    """A line and how much of its context precedes it."""

    context: int = 0
    """The number of context sentences."""
    cut: bool = False
    """Whether earlier context sentences were left out, because they exceed a limit."""


@dataclass(frozen=True)
class ContextCounts:
    """Counts of the lines that were scored after context; the notes of a job (`mtkit.storage.jobs.Notes`)."""

    lines: int = 0
    """Lines with context."""
    sentences: int = 0
    """Context sentences of these lines."""
    cut: int = 0
    """Lines whose context exceeds a limit, so that only its nearest sentences, or none, precede the line."""

    @classmethod
    def restored(cls, state: Any) -> Self:
        """Return the counts with this `state`. Raises: TypeError or ValueError for an invalid state."""
        if len(state) != len(fields(cls)):
            raise ValueError("counts of another version")
        return cls(*map(int, state))

    @classmethod
    def of(cls, lines: "Sequence[WithContext]") -> Self:
        """Return the counts of these lines."""
        sizes = [line.context for line in lines]
        return cls(sum(size > 0 for size in sizes), sum(sizes), sum(line.cut for line in lines))

    def __add__(self, other: "ContextCounts") -> Self:
        return type(self)(
            *(count + other_count for count, other_count in zip(self.state(), other.state(), strict=True))
        )

    def state(self) -> list[Any]:
        """Return the counts as JSON values."""
        return list(astuple(self))

    def message(self, limits: "ContextLimits") -> str | None:
        """Return the message for the user on contexts that were cut; None if there are none."""
        if not self.cut:
            return None
        more = "" if limits.sentences is None else f" and {limits.sentences:,} sentences"
        return (
            f"contexts were cut to their nearest sentences ({self.cut:,}): they are longer than the model has learned "
            f"to translate at once, {limits.pieces:,} pieces{more}, or than its maximum length"
        )


@dataclass(frozen=True)
class Pair(WithContext):
    """A source segment and its given translation, with their context."""

    segment: Segment
    target: list[int]
    """The pieces of the translation after the pieces of its context; EOS at the end."""
    first: int = 0
    """The index of the first piece after the context."""


def contexts_in_documents(
    sources: Sequence[str], targets: Sequence[str], ids: Sequence[int] | Sequence[str], pieces: int
) -> list[Context]:
    """Return the lines that precede each line in its document, as many of the nearest as `pieces` pieces can hold.

    `ids` are the documents of the lines; a changed id begins a new document.
    """
    most = pieces // 2 + 1  # each has at least a piece and a break
    pairs, contexts, begin = list(zip(sources, targets, strict=True)), list[Context](), 0
    for row, document in enumerate(ids):
        begin = row if row and document != ids[row - 1] else begin
        contexts.append(pairs[max(begin, row - most) : row])
    return contexts


class ContextJoiner:
    """Joins lines with as much of their context as fits, the nearest sentences."""

    def __init__(
        self,
        source: Source,
        tokenizers: Tokenizers,
        contexts: Sequence[Context],
        limits: ContextLimits,
        longest_target: int | None,
    ) -> None:
        """`source` holds the lines, `contexts` the context of each; `longest_target` is the limit of the model."""
        self._source, self._target_tokenizer, self._source_tokenizer = source, tokenizers.target, tokenizers.source
        self._contexts, self._seams, self._sentences = contexts, limits.seams, limits.sentences
        texts: list[set[str]] = [{pair[side] for context in contexts for pair in context} for side in range(2)]
        self._pieces = [_encode(tokenizers.source, texts[0]), _encode(tokenizers.target, texts[1])]
        tag = len(source.tag(0)) if source.lines else 0
        self._between = (1 + tag, 1) if limits.seams is None else (0, 0)
        model = (source.longest, None if longest_target is None else longest_target - 1)
        trained = (limits.pieces, limits.pieces) if limits.seams is None else (limits.pieces - 1 - tag, None)
        self._most = [_smaller(*pair) for pair in zip(model, trained, strict=True)]

    def pairs(
        self, texts: Sequence[str], targets: Sequence[Sequence[int]], alike: Sequence[Hashable] | None = None
    ) -> list[Pair]:
        """Return each line and its translation, a text and its pieces, after their context.

        Lines with equal values in `alike` get the same number of context sentences. A context sentence is left out if
        it or its translation has no pieces.
        """
        pairs = [self._pair(number, text, targets[number]) for number, text in enumerate(texts)]
        if alike is not None:
            fewest: dict[Hashable, int] = {}
            for key, pair in zip(alike, pairs, strict=True):
                fewest[key] = min(pair.context, fewest.get(key, pair.context))
            for number, (key, pair) in enumerate(zip(alike, pairs, strict=True)):
                if pair.context > fewest[key]:
                    pairs[number] = self._pair(number, texts[number], targets[number], fewest[key])
        return pairs

    def _pair(self, number: int, text: str, target: Sequence[int], most: int | None = None) -> Pair:
        """Return a line after `most` sentences of its context, or fewer; None: as many as fit."""
        source, context = self._source.encoded[number], list[tuple[str, str]]()
        if source and target:
            context = [(a, b) for a, b in self._contexts[number] if self._pieces[0][a] and self._pieces[1][b]]
        fitting = self._fitting(context, len(source), len(target))
        for count in range(fitting if most is None else min(fitting, most), 0, -1):
            nearest = context[-count:]
            if self._seams is None:
                joined = self._with_breaks(nearest, number, target)
            else:
                joined = self._as_text(nearest, number, text, self._seams)
            tag = self._source.tag(number)
            if self._fits(len(joined.segment.pieces) - 1 - len(tag), len(joined.target) - 1):
                return replace(joined, context=count, cut=count < len(context))
        return Pair(self._source.segment(number, source), [*target, EOS], cut=bool(context))

    def _fits(self, *sizes: int) -> bool:
        return all(most is None or size <= most for size, most in zip(sizes, self._most, strict=True))

    def _fitting(self, context: Context, source: int, target: int) -> int:
        """Return the number of sentences, from the nearest on, that fit before a line of so many pieces."""
        most = len(context) if self._sentences is None else min(len(context), self._sentences - 1)
        for count in range(most):
            before, translated = context[-1 - count]
            source += len(self._pieces[0][before]) + self._between[0]
            target += len(self._pieces[1][translated]) + self._between[1]
            if not self._fits(source, target):
                return count
        return most

    def _with_breaks(self, context: Context, number: int, target: Sequence[int]) -> Pair:
        tag = self._source.tag(number)
        befores = [[*self._pieces[0][before], BREAK, *tag] for before, _ in context]
        translated = [[*self._pieces[1][sentence], BREAK] for _, sentence in context]
        joined = [*chain.from_iterable(translated)]
        segment = self._source.segment(number, [*chain.from_iterable(befores), *self._source.encoded[number]])
        return Pair(segment, [*joined, *target, EOS], len(joined))

    def _as_text(self, context: Context, number: int, text: str, seams: tuple[str, str]) -> Pair:
        """Return the line after its context as one text.

        A piece that spells the end of the context and the beginning of the line is counted as the line's.
        """
        befores, translated = zip(*context, strict=True)
        source = self._source_tokenizer.encode(seams[0].join([*befores, self._source.lines[number]]))
        context_pieces = self._target_tokenizer.encode(seams[1].join(translated))
        all_pieces = self._target_tokenizer.encode(seams[1].join([*translated, text]))
        return Pair(self._source.segment(number, source), [*all_pieces, EOS], _shared(context_pieces, all_pieces))


def _encode(tokenizer: Tokenizer, texts: set[str]) -> dict[str, list[int]]:
    ordered = sorted(texts)
    return dict(zip(ordered, tokenizer.encode_lines(ordered), strict=True))


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of pieces at the beginning that two sequences share."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
