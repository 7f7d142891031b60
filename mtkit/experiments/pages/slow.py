"""The page docs/slow-learners.md: mechanisms that are worse than `full`, after more updates too, and why."""

from collections.abc import Mapping

from mtkit.experiments.pages.choose import MADE, by_score, seeds, updates
from mtkit.experiments.pages.findings import Measured, claims
from mtkit.experiments.pages.questions import Question, letters, score
from mtkit.terminal import markdown


def slow_page(question: Question, longer: Question) -> str:
    """Return docs/slow-learners.md, on mechanisms that are worse than `full` in a question.

    `longer` is the question after more updates; it may be empty.
    """
    first, why = question.measured, claims()
    worse = [entry for entry in reversed(by_score(first.values())) if entry.mark == "-"]
    later: Mapping[str, Measured] = longer.measured if longer.complete else {}
    heads = [f"{updates(shown)} updates" for shown in (question, *([longer] if later else []))]
    rows = [("attention", "roles", *heads, "likely reason")]
    for entry in [*worse, first["full"]]:
        scores = (score(entry), *([score(later.get(entry.name))] if later else []))
        rows.append((f"`{entry.name}`", letters(entry.name), *scores, why[entry.name].low or ""))
    parts = [
        "# Mechanisms that learn slowly",
        f"This page lists the mechanisms that are worse than `full` in the column `{question.head}` of "
        "[choose.md](choose.md), and why: some only need more updates. choose.md explains scores, marks and letters. "
        + (f"The scores after {updates(longer)} updates have {seeds(longer)}. " if later else "")
        + "The reasons follow from the equations; `mtkit attentions NAME` names the paper. "
        + MADE,
        markdown(rows, left=(0, 1, len(rows[0]) - 1)),
    ]
    return "\n\n".join(parts) + "\n"
