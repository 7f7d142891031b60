"""Rows of a comparison: what a trial measured, and which rows count in the table."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator
from typing_extensions import TypedDict

from mtkit.errors import shown
from mtkit.storage.records import Count, stored
from mtkit.training.progress import LOWER_IS_BETTER

Row = Mapping[str, Any]
"""Result of a trial, as its process writes it: `STORED_ROW`."""


@stored
class StoredTrial(TypedDict):
    """Content of trials/NAME.json, and the first keys of a row."""

    format: int
    trial: str
    entry: str
    task: str | None
    seed: int
    stage: str
    point: dict[str, Any]
    recipe: dict[str, Any]
    data: str


TRIAL_KEYS = tuple(StoredTrial.__annotations__)
"""Keys of trials/NAME.json."""


@stored
class _Training(TypedDict):
    updates: Count
    tokens: Count
    seconds: float
    tokens_per_second: float
    precision: NotRequired[str]


@stored
class _Decoding(TypedDict):
    tokens_per_second: float
    segments_per_second: float


@stored
class _Score(TypedDict):
    value: float
    signature: str


@stored
class _Valid(TypedDict):
    nll: NotRequired[float | None]
    best_by: NotRequired[str]


@stored
class _Point(_Valid):
    update: Count
    tokens: Count
    seconds: float


@stored
class _Measured(StoredTrial):
    """Row of a trial that was trained and scored."""

    family: str | None
    side: str
    scores: dict[str, dict[str, _Score]]
    valid: _Valid
    curve: list[_Point]
    training: _Training
    decoding: _Decoding
    parameters: Count
    peak_bytes: Count
    minutes: float
    hardware: str
    flops_per_token: NotRequired[float | None]
    state_bytes: NotRequired[dict[str, int | None]]


def _with_its_side(row: _Measured) -> _Measured:
    if not row["scores"].get(row["side"]):
        raise ValueError(f"scores has none of the side {shown(row['side'])}")
    return row


@stored
class _Failed(StoredTrial):
    """Row of a trial that failed, with the reason."""

    failed: str


@stored
class _Pruned(StoredTrial):
    """Row of a search trial that the pruner stopped: its validations so far."""

    pruned: Literal[True]
    valid: dict[str, Any]
    curve: list[dict[str, Any]]


STORED_ROW: Any = _Failed | _Pruned | Annotated[_Measured, AfterValidator(_with_its_side)]
"""Type of a stored row, for `read_stored`."""


def belongs_to(row: Row, entry: str, task: str | None) -> bool:
    """Return whether a row belongs to an entry on a task."""
    return row["entry"] == entry and row.get("task") == task


def is_measured(row: Row) -> bool:
    """Return whether a trial was trained to its end and scored: it neither failed nor was stopped by a pruner."""
    return "failed" not in row and not row.get("pruned", False)


def chosen_point(rows: Sequence[Row], stage: str, seed: int) -> dict[str, Any] | None:
    """Return the point with the best validation score among an entry's trials of the search; None if all failed.

    Of equal scores, the one with the lower loss is best.
    """
    tried = [row for row in rows if row["stage"] == stage and row["seed"] == seed and is_measured(row)]
    if not tried:
        return None
    return dict(max(tried, key=lambda row: (validation_score(row), -_loss(row)))["point"])


def _loss(row: Row) -> float:
    loss = row.get("valid", {}).get("nll")
    return float("inf") if loss is None else float(loss)


def validation_score(row: Row) -> float:
    """Return a row's best validation score, negated if lower is better; minus infinity without a validation."""
    valid = row.get("valid", {})
    by = valid.get("best_by", "bleu")
    score = valid.get("nll" if by == "loss" else by)
    if score is None:
        return float("-inf")
    return -score if by in LOWER_IS_BETTER else float(score)


def search_score(row: Row) -> float:
    """Return a row's validation score for Optuna, less a millionth of the loss, which orders equal scores.

    The BLEU of short trials is often 0.
    """
    loss = row.get("valid", {}).get("nll")
    return validation_score(row) - 1e-6 * (1e3 if loss is None else loss)


def curve(metrics: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the learning curve of a run's metrics: a point per validation."""
    points = []
    for line in metrics:
        if line["kind"] == "validation":
            names = dict.fromkeys(("update", "tokens", "nll", "bleu", line["best_by"], "best_by"))
            scores = {name: line[name] for name in names if name in line}
            points.append({**scores, "seconds": line["training_seconds"]})
    return points


def final_rows(rows: Sequence[Row], first_seed: int | None = None) -> list[Row]:
    """Return the rows that count in the table: those with the full budget, of each entry and task.

    With a search, whose trials have the seed `first_seed`, only those at the chosen point. Pruned trials do not count.
    """
    groups: dict[tuple[str, str | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["entry"], row.get("task")), []).append(row)
    chosen: list[Row] = []
    for group in groups.values():
        finals = [row for row in group if row["stage"] == "final" and not row.get("pruned", False)]
        if first_seed is not None:
            stage = "search" if any(row["stage"] == "search" for row in group) else "final"
            point = chosen_point(group, stage, first_seed)
            finals = [row for row in finals if point is None or row["point"] == point]
        chosen += finals
    return chosen
