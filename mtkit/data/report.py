"""What `prepare` did, as a compact table for people."""

from typing import Any

from mtkit.data.prepare import Report
from mtkit.data.prepared import open_prepared


def summary(report: Report, max_length: int) -> str:
    """Sides with their segments, words and pieces, what training leaves out and why, and the vocabulary.

    `max_length`: the tokens that the model can take, end mark counted; training leaves longer pairs out.
    """
    record, folder = report.record, report.folder
    settings = record["settings"]
    languages = (settings["source_language"], settings["target_language"])
    if report.unchanged:
        head = f"{folder} is up to date: the same settings and the same text were prepared before"
    else:
        head = f"{folder} prepared in {record['seconds']:.1f} s"
    rows = [("", "segments", *(f"{what} {each}" for what in ("words", "pieces", "pieces/word") for each in languages))]
    rows += [_row(name, count) for name, count in record["sides"].items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    too_long = open_prepared(folder).train.too_long(max_length)
    left_out = f"left out of training: {record['sides']['train']['empty']:,} with an empty side, {too_long:,} too long"
    left_out += f" (over {max_length:,} pieces)"
    return "\n".join([head, "", *table, "", left_out, _vocabulary(record)])


def _row(name: str, count: dict[str, Any]) -> tuple[str, ...]:
    sides = ("source", "target")
    numbers = [f"{count[what][side]:,}" for what in ("words", "pieces") for side in sides]
    ratios = [f"{count['pieces'][side] / max(count['words'][side], 1):.2f}" for side in sides]
    return (name, f"{count['rows']:,}", *numbers, *ratios)


def _vocabulary(record: dict[str, Any]) -> str:
    settings, sizes = record["settings"]["tokenizer"], record["vocabulary"]
    size = f"{sizes['source']:,} pieces, joint" if settings["joint"] else f"{sizes['source']:,} and {sizes['target']:,}"
    sides = record["sides"].values()
    total = sum(sum(count["pieces"].values()) for count in sides) or 1
    shares = {what: sum(sum(count[what].values()) for count in sides) / total for what in ("bytes", "unknown")}
    return (
        f"vocabulary: {size}, {settings['kind']}, normalisation {settings['normalization']}; "
        f"bytes {shares['bytes']:.2%} of the pieces, unknown {shares['unknown']:.2%}"
    )
