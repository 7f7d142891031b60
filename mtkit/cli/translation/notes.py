"""What `mtkit translate` says on standard error about some of the lines."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from mtkit.decoding.translate import Translation

NAMED = 10
"""Line numbers that a note lists at most."""


class Notes:
    """Gathers, chunk by chunk, the lines that a user should know about."""

    def __init__(self) -> None:
        self._parted, self._cut, self._failed = _Listed(), _Listed(), _Listed()
        self._joined, self._fell_back = _Listed(), _Listed()
        self._all = (self._parted, self._cut, self._failed, self._joined, self._fell_back)

    def state(self) -> list[list[Any]]:
        """What was gathered, as JSON can hold it."""
        return [[each.count, list(each.first)] for each in self._all]

    def restore(self, state: list[list[Any]]) -> None:
        """Go on from what `state` gave. Raises: ValueError for what it cannot have given."""
        if len(state) != len(self._all) or any(len(each) != 2 for each in state):
            raise ValueError("notes of another version")
        for each, (count, first) in zip(self._all, state, strict=True):
            each.count, each.first = int(count), [int(line) for line in first]

    def add(self, translations: "Sequence[Sequence[Translation]]", first: int) -> None:
        """Take in the translations of lines, the first of which is number `first` from 0."""
        for number, (best, *_) in enumerate(translations, start=first + 1):
            self._parted.add(number, best.parts > 1)
            self._cut.add(number, best.cut)
            self._failed.add(number, best.score == float("-inf"))
            self._joined.add(number, best.together > 1)
            self._fell_back.add(number, best.fell_back)

    def say(self) -> None:
        """Print what there is to say."""
        if self._parted.count:
            note(
                "lines were cut at sentence ends and translated in parts, as they hold more than training lines, or "
                f"than the model takes ({self._parted.count:,}): {self._parted}"
            )
        if self._cut.count:
            note(
                "translations that may lack their end, as they are as long as they may be (--max-pieces, or as those "
                f"of the training data, or the model's max_length): {self._cut}"
            )
        if self._failed.count:
            note(f"the model gave no finite probabilities, so these lines are empty: {self._failed}")
        if self._fell_back.count:
            note(
                f"of {self._joined.count:,} lines that were joined with others of their document, "
                f"{self._fell_back.count:,} were translated one by one, as their joined translation did not come "
                f"apart into as many lines: {self._fell_back}"
            )


class _Listed:
    """Line numbers: how many, and the first of them."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[int] = []

    def add(self, number: int, applies: bool) -> None:
        self.count += applies
        if applies and len(self.first) < NAMED:
            self.first.append(number)

    def __str__(self) -> str:
        more = f" and {self.count - len(self.first):,} more" if self.count > len(self.first) else ""
        return ", ".join(map(str, self.first)) + more


def note(message: str) -> None:
    """Say something on standard error."""
    typer.echo(f"note: {message}", err=True)
