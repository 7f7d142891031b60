"""The pages docs/choose.md and docs/claims.md, and the picture docs/choose.png, from the committed results.

`python -m mtkit.experiments.page` writes them; a test checks that the committed pages are what this makes. A task is
shown when every entry of its study has results of two seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from mtkit.attention.registry import mechanisms
from mtkit.experiments.findings import (
    LENGTH,
    LEVEL,
    MARGIN,
    SEEDS,
    Measured,
    claims,
    load,
    long_costs,
    mean_cost,
    measure,
    verdict,
)
from mtkit.experiments.pictures.canvas import save, styled
from mtkit.experiments.pictures.costs import Cost, draw_cost
from mtkit.experiments.pictures.points import Point
from mtkit.experiments.pooled import pool
from mtkit.memory import in_words
from mtkit.storage.files import write_text
from mtkit.terminal import markdown

DOCS = Path("docs")
LEAST = 2
"""Smallest number of seeds of a mechanism on a page."""
MOST = 6
"""Maximum names in a list."""
SAVING = 0.6
"""Largest share of the state of `full` that counts as little memory."""
MADE = "Made by `python -m mtkit.experiments.page` from [the results of the studies](../studies/README.md)."


@dataclass(frozen=True)
class Question:
    """A use of attention, and the score that shows which mechanism suits it."""

    use: str
    head: str
    """Head of its column in the table."""
    study: str
    task: str | None
    column: str
    measured: Mapping[str, Measured] = field(default_factory=dict)
    """The mechanisms by name; empty before there are results."""
    total: int = 0
    """Number of entries of the study."""

    @property
    def complete(self) -> bool:
        """Whether all entries of the study have results of LEAST seeds."""
        return 0 < len(self.measured) == self.total and all(len(each.rows) >= LEAST for each in self.measured.values())

    @property
    def place(self) -> str:
        """The name of the task in claims.yaml."""
        side = self.column.partition("@")[2]
        return "/".join(filter(None, (self.study, self.task))) + f"@{side}" * bool(side)


QUESTIONS = (
    Question(
        "Sources longer than windows and blocks: 8 symbols among 16 to 32 (`selective-copy`)",
        "select",
        "probes",
        "selective-copy",
        "token",
    ),
    Question("Sources twice as long as in training", "select 2x", "probes", "selective-copy", "token@test-2x"),
    Question("Short sources, all of them needed: 5 to 20 symbols (`sort`)", "sort", "probes", "sort", "token"),
    Question("Short sentences, little data: 29,000 captions (`sentences`)", "captions", "sentences", None, "chrF"),
    Question("Long documents: Python's documentation (`documents`)", "documents", "documents", None, "chrF"),
)


def answer(questions: Sequence[Question] = QUESTIONS) -> list[Question]:
    """Return the questions with the measurements that there are."""
    loaded = {name: load(name) for name in dict.fromkeys(question.study for question in questions)}
    answers = []
    for question in questions:
        study, rows = loaded[question.study]
        measured = measure(study, rows, question.task, question.column)
        answers.append(replace(question, measured=measured, total=len(study.entries)))
    return answers


def choose_page(answers: Sequence[Question]) -> str:
    """Return docs/choose.md. At least the first question must be complete."""
    shown = [question for question in answers if question.complete]
    parts = [
        "# Which attention?",
        MADE,
        _setting(shown[0]),
        "![Token match against the cost of a long layer, a dot per mechanism, coloured by family](choose.png)",
        "## In short",
        "\n".join([*_answers(shown), *_notes(answers, shown)]),
        "## How sure is this?",
        "\n".join(_doubts(shown)),
        "## Every mechanism",
        "Words at the right position, in per cent, as the mean over seeds. + is better than `full`, - is worse, = is "
        f"at most {MARGIN:g} points lower, ≡ computes the same at these lengths; without a mark, that is open. Cost: "
        f"growth with the length T, and counted FLOPs of a layer at {LENGTH:,} tokens by default options, relative to "
        "`full`. State: memory that decoding keeps per hypothesis after 100 tokens of the probes.",
        markdown(_table(shown), left=(0, 1, 2)),
    ]
    return "\n\n".join(parts) + "\n"


def _setting(question: Question) -> str:
    """Return a paragraph on the models, from the rows."""
    row = next(iter(question.measured.values())).rows[0]
    model, training = row["recipe"]["model"], row["recipe"]["training"]
    counts = sorted({len(each.rows) for each in question.measured.values()})
    seeds = " or ".join(map(str, counts)) + f" seed{'s' * (counts[-1] > 1)}"
    length = f"{row['training']['updates']} updates of {training['optimizer'].title()}"
    return (
        f"{len(question.measured)} mechanisms, each in the roles of its paper, the other roles `full`: models of width "
        f"{model['d_model']} with {model['encoder_layers']} + {model['decoder_layers']} layers, {seeds}, {length} with "
        f"{training['batch_tokens']} tokens per batch. This is a scale model: sources are about 30 times shorter than "
        "documents, and windows, blocks, strides and ranks are smaller too "
        f"([{question.study}.yaml](../studies/{question.study}.yaml)). It shows what a pattern of attention learns, "
        "and how soon; it does not show the quality of translations."
    )


def _answers(shown: Sequence[Question]) -> list[str]:
    """Return a line per question: the best mechanisms, and the best whose cost grows less than T²."""
    lines = []
    for question in shown:
        best = sorted(question.measured.values(), key=lambda each: -each.score.mean)
        cheap = [each for each in best if mechanisms()[each.name].growth < 2]
        lines.append(
            f"- **{question.use}**: `full` has {question.measured['full'].score.mean:.1f}. "
            f"Best: {_names(best)}. Best at a cost below O(T²): {_names(cheap)}."
        )
    return lines


def _names(measured: Sequence[Measured]) -> str:
    return ", ".join(f"`{each.name}` {_score(each)}" for each in measured[:MOST]) or "none"


def _notes(answers: Sequence[Question], shown: Sequence[Question]) -> list[str]:
    """Return lines on decoding, on what to avoid, and on what was not measured."""
    first, lines = shown[0].measured, []
    state = {name: mean_cost(each.rows, "state-100") or math.inf for name, each in first.items()}
    economical = [each for each in first.values() if state[each.name] <= SAVING * state["full"] < math.inf]
    lines.append(
        f"- **Fast decoding, little memory**: {len(economical)} mechanisms keep at most {SAVING:.0%} of the state of "
        f"`full` after 100 tokens. Best of them on `{shown[0].head}`: "
        f"{_names(sorted(economical, key=lambda each: -each.score.mean))}."
    )
    tasks = [question for question in shown if "@" not in question.column]
    worse = [
        name
        for name in first
        if all(question.measured[name].mark == "-" for question in tasks if name in question.measured)
    ]
    worse.sort(key=lambda name: first[name].score.mean)
    where = " and ".join(f"`{question.head}`" for question in tasks)
    names = ", ".join(f"`{name}` {first[name].score.mean:.1f}" for name in worse[: 2 * MOST])
    names += f" and {len(worse) - 2 * MOST} more with a - below" if len(worse) > 2 * MOST else ""
    lines.append(
        f"- **Avoid** if nothing else speaks for it: worse than `full` on {where} are {names or 'none'}. "
        "[slow-learners.md](slow-learners.md) says why some learn slowly."
    )
    missing = [
        f"{question.use} ({sum(len(each.rows) for each in question.measured.values())} trainings of {question.total} "
        f"entries, `mtkit compare --study {question.study}`)"
        for question in answers
        if not question.complete
    ]
    lines.append(f"- **Not measured yet**: {'; '.join(missing)}." if missing else "")
    lines.append(
        "- Speed and memory at long lengths: [cost.md](cost.md), in the decoder [cost-decoder.md](cost-decoder.md)."
    )
    return [line for line in lines if line]


def _doubts(shown: Sequence[Question]) -> list[str]:
    lines = []
    for question in shown:
        full = question.measured["full"].score
        tested = [each.score.p for each in question.measured.values() if each.score.p is not None]
        if full.low is None or full.high is None:  # all seeds of each entry have the same score
            continue
        lines.append(
            f"- `{question.head}`: {sum(p < LEVEL for p in tested)} of {len(tested)} differences to `full` "
            f"({full.mean:.1f}, 95% interval {full.low:.1f} to {full.high:.1f}) are significant at {LEVEL:.0%} after "
            "Holm's correction."
        )
    return [
        *lines,
        "- Tests and intervals are of seeds, with one variance for all mechanisms "
        "([how](compare-statistics.md#many-entries-with-few-seeds)).",
        "- All have the same learning rate, and one size of window or rank. A mechanism that needs other ones is "
        "better than it looks here.",
        "- [claims.md](claims.md) compares the claim of each paper with these results.",
    ]


def _table(shown: Sequence[Question]) -> list[tuple[str, ...]]:
    first, long = shown[0].measured, long_costs()
    rows = [("attention", "family", "cost", *(question.head for question in shown), f"cost at {LENGTH:,}", "state")]
    for each in sorted(first.values(), key=lambda each: -each.score.mean):
        mechanism = mechanisms()[each.name]
        scores = [_score(question.measured.get(each.name)) for question in shown]
        state = mean_cost(each.rows, "state-100")
        cost = f"{long[each.name]:.2f}" if each.name in long else "-"
        costs = (cost, "-" if state is None else in_words(round(state)))
        rows.append((f"`{each.name}`", mechanism.family, mechanism.complexity, *scores, *costs))
    return rows


def _score(each: Measured | None) -> str:
    return "-" if each is None else f"{each.score.mean:.1f} {each.mark}".strip()


def claims_page(answers: Sequence[Question]) -> str:
    """Return docs/claims.md."""
    rows = [("attention", "the paper claims", "nearest task", "score", "`full`", "verdict")]
    shown = {question.place: question.measured for question in answers if question.complete}
    counts: dict[str, int] = {}
    for name, claim in claims().items():
        measured = shown.get(claim.task or "", {})
        each = measured.get(name)
        said = verdict(claim, each)
        counts[said] = counts.get(said, 0) + 1
        numbers = (_score(each), f"{measured['full'].score.mean:.1f}" if each else "-")
        rows.append((f"`{name}`", claim.claim, claim.task or "none", *numbers, said))
    total = ", ".join(f"{counts[said]} {said}" for said in sorted(counts, key=lambda said: -counts[said]))
    parts = [
        "# What the papers claim, and what was seen here",
        f"{MADE} Of {len(rows) - 1} claims: {total}.",
        f"The verdict is computed. Held: better than `full` (p < {LEVEL:g}, corrected), or, if the claim is equal "
        f"quality at a lower cost, with 95% confidence at most {MARGIN:g} points lower. Contradicted: worse "
        f"(p < {LEVEL:g}, corrected), with at least {SEEDS} seeds. Not seen at this size: any other result. Not "
        "measured: the task has no complete results yet, or no task here would show it. Models and tasks are small, "
        "and most papers trained large ones; [choose.md](choose.md) explains the scores and their marks.",
        markdown(rows, left=(0, 1, 2, 5)),
    ]
    return "\n\n".join(parts) + "\n"


def picture(answers: Sequence[Question]) -> Any:
    """Return the figure: a point per mechanism, the mean over the complete probes, against the cost of a long layer."""
    groups = [question.measured for question in answers if question.complete and question.column == "token"]
    values = [
        tuple(map(fmean, zip(*(measured[name].values for measured in groups), strict=False))) for name in groups[0]
    ]
    long = long_costs()
    points = [
        Point(name, mechanisms()[name].family, of, pooled.low, pooled.high, {"length": long.get(name)})
        for name, of, pooled in zip(groups[0], values, pool(values), strict=True)
    ]
    tasks = " and ".join(str(question.task) for question in answers if question.measured in groups)
    title = f"FLOPs of a layer at {LENGTH:,} tokens, relative to full"
    with styled([*groups[0], title]):
        return draw_cost(points, "length", "token", tasks, Cost(f"cost at {LENGTH:,} tokens", title))


def pages(answers: Sequence[Question]) -> dict[str, str]:
    """Return the text of each page by its name in docs/; none before the first question is complete."""
    if not answers[0].complete:
        return {}
    return {"choose.md": choose_page(answers), "claims.md": claims_page(answers)}


def main() -> None:
    """Write the pages and the picture."""
    answers = answer()
    for name, text in pages(answers).items():
        write_text(DOCS / name, text)
    if answers[0].complete:
        save(picture(answers), DOCS / "choose.png")


if __name__ == "__main__":
    main()
