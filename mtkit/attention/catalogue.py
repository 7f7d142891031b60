"""The mechanisms for readers: one table of all, and one page for each.

What a mechanism is good at, and its scores, are in SCORES, which `python -m mtkit.experiments.pages.write` makes from
the results of studies.
"""

import inspect
import math
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mtkit.attention.contract import ROLES
from mtkit.attention.options import declared
from mtkit.attention.registry import Mechanism, find, mechanisms
from mtkit.attention.slots import SLOTS
from mtkit.errors import MtkitError, shown
from mtkit.storage.records import read_object
from mtkit.terminal import aligned, stdout_width, wrapped

SCORES = Path(__file__).parents[1] / "studies" / "scores.json"
"""By mechanism, what it is good at and its scores in the studies that come with mtkit."""


SCORE_MARKS = "+ better than full, - worse, = at most 2 points lower; speeds relative to full; docs/choose.md"


@cache
def measured() -> Mapping[str, Mapping[str, str]]:
    """Return `good_at` and `row` of each mechanism in SCORES; mechanisms of other packages have none."""
    scores: Mapping[str, Mapping[str, str]] = read_object(SCORES)
    return scores


def table() -> str:
    """Return a table of all mechanisms with family, roles, cost and use, sorted by family."""
    rows = [("name", "family", "roles", "cost", "good at")]
    for mechanism in sorted(mechanisms().values(), key=lambda entry: (entry.family, entry.name)):
        good = measured().get(mechanism.name, {}).get("good_at", "")
        rows.append((mechanism.name, mechanism.family, roles(mechanism), mechanism.complexity, good))
    notes = (
        "good at: in small models, better than full or at most 2 points lower (docs/choose.md). Roles in brackets are "
        "extensions of the paper. `mtkit attentions --year` lists papers, `mtkit attentions NAME` options and scores."
    )
    width = stdout_width()
    return f"{aligned(rows, left=range(5), width=width)}\n\n{wrapped(notes, width or 120)}"


def year_table(first: int | None = None, last: int | None = None) -> str:
    """Return a table of mechanisms from these years, by year, then by family; those without a year at the end.

    Raises: MtkitError if there is none.
    """
    chosen = [
        mechanism
        for mechanism in mechanisms().values()
        if (first is None or (mechanism.year or 0) >= first) and (last is None or (mechanism.year or last + 1) <= last)
    ]
    if not chosen:
        raise MtkitError(f"no mechanism of {'-'.join(str(year) for year in (first, last) if year is not None)}")
    rows = [("year", "name", "family", "roles", "cost", "paper")]
    for mechanism in sorted(chosen, key=lambda entry: (entry.year or math.inf, entry.family, entry.name)):
        facts = (mechanism.name, mechanism.family, roles(mechanism), mechanism.complexity, mechanism.paper)
        rows.append((str(mechanism.year or ""), *facts))
    return aligned(rows, left=range(6), width=stdout_width())


def years(text: str) -> tuple[int, int]:
    """Return the first and the last year of "2021" or "2021-2026". Raises: MtkitError for another text."""
    match = re.fullmatch(r"(\d{4})(?:-(\d{4}))?", text, re.ASCII)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise MtkitError(f"{shown(text)} is no year; write 2021 or 2021-2026, or leave it out")
    return int(match[1]), int(match[2] or match[1])


def complexity_table() -> str:
    """Return cost, sequential operations and longest path of attention, recurrence and convolution, and of mechanisms.

    The first table is table 1 of Vaswani et al., "Attention Is All You Need", NeurIPS 2017, arXiv 1706.03762.
    """
    head = ("cost of a layer", "sequential operations", "longest path")
    kinds = [
        ("layer", *head),
        ("attention to all tokens", "O(T² D)", "O(1)", "O(1)"),
        ("recurrence", "O(T D²)", "O(T)", "O(T)"),
        ("convolution, kernel of k tokens", "O(k T D²)", "O(1)", "O(T / k); O(log_k T) with growing dilation"),
        ("attention within r tokens", "O(r T D)", "O(1)", "O(T / r)"),
    ]
    rows = [("name", "family", *head)]
    for mechanism in sorted(mechanisms().values(), key=lambda entry: (entry.family, entry.name)):
        facts = (mechanism.complexity, mechanism.sequential_operations or "", mechanism.longest_path or "")
        rows.append((mechanism.name, mechanism.family, *facts))
    notes = [
        "T tokens of width D. Costs of mechanisms leave the width out; `mtkit attentions NAME` explains their letters.",
        "Sequential operations: a product, a softmax, a sort and a prefix sum are one operation each.",
        "Longest path, at the default options: layers until every token has reached every other (in the decoder, every "
        "later one). none: some never do. by content: the tokens decide.",
    ]
    width = stdout_width()
    tables = [aligned(kinds, left=range(4), width=width), aligned(rows, left=range(5), width=width)]
    return "\n\n".join([*tables, "\n".join(wrapped(note, width) for note in notes)])


def describe(name: str) -> str:
    """Return the page of one mechanism: facts, options, and the docstrings of its class and file.

    Raises: MtkitError for an unknown name.
    """
    mechanism = find(name)
    scores, path = measured().get(mechanism.name, {}), mechanism.longest_path
    facts = {
        "paper": mechanism.paper,
        "family": mechanism.family,
        "package": mechanism.package,
        "roles": roles(mechanism),
        "cost": f"{mechanism.complexity}, growing with T to the power {mechanism.growth:g}",
        "path": path and f"{path} layers between any two tokens",
        "good at": scores.get("good_at") or None,
        "measured": f"{scores['row']} ({SCORE_MARKS})" if scores else None,
        "weights": "yes" if mechanism.weights else "no",
        "slots": _slots(mechanism),
        "mixes": None if mechanism.kinds else _mixes(mechanism),
    }
    width = stdout_width() or 120
    lines = [f"  {key:8} {value}" for key, value in facts.items() if value is not None]
    parts = [
        wrapped(f"{mechanism.name}: {mechanism.summary}", width),
        "\n".join(wrapped(line, width, indent=" " * 11) for line in lines),
        "\n".join(["options (--attention-option NAME=VALUE, for one role ROLE.NAME=VALUE)", *_options(mechanism)]),
        _indented(_meanings(mechanism), width),
        _indented(_items(inspect.getdoc(sys.modules[mechanism.kind.__module__]) or ""), width),
    ]
    return "\n\n".join(part for part in parts if part)


FORMULA = "    "
"""Indentation of formula lines in docstrings; two spaces separate the formulas on a line."""

OPERATOR = re.compile(r"(?<=\S) ([-+*/.=<>]|<-|<=|>=) (?=\S)")

NO_BREAK = "\u00a0"


def _indented(lines: Sequence[str], width: int) -> str:
    """Return the lines indented, and the second part of a wrapped line further.

    Formula lines are divided only between formulas, and text is not divided before or after an operator.
    """
    parts = []
    for line in lines:
        if line.startswith(FORMULA):
            parts.append(wrapped("  " + re.sub(r"(?<=\S) (?=\S)", NO_BREAK, line), width, indent=f"  {FORMULA}"))
        else:
            parts.append(wrapped("  " + OPERATOR.sub(rf"{NO_BREAK}\1{NO_BREAK}", line), width, indent="    "))
    return "\n".join(parts).replace(NO_BREAK, " ")


def _meanings(mechanism: Mechanism) -> list[str]:
    """Return the class docstring after its first line, with a line for each option that it explains."""
    names = "|".join(declared(mechanism.kind)) or "none"
    text = " ".join((inspect.getdoc(mechanism.kind) or "").partition("\n")[2].split())
    return re.split(rf"(?<=\.) (?=(?:{names})(?:, (?:{names}))*: )", text) if text else []


def _items(documentation: str) -> list[str]:
    """Return a docstring after its first line: a line for each paragraph, item ("Cost: ...") and line of formulas.

    An item begins after the end of a sentence. Text after formulas is indented.
    """
    lines: list[str] = []
    for line in documentation.split("\n")[1:]:
        last = lines[-1] if lines else ""
        is_item = re.match(r"[A-Z]\w*: ", line) is not None and last.endswith(".")
        if not (line and last) or is_item or line.startswith(FORMULA):
            lines.append(line)
        elif last.startswith(FORMULA):
            lines.append(f"  {line}")
        else:
            lines[-1] += f" {line}"
    return "\n".join(lines).strip("\n").split("\n") if any(lines) else []


def roles(mechanism: Mechanism) -> str:
    """Return the published roles, then the extensions in brackets: "encoder decoder (cross)"."""
    names = [role if role in mechanism.published else f"({role})" for role in ROLES if role in mechanism.roles]
    return " ".join(names)


def _mixes(mechanism: Mechanism) -> str:
    """Return whether the mechanism can have some heads of a layer, with an example."""
    other = "band" if mechanism.name == "full" else "full"
    return f"with others in the heads of one layer, as {mechanism.name}:4+{other}:4" if mechanism.mixes else "no"


def _options(mechanism: Mechanism) -> list[str]:
    kinds = {f"{kind.name}.": kind.kind for kind, _ in mechanism.kinds} or {"": mechanism.kind}
    rows = [
        (f"{prefix}{name}", option.null if option.default is None else _written(option.default), option.rule)
        for prefix, kind in kinds.items()
        for name, option in declared(kind).items()
    ]
    if not rows:
        return ["  none"]
    width = stdout_width()
    return textwrap.indent(aligned(rows, left=range(3), width=width and width - 2), "  ").split("\n")


def _written(default: Any) -> str:
    """Return the default as it is typed after `--attention-option NAME=`."""
    if isinstance(default, tuple):
        return str(list(default))
    return str(default).lower() if isinstance(default, bool) else str(default)


def _slots(mechanism: Mechanism) -> str:
    if mechanism.kinds:
        first = mechanism.kinds[0][0].name
        return f"positions, projection and nearby for all heads; any slot for one kind, as {first}.merge"
    if mechanism.slot is not None:
        return f"is itself a {mechanism.slot}, and combines with other mechanisms as {mechanism.slot}={mechanism.name}"
    slots = getattr(mechanism.kind, "slots", {})
    names = {slot: slots[slot] for slot in SLOTS if slot in slots}
    return ", ".join(slot if some is None else f"{slot} ({', '.join(sorted(some))})" for slot, some in names.items())
