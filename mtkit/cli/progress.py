"""Notes and progress bars on standard error. Bars appear on a terminal after two seconds, and never in a log."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import typer

from mtkit.terminal import stderr_is_terminal


def note(message: str) -> None:
    """Print a note on standard error."""
    typer.echo(f"note: {message}", err=True)


def _bar(**options: Any) -> Any:
    from tqdm import tqdm

    return tqdm(delay=2, leave=False, **options)


@contextmanager
def steps(what: str, unit: str, *, show: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show a bar; yield a function that takes the number of steps done and their total."""
    with _bar(desc=what, unit=unit, disable=not (show and stderr_is_terminal())) as bar:

        def on_progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield on_progress


@contextmanager
def counted(what: str | None, unit: str, total: int | None, *, show: bool = True) -> Iterator[Callable[[int], object]]:
    """Show a bar; yield a function that takes the number of units just done."""
    with _bar(desc=what, unit=f" {unit}", total=total, disable=not (show and stderr_is_terminal())) as bar:
        yield bar.update


def through(items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]:
    """Iterate over `items` with a bar (`mtkit.terminal.ProgressBar`)."""
    bar: Iterable[Any] = _bar(iterable=items, desc=what, total=total, unit_scale=True, disable=not stderr_is_terminal())
    return bar


@contextmanager
def latest(every: float = 60.0) -> Iterator[Callable[[str], object]]:
    """Yield a function that takes lines such as "title: step". A terminal shows the latest line.

    A log gets the first line of each title, then a line every `every` seconds if the step has changed.
    """
    from tqdm import tqdm

    with tqdm(bar_format="{desc}", leave=False, disable=not stderr_is_terminal()) as bar:
        shown: dict[str, tuple[str, float]] = {}
        """Last line of each title, and when it was written: the titles of several trials take turns."""

        def show(line: str) -> None:
            if not bar.disable:
                bar.set_description_str(line)
                return
            title, now = line.partition(": ")[0], monotonic()
            last, when = shown.get(title, ("", float("-inf")))
            if line != last and now - when >= every:
                typer.echo(line, err=True)
                shown[title] = line, now

        yield show
