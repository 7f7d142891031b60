"""Promises of a recipe: bounds on the scores of its test sides, as in

promises:
  - BLEU >= 37 on flickr2016 after 20 minutes
  - TER <= 45 on flickr2016 after 75 minutes

The score of the test side must be within the bound, after the given minutes of training if there are any.
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
    """A bound on the score that a training with the recipe reaches."""

    text: str
    """The recipe's text: "BLEU >= 37 on flickr2016 after 20 minutes"."""
    metric: str
    side: str
    """Name of a test side."""
    bound: float
    at_most: bool
    """Whether lower is better."""
    minutes: float | None
    """Minutes of training; None for the recipe's own limits."""

    def kept(self, score: float) -> bool:
        """Return whether a score is within the bound."""
        return score <= self.bound if self.at_most else score >= self.bound


def promise(text: str) -> Promise:
    """Parse a promise. Raises: ValueError if the text has another form."""
    match = re.fullmatch(_FORM, text)
    if match is None:
        raise ValueError(f"cannot understand the promise {shown(text)}; write it as {EXAMPLE}")
    metric, sign, bound, side, minutes = match.groups()
    return Promise(text, metric, side, float(bound), sign == "<=", None if minutes is None else float(minutes))


def due_after(promises: Sequence[Promise], minutes: float | None) -> list[Promise]:
    """Return the promises that apply to a training of `minutes`; None means the recipe's own limits, and all apply.

    These are the promises for at most `minutes`; if all are for more, the first promise.
    """
    if minutes is None:
        return list(promises)
    return [item for item in promises if (item.minutes or 0) <= minutes] or list(promises[:1])


def _understood(text: str) -> str:
    promise(text)
    return text


PromiseText = Annotated[str, AfterValidator(_understood), Field(json_schema_extra={"pattern": f"^{_FORM}$"})]
"""The text of a promise in a recipe."""
