"""Output of a side's scores for `mtkit score`: tables for people, JSON objects for programs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mtkit.evaluation.documents import DocumentScores
from mtkit.evaluation.scores import Score
from mtkit.evaluation.side_scores import SideScores
from mtkit.evaluation.significance import Comparison, Difference
from mtkit.evaluation.statistics import LengthRow
from mtkit.terminal import aligned, stdout_width

SURE = 0.05
"""Significance level: smaller p-values are marked."""

MANY = 5
"""Minimum number of sides and directions that one matrix shows."""


def table(scores: Sequence[Score]) -> str:
    """Return a line for each score: name, value, 95% confidence interval if there is one, signature."""
    return _table(
        ["metric", "score", "95% interval", "signature"],
        [[score.name, score.text, score.interval, score.signature] for score in scores],
    )


@dataclass(frozen=True)
class Matrix:
    """Scores of many sides and directions."""

    heads: list[str]
    rows: list[list[str]]
    """Side, direction, segments, system, and two cells per metric; one row per side, direction and system."""
    signatures: list[list[str]]
    """Metric, signature and, if the metric has several signatures, the sides and directions that have this one."""


def matrix(sides: Sequence[SideScores]) -> Matrix:
    """Return the scores of one system with intervals, or of several systems with differences from the first system."""
    several = len(sides[0].files) > 1
    metrics = [score.name for score in sides[0].overall.scores[0]]
    second = "difference" if several else "95% interval"
    heads = ["side", "direction", "segments", "system", *(head for name in metrics for head in (name, second))]
    rows, signatures = [], dict[tuple[str, str], list[str]]()
    for side in sides:
        parts = {"all" if side.directions else "": (side.segments, side.overall), **side.directions}
        for direction, (segments, comparison) in parts.items():
            for number, system in enumerate(side.files):
                differences = comparison.differences[number - 1] if number else [None] * len(metrics)
                cells = [side.name or "", direction, f"{segments:,}", system.system if several else ""]
                for score, difference in zip(comparison.scores[number], differences, strict=True):
                    cells += [score.text, _short(difference) if several else score.interval]
                rows.append(cells)
            label = " ".join(filter(None, [side.name if len(sides) > 1 else "", direction]))
            for name, signature in _signed(comparison):
                signatures.setdefault((name, signature), []).append(label)
    different = len(signatures) > len(metrics)
    listed = [[*key, ", ".join(labels) if different else ""] for key, labels in signatures.items()]
    return Matrix(heads, rows, listed)


def is_many(sides: Sequence[SideScores]) -> bool:
    """Return whether there are at least `MANY` sides and directions."""
    return sum(1 + len(side.directions) for side in sides) >= MANY


def sides_text(sides: Sequence[SideScores]) -> str:
    """Return a block of text for each side, or one matrix of scores if there are many."""
    if not is_many(sides):
        return "\n\n".join(map(side_text, sides))
    files, shown = sides[0].files, matrix(sides)
    folders = dict.fromkeys(str(file.hypothesis.parent) for side in sides for file in side.files)
    parts = [
        _title(sides[0]) if len(sides) == 1 else f"{len(sides)} sides in {', '.join(folders)}",
        _table(shown.heads, shown.rows),
        _table(["metric", "signature", "used for"], shown.signatures),
    ]
    if len(files) > 1:
        parts.append(f"difference: the score minus the score of {files[0].system}; * if all p-values are below {SURE}")
    for side in sides:
        name = [side.name] if side.name and len(sides) > 1 else []
        if side.lengths:
            parts.append("\n".join([*name, _length_table(side)]))
        if side.documents is not None:
            parts.append("\n".join([*name, *_document_parts(side)]))
    return "\n\n".join(parts)


def _short(difference: Difference | None) -> str:
    if difference is None:
        return ""
    p_values = [p for p in (difference.bootstrap_p, difference.randomisation_p) if p is not None]
    return f"{difference.text} {'*' if p_values and max(p_values) < SURE else ' '}"


def side_text(side: SideScores) -> str:
    """Return a block of text for one side: files, and scores by system, direction and source length."""
    is_single = len(side.files) == 1
    if is_single and not side.directions:
        parts = [table(side.overall.scores[0])]
    else:
        parts = [_comparison_table(side), _table(["metric", "signature"], _signed(side.overall))]
    if not is_single:
        names = ", ".join(file.system for file in side.files[1:])
        parts.append(f"difference: {names} minus {side.files[0].system}; p is two-sided, * below {SURE}")
    if side.lengths:
        parts.append(_length_table(side))
    return "\n\n".join([_title(side), *parts, *_document_parts(side)])


def _title(side: SideScores) -> str:
    hypotheses = ", ".join(str(file.hypothesis) for file in side.files)
    title = f"{hypotheses} against {', '.join(map(str, side.files[0].references))}"
    if side.documents is None:
        return title
    return f"{title}, documents: {side.segments:,}, lines: {side.documents.lines:,}"


def _document_parts(side: SideScores) -> list[str]:
    """Return a line on term consistency, if it is known, and a table with a line for each position and system."""
    if side.documents is None:
        return []
    heads, rows = position_table(side)
    if len(side.files) == 1:
        rows = [[*row[:3], "", *row[4:]] for row in rows]
    about = consistency_of_reference(side.documents, [file.system for file in side.files])
    return [*([about] if about else []), _table(heads, rows)]


def consistency_of_reference(documents: DocumentScores, names: Sequence[str]) -> str:
    """Return what consistency is, its value for the reference, and the pairs it counts; empty if there is none."""
    if documents.reference is None:
        return ""
    interval = documents.reference.interval
    pairs = ", ".join(f"{name} {count:,}" for name, count in zip(["reference", *names], documents.pairs, strict=True))
    return (
        "consistency: pairs of occurrences of a source word in a document that are translated alike, in per cent; the "
        f"reference has {documents.reference.value:.2f}{interval and f' ({interval})'}; pairs: {pairs}"
    )


def position_table(side: SideScores) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the scores by position: a row per position and system, whose name is the fourth cell."""
    assert side.documents is not None
    names, rows = list(side.documents.positions[0][0].scores), []
    for of_position in zip(*side.documents.positions, strict=True):
        for files, row in zip(side.files, of_position, strict=True):
            interval = "" if row.low is None else f"{row.low:.2f} to {row.high:.2f}"
            first, *others = length_cells(row, [Score(name, 0.0, "") for name in names])
            about = [row.name, f"{row.segments:,}", f"{row.documents:,}", files.system]
            rows.append([*about, first, interval, *others])
    heads = ["line in document", "lines", "documents", "system", names[0], "95% interval", *names[1:], "length ratio"]
    return heads, rows


def sides_object(sides: Sequence[SideScores]) -> dict[str, Any]:
    """Return the scores of all sides as a JSON object, which begins with the scores of the first system and side."""
    objects = [side_object(side) for side in sides]
    first = objects[0]["systems"][0]
    return {**{key: first[key] for key in ("hypothesis", "references", "scores")}, "sides": objects}


def side_object(side: SideScores) -> dict[str, Any]:
    """Return the scores of one side as a JSON object, with unrounded numbers and differences from the first system."""
    systems = []
    for number, files in enumerate(side.files):
        systems.append(
            {
                "name": files.system,
                "hypothesis": str(files.hypothesis),
                "references": [str(reference) for reference in files.references],
                **_system_object(side.overall, number),
                "by_direction": [
                    {"direction": direction, "segments": segments, **_system_object(comparison, number)}
                    for direction, (segments, comparison) in side.directions.items()
                ],
                "by_length": [
                    {"words": row.name, **asdict(row)} for row in (side.lengths or [[]] * (number + 1))[number]
                ],
            }
        )
        if side.documents is not None:
            rows = side.documents.positions[number]
            systems[-1]["by_position"] = [{"lines": row.name, **asdict(row)} for row in rows]
    if side.documents is None:
        return {"name": side.name, "segments": side.segments, "systems": systems}
    reference = side.documents.reference
    about = {
        "lines": side.documents.lines,
        "consistency_of_reference": reference and asdict(reference),
        "pairs": side.documents.pairs,
    }
    return {"name": side.name, "segments": side.segments, "documents": about, "systems": systems}


def _system_object(comparison: Comparison, number: int) -> dict[str, Any]:
    differences = comparison.differences[number - 1] if number else []
    return {
        "scores": list(map(asdict, comparison.scores[number])),
        "differences": list(map(asdict, differences)),
    }


def _comparison_table(side: SideScores) -> str:
    """Return a table with a line for each metric, direction and system; empty columns are left out."""
    rows = []
    parts = [("all", side.segments, side.overall)]
    parts += [(direction, segments, comparison) for direction, (segments, comparison) in side.directions.items()]
    for metric in range(len(side.overall.scores[0])):
        for direction, segments, comparison in parts:
            where = [direction, f"{segments:,}"] if side.directions else ["", ""]
            for number, files in enumerate(side.files):
                score = comparison.scores[number][metric]
                system = files.system if len(side.files) > 1 else ""
                difference = comparison.differences[number - 1][metric] if number else None
                cells = [score.text, score.interval, *difference_cells(difference)]
                rows.append([score.name, *where, system, *cells])
    heads = ["metric", "direction", "segments", "system", "score", "95% interval", "difference"]
    return _table([*heads, "p bootstrap", "p randomisation"], rows)


def difference_cells(difference: Difference | None) -> list[str]:
    """Return the cells of a table for a difference: its value, and a p-value for each test."""
    if difference is None:
        return ["", "", ""]
    p_values = [difference.bootstrap_p, difference.randomisation_p]
    return [difference.text, *("" if p is None else f"{p:.4f} {'*' if p < SURE else ' '}" for p in p_values)]


def _signed(comparison: Comparison) -> list[tuple[str, str]]:
    """Return metrics and their signatures, which include the paired tests if there are any."""
    if comparison.differences:
        return [(difference.metric, difference.signature) for difference in comparison.differences[0]]
    return [(score.name, score.signature) for score in comparison.scores[0]]


def _length_table(side: SideScores) -> str:
    """Return a table with a line for each length and system."""
    scores, rows = side.overall.scores[0], []
    for rows_of_length in zip(*side.lengths, strict=True):
        for files, row in zip(side.files, rows_of_length, strict=True):
            system = files.system if len(side.files) > 1 else ""
            rows.append([row.name, f"{row.segments:,}", system, *length_cells(row, scores)])
    return _table(["words in source", "segments", "system", *(score.name for score in scores), "length ratio"], rows)


def length_cells(row: LengthRow, scores: Sequence[Score]) -> list[str]:
    """Return the table cells of a row: its value in each of the metrics, and the length ratio."""
    ratio = "" if row.length_ratio is None else f"{row.length_ratio:.3f}"
    return [*(replace(score, value=row.scores[score.name]).text for score in scores), ratio]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align a table with numbers to the right; empty columns are left out."""
    columns = [column for column in zip(heads, *rows, strict=True) if any(column[1:])]
    left = [number for number, (_, *cells) in enumerate(columns) if not all(map(_is_number, filter(None, cells)))]
    return aligned(list(zip(*columns, strict=True)), left=left, width=stdout_width())


def _is_number(cell: str) -> bool:
    return cell.rstrip(" *").replace(",", "").replace(".", "").lstrip("+-").isdigit()
