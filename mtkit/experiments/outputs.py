"""Output files of a comparison: rows, tables and pictures."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mtkit.evaluation.ranks import rank
from mtkit.experiments.folder import Folder
from mtkit.experiments.pictures.canvas import save, styled
from mtkit.experiments.pictures.draw import draw_all
from mtkit.experiments.pictures.points import Point
from mtkit.experiments.pictures.ranks import Ranks, draw_ranks
from mtkit.experiments.report import csv_text, latex, markdown
from mtkit.experiments.table import COSTS, LOWER_IS_BETTER, Line, Table, build
from mtkit.storage.files import inside, write_text
from mtkit.terminal import ProgressBar, silent

COSTS_OF_PICTURES: Mapping[str, str] = {
    "flops": "flops",
    "training-speed": "training",
    "decoding-speed": "decoding",
    "parameters": "parameters",
    "memory": "memory",
    "state": "state-1000",
    "minutes": "minutes",
}
"""{cost of a picture: column of the table}"""


def write_outputs(
    folder: Folder, columns: Sequence[str] = (), *, progress: ProgressBar = silent
) -> tuple[Table, list[Path]]:
    """Write results.jsonl, compare.md, .csv and .tex, and the pictures if matplotlib is installed.

    With tasks, each task's pictures are in pictures/TASK, and compare-ranks.png has the ranks over all tasks. Return
    the table and the paths of the files.

    Raises: MtkitError for an unknown column, and if a file cannot be written.
    """
    study, rows, table = folder.study(), folder.rows(), build(folder, columns)
    written = [folder.write_rows()]
    for name, text in (
        ("compare.md", markdown(study, table, rows)),
        ("compare.csv", csv_text(table)),
        ("compare.tex", latex(study, table, rows)),
    ):
        path = inside(folder.path, name)
        write_text(path, text)
        written.append(path)
    with suppress(ModuleNotFoundError):  # matplotlib is not installed
        written += _draw(folder, table, progress)
    return table, written


def _draw(folder: Folder, table: Table, progress: ProgressBar) -> list[Path]:
    metric = table.primary.partition("@")[0]
    if metric in COSTS and metric != "loss":
        return []
    order = [entry.name for entry in folder.study().entries]
    drawn = []
    for task in table.tasks:
        lines = sorted(table.of_task(task), key=lambda line: order.index(line.entry))
        if not lines:
            continue
        place = folder.path if task is None else inside(folder.path, "pictures", task)
        place.mkdir(parents=True, exist_ok=True)
        points = [_point(line, table) for line in lines]
        if lines[0].entry != order[0]:  # the first entry has no trial yet
            points.insert(0, Point(order[0], None, ()))
        ranks, title = _ranks([lines], table, metric, order[0]), task or "Comparison"
        drawn += draw_all(points, ranks, place, metric=metric, title=title, progress=progress)
    if len(table.tasks) > 1:
        lines_of_tasks = [table.of_task(task) for task in table.tasks]
        if (ranks := _ranks(lines_of_tasks, table, metric, order[0])) is not None:
            with styled([*ranks.names, *ranks.unranked]):
                figure = draw_ranks(ranks, f"{len(table.tasks)} tasks")
                drawn.append(save(figure, inside(folder.path, "compare-ranks.png")))
    return drawn


def _point(line: Line, table: Table) -> Point:
    """Return a line as the pictures take it."""
    column = next(column for column in table.columns if column.key == table.primary)
    summary = line.values.get(table.primary)
    values = tuple(value for row in line.rows if (value := column.value(row)) is not None)
    costs = {
        key: None if line.shared and COSTS[name].timed else _mean([COSTS[name].value(row) for row in line.rows])
        for key, name in COSTS_OF_PICTURES.items()
    }
    curves = [
        [
            {
                **point,
                "flops": point["tokens"] * (row.get("flops_per_token") or 0) or None,
                "seconds": None if line.shared else point["seconds"],
            }
            for point in row["curve"]
        ]
        for row in line.rows
    ]
    ends = {} if summary is None else {"low": summary.low, "high": summary.high}
    known = {name: end for name, end in ends.items() if end is not None}
    return Point(line.entry, line.family, values, costs=costs, curves=curves, failed=len(line.failures), **known)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _ranks(tasks: Sequence[Sequence[Line]], table: Table, metric: str, first: str) -> Ranks | None:
    """Return the mean ranks of the entries over tasks and seeds; None for fewer than 2 entries or 2 blocks.

    Only entries with a score for each block are ranked. `first` is the study's first entry.
    """
    column = next(column for column in table.columns if column.key == table.primary)
    scores: dict[str, dict[tuple[int, int], float]] = {}
    for number, lines in enumerate(tasks):
        for line in lines:
            for row in line.rows:
                if (value := column.value(row)) is not None:
                    scores.setdefault(line.entry, {})[number, row["seed"]] = value
    blocks = sorted({block for of_entry in scores.values() for block in of_entry})
    names = [name for name, of_entry in scores.items() if of_entry.keys() == set(blocks)]
    if len(names) < 2 or len(blocks) < 2:
        return None
    values = [[scores[name][block] for name in names] for block in blocks]
    ranking = rank(values, lower_is_better=metric in LOWER_IS_BETTER)
    unranked = sorted({line.entry for lines in tasks for line in lines} - set(names))
    return Ranks(names, ranking.means, ranking.critical, ranking.groups, ranking.blocks, ranking.p, first, unranked)
