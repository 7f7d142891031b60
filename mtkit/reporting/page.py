"""HTML report on runs: one file with inline style and plots, which makes no network requests (template: page.html)."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mtkit.errors import RunError
from mtkit.evaluation.documents import document_metrics
from mtkit.evaluation.pictures.curves import SHOWN, score_lines
from mtkit.evaluation.report import consistency_of_reference, is_many, length_cells, matrix, position_table
from mtkit.evaluation.segment_scores import check_files
from mtkit.evaluation.side_scores import SideScores, score_side
from mtkit.evaluation.significance import Difference
from mtkit.evaluation.systems import run_sides
from mtkit.reporting.contents import differing, differing_settings, sample_source, shown_attention, shown_segments
from mtkit.runs import Run
from mtkit.storage.records import read_object
from mtkit.terminal import ProgressBar, silent
from mtkit.text.words import word_starts, words
from mtkit.training.checkpoint import read_progress
from mtkit.training.metrics import read_metrics
from mtkit.training.progress import Progress

FOLDER = Path(__file__).parent
SIGNIFICANCE = 0.05
"""Smaller p-values are marked."""
SMOOTHED = 200
"""Maximum points of a training curve; a longer curve is averaged over groups of neighbours."""
COLOURS = 6
"""Number of run colours; with more runs, colours repeat."""
WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 420, 230, 46, 12, 24, 10
"""Size and margins of a chart, in pixels."""
TICKS = 4
"""Approximate number of grid lines of a chart."""

Points = Sequence[tuple[float, float]]


class RunName(NamedTuple):
    """Name of a run, shown in the run's colour."""

    name: str
    number: int
    """Index of the run's colour."""


Cell = str | RunName


class Table(NamedTuple):
    """Table of values; its template leaves out empty columns."""

    heads: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Chart:
    """Line chart in pixels."""

    title: str
    grid: list[tuple[float, str]]
    """Height and label of each grid line."""
    updates: list[tuple[float, str, str]]
    """Place, label and text anchor of each mark on the axis of updates."""
    lines: list[tuple[int, list[tuple[float, float]], bool]]
    """Run number, points, and whether the points are drawn as dots."""


def report_page(
    runs: Sequence[Run],
    sides: Sequence[str] = (),
    progress: ProgressBar = silent,
    segment_scores: Mapping[str, Sequence[Path]] | None = None,
) -> str:
    """Return the HTML page of runs; the first run is the baseline. `sides` to score are by default the latest.

    `segment_scores` are files of segment scores by metric, one per run, if there is one side.

    Raises: RunError if a run has no translations or is damaged; DataError if the runs translated different text, or
    for damaged segment scores; MtkitError if their files do not match the runs.
    """
    files = run_sides(runs, sides)
    check_files(segment_scores or {}, len(runs), len(files))
    first = next(iter(files.values()))
    systems = [RunName(translated.system, number % COLOURS) for number, translated in enumerate(first)]
    settings = runs[0].recipe.scoring
    how: dict[str, Any] = {
        "language": runs[0].target_language,
        "tokenize": settings.tokenize,
        "lowercase": settings.lowercase,
        "progress": progress,
    }
    usual = {"metrics": settings.metrics, "segment_scores": segment_scores, **how}
    scored = [
        score_side(name, translated, lengths=translated[0].source is not None, **usual)
        for name, translated in files.items()
    ]
    documents = [
        score_side(name, translated, metrics=document_metrics(None, settings.metrics), documents=True, **how)
        for name, translated in files.items()
        if any(texts.documents for texts in translated)
    ]
    sample = sample_source(first[0])
    return (
        environment()
        .get_template("page.html")
        .render(
            title=" and ".join(name for name, _ in systems) if len(systems) < 3 else f"{len(systems)} runs",
            style=(FOLDER / "page.css").read_text(encoding="utf-8"),
            systems=systems,
            notes=dict.fromkeys(note for side in scored for note in side.notes),
            side=scored[0],
            overview=_overview(runs, systems, scored[0]),
            settings=_settings(runs, systems),
            charts=_charts(runs),
            width=WIDTH,
            height=HEIGHT,
            left=LEFT,
            right=WIDTH - RIGHT,
            significance=SIGNIFICANCE,
            table=_matrix(scored, systems) if is_many(scored) else None,
            signatures=[" ".join(signature) for signature in matrix(scored).signatures],
            scores=[(scores, _scores(scores, systems)) for scores in scored],
            lengths=[(scores, _by_length(scores, systems)) for scores in scored if scores.lengths],
            documents=[_documents(scores, systems) for scores in documents],
            segments=shown_segments(first),
            differing=differing,
            marked_words=_marked_words,
            sample=sample,
            attention=[] if sample is None else [shown_attention(run, *sample) for run in runs],
            commands=_commands(runs, sides, segment_scores or {}),
        )
    )


def environment() -> Environment:
    """Return the environment of the templates: text is escaped, and an undefined name is an error."""
    loader = FileSystemLoader(FOLDER)
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)


def _overview(runs: Sequence[Run], systems: Sequence[RunName], side: SideScores) -> Table:
    rows: list[list[Cell]] = []
    for run, system, scores in zip(runs, systems, side.overall.scores, strict=True):
        record = read_object(run.folder / "translations" / f"{side.name}.json")
        metrics = read_metrics(run.folder / "metrics.jsonl")
        peak = max((row.get("peak_bytes", 0) for row in metrics), default=0)
        progress, weights = _progress(run), run.weights()
        rates = [row["tokens_per_second"] for row in metrics if row.get("tokens_per_second")]
        rows.append(
            [
                system,
                *(score.text for score in scores),
                f"{progress.update:,}" if progress else "",
                f"{progress.seconds / 60:,.1f}" if progress else "",
                f"{median(rates):,.0f}" if rates else "",
                f"{record['tokens_per_second']:,.0f}" if record.get("tokens_per_second") else "",
                f"{peak / 2**20:,.1f}" if peak else "",
                f"{weights.stat().st_size / 2**20:,.1f}" if weights.exists() else "",
            ]
        )
    metrics_heads = [score.name for score in side.overall.scores[0]]
    heads = ["run", *metrics_heads, "updates", "training minutes", "training tokens/s, median"]
    return Table([*heads, "decoding tokens/s", "peak memory of training, MiB", "weights, MiB"], rows)


def _progress(run: Run) -> Progress | None:
    """Return the training progress at the last checkpoint; metrics only have a row per `log_every` updates.

    None for a run without this checkpoint, such as an imported run.
    """
    try:
        return read_progress(run.checkpoint("last"))
    except RunError:
        return None


def _settings(runs: Sequence[Run], systems: Sequence[RunName]) -> Table:
    rows = [[name, *values] for name, values in differing_settings(runs)]
    return Table(["setting", *(["value"] if len(runs) == 1 else systems)], rows)


def _charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts that have points: validation scores, validation loss, training loss."""
    rows = [read_metrics(run.folder / "metrics.jsonl") for run in runs]

    def losses(kind: str) -> list[tuple[int, Points]]:
        return [
            (number, [(row["update"], row["nll"]) for row in of_run if row.get("kind") == kind and "nll" in row])
            for number, of_run in enumerate(rows)
        ]

    charts = []
    for measure, shown in SHOWN.items():
        # a line per run and signature: scores with different signatures are not comparable
        lines = [(number, *line) for number, of_run in enumerate(rows) for line in score_lines(of_run, measure)]
        several = len({signature for _, signature, _ in lines}) > 1
        title = f"Validation {shown}" + (" (signatures differ: lines are not comparable)" if several else "")
        charts.append(line_chart(title, [(number, points) for number, _, points in lines], dots=True))
    charts.append(line_chart("Validation loss, nats per token", losses("validation"), dots=True))
    charts.append(line_chart("Training loss, nats per token", losses("train"), dots=False))
    return [chart for chart in charts if chart is not None]


def line_chart(title: str, lines: Sequence[tuple[int, Points]], *, dots: bool) -> Chart | None:
    """Return the line chart of (run number, points), smoothed; None if there are no points."""
    smoothed = [(number, _smoothed([(x, y) for x, y in points if y is not None])) for number, points in lines]
    values = [point for _, points in smoothed for point in points]
    if not values:
        return None
    right = max(x for x, _ in values) or 1
    low, high = min(y for _, y in values), max(y for _, y in values)
    rough = ((high - low) or abs(high) or 1) / TICKS
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    low, high = floor(low / step) * step, -floor(-high / step) * step
    high = high if high > low else low + step

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            round(LEFT + x / right * (WIDTH - LEFT - RIGHT), 1),
            round(TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM), 1),
        )

    ticks = [low + number * step for number in range(round((high - low) / step) + 1)]
    return Chart(
        f"{title}, by update",
        [(place(0, tick)[1], f"{tick:.6g}") for tick in ticks],
        [
            (place(share * right, low)[0], f"{share * right:,.0f}", anchor)
            for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end"))
            if share != 0.5 or right % 2 == 0  # half of an odd number is no update
        ],
        [
            (number % COLOURS, [place(*point) for point in points], dots or len(points) == 1)
            for number, points in smoothed
            if points
        ],
    )


def _smoothed(points: Points) -> Points:
    size = -(-len(points) // SMOOTHED) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _matrix(sides: Sequence[SideScores], systems: Sequence[RunName]) -> Table:
    """Return the scores of many sides and directions as one table."""
    scores = matrix(sides)
    rows = [
        [*cells[:3], systems[number % len(systems)] if cells[3] else "", *cells[4:]]
        for number, cells in enumerate(scores.rows)
    ]
    return Table(["run" if head == "system" else head for head in scores.heads], rows)


def _scores(side: SideScores, systems: Sequence[RunName]) -> Table:
    rows: list[list[Cell]] = []
    for metric in range(len(side.overall.scores[0])):
        for number, system in enumerate(systems):
            score = side.overall.scores[number][metric]
            difference = side.overall.differences[number - 1][metric] if number else None
            rows.append([score.name, system, score.text, score.interval, *_difference(difference)])
    return Table(["metric", "run", "score", "95% interval", "difference", "p bootstrap", "p randomisation"], rows)


def _difference(difference: Difference | None) -> list[str]:
    if difference is None:
        return ["", "", ""]
    p_values = [difference.bootstrap_p, difference.randomisation_p]
    marked = ["" if p is None else f"{p:.4f}{' *' if p < SIGNIFICANCE else ''}" for p in p_values]
    return [difference.text, *marked]


def _by_length(side: SideScores, systems: Sequence[RunName]) -> Table:
    scores = side.overall.scores[0]
    rows: list[list[Cell]] = [
        [f"{row.name} words", f"{row.segments:,}", system, *length_cells(row, scores)]
        for of_length in zip(*side.lengths, strict=True)
        for system, row in zip(systems, of_length, strict=True)
    ]
    return Table(["source", "segments", "run", *(score.name for score in scores), "length ratio"], rows)


def _documents(side: SideScores, systems: Sequence[RunName]) -> tuple[SideScores, Table, str, Table]:
    """Return the scores of documents, a line on the consistency of the reference, and the scores by position."""
    assert side.documents is not None
    heads, rows = position_table(side)
    cells: list[list[Cell]] = [[*row[:3], systems[number % len(systems)], *row[4:]] for number, row in enumerate(rows)]
    about = consistency_of_reference(side.documents, [file.system for file in side.files])
    return side, _scores(side, systems), about, Table([*heads[:3], "run", *heads[4:]], cells)


def _marked_words(line: str, indices: Collection[int]) -> list[tuple[str, bool]]:
    """Return the line in parts, and for each part whether it is one of the words at `indices`."""
    parts, end = list[tuple[str, bool]](), 0
    for place, (begin, word) in enumerate(zip(word_starts(line), words(line), strict=True)):
        parts += [(line[end:begin], False), (word, place in indices)]
        end = begin + len(word)
    return [*parts, (line[end:], False)]


def _commands(runs: Sequence[Run], sides: Sequence[str], segment_scores: Mapping[str, Sequence[Path]]) -> list[str]:
    """Return the recorded training commands, and the commands that translate, score and report the runs."""
    folders = [str(run.folder) for run in runs]
    of_runs = [word for folder in folders for word in ("--run", folder)]
    of_sides = [word for side in sides for word in ("--side", side)]
    scores = [
        word
        for name, paths in segment_scores.items()
        for path in paths
        for word in ("--segment-scores", f"{name}={path}")
    ]
    return [
        *(command for run in runs for command in run.about.get("commands", [])),
        *(shlex.join(["mtkit", "translate", "--run", folder, *of_sides]) for folder in folders),
        shlex.join(["mtkit", "score", *of_runs, *of_sides, *scores, "--by-length"]),
        shlex.join(["mtkit", "report", *folders, *of_sides, *scores]),
    ]
