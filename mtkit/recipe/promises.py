"""What a recipe promises: bounds on scores of its test sides, as in

promises:
  - BLEU >= 37 on flickr2016 after 20 minutes
  - TER <= 45 on flickr2016 after 75 minutes

A promise is kept by the score of a test side, after so many minutes of training where it names them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from mtkit.errors import shown

EXAMPLE = "BLEU >= 37 on flickr2016 after 20 minutes"
_FORM = r"(\w+) (>=|<=) (\d+(?:\.\d+)?) on ([\w.-]+)(?: after (\d+) minutes)?"


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


def promise(text: str) -> Promise:
    """The promise that a text makes. Raises: ValueError where it has another form."""
    found = re.fullmatch(_FORM, text)
    if found is None:
        raise ValueError(f"cannot understand the promise {shown(text)}; write it as {EXAMPLE}")
    metric, sign, bound, side, minutes = found.groups()
    return Promise(text, metric, side, float(bound), sign == "<=", None if minutes is None else float(minutes))


def due_after(promises: Sequence[Promise], minutes: float | None) -> list[Promise]:
    """Those that a training of so many minutes, None for its own limits, is to keep.

    They are those for at most as many minutes; of a training shorter than all of them, the first.
    """
    if minutes is None:
        return list(promises)
    return [each for each in promises if (each.minutes or 0) <= minutes] or list(promises[:1])


def _understood(text: str) -> str:
    promise(text)
    return text


PromiseText = Annotated[str, AfterValidator(_understood), Field(json_schema_extra={"pattern": f"^{_FORM}$"})]
"""A promise as a recipe writes it."""
