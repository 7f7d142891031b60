"""How far long work is: what shows it to people, as whoever does the work calls it."""

from collections.abc import Iterable
from typing import Any, Protocol


class ProgressBar(Protocol):
    """Goes through `items` and shows how far it is; `total` may be unknown."""

    def __call__(self, items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]: ...


def silent(items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]:
    """Show no progress: the items as they are."""
    return items
