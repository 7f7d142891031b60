"""HTML elements, tables, line charts and attention maps from plain values. All text is escaped."""

from collections.abc import Sequence
from html import escape
from math import floor, log10

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 420, 230, 46, 12, 24, 10
TICKS = 4
COLOURS = 6
"""Number of run colours; with more runs, colours repeat."""

Points = Sequence[tuple[float, float]]


class Html(str):
    """Finished markup, which is not escaped again."""


def tag(name: str, *content: str, **attributes: object) -> Html:
    """Return an element; text in it is escaped, `Html` is not. A trailing _ of an attribute name is removed."""
    pairs = "".join(f' {key.rstrip("_")}="{escape(str(value))}"' for key, value in attributes.items())
    return Html(f"<{name}{pairs}>{text(*content)}</{name}>")


def text(*content: str) -> Html:
    """Concatenate the contents; text is escaped, `Html` is not."""
    return Html("".join(item if isinstance(item, Html) else escape(item) for item in content))


def run_name(name: str, number: int) -> Html:
    """Return the name of a run with its colour."""
    return tag("span", name, class_="run", style=colour(number))


def colour(number: int) -> str:
    """Return the style attribute with the colour of a run."""
    return f"--run: var(--run{number % COLOURS})"


def data_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    """Return a table of values; empty columns are left out."""
    columns = [column for column in zip(heads, *rows, strict=True) if any(column[1:])]
    head, *body = zip(*columns, strict=True)
    lines = [tag("tr", *(tag("td", cell) for cell in row)) for row in body]
    inner = tag("thead", tag("tr", *(tag("th", item) for item in head))) + tag("tbody", *lines)
    return tag("div", tag("table", Html(inner), class_="data"), class_="scroll")


def line_chart(title: str, lines: Sequence[tuple[int, Points]], *, dots: bool) -> Html:
    """Return a line chart of (run number, points); empty if there are no points."""
    points = [point for _, line in lines for point in line]
    if not points:
        return Html()
    right = max(x for x, _ in points) or 1
    low, high = min(y for _, y in points), max(y for _, y in points)
    step = _step((high - low) or abs(high) or 1)
    low, high = floor(low / step) * step, -floor(-high / step) * step
    high = high if high > low else low + step

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            round(LEFT + x / right * (WIDTH - LEFT - RIGHT), 1),
            round(TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM), 1),
        )

    parts: list[str] = []
    for number in range(round((high - low) / step) + 1):
        value = low + number * step
        _, y = place(0, value)
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", f"{value:.6g}", x=LEFT - 6, y=y + 4, **{"text-anchor": "end"}))
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        x, _ = place(share * right, low)
        parts.append(tag("text", f"{share * right:,.0f}", x=x, y=HEIGHT - 6, **{"text-anchor": anchor}))
    for number, line_points in lines:
        places = [place(*point) for point in line_points]
        line = [tag("polyline", points=" ".join(f"{x},{y}" for x, y in places))]
        line += [tag("circle", cx=x, cy=y, r=2.5) for x, y in places if dots or len(places) == 1]
        parts.append(tag("g", *line, style=colour(number)))
    label = f"{title}, by update"
    return tag(
        "figure",
        tag("figcaption", label),
        tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", **{"aria-label": label}),
    )


def attention_table(source: Sequence[str], target: Sequence[str], weights: Sequence[Sequence[float]]) -> Html:
    """Return a map of weights (T, S) with their pieces; larger weights have a stronger colour."""
    head = tag("thead", tag("tr", tag("td", style="border: 0"), *(tag("th", piece, dir="auto") for piece in source)))
    rows = [
        tag(
            "tr",
            tag("th", piece, dir="auto"),
            *(
                tag("td", style=f"--w: {weight:.3f}", title=f"{_apart(piece)} → {_apart(other)}: {weight:.3f}")
                for other, weight in zip(source, row, strict=True)
            ),
        )
        for piece, row in zip(target, weights, strict=True)
    ]
    return tag("div", tag("table", head, tag("tbody", *rows), class_="map"), class_="scroll")


def small_map(title: str, weights: Sequence[Sequence[float]]) -> Html:
    """Return a small map of weights (T, S) without pieces."""
    cells = [
        tag("rect", x=s, y=t, width=1, height=1, opacity=f"{weight:.2f}")
        for t, row in enumerate(weights)
        for s, weight in enumerate(row)
        if weight >= 0.01
    ]
    box = f"0 0 {len(weights[0])} {len(weights)}"
    drawn = tag("svg", *cells, viewBox=box, role="img", **{"aria-label": title})
    return tag("figure", tag("figcaption", title), drawn)


def _apart(piece: str) -> str:
    """Isolate a piece with U+2068 and U+2069, so that right-to-left letters do not reorder the line."""
    return f"\u2068{piece}\u2069"


def _step(span: float) -> float:
    """Return a round step that divides a span into about TICKS parts."""
    rough = span / TICKS
    power = 10.0 ** floor(log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
