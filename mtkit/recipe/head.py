"""The comment at the head of a recipe file: a description and the reached score.

# Multi30k English-German: captions of photographs
#
#     mtkit recipes check multi30k-en-de
#
# reached: BLEU 37.42 on flickr2016 after 20 minutes on 2 CPU cores (nrefs:1|...)

The first line is the description.
"""

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from mtkit.recipe.file import read_text

_REACHED = "reached:"


@dataclass(frozen=True)
class Head:
    """The head of a recipe: its description and the score that it reached."""

    name: str
    what: str
    reached: str | None


def read_head(path: Path) -> Head:
    """Parse the head of a recipe file. Raises: RecipeError if the file cannot be read."""
    comments = takewhile(lambda line: line.startswith("#"), read_text(path).split("\n"))
    head = [line.removeprefix("#").strip() for line in comments]
    reached = [line.removeprefix(_REACHED).strip() for line in head if line.startswith(_REACHED)]
    return Head(path.stem, head[0].rstrip(".") if head else "", reached[0] if reached else None)
