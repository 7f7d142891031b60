"""Write choose.md, choose.png, roles.md, slow-learners.md, claims.md in docs/, and studies/scores.json, from results.

`python -m mtkit.experiments.pages.write` writes them; a test checks that the committed files are what this makes.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from mtkit.attention.registry import mechanisms
from mtkit.experiments.pages.choose import choose_page
from mtkit.experiments.pages.claims import claims_page
from mtkit.experiments.pages.findings import LENGTH, speeds
from mtkit.experiments.pages.questions import CLOSER_QUESTIONS, ROLE_QUESTIONS, Question, answer, scores_object
from mtkit.experiments.pages.roles import roles_page
from mtkit.experiments.pages.slow import slow_page
from mtkit.experiments.pictures.canvas import save, styled
from mtkit.experiments.pictures.costs import Cost, draw_cost
from mtkit.experiments.pictures.points import Point
from mtkit.experiments.pooled import pool
from mtkit.recipe.file import STUDIES
from mtkit.storage.files import json_text, write_text

DOCS = Path("docs")
SCORES = STUDIES / "scores.json"
"""File of the scores that `mtkit attentions` shows."""
LEAST = 2
"""Smallest number of seeds for the first question."""


def picture(answers: Sequence[Question]) -> Any:
    """Return the figure: a point per mechanism, the mean over the complete probes, against the cost of a long layer."""
    groups = [question.measured for question in answers if question.complete and question.column == "token"]
    values = [
        tuple(map(fmean, zip(*(measured[name].values for measured in groups), strict=False))) for name in groups[0]
    ]
    times = {name: 1 / of[LENGTH] for name, of in speeds().items() if LENGTH in of}
    points = [
        Point(name, mechanisms()[name].family, of, pooled.low, pooled.high, {"length": times.get(name)})
        for name, of, pooled in zip(groups[0], values, pool(values), strict=True)
    ]
    tasks = " and ".join(str(question.task) for question in answers if question.measured in groups)
    title = f"time of a layer at {LENGTH:,} tokens, relative to full"
    with styled([*groups[0], title]):
        return draw_cost(points, "length", "token", tasks, Cost(f"cost at {LENGTH:,} tokens", title))


def files(answers: Sequence[Question], closer: Sequence[Question], of_roles: Sequence[Question]) -> dict[Path, str]:
    """Return the text of each file by its path; none before the first question has results of LEAST seeds."""
    if not (answers[0].complete and min(answers[0].seeds) >= LEAST):
        return {}
    shown = [question for question in answers if question.complete]
    roles = of_roles if all(question.complete and min(question.seeds) >= LEAST for question in of_roles) else ()
    return {
        DOCS / "choose.md": choose_page(answers, closer, roles),
        **({DOCS / "roles.md": roles_page(roles)} if roles else {}),
        DOCS / "slow-learners.md": slow_page(answers[0], closer[0]),
        DOCS / "claims.md": claims_page(answers),
        SCORES: json_text(scores_object(shown, roles), indent=1, ensure_ascii=False) + "\n",
    }


def main() -> None:
    """Write the pages, the scores and the picture."""
    answers = answer()
    written = files(answers, answer(CLOSER_QUESTIONS), answer(ROLE_QUESTIONS))
    for path, text in written.items():
        write_text(path, text)
    if written:
        save(picture(answers), DOCS / "choose.png")


if __name__ == "__main__":
    main()
