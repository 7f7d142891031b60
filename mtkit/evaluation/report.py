"""Scores for people, as tables, and for programs, as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mtkit.evaluation.by_length import LengthRow
from mtkit.evaluation.scores import Score
from mtkit.evaluation.side_scores import SideScores
from mtkit.evaluation.significance import Comparison, Difference
from mtkit.tables import aligned

SURE = 0.05
"""p-values below it are marked."""

MANY = 5
"""Rows from which on sides and directions are shown as one matrix of scores."""


def table(scores: Sequence[Score]) -> str:
    """A line for each score: name, value, 95% confidence interval where there is one, signature."""
    return _table(
        ["metric", "score", "95% interval", "signature"],
        [[score.name, f"{score.value:.2f}", _interval(score), score.signature] for score in scores],
    )


def as_objects(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """An object for each score, its numbers unrounded."""
    return [asdict(score) for score in scores]


def sides_text(sides: Sequence[SideScores]) -> str:
    """Everything that is known of all sides: a block for each, or one matrix of scores if there are `MANY` rows."""
    rows = [row for side in sides for row in _matrix_rows(side)]
    if len(rows) < MANY:
        return "\n\n".join(map(side_text, sides))
    files = sides[0].files
    metrics = [score.name for score in sides[0].overall.scores[0]]
    second = "95% interval" if len(files) == 1 else "difference"
    heads = ["side", "direction", "segments", "system", *(head for name in metrics for head in (name, second))]
    cells, signatures = [], dict[tuple[str, str], list[str]]()
    for side, direction, segments, comparison in rows:
        for number, system in enumerate(side.files):
            where = [side.name or "", direction, f"{segments:,}", system.system if len(files) > 1 else ""]
            differences = comparison.differences[number - 1] if number else [None] * len(metrics)
            cells.append(where)
            for score, difference in zip(comparison.scores[number], differences, strict=True):
                where += [f"{score.value:.2f}", _interval(score) if len(files) == 1 else _short(difference)]
        for each in comparison.differences[0] if comparison.differences else comparison.scores[0]:
            name = each.metric if isinstance(each, Difference) else each.name
            signatures.setdefault((name, each.signature), []).append(direction or side.name or "")
    different = len(signatures) > len(metrics)
    listed = [[*key, ", ".join(dict.fromkeys(used)) if different else ""] for key, used in signatures.items()]
    folders = dict.fromkeys(str(each.hypothesis.parent) for side in sides for each in side.files)
    parts = [
        _title(sides[0]) if len(sides) == 1 else f"{len(sides)} sides in {', '.join(folders)}",
        _table(heads, cells),
        _table(["metric", "signature", "used for"], listed),
    ]
    if len(files) > 1:
        names = ", ".join(each.system for each in files[1:])
        parts.append(f"differences are those of {names} from {files[0].system}; * if all p are below {SURE}")
    for side in sides:
        if side.lengths:
            parts.append("\n".join([*([side.name] if side.name and len(sides) > 1 else []), _length_table(side)]))
    return "\n\n".join(parts)


def _matrix_rows(side: SideScores) -> list[tuple[SideScores, str, int, Comparison]]:
    """Direction, segments and scores: of the side, and of each direction if it has several."""
    every = (side, "all" if side.directions else "", side.segments, side.overall)
    return [every, *((side, way, segments, comparison) for way, (segments, comparison) in side.directions.items())]


def _short(difference: Difference | None) -> str:
    if difference is None:
        return ""
    found = [p for p in (difference.bootstrap_p, difference.randomisation_p) if p is not None]
    return f"{difference.value:+.2f} {'*' if found and max(found) < SURE else ' '}"


def side_text(side: SideScores) -> str:
    """All that is known of one side: what was scored, scores by system and direction, and by source length."""
    alone = len(side.files) == 1
    if alone and not side.directions:
        parts = [table(side.overall.scores[0])]
    else:
        parts = [_comparison_table(side), _signatures(side.overall)]
    if not alone:
        names = ", ".join(each.system for each in side.files[1:])
        parts.append(f"differences are those of {names} from {side.files[0].system}; p is two-sided, * below {SURE}")
    if side.lengths:
        parts.append(_length_table(side))
    return "\n\n".join([_title(side), *parts])


def _title(side: SideScores) -> str:
    hypotheses = ", ".join(str(each.hypothesis) for each in side.files)
    return f"{hypotheses} against {', '.join(map(str, side.files[0].references))}"


def side_object(side: SideScores) -> dict[str, Any]:
    """The same for programs, its numbers unrounded; a system's differences are those from the first."""
    systems = []
    for number, files in enumerate(side.files):
        systems.append(
            {
                "name": files.system,
                "hypothesis": str(files.hypothesis),
                "references": [str(each) for each in files.references],
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
    return {"name": side.name, "segments": side.segments, "systems": systems}


def _system_object(comparison: Comparison, number: int) -> dict[str, Any]:
    differences = comparison.differences[number - 1] if number else []
    return {"scores": as_objects(comparison.scores[number]), "differences": [asdict(each) for each in differences]}


def _comparison_table(side: SideScores) -> str:
    """A line for each metric, direction and system; columns that say nothing here are left out."""
    rows = []
    parts = [("all", side.segments, side.overall)]
    parts += [(direction, segments, each) for direction, (segments, each) in side.directions.items()]
    for metric in range(len(side.overall.scores[0])):
        for direction, segments, comparison in parts:
            where = [direction, f"{segments:,}"] if side.directions else ["", ""]
            for number, files in enumerate(side.files):
                score = comparison.scores[number][metric]
                system = files.system if len(side.files) > 1 else ""
                difference = comparison.differences[number - 1][metric] if number else None
                cells = [f"{score.value:.2f}", _interval(score), *_difference_cells(difference)]
                rows.append([score.name, *where, system, *cells])
    heads = ["metric", "direction", "segments", "system", "score", "95% interval", "difference"]
    return _table([*heads, "p bootstrap", "p randomisation"], rows)


def _difference_cells(difference: Difference | None) -> list[str]:
    if difference is None:
        return ["", "", ""]
    found = [difference.bootstrap_p, difference.randomisation_p]
    return [f"{difference.value:+.2f}", *("" if p is None else f"{p:.4f} {'*' if p < SURE else ' '}" for p in found)]


def _signatures(comparison: Comparison) -> str:
    rows = [[each.name, each.signature] for each in comparison.scores[0]]
    if comparison.differences:
        rows = [[each.metric, each.signature] for each in comparison.differences[0]]
    return _table(["metric", "signature"], rows)


def _length_table(side: SideScores) -> str:
    """A line for each length and system."""
    names = [score.name for score in side.overall.scores[0]]
    rows = []
    for rows_of_length in zip(*side.lengths, strict=True):
        for files, row in zip(side.files, rows_of_length, strict=True):
            rows.append(
                [row.name, f"{row.segments:,}", files.system if len(side.files) > 1 else "", *_numbers(row, names)]
            )
    return _table(["words in source", "segments", "system", *names, "length ratio"], rows)


def _numbers(row: LengthRow, names: Sequence[str]) -> list[str]:
    ratio = "" if row.length_ratio is None else f"{row.length_ratio:.3f}"
    return [*(f"{row.scores[name]:.2f}" for name in names), ratio]


def _interval(score: Score) -> str:
    return "" if score.low is None or score.high is None else f"{score.low:.2f} to {score.high:.2f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Numbers to the right; a column without any cell is left out."""
    columns = [column for column in zip(heads, *rows, strict=True) if any(column[1:])]
    left = [number for number, (_, *cells) in enumerate(columns) if not all(map(_is_number, filter(None, cells)))]
    return aligned(list(zip(*columns, strict=True)), left=left)


def _is_number(cell: str) -> bool:
    return cell.rstrip(" *").replace(",", "").replace(".", "").lstrip("+-").isdigit()
