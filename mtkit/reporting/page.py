"""The page of a report: one HTML file with inline style and plots, which makes no network requests."""

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mtkit.decoding.links.heads import begins, words
from mtkit.errors import RunError
from mtkit.evaluation.plots import SHOWN, score_lines
from mtkit.evaluation.report import SideScores, is_many, matrix, score_side
from mtkit.evaluation.significance import Difference
from mtkit.evaluation.systems import run_sides
from mtkit.reporting.contents import (
    ShownAttention,
    ShownSegment,
    differing,
    differing_settings,
    sample_source,
    shown_attention,
    shown_segments,
)
from mtkit.reporting.markup import (
    Html,
    Points,
    attention_table,
    data_table,
    line_chart,
    run_name,
    small_map,
    tag,
    text,
)
from mtkit.runs import Run
from mtkit.storage.records import read_object
from mtkit.terminal import ProgressBar, silent
from mtkit.training.checkpoint import read_progress
from mtkit.training.progress import Progress
from mtkit.training.report import read_metrics

SURE = 0.05
"""Significance level: smaller p-values are marked."""
SMOOTHED = 200
"""Maximum points of a training curve; a longer curve is averaged over groups of neighbours."""


def report_page(runs: Sequence[Run], sides: Sequence[str] = (), progress: ProgressBar = silent) -> str:
    """Return the HTML page of runs; the first run is the baseline. `sides` to score are by default the latest.

    Raises: RunError if a run has no translations or is damaged; DataError if the runs translated different text.
    """
    files = run_sides(runs, sides)
    systems = [each.system for each in next(iter(files.values()))]
    settings = runs[0].recipe.scoring
    scored = [
        score_side(
            name,
            each,
            metrics=settings.metrics,
            lengths=each[0].source is not None,
            language=runs[0].target_language,
            tokenize=settings.tokenize,
            lowercase=settings.lowercase,
            progress=progress,
        )
        for name, each in files.items()
    ]
    first = next(iter(files.values()))
    sample = sample_source(first[0])
    title = " and ".join(systems) if len(systems) < 3 else f"{len(systems)} runs"
    notes = dict.fromkeys(note for each in scored for note in each.notes)
    body = text(
        tag("h1", f"Report on {title}"),
        *(tag("p", f"Note: {note}", class_="soft") for note in notes),
        _overview(runs, systems, scored[0]),
        _settings(runs, systems),
        _curves(runs, systems),
        *([_matrix(scored)] if is_many(scored) else [_scores(each) for each in scored]),
        _segments(shown_segments(first), systems, scored[0].name),
        Html() if sample is None else _attention([shown_attention(run, *sample) for run in runs], systems, *sample),
        _commands(runs, systems),
    )
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    head = text(
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", f"mtkit: {title}"),
        Html(f'<link rel="icon" href="data:,"><style>{style}</style>'),
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _overview(runs: Sequence[Run], systems: Sequence[str], side: SideScores) -> Html:
    rows = []
    for number, (run, system) in enumerate(zip(runs, systems, strict=True)):
        record = read_object(run.folder / "translations" / f"{side.name}.json")
        metrics = read_metrics(run.folder / "metrics.jsonl")
        peak = max((row.get("peak_bytes", 0) for row in metrics), default=0)
        done = _progress(run)
        scores = [f"{each.value:.2f}" for each in side.overall.scores[number]]
        rates = [row["tokens_per_second"] for row in metrics if row.get("tokens_per_second")]
        rows.append(
            [
                run_name(system, number),
                *scores,
                f"{done.update:,}" if done else "",
                f"{done.seconds / 60:,.1f}" if done else "",
                f"{median(rates):,.0f}" if rates else "",
                f"{record['tokens_per_second']:,.0f}" if record.get("tokens_per_second") else "",
                f"{peak / 2**20:,.1f}" if peak else "",
                f"{run.weights().stat().st_size / 2**20:,.1f}",
            ]
        )
    names = [each.name for each in side.overall.scores[0]]
    heads = ["run", *names, "updates", "training minutes", "training tokens/s", "decoding tokens/s"]
    heads += ["peak memory of training, MiB", "weights, MiB"]
    about = f"Scores on {side.name}, {side.segments:,} segments. Training tokens/s is the median."
    return text(data_table(heads, rows), tag("p", about, class_="soft"))


def _progress(run: Run) -> Progress | None:
    """Return the training progress at the last checkpoint; metrics only have a row per `log_every` updates.

    None for a run without this checkpoint, such as an imported run.
    """
    try:
        return read_progress(run.checkpoint("last"))
    except RunError:
        return None


def _settings(runs: Sequence[Run], systems: Sequence[str]) -> Html:
    rows = [[name, *values] for name, values in differing_settings(runs)]
    if len(runs) == 1:
        table = data_table(["setting", "value"], rows)
        return text(tag("h2", "Settings"), tag("details", tag("summary", f"All {len(rows)} settings"), table))
    if not rows:
        return text(tag("h2", "Settings"), tag("p", "All settings are the same."))
    heads = ["setting", *(run_name(system, number) for number, system in enumerate(systems))]
    return text(tag("h2", "Settings that differ"), data_table(heads, rows))


def _curves(runs: Sequence[Run], systems: Sequence[str]) -> Html:
    rows = [read_metrics(run.folder / "metrics.jsonl") for run in runs]

    def losses(kind: str) -> list[tuple[int, Points]]:
        found: list[tuple[int, Points]] = []
        for number, each in enumerate(rows):
            points = [(r["update"], r["nll"]) for r in each if r.get("kind") == kind and r.get("nll") is not None]
            if points:
                found.append((number, _smoothed(points)))
        return found

    def scores(measure: str) -> Html:
        """Return a chart with a line per run and signature; scores with different signatures are not comparable."""
        found = [(number, *line) for number, each in enumerate(rows) for line in score_lines(each, measure)]
        several = len({signature for _, signature, _ in found}) > 1
        title = f"Validation {SHOWN[measure]}" + (" (signatures differ: lines are not comparable)" if several else "")
        return line_chart(title, [(number, _smoothed(points)) for number, _, points in found], dots=True)

    charts = [
        *map(scores, SHOWN),
        line_chart("Validation loss, nats per token", losses("validation"), dots=True),
        line_chart("Training loss, nats per token", losses("train"), dots=False),
    ]
    if not any(charts):
        return Html()
    legend = [run_name(system, number) for number, system in enumerate(systems)]
    return text(tag("h2", "Curves"), tag("p", *legend), tag("div", *charts, class_="charts"))


def _smoothed(points: Sequence[tuple[float, float]]) -> Points:
    size = -(-len(points) // SMOOTHED)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def _matrix(sides: Sequence[SideScores]) -> Html:
    """Return the scores of many sides and directions as one table."""
    shown, files = matrix(sides), sides[0].files
    rows = [
        [*cells[:3], run_name(cells[3], number % len(files)) if cells[3] else "", *cells[4:]]
        for number, cells in enumerate(shown.rows)
    ]
    parts = [tag("h2", "Scores"), data_table(["run" if head == "system" else head for head in shown.heads], rows)]
    if len(files) > 1:
        about = f"Difference: the score minus the score of {files[0].system}; * if all p-values are below {SURE}."
        parts.append(tag("p", about, class_="soft"))
    listed = tag("pre", "\n".join("  ".join(filter(None, each)) for each in shown.signatures))
    return text(*parts, tag("details", tag("summary", "Signatures"), listed), *map(_lengths, sides))


def _scores(side: SideScores) -> Html:
    rows, signatures = [], []
    for metric, best in enumerate(side.overall.scores[0]):
        signatures.append([best.name, best.signature])
        for number, files in enumerate(side.files):
            score = side.overall.scores[number][metric]
            low_high = "" if score.low is None or score.high is None else f"{score.low:.2f} to {score.high:.2f}"
            difference = side.overall.differences[number - 1][metric] if number else None
            rows.append(
                [score.name, run_name(files.system, number), f"{score.value:.2f}", low_high, *_difference(difference)]
            )
    heads = ["metric", "run", "score", "95% interval", "difference", "p bootstrap", "p randomisation"]
    parts = [tag("h2", f"Scores of {side.name}"), data_table(heads, rows)]
    if len(side.files) > 1:
        about = f"Difference: the score minus the score of {side.files[0].system}; p is two-sided, * below {SURE}."
        parts.append(tag("p", about, class_="soft"))
    listed = tag("pre", "\n".join(f"{name}  {signature}" for name, signature in signatures))
    parts.append(tag("details", tag("summary", "Signatures"), listed))
    return text(*parts, tag("h3", "Scores by source length") if side.lengths else Html(), _by_length(side))


def _lengths(side: SideScores) -> Html:
    """Return the scores of a side by source length, folded."""
    if not side.lengths:
        return Html()
    return tag("details", tag("summary", f"{side.name} by source length"), _by_length(side))


def _by_length(side: SideScores) -> Html:
    if not side.lengths:
        return Html()
    names = [each.name for each in side.overall.scores[0]]
    rows = [
        [
            f"{row.name} words",
            f"{row.segments:,}",
            run_name(files.system, number),
            *(f"{row.scores[name]:.2f}" for name in names),
            "" if row.length_ratio is None else f"{row.length_ratio:.3f}",
        ]
        for of_length in zip(*side.lengths, strict=True)
        for number, (files, row) in enumerate(zip(side.files, of_length, strict=True))
    ]
    return data_table(["source", "segments", "run", *names, "length ratio"], rows)


def _difference(difference: Difference | None) -> list[str]:
    if difference is None:
        return ["", "", ""]
    found = [difference.bootstrap_p, difference.randomisation_p]
    marks = ["" if p is None else f"{p:.4f}{' *' if p < SURE else ''}" for p in found]
    return [f"{difference.value:+.2f}", *marks]


def _segments(kinds: dict[str, list[ShownSegment]], systems: Sequence[str], side: str | None) -> Html:
    parts: list[Html] = []
    for title, segments in kinds.items():
        parts.append(tag("h3", title))
        parts += [_segment(each, systems) for each in segments]
    about = (
        f"Segments of {side}, ordered by chrF. "
        "Words that differ from the reference are marked; reference words that a run lacks are underlined."
    )
    return text(tag("h2", "Segments"), tag("p", about, class_="soft"), *parts)


def _segment(segment: ShownSegment, systems: Sequence[str]) -> Html:
    rows: list[Html] = []
    if segment.source is not None:
        rows += [tag("dt", "source"), tag("dd", segment.source, dir="auto")]
    lacking = [differing(segment.reference, each) for each in segment.translations]
    rows += [tag("dt", "reference"), _words(segment.reference, set().union(*lacking), "span", class_="missed")]
    for number, (system, translation) in enumerate(zip(systems, segment.translations, strict=True)):
        score = tag("span", f" {segment.scores[number]:.1f}", class_="soft")
        others = differing(translation, segment.reference)
        rows += [tag("dt", run_name(system, number), score), _words(translation, others, "mark")]
    return tag("div", tag("span", f"line {segment.number:,}", class_="soft"), tag("dl", *rows), class_="segment")


def _words(line: str, chosen: Collection[int], name: str, **attributes: str) -> Html:
    """Return the line with the words at the `chosen` indices inside elements."""
    spelt, end = list[str](), 0
    for place, (begin, word) in enumerate(zip(begins(line), words(line), strict=True)):
        spelt += [line[end:begin], tag(name, word, **attributes) if place in chosen else word]
        end = begin + len(word)
    return tag("dd", *spelt, line[end:], dir="auto")


def _attention(
    found: Sequence[ShownAttention | str], systems: Sequence[str], source: str, direction: str | None
) -> Html:
    parts = [tag("h2", "Attention"), tag("p", source, dir="auto")]
    for number, (system, shown) in enumerate(zip(systems, found, strict=True)):
        parts.append(tag("h3", run_name(system, number)))
        if isinstance(shown, str):
            parts.append(tag("p", f"No attention is shown: {shown}", class_="soft"))
            continue
        aligned = shown.aligned.first()
        layers: list[Any] = aligned.layers["cross"]
        links = text("Words: ", tag("code", shown.links), f", by {shown.heads}.")
        mean = shown.heads.rows(layers)
        parts += [
            tag("p", shown.translation, dir="auto"),
            tag("p", links, class_="soft"),
            attention_table(aligned.source, aligned.target, mean.tolist()),
        ]
        if left_out := shown.aligned.left_out():
            parts.append(tag("p", f"{left_out.capitalize()}.", class_="soft"))
        small = [
            small_map(f"layer {layer} head {head}", weights.tolist())
            for layer, each in enumerate(layers, start=1)
            if each is not None
            for head, weights in enumerate(each, start=1)
        ]
        parts.append(
            tag("details", tag("summary", "Cross attention by layer and head"), tag("div", *small, class_="heads"))
        )
    return text(*parts)


def _commands(runs: Sequence[Run], systems: Sequence[str]) -> Html:
    """Return the recorded training commands, and the commands that translate, score and report the runs."""
    run_options = " ".join(f"--run {shlex.quote(str(run.folder))}" for run in runs)
    lines = [command for run in runs for command in run.about.get("commands", [])]
    lines += [f"mtkit translate --run {shlex.quote(str(run.folder))}" for run in runs]
    lines += [f"mtkit score {run_options} --by-length"]
    lines += ["mtkit report " + " ".join(shlex.quote(str(run.folder)) for run in runs)]
    return text(tag("h2", "Commands"), tag("pre", tag("code", "\n".join(lines))))
