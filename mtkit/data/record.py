"""The record of prepared data, prepared.json: settings, fingerprints of the text, and counts."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import StringConstraints
from typing_extensions import TypedDict

from mtkit.errors import DataError
from mtkit.storage.files import check_regular, json_text
from mtkit.storage.records import Count, read_stored, stored
from mtkit.text.tokenizer import PREPARE_AGAIN

FORMAT = 3
"""Version of the folder's layout, incremented when older folders can no longer be read."""


class Sides(TypedDict):
    """A count of the source side and of the target side."""

    source: Count
    target: Count


@stored
class Altered(TypedDict):
    """A target that decoding its pieces does not restore: the result is `back`."""

    line: int
    text: str
    back: str


@stored
class Counts(TypedDict):
    """Counts of a side or a corpus; see `mtkit.data.sides`."""

    segments: Count
    words: Sides
    pieces: Sides
    unknown: Sides
    bytes: Sides
    found: dict[str, Count]
    left_out: dict[str, Count]
    altered: Count
    sentences: dict[Annotated[str, StringConstraints(pattern="^[0-9]{1,3}$")], Count]


class CorpusCounts(Counts):
    """Counts of one corpus."""

    direction: str
    suspicious_line: int | None
    altered_line: Altered | None


@stored
class PieceUse(TypedDict):
    """Use of a vocabulary's pieces in training, without special pieces and byte pieces."""

    used: Count
    """Pieces that occur at all."""
    rare: Count
    """Pieces of several characters that occur fewer than `mtkit.data.sides.RARE` times."""
    enough: Count
    """Size of the vocabulary without rare pieces of several characters."""


class SideCounts(Counts):
    """Counts of one side and of its corpora."""

    rows: Count
    corpora: list[CorpusCounts]
    use: NotRequired[dict[str, PieceUse]]
    """In the training side, by vocabulary: joint, or source and target."""


@stored
class Input(TypedDict):
    """Fingerprint and repairs of a text; see `mtkit.text.corpora`."""

    sha256: str
    carriage_returns: NotRequired[int]
    byte_order_marks: NotRequired[int]
    inner_newlines: NotRequired[int]
    line_separators: NotRequired[int]
    inner_carriage_returns: NotRequired[int]
    oddities: NotRequired[dict[str, dict[str, list[Count]]]]


class Identity(TypedDict):
    """Values that decide whether data must be prepared again."""

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
    vocabulary: Sides
    sides: dict[str, SideCounts]
    seconds: float


def fingerprint_of(identity: Mapping[str, Any], tokenizer: Path) -> str:
    """Return the fingerprint of prepared data with the tokenizers of a folder."""
    digest = hashlib.sha256(json_text([FORMAT, identity], sort_keys=True).encode())
    for model in (tokenizer / f"{name}.model" for name in ("folding", "joint", "source", "target")):
        if model.is_file():
            digest.update(model.read_bytes())
    return digest.hexdigest()


def read_record(folder: Path) -> Record:
    """Read the record of a prepared folder. Raises: DataError if it is missing, damaged or of another version."""
    path = folder / "prepared.json"
    if not path.exists():
        raise DataError(
            f"no prepared data in {folder}; run `mtkit prepare` first, with the same --recipe, or with --data {folder} "
            "and your text (without text it prepares the built-in corpus)"
        )
    check_regular(folder)
    return read_stored(path, Record, PREPARE_AGAIN, error=DataError, version=FORMAT)
