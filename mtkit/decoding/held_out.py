"""Held-out sides of prepared data, and the files of their translations in the folder of a run.

translations/test.txt            the best translation of each segment
translations/test.nbest.txt      all translations of each segment, if there are several
translations/test.source.txt     the source segments
translations/test.reference.txt  the reference translations
translations/test.direction.txt  the direction of each segment, as en-fr, if the data has several
translations/test.docids.txt     the id of each segment's document, if the side has any
translations/test.json           settings, checkpoint, time and speed; written last, so that it marks a complete set

`test` is the name of the side: a test side in the recipe, or `valid`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from mtkit.data.prepared import Prepared
from mtkit.decoding.lines.source import Directions, Documents, SourceLines, TrainedOn, source_budget
from mtkit.decoding.translation import Translation
from mtkit.errors import DataError, did_you_mean, shown
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from mtkit.storage.files import inside, write_json, write_text
from mtkit.version import __version__

TRANSLATIONS = "translations"
"""The folder of translations in a run."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out segments with their references."""

    name: str
    """The name of a test side, or "valid"."""
    sources: Sequence[str]
    references: Sequence[str]
    directions: Directions | None = None
    """The direction of each segment."""
    documents: Documents | None = None
    """The documents to translate together, if the data was prepared by documents and the side has any."""
    corpora: Sequence[int] | None = None
    """The number of segments in each corpus, in order; None: there is one corpus."""
    document_ids: Sequence[int] | None = None
    """The document id of each segment, if the side has any, also if documents are not translated together."""

    def sample(self, segments: int) -> "HeldOut":
        """Take this number of segments: the first ones of each corpus, in proportion to its size, at least one.

        The first ones keep documents together.
        """
        if segments >= len(self.sources):
            return self
        sizes = [len(self.sources)] if self.corpora is None else self.corpora
        taken, begins = _shares(sizes, segments), accumulate(sizes, initial=0)
        rows = [begin + row for begin, share in zip(begins, taken, strict=False) for row in range(share)]
        return replace(self.at(rows), corpora=taken)

    def at(self, rows: Sequence[int]) -> "HeldOut":
        """Return the segments of these rows, as one corpus."""
        return HeldOut(
            self.name,
            [self.sources[row] for row in rows],
            [self.references[row] for row in rows],
            self.directions and self.directions.at(rows),
            self.documents and self.documents.at(rows),
            document_ids=self.document_ids and [self.document_ids[row] for row in rows],
        )

    @property
    def target_languages(self) -> list[str] | None:
        """The target language of each segment; None if unknown."""
        return None if self.directions is None else self.directions.targets_of_lines()

    def lines(
        self, settings: DecodingSettings, *, joined: bool = True, trained_on: TrainedOn | None = None
    ) -> SourceLines:
        """Return the source lines to translate; documents that are `joined` allow one translation per line."""
        documents = self.documents and self.documents.under(settings) if joined and settings.n_best == 1 else None
        return SourceLines(self.sources, self.directions, documents, trained_on or TrainedOn())


@dataclass(frozen=True)
class Speed:
    """The time of a translation, without loading the model."""

    seconds: float
    segments: int
    tokens: int
    """Pieces of the best translations, EOS counted."""

    def numbers(self) -> dict[str, float]:
        """Seconds, segments/s and tokens/s, for people and programs."""
        seconds = max(self.seconds, 1e-9)
        return {
            "seconds": round(self.seconds, 3),
            "segments_per_second": round(self.segments / seconds, 2),
            "tokens_per_second": round(self.tokens / seconds, 1),
        }


def held_out(prepared: Prepared, name: str | None = None) -> HeldOut:
    """Return a side of prepared data by name; None: the first test side, or the validation side without any.

    Raises: DataError for an unknown name; the message lists the sides.
    """
    sides = {**prepared.tests, "valid": prepared.valid}
    name = next(iter(sides)) if name is None else name
    if name not in sides:
        hint = did_you_mean(name, list(sides))
        raise DataError(f"{prepared.folder} has no test side {shown(name)}{hint}; it has: {', '.join(sides)}")
    side, budget = sides[name], source_budget(prepared)
    ids: list[int] | None = None if side.documents is None else side.documents.tolist()
    assert side.source_text is not None
    assert side.target_text is not None
    return HeldOut(
        name,
        _lines(side.source_text),
        _lines(side.target_text),
        Directions(prepared.directions, [0] * len(side) if side.tasks is None else side.tasks.tolist()),
        None if ids is None or budget is None else Documents(ids, budget),
        [corpus["segments"] for corpus in prepared.record["sides"][name]["corpora"]],
        ids,
    )


def files_of(run: Run, side: str) -> dict[str, Path]:
    """Return the files of a side's translations in the run's folder, by their suffixes: "txt", "source.txt", ...

    Raises: MtkitError if one of them, or their folder, is a link.
    """
    ends = ("txt", "nbest.txt", "source.txt", "reference.txt", "direction.txt", "docids.txt", "json")
    return {end: inside(run.folder, TRANSLATIONS, f"{side}.{end}") for end in ends}


def save(
    run: Run, side: HeldOut, translations: Sequence[Sequence[Translation]], speed: Speed, about: dict[str, Any]
) -> Path:
    """Write translations into the run's folder, with `about` in the JSON file; returns the path of the text.

    Raises: MtkitError if they cannot be written.
    """
    files = files_of(run, side.name)
    path, record = files["txt"], files["json"]
    record.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    _write_lines(path, [best.text for best, *_ in translations])
    _write_lines(files["source.txt"], side.sources)
    _write_lines(files["reference.txt"], side.references)
    optional = {
        "direction.txt": side.directions.names_of_lines() if side.directions and len(side.directions.names) > 1 else [],
        "docids.txt": [str(document) for document in side.document_ids or []],
        "nbest.txt": list(n_best_lines(translations)) if len(translations[0]) > 1 else [],
    }
    for suffix, lines in optional.items():
        files[suffix].unlink(missing_ok=True)
        if lines:
            _write_lines(files[suffix], lines)
    write_json(
        record,
        {
            "mtkit": __version__,
            "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "segments": len(translations),
            **unusual([best for best, *_ in translations]),
            **speed.numbers(),
            **about,
        },
    )
    return path


def unusual(translations: Sequence[Translation]) -> dict[str, int]:
    """Count the lines that were joined with others of their document, fell back, were cut, or were split."""
    return {
        "joined": sum(translation.together > 1 for translation in translations),
        "fell_back": sum(translation.fell_back for translation in translations),
        "cut": sum(translation.cut for translation in translations),
        "in_parts": sum(translation.parts > 1 for translation in translations),
    }


def n_best_lines(translations: Sequence[Sequence[Translation]], first: int = 0) -> Iterator[str]:
    """Yield one output line per translation: line number from 1, score and text, separated by tabs.

    A tab in the text is written as a space. `first` is the number of the first line among all, from 0.
    """
    for number, hypotheses in enumerate(translations, start=first + 1):
        for translation in hypotheses:
            yield f"{number}\t{scored_line(translation)}"


def scored_line(translation: Translation) -> str:
    """Score and text, separated by the line's only tab: a tab in the text, which samples contain, becomes a space."""
    text = translation.text.replace("\t", " ")
    return f"{translation.score:.6f}\t{text}"


def _shares(sizes: Sequence[int], total: int) -> list[int]:
    """Return the shares of `total` in proportion to the sizes, each at least one as long as any are left."""
    shares, left = [], total
    for place, size in enumerate(sizes):
        fair = round(left * size / max(sum(sizes[place:]), 1))
        later = sum(other > 0 for other in sizes[place + 1 :])
        shares.append(min(size, left, max(fair, 1), max(left - later, 1)))
        left -= shares[-1]
    return shares


def _lines(texts: Sequence[str]) -> list[str]:
    """Segments as lines of text."""
    return [text.replace("\n", " ") for text in texts]


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    write_text(path, "".join(f"{line}\n" for line in lines))
