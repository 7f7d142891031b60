"""Uses of attention, each with the score of a study that shows which mechanism suits it.

A question is complete if every entry of its study has a result. Marks need two seeds of some entries.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from mtkit.attention.contract import ROLES
from mtkit.attention.registry import mechanisms
from mtkit.experiments.pages.findings import LONG, Measured, load, measure, mechanism_and_role, speeds
from mtkit.experiments.table import COSTS
from mtkit.memory import in_words

SAVING = 0.6
"""Largest share of the state of `full` that counts as little memory."""
FAST = 5.0
"""Smallest layer speed at LONG tokens, relative to `full`, that counts as fast."""


@dataclass(frozen=True)
class Question:
    """A use of attention, and the score that shows which mechanism suits it."""

    use: str
    head: str
    """Head of its column in the table."""
    good: str
    """The ability of a mechanism that is better than `full`, or as good."""
    study: str
    task: str | None
    column: str
    role: str | None = None
    """The only role of the study's mechanisms, with `full` in the others; None for the roles of their papers."""
    measured: Mapping[str, Measured] = field(default_factory=dict)
    """The mechanisms by name; empty before there are results."""
    total: int = 0
    """Number of entries in the study, of those with the question's role."""

    @property
    def complete(self) -> bool:
        """Whether every entry of the study has results."""
        return 0 < len(self.measured) == self.total

    @property
    def seeds(self) -> Counter[int]:
        """The numbers of seeds, fewest first, each with the number of mechanisms that have it."""
        return Counter(sorted(len(entry.rows) for entry in self.measured.values()))

    @property
    def place(self) -> str:
        """The name of the task in claims.yaml."""
        side = self.column.partition("@")[2]
        return "/".join(filter(None, (self.study, self.task))) + f"@{side}" * bool(side)


SELECT = Question(
    "few words count: 8 symbols among 16 to 32 (`select`: the task selective-copy)",
    "select",
    "selection",
    "probes",
    "selective-copy",
    "token",
)
CAPTIONS = Question(
    "short sentences, little data: 29,000 captions of Multi30k (`captions`)",
    "captions",
    "captions",
    "sentences",
    None,
    "chrF",
)
QUESTIONS = (
    SELECT,
    replace(
        SELECT,
        use="the same in sources twice as long as in training (`select 2x`)",
        head="select 2x",
        good="length",
        column="token@test-2x",
    ),
    Question(
        "short sources, every word counts: 5 to 20 symbols (`sort`: the task sort)",
        "sort",
        "sorting",
        "probes",
        "sort",
        "token",
    ),
    CAPTIONS,
    Question(
        "long documents: 100 sentences, about 880 pieces (`documents`)",
        "documents",
        "documents",
        "documents",
        None,
        "chrF",
    ),
)
ROLE_QUESTIONS = tuple(
    replace(question, head=f"{role}{question.head.removeprefix('select')}", study="roles", role=role)
    for role in ROLES
    for question in QUESTIONS[:2]
)
"""The first two questions for one role at a time."""
LONGER = replace(SELECT, head="longer", study="longer")
"""The first question after more updates, for the mechanisms that are worse than `full` in it."""
LONGER_CAPTIONS = replace(CAPTIONS, study="sentences-longer")
"""The captions after more updates, for some mechanisms that are better than `full` in them."""
CAPTIONS_PARTS = replace(CAPTIONS, study="sentences-parts")
"""The captions, for `nystrom` without its convolution."""
CLOSER_QUESTIONS = (LONGER, LONGER_CAPTIONS, CAPTIONS_PARTS)
"""Questions about the answers to QUESTIONS: whether they last, and why."""


def answer(questions: Sequence[Question] = QUESTIONS) -> list[Question]:
    """Return the questions with the measurements that there are."""
    loaded = {name: load(name) for name in dict.fromkeys(question.study for question in questions)}
    answers = []
    for question in questions:
        study, rows = loaded[question.study]
        first, *others = study.entries
        entries = (first, *(entry for entry in others if mechanism_and_role(entry)[1] == question.role))
        measured = measure(replace(study, entries=entries), rows, question.task, question.column)
        answers.append(replace(question, total=len(entries), measured=measured))
    return answers


def letters(name: str) -> str:
    """Return E, D and C for the published roles of a mechanism: encoder, decoder, cross."""
    return "".join(role[0].upper() for role in ROLES if role in mechanisms()[name].published)


def states(question: Question) -> dict[str, float]:
    """Return the bytes that decoding keeps per hypothesis after 100 tokens, by mechanism, if they were measured."""
    state, sizes = COSTS["state-100"], {}
    for name, entry in question.measured.items():
        known = [size for row in entry.rows if (size := state.value(row)) is not None]
        if len(known) == len(entry.rows):
            sizes[name] = fmean(known)
    return sizes


def good_at(shown: Sequence[Question]) -> dict[str, list[str]]:
    """Return what each mechanism is good at: complete questions in which it is better than `full` or as good.

    A small state and a fast layer count for mechanisms that are worse than `full` in no question.
    """
    state, times = states(shown[0]), speeds()
    good: dict[str, list[str]] = {}
    for name in shown[0].measured:
        marks = {question.good: question.measured[name].mark for question in shown if name in question.measured}
        good[name] = [what for what, mark in marks.items() if mark in ("+", "=", "≡")]
        if "-" not in marks.values() and name != "full":
            if state.get(name, state["full"]) <= SAVING * state["full"]:
                good[name].append("small state")
            if times.get(name, {}).get(LONG, 1.0) >= FAST:
                good[name].append("long texts")
    return good


def scores_object(shown: Sequence[Question], roles: Sequence[Question] = ()) -> dict[str, dict[str, str]]:
    """Return what `mtkit attentions` shows by mechanism: `good_at`, and `row`, its scores and costs.

    `roles` are the complete ROLE_QUESTIONS.
    """
    state, times, good = states(shown[0]), speeds(), good_at(shown)
    rows = {}
    for name in shown[0].measured:
        facts = []
        for question in shown:
            full = question.measured["full"]
            compared = "" if name == "full" else f" (full {full.score.mean:.1f})"
            facts.append(f"{question.head} {score(question.measured.get(name))}{compared}")
        alone = [
            f"{question.role} {score(question.measured[name])}"
            for question in roles
            if question.column == "token" and name in question.measured and name != "full"
        ]
        facts += [f"select in one role: {', '.join(alone)}"] if alone else []
        fast = {} if name == "full" else times.get(name, {})
        speed = ", ".join(f"{ratio:.2g} at {length:,}" for length, ratio in sorted(fast.items()))
        facts += [f"speed {speed} tokens"] if speed else []
        facts += [f"state {in_words(round(state[name]))}"] if name in state else []
        rows[name] = {"good_at": ", ".join(good[name]), "row": "; ".join(facts)}
    return rows


def counts(question: Question) -> tuple[int, int, int, int]:
    """Return the number of mechanisms other than `full`, and how many are better than `full`, as good, and worse."""
    marks = [entry.mark for name, entry in question.measured.items() if name != "full"]
    return len(marks), marks.count("+"), marks.count("=") + marks.count("≡"), marks.count("-")


def score(measured: Measured | None) -> str:
    """Return a score with its mark: "97.5 +"; "-" without a score."""
    return "-" if measured is None else f"{measured.score.mean:.1f} {measured.mark}".strip()
