"""Progress on standard error: bars on a terminal, for work of more than two seconds; a log gets no bars."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import typer
from tqdm import tqdm

from mtkit.terminal import watched


@contextmanager
def steps(what: str, unit: str, *, show: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Takes (steps done, of how many)."""
    with tqdm(desc=what, unit=unit, delay=2, leave=False, disable=not (show and watched())) as bar:

        def on_progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield on_progress


@contextmanager
def counted(what: str | None, unit: str, total: int | None) -> Iterator[Callable[[int], object]]:
    """Takes the number of units just done."""
    with tqdm(desc=what, unit=f" {unit}", total=total, delay=2, leave=False, disable=not watched()) as bar:
        yield bar.update


def through(items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]:
    """Goes through `items` (`mtkit.terminal.ProgressBar`)."""
    bar: Iterable[Any] = tqdm(items, what, total, delay=2, unit_scale=True, leave=False, disable=not watched())
    return bar


@contextmanager
def latest(every: float = 60.0) -> Iterator[Callable[[str], object]]:
    """Takes lines such as "title: step". A terminal shows the latest one.

    A log gets the first line of each title, then a line every `every` seconds if the step has changed.
    """
    with tqdm(bar_format="{desc}", leave=False, disable=not watched()) as bar:
        shown, when = "", 0.0

        def show(line: str) -> None:
            nonlocal shown, when
            if not bar.disable:
                bar.set_description_str(line)
                return
            same_title = line.partition(": ")[0] == shown.partition(": ")[0]
            if line != shown and not (same_title and monotonic() - when < every):
                typer.echo(line, err=True)
                shown, when = line, monotonic()

        yield show
