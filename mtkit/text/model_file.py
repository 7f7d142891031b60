"""The file of a sentencepiece model: its pieces and settings, read and written without the library of its format.

It is a protocol buffer (https://protobuf.dev/programming-guides/encoding): ModelProto has the pieces as field 1, each
with its spelling (1), score (2) and type (3), the settings of training (2), the rules of normalisation (3), and those
of decoding (5).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

PIECE, TRAINER, NORMALIZER, DENORMALIZER = 1, 2, 3, 5
"""Fields of ModelProto."""

MODEL_TYPE, BYTE_FALLBACK = 3, 35
"""Fields of the settings of training."""

SPECIAL_IDS, SPECIAL_PIECES = (43, 40, 41, 42), (48, 45, 46, 47)
"""Fields with the ids, and with the spellings, of padding, unknown, beginning and end."""

CHARSMAP = 2
"""Field of the rules of normalisation: what is written for what."""

EXTRA_SPACES, ESCAPED_SPACES = 4, 5
"""Fields of the rules of normalisation: whether a run of spaces becomes one, and a space U+2581; 1 if not there."""

KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
"""Segmentation algorithms by their numbers in the settings of training."""


class PieceType(IntEnum):
    """What a piece is to sentencepiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    """Text is never cut into it, and it is decoded as nothing."""
    USER_DEFINED = 4
    UNUSED = 5
    """Text is never cut into it, and it is decoded as it is spelt."""
    BYTE = 6


@dataclass(frozen=True)
class ModelPiece:
    """A piece of a model."""

    text: str
    score: float = 0.0
    type: PieceType = PieceType.NORMAL


@dataclass(frozen=True)
class ModelFile:
    """The content of a sentencepiece model."""

    pieces: tuple[ModelPiece, ...]
    """In the order of their ids."""
    trainer: bytes = b""
    normalizer: bytes = b""
    denormalizer: bytes = b""

    @classmethod
    def read(cls, content: bytes) -> "ModelFile":
        """The model of a file with this content. Raises: ValueError where it is no such file."""
        try:
            fields = list(_fields(content))
            parts = {number: value for number, value in fields if number != PIECE and isinstance(value, bytes)}
            pieces = [_piece(value) for number, value in fields if number == PIECE and isinstance(value, bytes)]
        except (IndexError, struct.error, UnicodeDecodeError) as error:
            raise ValueError("not a sentencepiece model") from error
        if not pieces:
            raise ValueError("not a sentencepiece model: it has no pieces")
        return cls(tuple(pieces), *(parts.get(each, b"") for each in (TRAINER, NORMALIZER, DENORMALIZER)))

    def written(self) -> bytes:
        """The content of its file."""
        pieces = (
            _field(1, each.text.encode()) + _field(2, each.score) + _field(3, int(each.type)) for each in self.pieces
        )
        parts = ((TRAINER, self.trainer), (NORMALIZER, self.normalizer), (DENORMALIZER, self.denormalizer))
        return b"".join([*(_field(PIECE, each) for each in pieces), *(_field(*each) for each in parts if each[1])])

    @property
    def kind(self) -> str:
        """The segmentation algorithm, one of KINDS."""
        return KINDS[int(self._setting(MODEL_TYPE) or 1)]

    @property
    def byte_fallback(self) -> bool:
        """Whether characters without a piece are written as bytes."""
        return bool(self._setting(BYTE_FALLBACK))

    @property
    def charsmap(self) -> bytes:
        """The compiled rules of normalisation; empty where text stays as it is."""
        return _bytes_of(self.normalizer, CHARSMAP)

    def with_specials(self, pieces: tuple[ModelPiece, ...]) -> "ModelFile":
        """The model with these pieces, the first four of which stand for padding, unknown, beginning and end."""
        names = (each.text.encode() for each in pieces[:4])
        added = [
            *(_field(number, place) for place, number in enumerate(SPECIAL_IDS)),
            *map(_field, SPECIAL_PIECES, names),
        ]
        return replace(self, pieces=pieces, trainer=self.trainer + b"".join(added))  # of two values the last one holds

    def with_charsmap(self, charsmap: bytes) -> "ModelFile":
        """The model with other rules of normalisation; spaces are treated as before."""
        return replace(self, normalizer=self.normalizer + _field(CHARSMAP, charsmap))

    def _setting(self, field: int) -> int | float | bytes | None:
        found = [value for number, value in _fields(self.trainer) if number == field]
        return found[-1] if found else None


def charsmap_of(content: bytes) -> bytes:
    """The compiled rules of normalisation of a model's file, which may have no pieces; empty where there are none."""
    return _bytes_of(_bytes_of(content, NORMALIZER), CHARSMAP)


def keeps_text(content: bytes) -> bool:
    """Whether the model of a file cuts text as it is, and joins pieces as they are, but for the spaces and U+2581."""
    rules, backward = _bytes_of(content, NORMALIZER), _bytes_of(content, DENORMALIZER)
    usual = all(value == 1 for number, value in _fields(rules) if number in (EXTRA_SPACES, ESCAPED_SPACES))
    return usual and not _bytes_of(rules, CHARSMAP) and not _bytes_of(backward, CHARSMAP)


def _bytes_of(content: bytes, field: int) -> bytes:
    """The last value of a field, empty where there is none."""
    found = [value for number, value in _fields(content) if number == field and isinstance(value, bytes)]
    return found[-1] if found else b""


def _piece(content: bytes) -> ModelPiece:
    found = dict(_fields(content))
    text = found.get(1, b"")
    if not isinstance(text, bytes):
        raise IndexError
    return ModelPiece(text.decode(), float(found.get(2, 0.0)), PieceType(int(found.get(3, 1))))


def _fields(content: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Number and value of each field. Raises: IndexError or struct.error where the content ends too soon."""
    place = 0
    while place < len(content):
        key, place = _varint(content, place)
        kind = key & 7
        if kind == 0:
            whole, place = _varint(content, place)
            yield key >> 3, whole
        elif kind in (1, 5):
            size, form = (8, "<d") if kind == 1 else (4, "<f")
            yield key >> 3, struct.unpack(form, content[place : place + size])[0]
            place += size
        elif kind == 2:
            size, place = _varint(content, place)
            if place + size > len(content):
                raise IndexError
            yield key >> 3, content[place : place + size]
            place += size
        else:
            raise IndexError


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """A number, seven bits a byte, and the place behind it."""
    number = shift = 0
    while True:
        byte = content[place]
        number |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return number, place
        if shift > 63:
            raise IndexError


def _field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, bytes):
        return _written(number << 3 | 2) + _written(len(value)) + value
    if isinstance(value, int):
        return _written(number << 3) + _written(value)
    return _written(number << 3 | 5) + struct.pack("<f", value)


def _written(number: int) -> bytes:
    """A number from 0, seven bits a byte."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])
