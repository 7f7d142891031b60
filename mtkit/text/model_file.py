"""Sentencepiece model files: pieces and settings, read and written without the protobuf library.

The format is a protocol buffer (https://protobuf.dev/programming-guides/encoding): ModelProto has the pieces (field 1),
each with text (1), score (2) and type (3), the settings of training (2), and the rules of normalisation (3) and of
decoding (5).
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
"""Fields with the ids, and with the texts, of padding, unknown, beginning and end."""

CHARSMAP = 2
"""Field of the normalisation rules: the compiled replacements."""

FIRST_SPACE, EXTRA_SPACES, ESCAPED_SPACES = 3, 4, 5
"""Fields of the normalisation rules: whether a text gets a space in front, a run of spaces becomes one, and a space
U+2581; 1 if missing."""

KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
"""Segmentation algorithms by their numbers in the training settings."""


class PieceType(IntEnum):
    """sentencepiece's types of pieces."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    """Never encoded; decoded as nothing."""
    USER_DEFINED = 4
    UNUSED = 5
    """Never encoded; decoded as its text."""
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
        """Read the content of a model file. Raises: ValueError if it is none."""
        try:
            fields = list(_fields(content))
            parts = {number: value for number, value in fields if number != PIECE and isinstance(value, bytes)}
            pieces = [_piece(value) for number, value in fields if number == PIECE and isinstance(value, bytes)]
        except (IndexError, struct.error, UnicodeDecodeError) as error:
            raise ValueError("not a sentencepiece model") from error
        if not pieces:
            raise ValueError("not a sentencepiece model: it has no pieces")
        return cls(tuple(pieces), *(parts.get(field, b"") for field in (TRAINER, NORMALIZER, DENORMALIZER)))

    def written(self) -> bytes:
        """Return the content of the model's file."""
        pieces = (
            _field(1, piece.text.encode()) + _field(2, piece.score) + _field(3, int(piece.type))
            for piece in self.pieces
        )
        parts = ((TRAINER, self.trainer), (NORMALIZER, self.normalizer), (DENORMALIZER, self.denormalizer))
        return b"".join([*(_field(PIECE, piece) for piece in pieces), *(_field(*part) for part in parts if part[1])])

    @property
    def kind(self) -> str:
        """The segmentation algorithm, one of KINDS."""
        return KINDS[int(self._setting(MODEL_TYPE) or 1)]

    @property
    def byte_fallback(self) -> bool:
        """Whether characters without a piece are encoded as bytes."""
        return bool(self._setting(BYTE_FALLBACK))

    @property
    def charsmap(self) -> bytes:
        """The compiled normalisation rules; empty if text stays as it is."""
        return _bytes_of(self.normalizer, CHARSMAP)

    def with_specials(self, pieces: tuple[ModelPiece, ...]) -> "ModelFile":
        """Return the model with these pieces, whose first four are padding, unknown, beginning and end."""
        names = (piece.text.encode() for piece in pieces[:4])
        added = [
            *(_field(number, place) for place, number in enumerate(SPECIAL_IDS)),
            *map(_field, SPECIAL_PIECES, names),
        ]
        return replace(self, pieces=pieces, trainer=self.trainer + b"".join(added))  # the last of two values counts

    def with_charsmap(self, charsmap: bytes) -> "ModelFile":
        """Return the model with other normalisation rules; those for spaces stay."""
        return replace(self, normalizer=self.normalizer + _field(CHARSMAP, charsmap))

    def without_first_space(self) -> "ModelFile":
        """Return the model that adds no space before a text, so that it encodes text within a word or a sentence."""
        return replace(self, normalizer=self.normalizer + _field(FIRST_SPACE, 0))

    def _setting(self, field: int) -> int | float | bytes | None:
        values = [value for number, value in _fields(self.trainer) if number == field]
        return values[-1] if values else None


def charsmap_of(content: bytes) -> bytes:
    """Return the compiled normalisation rules of a model file, which may have no pieces; empty if there are none."""
    return _bytes_of(_bytes_of(content, NORMALIZER), CHARSMAP)


def keeps_text(content: bytes) -> bool:
    """Return whether a model file encodes and decodes text unchanged, except for spaces and U+2581."""
    rules, decoding = _bytes_of(content, NORMALIZER), _bytes_of(content, DENORMALIZER)
    usual = all(value == 1 for number, value in _fields(rules) if number in (EXTRA_SPACES, ESCAPED_SPACES))
    return usual and not _bytes_of(rules, CHARSMAP) and not _bytes_of(decoding, CHARSMAP)


def _bytes_of(content: bytes, field: int) -> bytes:
    """Return the last value of a field, empty if there is none."""
    values = [value for number, value in _fields(content) if number == field and isinstance(value, bytes)]
    return values[-1] if values else b""


def _piece(content: bytes) -> ModelPiece:
    fields = dict(_fields(content))
    text = fields.get(1, b"")
    if not isinstance(text, bytes):
        raise IndexError
    return ModelPiece(text.decode(), float(fields.get(2, 0.0)), PieceType(int(fields.get(3, 1))))


def _fields(content: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield the number and value of each field. Raises: IndexError or struct.error if the content ends too soon."""
    place = 0
    while place < len(content):
        key, place = _decode_varint(content, place)
        kind = key & 7
        if kind == 0:
            number, place = _decode_varint(content, place)
            yield key >> 3, number
        elif kind in (1, 5):
            size, form = (8, "<d") if kind == 1 else (4, "<f")
            yield key >> 3, struct.unpack(form, content[place : place + size])[0]
            place += size
        elif kind == 2:
            size, place = _decode_varint(content, place)
            if place + size > len(content):
                raise IndexError
            yield key >> 3, content[place : place + size]
            place += size
        else:
            raise IndexError


def _decode_varint(content: bytes, place: int) -> tuple[int, int]:
    """Decode a number, seven bits a byte; also return the place after it."""
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
        return _encode_varint(number << 3 | 2) + _encode_varint(len(value)) + value
    if isinstance(value, int):
        return _encode_varint(number << 3) + _encode_varint(value)
    return _encode_varint(number << 3 | 5) + struct.pack("<f", value)


def _encode_varint(number: int) -> bytes:
    """Encode a number from 0, seven bits a byte."""
    content = bytearray()
    while number > 127:
        content.append(number & 127 | 128)
        number >>= 7
    return bytes([*content, number])
