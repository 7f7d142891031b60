"""Output of a comparison: its table on the terminal, in Markdown, CSV and LaTeX, each with what all rows share."""

import csv
import io
from collections import Counter
from collections.abc import Callable, Sequence

from mtkit import terminal
from mtkit.evaluation.seeds import INTERVALS, ONE_SEED, ONE_SEED_TESTS, TESTS
from mtkit.experiments.rows import Row
from mtkit.experiments.study import Study, trial_recipe
from mtkit.experiments.table import COSTS, Line, Table
from mtkit.recipe.settings import LIMITS


def text(study: Study, table: Table, rows: Sequence[Row]) -> str:
    """Return the table for a terminal, with the caption above it."""
    width = terminal.stdout_width()
    written = _written(study, table, rows, lambda cells, left: terminal.aligned(cells, left=left, width=width), "")
    return terminal.wrapped(written, width)


def markdown(study: Study, table: Table, rows: Sequence[Row]) -> str:
    """Return the caption and the table in Markdown."""
    return _written(study, table, rows, lambda cells, left: terminal.markdown(cells, left=left), "### ") + "\n"


def csv_text(table: Table) -> str:
    """Return the table with unrounded numbers as CSV, with a line per entry and task."""
    records, output = table.records(), io.StringIO()
    writer = csv.DictWriter(output, list(records[0]) if records else ["entry"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return output.getvalue()


def latex(study: Study, table: Table, rows: Sequence[Row]) -> str:
    r"""Return the table as a LaTeX `table` per task, for the packages booktabs and graphicx."""
    parts = []
    for task in table.tasks:
        cells, left = _cells(table, table.of_task(task))
        head, *body = [[_escaped(cell) for cell in line] for line in cells]
        columns = "".join("l" if place in left else "r" for place in range(len(head)))
        lines = [
            r"\begin{table}",
            r"\centering",
            r"\resizebox{\linewidth}{!}{%",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            " & ".join(head) + r" \\",
            r"\midrule",
            *(" & ".join(line) + r" \\" for line in body),
            r"\bottomrule",
            r"\end{tabular}}",
            rf"\caption{{{_escaped(' '.join(filter(None, [task and f'{task}:', caption(study, table, rows)])))}}}",
            r"\end{table}",
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def caption(study: Study, table: Table, rows: Sequence[Row]) -> str:
    """Return what all lines share, how intervals and tests are made, and the first warning if there is one."""
    good = [row for line in table.lines for row in line.rows]
    shared = {key: value for key, value in study.base.items() if key != "data"}  # its paths may be of another machine
    recipe = trial_recipe(shared, "the study")
    training, decoding = recipe.training, recipe.decoding
    limits = [f"{value:,.10g} {LIMITS[name]}" for name, value in training.limits.items()]
    method = f"beam {decoding.beam}" if decoding.method == "beam" else decoding.method
    parts = [
        f"Preset {recipe.preset}",
        f"until {' or '.join(limits) or 'patience ends'}",
        f"{training.batch_tokens:,} tokens per batch",
        *_precisions(good),
        method,
        *sorted({row["hardware"] for row in good}),
        *_signatures(good),
    ]
    if {row["side"] for row in good} == {"valid"}:
        parts.append("scored on the validation side")
    seeds = max((len(line.rows) for line in table.lines), default=0)
    sentences = [", ".join(parts) + ".", *_searched(study, rows)]
    if study.settings.match is not None:
        what = "parameters" if study.settings.match == "parameters" else "training FLOPs per token"
        sentences.append(f"The feed-forward widths are set so that all models have the first entry's {what} within 1%.")
    if good:
        sentences.append(INTERVALS if seeds > 1 else ONE_SEED)
    lacking = dict.fromkeys(line.entry for line in table.lines if len(line.rows) > 1 and not line.segments)
    if lacking and table.primary not in COSTS:
        sentences.append(f"Without statistics of segments, these intervals are over seeds only: {', '.join(lacking)}.")
    if any(line.tests for line in table.lines):
        sentences.append(TESTS if seeds > 1 else ONE_SEED_TESTS)
    if any(line.shared for line in table.lines):
        sentences.append("* Timed while other trials ran on the same machine.")
    doubts = [f"{row['entry']}: {row['doubt']}." for row in good if "doubt" in row]
    return " ".join([*sentences, *doubts[:1]])


Layout = Callable[[list[list[str]], list[int]], str]


def _written(study: Study, table: Table, rows: Sequence[Row], layout: Layout, heading: str) -> str:
    parts = [caption(study, table, rows)]
    for task in table.tasks:
        parts += [f"{heading}{task}"] if task is not None else []
        parts.append(layout(*_cells(table, table.of_task(task))))
    return "\n\n".join(parts)


def _cells(table: Table, lines: Sequence[Line]) -> tuple[list[list[str]], list[int]]:
    """Return head and cells of a task's lines, and the left-aligned columns.

    The first score has its standard deviation if there are several seeds, its interval, and the p-value.
    """
    several = any(len(line.rows) > 1 for line in lines)
    tests, failures = any(line.tests for line in lines), any(line.failed for line in lines)
    searched = any(line.rows and line.rows[0]["point"] for line in lines)
    head, left = ["entry"], [0]
    if searched:
        left.append(len(head))
        head.append("chosen")
    head += ["seeds"] if several else []
    for column in table.columns:
        head.append(column.title)
        if column.key == table.primary:
            head += [*(["sd"] if several else []), "95% interval", *(["p"] if tests else [])]
    if failures:
        left.append(len(head))
        head.append("failed")
    cells = [head]
    for line in lines:
        row = [line.entry]
        row += [line.chosen] if searched else []
        row += [str(len(line.rows))] if several else []
        for column in table.columns:
            summary = line.values.get(column.key)
            star = "*" if line.shared and column.timed else ""
            row.append("-" if summary is None else column.text(summary.mean) + star)
            if column.key == table.primary:
                sd = None if summary is None else summary.sd
                row += [("-" if sd is None else column.text(sd))] if several else []
                known = summary is not None and summary.low is not None and summary.high is not None
                row.append(f"{column.text(summary.low)} to {column.text(summary.high)}" if known else "-")  # type: ignore[union-attr, arg-type]
                row += [_p(line.tests[column.key].p_holm) if column.key in line.tests else "-"] if tests else []
        row += [line.failed] if failures else []
        cells.append(row)
    return cells, left


def _p(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _precisions(rows: Sequence[Row]) -> list[str]:
    """Return the precisions of training, with the names of the entries if there are several precisions."""
    names: dict[str, dict[str, None]] = {}
    for row in rows:
        names.setdefault(row["training"].get("precision", ""), {})[row["entry"]] = None
    return [f"{name} ({', '.join(names[name])})" if len(names) > 1 else name for name in sorted(names) if name]


def _signatures(rows: Sequence[Row]) -> list[str]:
    """Return the signature of the first metric."""
    signatures = [next(iter(row["scores"][row["side"]].values()))["signature"] for row in rows]
    return sorted(set(signatures))


def _searched(study: Study, rows: Sequence[Row]) -> list[str]:
    """Return a sentence about the search, with the number of its trials."""
    search = study.settings.search
    if search is None:
        return []
    stage = "search" if search.share < 1 else "final"
    tried = [row for row in rows if row["stage"] == stage and row["seed"] == study.seeds[0]]
    failed, pruned = sum("failed" in row for row in tried), sum(bool(row.get("pruned")) for row in tried)
    budget = f" with {search.share:.0%} of the budget" if search.share < 1 else ""
    numbers = sorted(Counter((row["entry"], row.get("task")) for row in tried).values()) or [0]
    per = f"{numbers[0]} to {numbers[-1]}" if numbers[0] < numbers[-1] else str(numbers[0])
    settings = ", ".join(search.settings)
    counts = [
        f"{len(tried)} trials",
        *([f"{failed} failed"] if failed else []),
        *([f"{pruned} stopped early by the {search.pruner} pruner"] if pruned else []),
    ]
    return [
        f"{settings}: the best of {per} trials per entry{budget}, chosen by the validation score of seed "
        f"{study.seeds[0]} ({search.method} search, {', '.join(counts)})."
    ]


def _escaped(text: str) -> str:
    """Return text with LaTeX's special characters escaped."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {letter: f"${letter}$" for letter in "<>|"}  # the default fonts lack them outside formulas
    special |= {letter: f"\\{letter}" for letter in "&%$#_{}"}
    return "".join(special.get(letter, letter) for letter in text)
