"""Progress bars on a terminal's standard error, for work of more than two seconds; a log gets none."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

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
    """Goes through `items` (`mtkit.data.progress.ProgressBar`)."""
    bar: Iterable[Any] = tqdm(items, what, total, delay=2, unit_scale=True, leave=False, disable=not watched())
    return bar
