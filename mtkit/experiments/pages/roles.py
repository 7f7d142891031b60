"""The page docs/roles.md: every mechanism in each role that it can play, one role at a time, from committed results."""

from collections.abc import Sequence

from mtkit.attention.registry import mechanisms
from mtkit.experiments.pages.choose import MADE, MARKS, MOST, by_score, seeds, updates
from mtkit.experiments.pages.findings import Measured
from mtkit.experiments.pages.questions import Question, counts, score
from mtkit.terminal import markdown


def roles_page(answers: Sequence[Question]) -> str:
    """Return docs/roles.md; `answers` are the complete ROLE_QUESTIONS."""
    first = answers[0]
    parts = [
        "# Which attention in which role?",
        "This page shows what each attention mechanism does in a single role: in the encoder, in the decoder, or in "
        f"the attention to the source (cross). The other two roles are `full`. {MADE}",
        "\n".join(
            (
                f"- Scores: the percentage of words at the right position in the tasks `select` and `select 2x` of "
                f"[choose.md](choose.md), after {updates(first)} updates, {seeds(first)} "
                f"([{first.study}.yaml](../studies/{first.study}.yaml)). `full` in all roles has "
                f"{first.measured['full'].score.mean:.1f} and {answers[1].measured['full'].score.mean:.1f}.",
                MARKS,
                "- In parentheses: the paper does not have this role; it is an extension of mtkit.",
            )
        ),
        markdown(_summary([question for question in answers if question.column == "token"]), left=(0, 5)),
        "## Every mechanism",
        markdown(_table(answers), left=(0, 1)),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(answers: Sequence[Question]) -> list[tuple[str, ...]]:
    """Return a row per role: how many mechanisms are better, as good or worse, and the best."""
    rows: list[tuple[str, ...]] = [("role", "mechanisms", "+", "=, ≡", "-", "best")]
    for question in answers:
        best = [entry for entry in by_score(question.measured.values()) if entry.name != "full"][:MOST]
        names = ", ".join(f"`{entry.name}` {_cell(question, entry)}" for entry in best)
        rows.append((question.role or "", *map(str, counts(question)), names))
    return rows


def _table(answers: Sequence[Question]) -> list[tuple[str, ...]]:
    """Return a row per mechanism, by name, with its scores in each role."""
    names = sorted({name for question in answers for name in question.measured} - {"full"})
    rows = [("attention", "family", *(question.head for question in answers))]
    for name in names:
        cells = (_cell(question, question.measured.get(name)) for question in answers)
        rows.append((f"`{name}`", mechanisms()[name].family, *cells))
    return rows


def _cell(question: Question, entry: Measured | None) -> str:
    """Return a score with its mark, in parentheses in a role that the paper does not have."""
    if entry is None or question.role in mechanisms()[entry.name].published:
        return score(entry)
    return f"({score(entry)})"
