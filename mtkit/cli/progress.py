"""A progress bar for work that tells how many of how many steps are done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def steps(what: str, unit: str, *, show: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Takes (steps done, of how many); a bar on a terminal, when it takes more than two seconds."""
    with tqdm(desc=what, unit=unit, delay=2, leave=False, disable=None if show else True) as bar:

        def on_progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield on_progress
