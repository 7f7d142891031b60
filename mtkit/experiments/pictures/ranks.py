"""Mean ranks with critical differences (Demsar, 2006, Statistical comparisons of classifiers over multiple data sets).

Up to `FEW` entries are drawn as in that paper. More entries are drawn as a list with a line of half the critical
difference on both sides of each mean rank (Koning et al., 2005, The M3 competition: statistical tests of the results).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtkit.experiments.pictures.canvas import FAINT, INK, entitle, new_figure, shortened
from mtkit.experiments.pictures.points import listed

FEW = 20
"""Number of entries up to which the picture is the diagram of Demsar (2006)."""
ROW, LANE = 1.0, 0.45
"""Height of a name and of a group's bar in the diagram, in rows."""


@dataclass(frozen=True)
class Ranks:
    """Mean ranks of entries, which `mtkit.evaluation.ranks.rank` returns without names; rank 1 is best."""

    names: Sequence[str]
    means: Sequence[float]
    """Mean rank of each entry over the blocks."""
    critical: float
    """Nemenyi's critical difference: mean ranks that differ by less do not differ significantly."""
    groups: Sequence[Sequence[int]]
    """Indices of the entries in each group without significant differences."""
    blocks: int
    """Number of blocks in which entries were ranked: a block is a task with a seed."""
    p: float | None = None
    """Probability, by Friedman's test, of such differences if no entries differ."""
    first: str = ""
    """The entry with which the others are compared. It is drawn in bold."""
    unranked: Sequence[str] = ()
    """Entries without a score in some block, which have no rank."""


def draw_ranks(ranks: Ranks, title: str) -> Any:
    """Return a figure of the mean ranks; None for less than 2 entries, which have no ranks."""
    if len(ranks.names) < 2:
        return None
    order = sorted(range(len(ranks.names)), key=lambda index: (ranks.means[index], index))
    figure = (_diagram if len(order) <= FEW else _list)(ranks, order)
    if len(order) <= FEW:
        meaning = "Bars join entries without a significant difference."
    else:
        meaning = (
            "Entries whose lines overlap have no significant difference; dark: no significant difference from the best."
        )
    together = ""
    if ranks.p is not None:
        p = "< 0.001" if ranks.p < 0.001 else f"= {ranks.p:.3f}"
        together = f"All entries together: p {p} (Friedman test of Iman and Davenport)."
    entitle(
        figure,
        f"{title}: mean rank in {ranks.blocks} block{'s' * (ranks.blocks != 1)}",
        "Rank 1 is best." + (" Bold: first entry." if ranks.first in ranks.names else ""),
        f"CD: Nemenyi's critical difference at 5%, {ranks.critical:.2f}. {meaning}",
        together,
        "A block is a task with a seed, so this describes new seeds on the same tasks.",
        f"Not ranked, because a block has no score of them: {listed(ranks.unranked)}." if ranks.unranked else "",
    )
    return figure


def lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return the lane of each span: spans that overlap or touch lie in different lanes, as few as possible."""
    ends: list[float] = []
    chosen = {}
    for index in sorted(range(len(spans)), key=spans.__getitem__):
        low, high = spans[index]
        lane = next((lane for lane, end in enumerate(ends) if end < low), len(ends))
        ends[lane : lane + 1] = [high]
        chosen[index] = lane
    return [chosen[index] for index in range(len(spans))]


def _spans(ranks: Ranks, pad: float) -> list[tuple[float, float]]:
    """Return the ends of each bar, for groups of at least two entries; groups within other groups have none."""
    spans = {
        (min(ranks.means[index] for index in group) - pad, max(ranks.means[index] for index in group) + pad)
        for group in ranks.groups
        if len(group) > 1
    }
    return sorted(
        span
        for span in spans
        if not any(other != span and other[0] <= span[0] <= span[1] <= other[1] for other in spans)
    )


def _diagram(ranks: Ranks, order: Sequence[int]) -> Any:
    """Draw the axis of ranks on top, bars of groups below it, and names on both sides, the best half on the left."""
    count = len(order)
    spans = _spans(ranks, pad=0.006 * (count - 1))
    bars = lanes(spans)
    top = 0.6 + LANE * (max(bars, default=-1) + 1)
    left = order[: (count + 1) // 2]
    figure = new_figure(9, 1.5 + 0.26 * (top + len(left) + 2))
    axes = figure.subplots()
    axes.set_xlim(1, count)
    axes.set_ylim(top + len(left), -2)
    reach = min(1 + ranks.critical, count)
    axes.plot([1, reach], [-1.2, -1.2], "|-", color=INK, gid="difference")
    longer = ", longer than the axis" if reach < 1 + ranks.critical else ""
    axes.text(1, -1.5, f"CD = {ranks.critical:.2f}{longer}", verticalalignment="bottom", fontsize=8)
    for (low, high), lane in zip(spans, bars, strict=True):
        y = 0.5 + LANE * lane
        axes.plot([low, high], [y, y], color=INK, linewidth=4, solid_capstyle="butt", gid="group")
    names = shortened(ranks.names)
    for place, index in enumerate(order):
        on_left = place < len(left)
        y = top + ROW * (place if on_left else count - 1 - place)
        side = 1 - 0.02 * (count - 1) if on_left else count + 0.02 * (count - 1)
        mean = ranks.means[index]
        axes.plot([mean, mean, side], [0, y, y], color=FAINT, linewidth=0.9, clip_on=False, gid=ranks.names[index])
        name = names[ranks.names[index]]
        axes.text(
            side, y, f"{name}  {mean:.2f} " if on_left else f" {mean:.2f}  {name}",
            horizontalalignment="right" if on_left else "left", verticalalignment="center",
            fontweight="bold" if ranks.names[index] == ranks.first else "normal", gid=f"label {ranks.names[index]}",
        )  # fmt: skip
    axes.xaxis.set_ticks_position("top")
    axes.set_xticks(range(1, count + 1))
    axes.spines["top"].set(visible=True, position=("data", 0))
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_yticks([])
    axes.grid(visible=False)
    return figure


def _list(ranks: Ranks, order: Sequence[int]) -> Any:
    """Draw an entry per row, the best on top, and a band over the ranks that do not differ from the best rank."""
    figure = new_figure(9, 1.6 + 0.19 * len(order))
    axes = figure.subplots()
    half = ranks.critical / 2
    best = ranks.means[order[0]]
    axes.set_xlim(0, len(order) + 1)
    axes.axvspan(best - half, best + half, color=FAINT, alpha=0.15, linewidth=0, gid="best")
    for row, index in enumerate(order):
        mean = ranks.means[index]
        color = INK if mean - best < ranks.critical else FAINT
        axes.plot([mean - half, mean + half], [row, row], color=color, linewidth=1.4, gid=ranks.names[index])
        axes.plot([mean], [row], "o", color=color, markersize=4)
    names = shortened(ranks.names)
    labels = [f"{names[ranks.names[index]]}  {ranks.means[index]:.1f}" for index in order]
    axes.set_yticks(range(len(order)), labels, fontsize=8)
    for label, index in zip(axes.get_yticklabels(), order, strict=True):
        label.set_fontweight("bold" if ranks.names[index] == ranks.first else "normal")
    axes.set_ylim(len(order) - 0.3, -0.7)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", top=True, labeltop=True)
    axes.set_xlabel("mean rank (dot) and half the critical difference (line)")
    return figure
