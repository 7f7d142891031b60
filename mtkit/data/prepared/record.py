"""prepared.json: what is known of prepared data, read back."""

from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import StringConstraints
from typing_extensions import TypedDict

from mtkit.errors import DataError
from mtkit.storage.files import check_regular
from mtkit.storage.records import Count, read_stored, stored

FORMAT = 3
"""Raised when the layout of the folder changes so that older ones cannot be read."""


AGAIN = "repeat the `mtkit prepare` that made it, with --overwrite"
"""What to do where prepared data is damaged or of another version."""


class Sides(TypedDict):
    """A count of the source side and of the target side."""

    source: Count
    target: Count


@stored
class Altered(TypedDict):
    """A target that does not come back from its pieces."""

    line: int
    text: str
    back: str


@stored
class Counts(TypedDict):
    """What was counted in a side or a corpus; see `mtkit.data.sides`."""

    segments: Count
    words: Sides
    pieces: Sides
    unknown: Sides
    bytes: Sides
    found: dict[str, Count]
    left_out: dict[str, Count]
    altered: NotRequired[Count]
    sentences: NotRequired[dict[Annotated[str, StringConstraints(pattern="^[0-9]{1,3}$")], Count]]


class CorpusCounts(Counts):
    """Counts of one corpus."""

    direction: str
    suspicious_line: int | None
    altered_line: NotRequired[Altered | None]


@stored
class PieceUse(TypedDict):
    """Occurrences in training of the pieces of a vocabulary, without special pieces and byte pieces."""

    used: Count
    """Pieces that occur at all."""
    rare: Count
    """Pieces that occur, but fewer than `mtkit.data.sides.RARE` times."""
    enough: Count
    """Size of a vocabulary without the rare ones of several characters."""


class SideCounts(Counts):
    """Counts of one side, with those of its corpora."""

    rows: Count
    corpora: list[CorpusCounts]
    use: NotRequired[dict[str, PieceUse]]
    """Of the training side: by the name of a vocabulary, joint, or source and target."""


@stored
class Input(TypedDict):
    """What was read, and what was put right in it; see `mtkit.text.readers.facts`."""

    sha256: str
    carriage_returns: NotRequired[int]
    byte_order_marks: NotRequired[int]
    inner_newlines: NotRequired[int]
    line_separators: NotRequired[int]
    inner_carriage_returns: NotRequired[int]
    oddities: NotRequired[dict[str, dict[str, list[Count]]]]


class Identity(TypedDict):
    """What decides whether data must be prepared anew."""

    settings: dict[str, Any]
    inputs: dict[str, str]


@stored
class Record(TypedDict):
    """Content of prepared.json."""

    format: int
    mtkit: str
    fingerprint: str
    settings: dict[str, Any]
    identity: Identity
    inputs: dict[str, Input]
    normalization: NotRequired[dict[str, str]]
    """Of source and target; earlier versions normalised both by `settings`."""
    vocabulary: Sides
    sides: dict[str, SideCounts]
    seconds: float


def read_record(folder: Path) -> Record:
    """The record of a prepared folder. Raises: DataError where it is missing, damaged or of another version."""
    path = folder / "prepared.json"
    if not path.exists():
        raise DataError(
            f"no prepared data in {folder}; run `mtkit prepare` first, with the same --recipe, or with --data {folder} "
            "and your text (without text it prepares the built-in corpus)"
        )
    check_regular(folder)
    return read_stored(path, Record, AGAIN, error=DataError, version=FORMAT)
