"""Data sets of the `datasets` library: from the Hugging Face hub, or a folder that it has saved."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtkit.data.readers.arrow import reason, rows_of
from mtkit.data.readers.tables import Cell
from mtkit.data.readers.text import Repairs
from mtkit.errors import DataError, shown

_ROWS = 1_000
"""Rows taken from a data set at a time."""


def dataset_rows(
    name: str, subset: str | None, split: str, columns: Sequence[str], repairs: Repairs, *, streaming: bool
) -> Iterator[tuple[int, list[Cell]]]:
    """The number, from 1, and the values of `columns` of each row of a data set's split.

    Raises: DataError where there is no such data set, subset, split or column, no network to fetch it, or no text.
    """
    called = " ".join(part for part in (name, subset, split) if part)
    rows = _saved(Path(name), split) if Path(name).is_dir() else _from_hub(name, subset, split, streaming)
    yield from rows_of(_batches(rows, called), columns, repairs, called)


def _batches(rows: Any, called: str) -> Iterator[Any]:
    batches = iter(rows.with_format("arrow").iter(batch_size=_ROWS))
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:  # whatever the library, its file formats and the network can raise
            raise DataError(f"data set {called}: reading failed ({reason(error)}); run the command again") from error
        yield batch


def _saved(folder: Path, split: str) -> Any:
    """A split of what `save_to_disk` wrote: a set of splits, or a single one, which answers to its own name only."""
    import datasets

    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        raise DataError(
            f"{folder} is a folder that datasets.save_to_disk did not write; "
            f"give such a folder, or the name of a data set on the hub"
        )
    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"{folder}: cannot read the saved data set ({reason(error)}); save it again") from error
    if not isinstance(saved, datasets.DatasetDict):
        own = str(saved.split or split)
        splits = {own: saved}
    else:
        splits = dict(saved)
    if split not in splits:
        raise DataError(f"{folder} has no split {shown(split)}; there is {', '.join(map(str, splits))}")
    return splits[split]


def _from_hub(name: str, subset: str | None, split: str, streaming: bool) -> Any:
    import datasets

    try:
        with _quiet():
            return datasets.load_dataset(name, subset, split=split, streaming=streaming)
    except Exception as error:  # a missing name, subset, split or network are each raised as something else
        which = f"data set {name}" + (f", subset {subset}" if subset else "") + f", split {split}"
        raise DataError(
            f"{which}: cannot load it ({reason(error)}); "
            f"check the names and the network, or give a folder that datasets.save_to_disk wrote"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the dozen warnings by which the hub's client says that there is no network, before it fails."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
