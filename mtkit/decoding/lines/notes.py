"""Notes to the user on translated lines that need attention."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Self

from mtkit.decoding.translation import Translation

NAMED = 10
"""Maximum line numbers that a note lists."""


@dataclass(frozen=True)
class Listed:
    """Line numbers: their count, and the first of them."""

    count: int = 0
    first: tuple[int, ...] = ()

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Self:
        """Return the list of these numbers, which are in ascending order."""
        numbers = tuple(numbers)
        return cls(len(numbers), numbers[:NAMED])

    def __add__(self, other: Self) -> "Listed":
        """These numbers followed by the others."""
        return Listed(self.count + other.count, (*self.first, *other.first)[:NAMED])

    def __str__(self) -> str:
        more = f" and {self.count - len(self.first):,} more" if self.count > len(self.first) else ""
        return f"line{'s' if self.count > 1 else ''} {', '.join(map(str, self.first))}{more}"


@dataclass(frozen=True)
class Notes:
    """The numbers, from 1, of lines that were translated in a special way."""

    in_parts: Listed = Listed()
    cut: Listed = Listed()
    failed: Listed = Listed()
    joined: Listed = Listed()
    fell_back: Listed = Listed()
    cleaned: Listed = Listed()
    present: Listed = Listed()
    """Lines whose translation contains a glossary term, once per term."""
    missed: Listed = Listed()
    """Lines whose translation lacks a glossary term, once per term."""
    unnested: Listed = Listed()
    """Lines whose tags are not nested."""
    lacking: Listed = Listed()
    """Lines whose translation lacks glossary terms, once per line."""

    @classmethod
    def of(cls, translations: Sequence[Sequence[Translation]], first: int = 0) -> Self:
        """Return the notes on the translations of lines from number `first` on, from 0."""
        best = list(enumerate((line for line, *_ in translations), start=first + 1))
        return cls(
            in_parts=Listed.of(number for number, line in best if line.parts > 1),
            cut=Listed.of(number for number, line in best if line.cut),
            failed=Listed.of(number for number, line in best if line.score == float("-inf")),
            joined=Listed.of(number for number, line in best if line.together > 1),
            fell_back=Listed.of(number for number, line in best if line.fell_back),
            cleaned=Listed.of(number for number, line in best if line.cleaned),
            present=Listed.of(n for n, line in best for _ in range(line.terms - line.missed)),
            missed=Listed.of(number for number, line in best for _ in range(line.missed)),
            lacking=Listed.of(number for number, line in best if line.missed),
        )

    @classmethod
    def restored(cls, state: Any) -> Self:
        """Return the notes that `state` returned. Raises: TypeError or ValueError."""
        if len(state) != len(fields(cls)):
            raise ValueError("notes of another version")
        return cls(*(Listed(int(count), tuple(map(int, first))) for count, first in state))

    def __add__(self, other: Self) -> "Notes":
        """These notes and those on the lines that follow."""
        return Notes(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def state(self) -> list[Any]:
        """Return the notes as JSON values."""
        return [[count, list(first)] for count, first in astuple(self)]

    def messages(self, *, glossary: bool = False) -> Iterator[str]:
        """Yield the messages for the user, one line each; `glossary`: whether translations must contain terms."""
        if self.cleaned.count:
            yield (
                f"control or invisible characters of {self.cleaned.count:,} source lines were dropped or became "
                f"spaces: {self.cleaned}"
            )
        if self.in_parts.count:
            yield (
                f"{_were(self.in_parts, 'line')} split at sentence ends and translated in parts, because of more "
                f"sentences or pieces than training lines have, or than the model allows: {self.in_parts}"
            )
        if self.cut.count:
            yield (
                f"{_were(self.cut, 'translation')} cut at the maximum length (--max-pieces, by the lengths of the "
                f"training data, or the model's max_length) and may be incomplete: {self.cut}"
            )
        if self.failed.count:
            yield f"the model gave no finite probabilities, so these translations are empty: {self.failed}"
        if self.fell_back.count:
            yield (
                f"of {self.joined.count:,} lines that were joined with others of their document, "
                f"{self.fell_back.count:,} were translated one by one, because the joined translation "
                f"would not have matched the source line by line: {self.fell_back}"
            )
        if self.unnested.count:
            yield (
                "tags that are not nested were carried over one by one, and may not be nested in the translation "
                f"either: {self.unnested}"
            )
        if self.present.count or self.missed.count:
            lines = f"; {self.missed.count:,} missing, in {self.lacking}" if self.missed.count else ""
            yield (
                f"{self.present.count:,} of {self.present.count + self.missed.count:,} glossary terms are in the "
                f"translations{lines}"
            )
        elif glossary:
            yield "no term of the glossary is in the text; a line of the file is a source term, a tab and a target term"


def _were(lines: Listed, noun: str) -> str:
    return f"1 {noun} was" if lines.count == 1 else f"{lines.count:,} {noun}s were"
