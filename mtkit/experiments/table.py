"""The table of a comparison: a line per entry and task, with means over seeds, intervals, tests and costs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from mtkit.errors import MtkitError, did_you_mean, shown
from mtkit.evaluation.metrics import ALL_METRICS, make_metric
from mtkit.evaluation.seeds import Summary, Tested, differences, score_seeds, summarise, summary_of
from mtkit.evaluation.statistics import Statistics
from mtkit.experiments.folder import Folder
from mtkit.experiments.rows import Row, belongs_to, final_rows
from mtkit.memory import in_words
from mtkit.terminal import short

LOWER_IS_BETTER = ("TER", "loss")


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    key: str
    """Name for --columns, and in CSV."""
    title: str
    value: Callable[[Row], float | None]
    """Value of one trial."""
    text: Callable[[float], str]
    timed: bool = False
    """Whether other trials on the same machine change it."""


def _timing(key: str, title: str, value: Callable[[Row], float | None], digits: int = 0) -> Column:
    return Column(key, title, value, lambda number: f"{number:,.{digits}f}", timed=True)


def _state(length: str) -> Column:
    return Column(
        f"state-{length}",
        f"state at {int(length):,}",
        lambda row: row.get("state_bytes", {}).get(length),
        lambda number: in_words(round(number)),
    )


COSTS = {
    column.key: column
    for column in (
        Column("loss", "loss", lambda row: row["valid"].get("nll"), lambda number: f"{number:.3f}"),
        Column("parameters", "parameters", lambda row: row["parameters"], lambda number: f"{number:,.0f}"),
        Column("flops", "training FLOPs/token", lambda row: row.get("flops_per_token"), partial(short, gap=" ")),
        _state("100"),
        _state("1000"),
        _timing("training", "training tokens/s", lambda row: row["training"]["tokens_per_second"]),
        _timing("decoding", "decoding tokens/s", lambda row: row["decoding"]["tokens_per_second"]),
        _timing("segments", "segments/s", lambda row: row["decoding"]["segments_per_second"], 1),
        Column("memory", "peak memory", lambda row: row["peak_bytes"], lambda number: in_words(round(number))),
        _timing("minutes", "minutes", lambda row: row["minutes"], 1),
        Column("updates", "updates", lambda row: row["training"]["updates"], lambda number: f"{number:,.0f}"),
    )
}
"""Columns that are not scores of translations."""

DEFAULT_COSTS = ("loss", "parameters", "flops", "state-1000", "training", "decoding", "memory", "updates")


@dataclass(frozen=True)
class Line:
    """One entry on one task."""

    entry: str
    task: str | None
    family: str | None
    values: Mapping[str, Summary] = field(default_factory=dict)
    """Mean over seeds by column, in the order of the table."""
    tests: Mapping[str, Tested] = field(default_factory=dict)
    """Difference to the first entry by column, for scores of the first side."""
    rows: Sequence[Row] = ()
    """Rows of the seeds that did not fail."""
    failures: Sequence[str] = ()
    """Why seeds failed, as "seed 2: out of memory"."""
    segments: bool = False
    """Whether intervals are over test segments too: their statistics are in the folder."""
    shared: bool = False
    """Whether its timings were measured while other trials ran on the machine."""

    @property
    def failed(self) -> str:
        """Why seeds failed; empty if none did."""
        return "; ".join(self.failures)

    @property
    def chosen(self) -> str:
        """The searched settings, as "peak_rate=0.003"."""
        point = self.rows[0]["point"] if self.rows else {}
        return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in point.items())


@dataclass(frozen=True)
class Table:
    """Lines of a comparison, the best first in each task, and their columns."""

    lines: Sequence[Line]
    columns: Sequence[Column]
    primary: str
    """Key of the column that orders the lines."""

    @property
    def tasks(self) -> list[str | None]:
        """The tasks in order; [None] without tasks."""
        return list(dict.fromkeys(line.task for line in self.lines)) or [None]

    def of_task(self, task: str | None) -> list[Line]:
        """Return the lines of a task."""
        return [line for line in self.lines if line.task == task]

    def records(self) -> list[dict[str, Any]]:
        """Return a flat record per line: `pandas.DataFrame(table.records())`."""
        records = []
        for line in self.lines:
            record: dict[str, Any] = {"task": line.task, "entry": line.entry, "family": line.family}
            record |= {"seeds": len(line.rows), "point": line.chosen, "failed": line.failed or None}
            for key, summary in line.values.items():
                record[key] = summary.mean
                names = ("sd",) if key in COSTS else ("sd", "low", "high")
                record |= {f"{key}_{name}": getattr(summary, name) for name in names}
                if (tested := line.tests.get(key)) is not None:
                    record |= {f"{key}_difference": tested.value, f"{key}_p": tested.p, f"{key}_p_holm": tested.p_holm}
            records.append(record)
        keys = dict.fromkeys(key for record in records for key in record)
        return [{key: record.get(key) for key in keys} for record in records]


def build(folder: Folder, wanted: Sequence[str] = ()) -> Table:
    """Build the table of a comparison's results; `wanted` are the columns, else the study's, else by the data.

    Raises: MtkitError for an unknown column.
    """
    study, rows = folder.study(), folder.rows()
    good = [row for row in final_rows(rows, study.seeds[0] if study.settings.search else None) if "failed" not in row]
    columns = choose_columns(good, wanted or study.settings.columns)
    lines: list[Line] = []
    primary = next((column.key for column in columns if column.key not in COSTS), columns[0].key)
    for task in dict.fromkeys(row.get("task") for row in rows):
        of_task = [
            _line(entry.name, task, columns, [row for row in good if belongs_to(row, entry.name, task)], own)
            for entry in study.entries
            if (own := [row for row in rows if belongs_to(row, entry.name, task)])
        ]
        lines += _ordered(_tested(of_task, study.entries[0].name, folder, columns), primary)
    return Table(lines, columns, primary)


def check_columns(wanted: Sequence[str]) -> None:
    """Raise MtkitError for a column that no comparison has; results show only later which scores there are."""
    known = {name.lower(): name for name in (*ALL_METRICS, *COSTS)}
    for name in wanted:
        metric, _, side = name.lower().partition("@")
        if metric not in known or (side and known[metric] in COSTS):
            names = list(known.values())
            raise MtkitError(f"no column {shown(name)}{did_you_mean(name, names)}; there are: {', '.join(names)}")


def choose_columns(rows: Sequence[Row], wanted: Sequence[str] = ()) -> list[Column]:
    """Return the wanted columns; by default scores and costs as the rows have them.

    A score's column is named by its metric, for the first side, or as `exact@test-2x`. Raises: MtkitError for an
    unknown column.
    """
    scores = {column.key: column for column in _score_columns(rows)}
    known = scores | COSTS
    if wanted:
        names = {key.lower(): key for key in known}
        for name in wanted:
            if rows and name.lower() not in names:
                raise MtkitError(
                    f"no column {shown(name)}{did_you_mean(name, list(known))}; there are: {', '.join(known)}"
                )
        return [known[names[name.lower()]] for name in wanted if name.lower() in names] or list(COSTS.values())[:1]
    # exact match of real translations is almost 0
    task = any(row.get("task") for row in rows)
    hidden = () if task or "BLEU" not in scores else ("exact",)
    return [*(column for key, column in scores.items() if key not in hidden), *(COSTS[key] for key in DEFAULT_COSTS)]


def _score_columns(rows: Sequence[Row]) -> list[Column]:
    keys = dict.fromkeys(
        metric if side == row["side"] else f"{metric}@{side}"
        for row in rows
        for side, scores in row["scores"].items()
        for metric in scores
    )
    order = {metric: place for place, metric in enumerate(ALL_METRICS)}
    if any(row.get("task") for row in rows):
        order |= {"exact": -2, "token": -1}
    return [
        Column(key, "exact match" if key == "exact" else key, _score_of(key), lambda number: f"{number:.2f}")
        for key in sorted(keys, key=lambda key: (key.count("@"), order.get(key.partition("@")[0], 99)))
    ]


def _score_of(key: str) -> Callable[[Row], float | None]:
    metric, _, side = key.partition("@")

    def value(row: Row) -> float | None:
        of_metric = row["scores"].get(side or row["side"], {}).get(metric)
        return None if of_metric is None else float(of_metric["value"])

    return value


def _line(entry: str, task: str | None, columns: Sequence[Column], good: Sequence[Row], rows: Sequence[Row]) -> Line:
    """Return the line of an entry on a task, without tests, of the rows that count, `good`, and all its rows."""
    good = [row for row in good if row["point"] == good[0]["point"]]
    finals = [row for row in rows if row["stage"] == "final"]
    failures = [f"seed {row['seed']}: {row['failed']}" for row in finals or rows if "failed" in row]
    values = {}
    for column in columns:
        numbers = [number for row in good if (number := column.value(row)) is not None]
        if numbers:
            summary = summary_of(numbers)
            values[column.key] = summary if column.key in COSTS else _within_range(summary, column.key)
    return Line(
        entry,
        task,
        good[0]["family"] if good else None,
        values,
        rows=good,
        failures=failures,
        shared=any(row.get("shared") for row in good),
    )


def _within_range(summary: Summary, key: str) -> Summary:
    """Return the summary of a score whose segments are unknown: its interval is cut at the limits of the metric.

    Equal scores of all seeds have no interval.
    """
    if summary.low is None or summary.high is None or not summary.sd:
        return replace(summary, low=None, high=None)
    high = summary.high if key.partition("@")[0] in LOWER_IS_BETTER else min(summary.high, 100.0)
    return replace(summary, low=max(summary.low, 0.0), high=high)


def _tested(lines: Sequence[Line], baseline: str, folder: Folder, columns: Sequence[Column]) -> list[Line]:
    """Return the lines with intervals over seeds and segments, and tests against the entry `baseline`."""
    result = list(lines)
    first = lines[0] if lines and lines[0].entry == baseline else None
    scored = [place for place, line in enumerate(lines) if line.rows]
    read = {row["trial"]: _statistics(folder, row) for line in lines for row in line.rows}
    for column in columns:
        if column.key in COSTS:
            continue
        metric, _, side = column.key.partition("@")
        key = f"{side or lines[scored[0]].rows[0]['side']}/{metric}" if scored else ""
        places = [place for place in scored if all(key in read[row["trial"]] for row in lines[place].rows)]
        entries = [[_as_statistics(metric, read[row["trial"]][key]) for row in lines[place].rows] for place in places]
        if len({len(statistics.rows) for entry in entries for statistics in entry}) != 1:
            continue
        scores = score_seeds(entries)
        tests = differences(scores) if first is not None and first.rows and places[0] == 0 else []
        for number, (place, summary) in enumerate(zip(places, summarise(scores), strict=True)):
            tested = {column.key: tests[number - 1]} if tests and number else {}
            line = result[place]
            values = {**line.values, column.key: summary}
            result[place] = replace(line, values=values, tests={**line.tests, **tested}, segments=True)
    return result


def _statistics(folder: Folder, row: Row) -> dict[str, np.ndarray]:
    try:
        return folder.statistics(row["trial"])
    except MtkitError:
        return {}  # the file was not copied with the row: the mean is shown without the segments' part


def _as_statistics(metric: str, rows: np.ndarray) -> Statistics:
    # sums of statistics become scores without the tokenizer
    tokenize = "13a" if metric == "BLEU" else None
    return Statistics(metric, [make_metric(metric, tokenize=tokenize)], rows, np.zeros(len(rows), dtype=np.intp))


def _ordered(lines: Sequence[Line], primary: str) -> list[Line]:
    """Return the lines with the best mean first, and the failed ones last."""
    sign = 1 if primary.partition("@")[0] in LOWER_IS_BETTER else -1
    return sorted(
        lines,
        key=lambda line: (
            primary not in line.values,
            sign * line.values[primary].mean if primary in line.values else 0,
        ),
    )
