"""Findings from the committed results of the studies, by mechanism: scores, tests against `full`, verdicts on claims.

studies/results/NAME.jsonl.gz has the rows of the study NAME, as `mtkit compare` writes them. The file claims.yaml has
the claim of each mechanism's paper, and the task of a study that would show it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from mtkit.attention.contract import ROLES
from mtkit.experiments.entries import Entry, parse_entries
from mtkit.experiments.folder import read_rows
from mtkit.experiments.pooled import Pooled, pool
from mtkit.experiments.rows import Row, final_rows
from mtkit.experiments.study import Study, StudySettings, read_study
from mtkit.experiments.table import choose_columns
from mtkit.recipe.file import STUDIES
from mtkit.recipe.settings import Settings
from mtkit.storage.records import read_object
from mtkit.storage.yaml_text import load_yaml

RESULTS = STUDIES / "results"
LENGTH = 2048
"""Length of the counted costs, in tokens."""
LONG = 16_384
"""Length at which speeds show whether a mechanism suits long texts."""
REPEATS = 3
"""Smallest number of repeats for a time."""
MARGIN = 2.0
"""A mechanism is as good as `full` if its score is at most this much lower, with 95% confidence."""
LEVEL = 0.05
"""Largest p-value of a difference."""
Verdict = Literal["held", "not seen at this size", "worse after this training", "not measured"]


class Claim(Settings):
    """An entry of claims.yaml."""

    claim: str
    """The paper's claim, in one line."""
    task: str | None = None
    """Study and task that would show it, as "probes/sort"; None if no study here would."""
    expect: Literal["better", "equal"] = "equal"
    """Whether the claim is a higher score than `full` has, or one that is not lower."""
    low: str | None = None
    """Why a small model learns selective copying slowly with it, or not at all."""


@dataclass(frozen=True)
class Measured:
    """A mechanism on one task of a study."""

    name: str
    entry: str
    rows: Sequence[Row]
    values: Sequence[float]
    """Score of each row."""
    score: Pooled
    same: bool = False
    """Whether every training has the validation loss of `full`: the mechanism computes the same at these lengths."""

    @property
    def mark(self) -> str:
        """Return + for better than `full`, - for worse, = for as good within MARGIN, ≡ for the same, "" if open."""
        if self.same:
            return "≡"
        if self.score.p is None or self.score.difference_low is None:
            return ""
        if self.score.p < LEVEL and abs(self.score.difference) > 0:
            return "+" if self.score.difference > 0 else "-"
        return "=" if self.score.difference_low > -MARGIN else ""


def load(name: str) -> tuple[Study, list[Row]]:
    """Return a study that comes with mtkit, without its recipe, and its committed rows that count.

    There is no row without a file of results. Raises: MtkitError if a row is damaged.
    """
    settings = StudySettings.model_validate(read_study(Path(name))[0])
    path, search = RESULTS / f"{name}.jsonl.gz", settings.search
    rows: list[Row] = list(read_rows(path)) if path.exists() else []
    good = [row for row in final_rows(rows, settings.seeds[0] if search else None) if "failed" not in row]
    return Study({}, tuple(parse_entries(settings.entries)), settings), good


def mechanism_and_role(entry: Entry) -> tuple[str, str | None]:
    """Return an entry's mechanism, and its only role; None for the roles of its paper."""
    attention = entry.settings["attention"]
    if "name" in attention:
        return str(attention["name"]), None
    ((role, name),) = ((role, name) for role, name in attention.items() if role in ROLES)
    return str(name), role


def measure(study: Study, rows: Sequence[Row], task: str | None, column: str) -> dict[str, Measured]:
    """Return the mechanisms on a task by name, in the order of the study, each compared with the first entry."""
    rows = [row for row in rows if row["task"] == task]
    if not rows:
        return {}
    (score,) = choose_columns(rows, [column])
    ordered = sorted((row for row in rows if score.value(row) is not None), key=lambda row: row["seed"])
    groups = [(entry, [row for row in ordered if row["entry"] == entry.name]) for entry in study.entries]
    groups = [(entry, of_entry) for entry, of_entry in groups if of_entry]
    values = [[float(score.value(row) or 0.0) for row in of_entry] for _, of_entry in groups]
    names = [mechanism_and_role(entry)[0] for entry, _ in groups]
    full = {row["seed"]: row["valid"].get("nll") for row in groups[0][1]}
    same = [
        name != "full" and all(row["valid"].get("nll") == full.get(row["seed"]) for row in of_entry)
        for name, (_, of_entry) in zip(names, groups, strict=True)
    ]
    return {
        name: Measured(name, entry.name, of_entry, scores, pooled, equal)
        for name, (entry, of_entry), scores, pooled, equal in zip(
            names, groups, values, pool(values), same, strict=True
        )
    }


def long_costs() -> dict[str, float]:
    """Return a layer's FLOPs at LENGTH tokens by mechanism, relative to `full` in the same role."""
    return {name: 1 / of[LENGTH] for name, of in _ratios("flops").items() if LENGTH in of}


def speeds() -> dict[str, dict[int, float]]:
    """Return how many times faster than `full` a layer is, by mechanism and length, forward and backward.

    Only the fastest of REPEATS measurements counts.
    """
    return _ratios("seconds", REPEATS)


def _ratios(metric: str, repeats: int = 1) -> dict[str, dict[int, float]]:
    """Return the cost of `full` divided by the mechanism's, by mechanism and length, of at least so many repeats.

    `mtkit benchmark attention` measured it in the encoder, or in the decoder for mechanisms without that role.
    """
    ratios: dict[str, dict[int, float]] = {}
    paths = [path for role in ("decoder", "encoder") for path in sorted(RESULTS.glob(f"attention-{role}*.json"))]
    for run in map(read_object, paths):
        measurements = run["measurements"] if run and run["setting"]["repeats"] >= repeats else ()
        for case in measurements:
            if (case["work"], case["form"]) == ("forward-backward", "sub-layer"):
                ratios.setdefault(case["attention"], {})[case["length"]] = case["full_by_this"][metric]
    return ratios


def claims() -> dict[str, Claim]:
    """Read the claims by mechanism."""
    text = (RESULTS / "claims.yaml").read_text(encoding="utf-8")
    return TypeAdapter(dict[str, Claim]).validate_python(load_yaml(text))


def verdict(claim: Claim, measured: Measured | None) -> Verdict:
    """Return whether a measurement confirms a claim.

    Held: the mechanism is better than `full`, if the claim expects that, or better or as good, if not. Worse after this
    training: a study of this size does not contradict a paper. Not measured: no test, or the same model as `full`. Not
    seen: any other result.
    """
    if claim.task is None or measured is None or measured.score.p is None or measured.same:
        return "not measured"
    if measured.mark == "+" or (measured.mark == "=" and claim.expect == "equal"):
        return "held"
    return "worse after this training" if measured.mark == "-" else "not seen at this size"
