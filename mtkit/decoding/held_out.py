"""Translating the side of the prepared data that a run was not trained on, into the run's folder.

translations/test.txt            the best translation of each segment
translations/test.nbest.txt      all of them, where more than one was asked for
translations/test.source.txt     what was translated
translations/test.reference.txt  what it is scored against
translations/test.json           settings, checkpoint, time and speed; written last: with it the others are whole

For the validation side, `valid` stands in the place of `test`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import mtkit
from mtkit.data.prepared import Prepared
from mtkit.decoding.search import Model
from mtkit.decoding.translate import Translation, translate_lines
from mtkit.errors import RunError
from mtkit.files import write_json, write_text
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run


@dataclass(frozen=True)
class HeldOut:
    """Segments with references that were not trained on."""

    name: str
    """"test", or "valid" where the data has no test side."""
    sources: Sequence[str]
    references: Sequence[str]


@dataclass(frozen=True)
class Speed:
    """How long a translation took, the loading of the model left out."""

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


def held_out(prepared: Prepared) -> HeldOut:
    """The test side of prepared data, or the validation side where there is none."""
    name, side = ("valid", prepared.valid) if prepared.test is None else ("test", prepared.test)
    assert side.source_text is not None
    assert side.target_text is not None
    return HeldOut(name, _lines(side.source_text), _lines(side.target_text))


def timed(
    run: Run, model: Model, lines: Sequence[str], settings: DecodingSettings, **how: Any
) -> tuple[list[list[Translation]], Speed]:
    """What `translate_lines` gives with the same arguments, and how fast."""
    begin = monotonic()
    found = translate_lines(model, run.tokenizers, lines, settings, **how)
    tokens = sum(len(translations[0].pieces) for translations in found)
    return found, Speed(monotonic() - begin, len(lines), tokens)


def save(
    run: Run, side: HeldOut, translations: Sequence[Sequence[Translation]], speed: Speed, about: dict[str, Any]
) -> Path:
    """Writes translations into the run's folder with `about` beside them; gives the path of the text.

    Raises: MtkitError where it cannot be written.
    """
    folder = run.folder / "translations"
    path, record = folder / f"{side.name}.txt", folder / f"{side.name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    _write_lines(path, [each[0].text for each in translations])
    _write_lines(folder / f"{side.name}.source.txt", side.sources)
    _write_lines(folder / f"{side.name}.reference.txt", side.references)
    n_best = folder / f"{side.name}.nbest.txt"
    n_best.unlink(missing_ok=True)
    if len(translations[0]) > 1:
        _write_lines(n_best, list(n_best_lines(translations)))
    write_json(
        record,
        {
            "mtkit": mtkit.__version__,
            "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "segments": len(translations),
            **speed.numbers(),
            **about,
        },
    )
    return path


def n_best_lines(translations: Sequence[Sequence[Translation]]) -> Iterator[str]:
    """A line for each of several translations: line number from 1, score, text, with tabs between."""
    for number, each in enumerate(translations, start=1):
        for translation in each:
            yield f"{number}\t{translation.score:.6f}\t{translation.text}"


def latest_translations(run: Run) -> Path:
    """The text of a run's latest translations; the reference stands beside it, as `reference_of` says.

    Raises: RunError where there are none.
    """
    finished: list[tuple[str, Path]] = []
    for record in sorted((run.folder / "translations").glob("*.json")):
        try:
            finished.append((json.loads(record.read_text(encoding="utf-8"))["finished"], record.with_suffix(".txt")))
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{record} is damaged; run `mtkit translate` again") from None
    if not finished:
        raise RunError(f"{run.folder} has no translations yet; run `mtkit translate --run {run.folder}` first")
    return max(finished)[1]


def reference_of(translations: Path) -> Path:
    """Where the references of saved translations stand."""
    return translations.with_suffix(".reference.txt")


def _lines(texts: Sequence[str]) -> list[str]:
    """Segments as lines of text."""
    return [text.replace("\n", " ") for text in texts]


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    write_text(path, "".join(f"{line}\n" for line in lines))
