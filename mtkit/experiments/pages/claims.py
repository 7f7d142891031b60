"""The page docs/claims.md: what the papers claim, and what the committed results show."""

from collections.abc import Sequence

from mtkit.experiments.pages.choose import MADE
from mtkit.experiments.pages.findings import LEVEL, MARGIN, claims, verdict
from mtkit.experiments.pages.questions import Question, score
from mtkit.terminal import markdown


def claims_page(answers: Sequence[Question]) -> str:
    """Return docs/claims.md."""
    rows = [("attention", "the paper claims", "nearest task", "score", "`full`", "verdict")]
    shown = {question.place: question.measured for question in answers if question.complete}
    counts: dict[str, int] = {}
    for name, claim in claims().items():
        of_task = shown.get(claim.task or "", {})
        measured = of_task.get(name)
        result = verdict(claim, measured)
        counts[result] = counts.get(result, 0) + 1
        numbers = (score(measured), f"{of_task['full'].score.mean:.1f}" if measured else "-")
        rows.append((f"`{name}`", claim.claim, claim.task or "none", *numbers, result))
    total = ", ".join(f"{counts[result]} {result}" for result in sorted(counts, key=lambda result: -counts[result]))
    parts = [
        "# Claims of the papers, compared with results here",
        "This page lists what the paper of each mechanism claims, with the mechanism's score in the task that is "
        f"nearest to the claim. Of {len(rows) - 1} claims: {total}.",
        "The verdict is computed from this score:\n\n"
        f"- held: better than `full` (p < {LEVEL:g}, corrected), or, if the claim is equal quality at a lower cost, "
        f"with 95% confidence at most {MARGIN:g} points lower;\n"
        f"- worse after this training: worse (p < {LEVEL:g}, corrected); this does not contradict the paper, because "
        "training was short: [slow-learners.md](slow-learners.md) shows which mechanisms learn the task with more "
        "updates;\n"
        "- not seen at this size: any other result;\n"
        "- not measured: the task has no complete results yet, or no task here would show it.\n\n"
        "Models and tasks here are small, and most papers trained large models. [choose.md](choose.md) explains the "
        f"scores and their marks. {MADE}",
        markdown(rows, left=(0, 1, 2, 5)),
    ]
    return "\n\n".join(parts) + "\n"
