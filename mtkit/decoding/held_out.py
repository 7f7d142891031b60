"""Translation of the held-out sides of prepared data into the folder of a run.

translations/test.txt            the best translation of each segment
translations/test.nbest.txt      all translations of each segment, if there are several
translations/test.source.txt     the source segments
translations/test.reference.txt  the reference translations
translations/test.direction.txt  the direction of each segment, as en-fr, if the data has several
translations/test.json           settings, checkpoint, time and speed; written last, as a mark that all are complete

The files of another side have its name in place of `test`: that of a test side in the recipe, or `valid`.

Translation of a held-out side, chunk by chunk: the same call after an interruption goes on behind the last chunk.

Until all of it is there, translations lie beside the others of the run, a line of JSON for each segment, in
`.test.jsonl.partial` with the journal of `mtkit.storage.jobs`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, cast

from pydantic_core import from_json

from mtkit.data.prepared import Prepared
from mtkit.decoding.contract import Engine
from mtkit.decoding.lines.chunks import chunks_of
from mtkit.decoding.lines.notes import Notes
from mtkit.decoding.lines.source import Directions, Documents, TrainedOn, source_budget
from mtkit.decoding.translate import OnProgress, Translation, translate_lines
from mtkit.errors import DataError, MtkitError, did_you_mean, shown
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from mtkit.storage.files import inside, json_text, write_json, write_text
from mtkit.storage.jobs import Item, open_job
from mtkit.text.tokenizer import Tokenizers
from mtkit.version import __version__

TRANSLATIONS = "translations"
"""The folder of a run that holds them."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out segments with their references."""

    name: str
    """The name of a test side, or "valid"."""
    sources: Sequence[str]
    references: Sequence[str]
    directions: Directions | None = None
    """Which way each is translated."""
    documents: Documents | None = None
    """Which of them are translated together, where the model was trained on documents and the side has them."""
    corpora: Sequence[int] | None = None
    """Segments of each corpus of the side, one after the other; None stands for a single one."""

    def sample(self, segments: int) -> "HeldOut":
        """A sample of this number of segments: the first of each corpus, in proportion to its size, and at least one.

        Taking the first ones keeps documents together.
        """
        if segments >= len(self.sources):
            return self
        sizes = [len(self.sources)] if self.corpora is None else self.corpora
        taken, begins = _shares(sizes, segments), accumulate(sizes, initial=0)
        rows = [begin + row for begin, share in zip(begins, taken, strict=False) for row in range(share)]
        return replace(self.at(rows), corpora=taken)

    def at(self, rows: Sequence[int]) -> "HeldOut":
        """The segments of these rows, as one corpus."""
        directions, documents = self.directions, self.documents
        return HeldOut(
            self.name,
            [self.sources[row] for row in rows],
            [self.references[row] for row in rows],
            directions and replace(directions, tasks=[directions.tasks[row] for row in rows]),
            documents and replace(documents, ids=cast("Sequence[int]", [documents.ids[row] for row in rows])),
        )

    @property
    def target_languages(self) -> list[str] | None:
        """The target language of each segment; None where it is unknown."""
        return None if self.directions is None else self.directions.targets_of_lines()

    def renamed(self, name: str) -> "HeldOut":
        """The same segments under another name."""
        return replace(self, name=name)

    def how(self, settings: DecodingSettings, *, joined: bool = True) -> dict[str, Any]:
        """The arguments of `translate_lines` for these segments; `joined` documents allow one translation each."""
        documents = self.documents if joined and settings.n_best == 1 else None
        return {"directions": self.directions, "documents": documents}


@dataclass(frozen=True)
class Speed:
    """The time of a translation, without loading the model."""

    seconds: float
    segments: int
    tokens: int
    """Pieces of the best translations, their ends counted."""

    def numbers(self) -> dict[str, float]:
        """Seconds, segments/s and tokens/s, for people and programs."""
        seconds = max(self.seconds, 1e-9)
        return {
            "seconds": round(self.seconds, 3),
            "segments_per_second": round(self.segments / seconds, 2),
            "tokens_per_second": round(self.tokens / seconds, 1),
        }


def held_out(prepared: Prepared, name: str | None = None) -> HeldOut:
    """The named side of prepared data; by default the first test side, or the validation side if there is no other.

    Raises: DataError for an unknown name; the message lists the sides.
    """
    sides = {**prepared.tests, "valid": prepared.valid}
    name = next(iter(sides)) if name is None else name
    if name not in sides:
        hint = did_you_mean(name, list(sides))
        raise DataError(f"{prepared.folder} has no test side {shown(name)}{hint}; it has: {', '.join(sides)}")
    side, budget = sides[name], source_budget(prepared)
    assert side.source_text is not None
    assert side.target_text is not None
    return HeldOut(
        name,
        _lines(side.source_text),
        _lines(side.target_text),
        Directions(prepared.directions, [0] * len(side) if side.tasks is None else side.tasks.tolist()),
        None if side.documents is None or budget is None else Documents(side.documents.tolist(), budget),
        [each["segments"] for each in prepared.record["sides"][name]["corpora"]],
    )


def timed(
    engine: Engine,
    tokenizers: Tokenizers,
    side: HeldOut,
    *,
    joined: bool = True,
    trained_on: TrainedOn | None = None,
    first: int = 0,
    on_progress: OnProgress | None = None,
) -> tuple[list[list[Translation]], Speed]:
    """The result of `translate_lines` for a side whose first segment has the number `first`, and its speed."""
    begin, how = monotonic(), side.how(engine.settings, joined=joined)
    numbers = range(first, first + len(side.sources))
    how |= {"trained_on": trained_on, "numbers": numbers, "on_progress": on_progress}
    found = translate_lines(engine, tokenizers, side.sources, **how)
    tokens = sum(len(translations[0].pieces) for translations in found)
    return found, Speed(monotonic() - begin, len(side.sources), tokens)


def files_of(run: Run, side: str) -> dict[str, Path]:
    """The files of a side's translations in the run's folder, by the ends of their names: "txt", "source.txt", ...

    Raises: MtkitError if one of them, or their folder, is a link.
    """
    ends = ("txt", "nbest.txt", "source.txt", "reference.txt", "direction.txt", "json")
    return {end: inside(run.folder, TRANSLATIONS, f"{side}.{end}") for end in ends}


def save(
    run: Run, side: HeldOut, translations: Sequence[Sequence[Translation]], speed: Speed, about: dict[str, Any]
) -> Path:
    """Writes translations into the run's folder with `about` beside them; gives the path of the text.

    Raises: MtkitError where it cannot be written.
    """
    files = files_of(run, side.name)
    path, record = files["txt"], files["json"]
    record.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    _write_lines(path, [each[0].text for each in translations])
    _write_lines(files["source.txt"], side.sources)
    _write_lines(files["reference.txt"], side.references)
    ways = side.directions.names_of_lines() if side.directions and len(side.directions.names) > 1 else []
    _write_if_any(files["direction.txt"], ways)
    several = len(translations[0]) > 1
    _write_if_any(files["nbest.txt"], list(n_best_lines(translations)) if several else [])
    write_json(
        record,
        {
            "mtkit": __version__,
            "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "segments": len(translations),
            **unusual([each[0] for each in translations]),
            **speed.numbers(),
            **about,
        },
    )
    return path


def unusual(translations: Sequence[Translation]) -> dict[str, int]:
    """The numbers of lines that were joined with others of their document, fell back, were cut, or were split."""
    return {
        "joined": sum(each.together > 1 for each in translations),
        "fell_back": sum(each.fell_back for each in translations),
        "cut": sum(each.cut for each in translations),
        "in_parts": sum(each.parts > 1 for each in translations),
    }


def n_best_lines(translations: Sequence[Sequence[Translation]], first: int = 0) -> Iterator[str]:
    """One output line per translation: line number from 1, score and text, separated by tabs.

    `first` is the number of the first line among all, from 0.
    """
    for number, each in enumerate(translations, start=first + 1):
        for translation in each:
            yield f"{number}\t{translation.score:.6f}\t{translation.text}"


def _shares(sizes: Sequence[int], total: int) -> list[int]:
    """The shares of `total` in proportion to the sizes; each is at least one while any are left."""
    shares, left = [], total
    for place, size in enumerate(sizes):
        fair = round(left * size / max(sum(sizes[place:]), 1))
        later = sum(each > 0 for each in sizes[place + 1 :])
        shares.append(min(size, left, max(fair, 1), max(left - later, 1)))
        left -= shares[-1]
    return shares


def _lines(texts: Sequence[str]) -> list[str]:
    """Segments as lines of text."""
    return [text.replace("\n", " ") for text in texts]


def _write_if_any(path: Path, lines: Sequence[str]) -> None:
    """Writes a file with these lines; without lines, removes it."""
    path.unlink(missing_ok=True)
    if lines:
        _write_lines(path, lines)


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    write_text(path, "".join(f"{line}\n" for line in lines))


CHUNK = 1_000
"""Segments translated together, at most; what is lost by a kill."""

Timed = Callable[[HeldOut, int], tuple[list[list[Translation]], Speed]]
"""Translates a part of a side, of which the first segment has this number in the side, from 0."""


def translate_side(
    side: HeldOut,
    translated: Timed,
    folder: Path,
    about: dict[str, Any],
    *,
    joined: bool,
    say: Callable[[str], object] = lambda message: None,
    on_progress: OnProgress = lambda lines: None,
) -> tuple[list[list[Translation]], Speed]:
    """The translations of all segments, and their speed; the time of interrupted calls counts.

    `about`: the JSON values of all that translations depend on besides the side. `joined` segments of a document stay
    in one chunk. `say` gets a message when work resumes or starts again.

    Raises: MtkitError where the folder cannot be written, or another process is translating the side.
    """
    path = inside(folder, f".{side.name}.jsonl")
    ways = side.directions.names_of_lines() if side.directions else [""] * len(side.sources)
    documents = [str(each) for each in side.documents.ids] if joined and side.documents else [""] * len(side.sources)

    def together(one: Item, other: Item) -> bool:
        return one[2] == other[2] != ""

    items = zip(side.sources, ways, documents, strict=True)
    with open_job([path], about, Notes(), say=say) as job:
        for chunk in job.todo(chunks_of(items, together, CHUNK), on_progress):
            rows = range(chunk.first, chunk.first + len(chunk.items))
            found, speed = translated(side.at(rows), chunk.first)
            share = speed.seconds / len(rows)
            lines = [json_text({"seconds": share, "found": [*map(asdict, each)]}) for each in found]
            job.write(chunk, [lines], Notes())
    found, seconds = _read(path)
    return found, Speed(seconds, len(found), sum(len(best.pieces) for best, *_ in found))


def _read(path: Path) -> tuple[list[list[Translation]], float]:
    """The translations in a file, which is then removed, and their seconds. Raises: MtkitError where it is damaged."""
    found, seconds = list[list[Translation]](), 0.0
    try:
        for line in path.read_bytes().splitlines():
            row = from_json(line)
            found.append([_translation(each) for each in row["found"]])
            seconds += row["seconds"]
    except (ValueError, KeyError, TypeError) as error:
        raise MtkitError(f"{path} is damaged; the same command translates that side anew") from error
    finally:
        path.unlink()
    return found, seconds


def _translation(row: dict[str, Any]) -> Translation:
    """The translation of JSON values, in which null stands for minus infinity."""
    row |= {name: -inf for name in ("score", "log_prob") if row[name] is None}
    return Translation(**row | {"pieces": tuple(row["pieces"]), "of_parts": tuple(map(_translation, row["of_parts"]))})
