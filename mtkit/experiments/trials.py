"""Trials of a study: which trainings there are, their names, and which are next.

With a search, each entry first has one trial for each point, with the first seed. The point with the best validation
score is the entry's; its other seeds come next.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtkit.experiments.entries import Entry
from mtkit.experiments.rows import Row, belongs_to, chosen_point
from mtkit.experiments.search import points as points_of
from mtkit.experiments.search import size_of
from mtkit.experiments.study import Study, at_share, with_point
from mtkit.recipe import merged

LONGEST = 100
"""Maximum bytes of an entry or a point in a trial's name; the rest is replaced by a hash."""

LONGEST_NAME = 200
"""Maximum bytes of a trial's name: file names have 255 at most, and temporary ones are longer."""


@dataclass(frozen=True)
class Trial:
    """One training of a study."""

    name: str
    """Name of its files: `band-window_radius-16.seed-1`."""
    entry: str
    task: str | None
    seed: int
    stage: str
    """"final", or "search" for a trial with a share of the budget, which only chooses the point."""
    point: Mapping[str, Any] = field(default_factory=dict)
    """Searched settings: {"training.peak_rate": 0.003}."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Nested settings of the recipe, as they are written."""


Widths = Mapping[tuple[str | None, str], int]
"""Feed-forward widths of matched models, by task and entry; empty without matching."""


class Plan:
    """The trials of a study, given the rows that exist."""

    def __init__(self, study: Study, tasks: Mapping[str | None, Mapping[str, Any]], widths: Widths) -> None:
        """Plan the trials on each task; `tasks` holds nested settings of their data, by name (None: no task)."""
        self.study = study
        self._tasks = tasks
        self._widths = widths

    def due(self, rows: Sequence[Row], begun: Sequence[Row] = ()) -> list[Trial]:
        """Return all trials that can be named now, in order: searches, then the seeds of each chosen point.

        A search by Optuna chooses its next point when it has the results of earlier points. `begun` are the trials
        that have been started, finished or not, without their results.
        """
        return [
            trial
            for task in self._tasks
            for entry in self.study.entries
            for trial in self._of_entry(
                entry,
                task,
                [row for row in rows if belongs_to(row, entry.name, task)],
                [row for row in begun if belongs_to(row, entry.name, task)],
            )
        ]

    def _of_entry(self, entry: Entry, task: str | None, rows: Sequence[Row], begun: Sequence[Row]) -> Iterator[Trial]:
        search, seeds = self.study.settings.search, self.study.seeds
        if search is None:
            yield from (self.trial(entry, task, seed, {}) for seed in seeds)
            return
        stage = "search" if search.share < 1 else "final"
        if search.method == "grid":
            # a point that is written in another way, as 0 and 0.0, is the trial that has begun
            known = [dict(row["point"]) for row in begun if row["stage"] == stage]
            points = [next((other for other in known if other == point), point) for point in search.grid()]
        else:
            points = self._asked(rows, begun, stage)
        tried = [self.trial(entry, task, seeds[0], point, stage) for point in points]
        yield from tried
        done = {row["trial"] for row in rows}
        complete = search.method == "grid" or len(points) >= size_of(search)
        if complete and all(trial.name in done for trial in tried):
            point = chosen_point(rows, stage, seeds[0])
            if point is not None:
                yield from (trial for seed in seeds if (trial := self.trial(entry, task, seed, point)) not in tried)

    def _asked(self, rows: Sequence[Row], begun: Sequence[Row], stage: str) -> list[dict[str, Any]]:
        """Return the points of a search by Optuna so far, and the next one."""
        search, seed = self.study.settings.search, self.study.seeds[0]
        assert search is not None
        tried = ([row for row in some if row["stage"] == stage and row["seed"] == seed] for some in (rows, begun))
        return points_of(search, *tried)

    def trial(self, entry: Entry, task: str | None, seed: int, point: Mapping[str, Any], stage: str = "final") -> Trial:
        """Return the trial of an entry on a task with a seed at a point of the search."""
        recipe = with_point(merged(self.study.base, entry.settings), point)
        recipe = merged(recipe, {"seed": seed, **self._tasks[task]})
        if (task, entry.name) in self._widths:
            recipe = merged(recipe, {"model": {"feed_forward": self._widths[task, entry.name]}})
        search = self.study.settings.search
        if stage == "search" and search is not None:
            complete = self.study.recipe(Entry(entry.name, recipe)).training
            recipe = merged(recipe, {"training": at_share(complete.model_dump(), search.share)})
        # a minus sign would be lost beside the hyphens
        texts = {key: re.sub(r"^-", "minus", str(value)) for key, value in point.items()}
        values = "-".join(f"{key.rpartition('.')[2]}-{text}" for key, text in texts.items())
        parts = [task, slug(entry.name), slug(values), f"seed-{seed}", "search" if stage == "search" else None]
        name = _cut(".".join(filter(None, parts)), LONGEST_NAME)
        return Trial(name, entry.name, task, seed, stage, dict(point), recipe)


def slug(text: str, letters: re.RegexFlag = re.ASCII) -> str:
    """Return a text as a part of a file name: "band-window_radius-16" for "band[window_radius=16]".

    Other letters than ASCII's are kept with `re.UNICODE`.
    """
    name = re.sub(r"[^\w.]+", "-", text, flags=letters).strip("-.")
    return _cut(name, LONGEST, text) if name or not text else _hash(text)


def _cut(name: str, longest: int, text: str | None = None) -> str:
    """Return a name of at most that many bytes; the end of a longer one is replaced by a hash of `text`."""
    if len(name.encode()) <= longest:
        return name
    return f"{name.encode()[: longest - 9].decode(errors='ignore')}-{_hash(name if text is None else text)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
