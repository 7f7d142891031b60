"""What the head of a recipe's file says: what the recipe is, what it promises, and what was reached.

# Multi30k English-German: captions of photographs
#
#     mtkit recipes check multi30k-en-de
#
# promises: BLEU >= 37 on flickr2016 after 20 minutes
# reached: BLEU 37.42 on flickr2016 after 20 minutes on 2 CPU cores (nrefs:1|...)

The first line says what it is. A promise is kept by the score of a test side, after so many minutes of training where
it names them; there may be several, by growing minutes.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from mtkit.errors import RecipeError
from mtkit.recipe.file import read_text

_PROMISE = re.compile(
    r"(?P<metric>\w+) (?P<sign>>=|<=) (?P<bound>\d+(?:\.\d+)?) on (?P<side>[\w.-]+)(?: after (?P<minutes>\d+) minutes)?"
)


@dataclass(frozen=True)
class Promise:
    """A bound on a score that the recipe's training reaches."""

    text: str
    """As it stands in the recipe: "BLEU >= 37 on flickr2016 after 20 minutes"."""
    metric: str
    side: str
    """The name of a test side."""
    bound: float
    at_most: bool
    """Whether lower is better."""
    minutes: float | None
    """Minutes of training; None for those of the recipe's own limits."""

    def kept(self, score: float) -> bool:
        """Whether a score is as good as promised."""
        return score <= self.bound if self.at_most else score >= self.bound


@dataclass(frozen=True)
class Head:
    """The head of a recipe: what it is, what it promises and what it reached."""

    name: str
    what: str
    promises: tuple[Promise, ...]
    reached: str | None

    def promises_after(self, minutes: float | None) -> list[Promise]:
        """Those that a training of so many minutes, None for its own limits, is to keep.

        They are those for at most as many minutes; of a training shorter than all of them, the first.
        """
        if minutes is None:
            return list(self.promises)
        return [each for each in self.promises if (each.minutes or 0) <= minutes] or list(self.promises[:1])


def read_head(path: Path) -> Head:
    """What the head of a recipe's file says. Raises: RecipeError for a promise that cannot be understood."""
    lines = read_text(path).split("\n")
    head = [line.removeprefix("#").strip() for line in _while_comments(lines)]
    reached = _marked(head, "reached:")
    return Head(
        path.stem,
        head[0].rstrip(".") if head else "",
        tuple(_promise(text, path) for text in _marked(head, "promises:")),
        reached[0] if reached else None,
    )


def _while_comments(lines: list[str]) -> list[str]:
    end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return lines[:end]


def _marked(head: list[str], mark: str) -> list[str]:
    return [line.removeprefix(mark).strip() for line in head if line.startswith(mark)]


def _promise(text: str, path: Path) -> Promise:
    found = _PROMISE.fullmatch(text)
    if found is None:
        raise RecipeError(
            f"{path}: cannot understand the promise '{text}'; write it as BLEU >= 37 on flickr2016 after 20 minutes"
        )
    minutes = found["minutes"]
    return Promise(
        text,
        found["metric"],
        found["side"],
        float(found["bound"]),
        found["sign"] == "<=",
        None if minutes is None else float(minutes),
    )
