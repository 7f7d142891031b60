"""The tokenizer: a sentencepiece model, trained on the training text, that encodes and decodes lines."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from mtkit.errors import DataError
from mtkit.text.characters import Folding, has_invisible
from mtkit.text.model_file import keeps_text

PAD, UNK, BOS, EOS = 0, 1, 2, 3
"""The ids of padding, unknown, beginning and end in every model."""

BREAK = 4
"""The id of the piece between the segments of a document. Encoding never produces it."""

SPECIALS = ("< pad>", "< unk>", "< s>", "< /s>", "< break>")
"""The texts of PAD, UNK, BOS, EOS and BREAK. No text contains them, since spaces are rewritten first."""

TAGS = ("< 2{}>", ">>{}<<")
"""The text of a target language's tag: mtkit's, with a space like the specials, and OPUS-MT's."""

BYTES = 256
"""Values of a byte; a vocabulary with a piece for each has no unknown text."""

PREPARE_AGAIN = "repeat the `mtkit prepare` that made it, with --overwrite"
"""Advice about a damaged tokenizer of prepared data."""

_SPACE = "\u2581"
"""sentencepiece's mark of a space."""

_SPACE_BYTES = _SPACE.encode()


class Tokenizer:
    """One sentencepiece model: text to pieces and back.

    Decoding restores the text except for spaces: a run becomes one space, and spaces at the ends are dropped. U+2581,
    sentencepiece's mark of a space, becomes a space. Imported models may also normalise.
    """

    def __init__(self, processor: Any, folding: Folding | None = None) -> None:
        """`folding` normalises text before it is encoded."""
        self._processor, self._folding = processor, folding
        self.size: int = processor.get_piece_size()
        """Pieces in the vocabulary, specials and bytes included; a multiple of 8."""
        self.is_byte = np.array([processor.is_byte(piece) for piece in range(self.size)])
        """(size,) True for pieces of one byte of a character outside the vocabulary."""
        self.begins_word = np.array([self.piece(piece).startswith(_SPACE) for piece in range(self.size)])
        """(size,) True for pieces that begin with a space: the first piece of each word."""

    @cached_property
    def bytes(self) -> np.ndarray:
        """(size,) int64: UTF-8 bytes of each piece's text, without spaces; 0 for specials, tags and breaks."""
        special = (self._processor.is_control, self._processor.is_unknown)
        sizes = [
            0 if any(kind(piece) for kind in special) else len(self.piece(piece).replace(_SPACE, "").encode())
            for piece in range(self.size)
        ]
        return np.where(self.is_byte, 1, sizes)

    def space_bytes(self, pieces: np.ndarray) -> np.ndarray:
        """Return where three of (n,) pieces are the bytes that spell a space: the indices of their first pieces.

        A model of words encodes the start of an unknown word so; other models have a piece for a space.
        """
        if len(pieces) < len(_SPACE_BYTES) or not self.is_byte.any():
            return np.zeros(0, dtype=np.int64)
        spelling = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_BYTES]
        first, second, third = (pieces[place : len(pieces) - 2 + place] == spelling[place] for place in range(3))
        return np.flatnonzero(first & second & third)

    @cached_property
    def _spells_all(self) -> bool:
        """Whether a text's joined pieces are the text except for its spaces and U+2581: nothing is rewritten."""
        return bool(self.is_byte.sum() == BYTES) and keeps_text(self._processor.serialized_model_proto())

    @classmethod
    def load(cls, path: Path, folding: Folding | None = None, advice: str = PREPARE_AGAIN) -> "Tokenizer":
        """Load the tokenizer at `path`.

        Raises: DataError, with the advice what to do, if it is missing, damaged or not mtkit's.
        """
        if not path.is_file():
            raise DataError(f"no tokenizer at {path}; {advice}")
        if path.stat().st_size == 0:  # sentencepiece takes it, and logs that it is not initialised
            raise DataError(f"{path} is empty; {advice}")
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
            ids = (processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id())
            tokenizer = cls(processor, folding)  # reads all pieces, which may not be UTF-8
        except Exception as error:  # sentencepiece raises RuntimeError, TypeError or its own, by version
            raise DataError(f"{path} is not a readable sentencepiece model; {advice}") from error
        if ids != (PAD, UNK, BOS, EOS):
            raise DataError(
                f"{path} was not made by mtkit: its pad, unk, bos and eos are {ids}, not 0, 1, 2 and 3; {advice}"
            )
        return tokenizer

    @property
    def processor(self) -> Any:
        """The sentencepiece processor."""
        return self._processor

    def encode(self, text: str) -> list[int]:
        """Return the pieces of a text, without beginning and end; they are never special."""
        folded = text if self._folding is None else self._folding(text)
        return self._resolve_unknown(self._processor.encode(folded), folded)

    def normal(self, text: str) -> str:
        """Return the text that is cut into pieces: folded, and normalised by imported models."""
        text = text if self._folding is None else self._folding(text)
        normalised: str = self._processor.normalize(text)
        return normalised

    def count_words(self, text: str) -> int:
        """Return the number of words between the spaces of the normalised text."""
        return sum(map(bool, self.normal(text).split(_SPACE)))

    def cleans(self, text: str) -> bool:
        """Return whether folding removes or replaces control or invisible characters of the text."""
        return self._folding is not None and has_invisible(text)

    def encode_lines(self, lines: Sequence[str], threads: int = -1) -> list[list[int]]:
        """Return the pieces of each line, with that many threads (-1: one per processor core)."""
        folded = list(lines) if self._folding is None else self._folding.lines(lines)
        encoded: list[list[int]] = self._processor.encode(folded, num_threads=threads)
        if self.is_byte.sum() == BYTES:  # characters without a piece are bytes
            return list(encoded)
        return [self._resolve_unknown(pieces, line) for pieces, line in zip(encoded, folded, strict=True)]

    def _resolve_unknown(self, pieces: list[int], text: str) -> list[int]:
        """Replace unknown pieces whose text is in the vocabulary, as an imported one for two models may have it."""
        if UNK not in pieces:
            return pieces
        texts = self._processor.encode(text, out_type=str)
        number = self._processor.piece_to_id
        return [number(spelling) if piece == UNK else piece for piece, spelling in zip(pieces, texts, strict=True)]

    def tag(self, direction: str) -> int:
        """Return the tag of a direction's target language, as for `en-fr`; it precedes the source.

        Raises: DataError if the model was made for a single direction, or for others.
        """
        language = direction.partition("-")[2]
        for spelling in TAGS:
            piece: int = self._processor.piece_to_id(spelling.format(language))
            if piece != UNK and self._processor.is_control(piece):
                return piece
        raise DataError(
            f"this data has no direction {direction}: its tokenizer has no tag for the target language {language}"
        )

    def tags(self, directions: Sequence[str]) -> list[int]:
        """Return the tags of all directions; none if there is one direction and the model has no tag for it.

        Raises: DataError as `tag`.
        """
        if len(directions) == 1:
            with suppress(DataError):
                return [self.tag(directions[0])]
            return []
        return [self.tag(direction) for direction in directions]

    def piece(self, index: int) -> str:
        """Return the text of a piece, with U+2581 for a space."""
        text: str = self._processor.id_to_piece(index)
        return text

    def name(self, index: int) -> str:
        """Return the text of a piece as tables show it: specials and tags are without their space, as `<s>`."""
        return self.piece(index).replace("< ", "<")

    def decode(self, ids: Sequence[int]) -> str:
        """Return one line of text, without specials, tags and breaks.

        Line feeds and carriage returns, which pieces of bytes can spell, become spaces; bytes that are not UTF-8 become
        U+FFFD.
        """
        text: str = self._processor.decode([int(piece) for piece in ids if piece > EOS])
        return _spaced(text).replace("\n", " ").replace("\r", " ")

    def altered(self, lines: Sequence[str], pieces: Sequence[list[int]], threads: int = -1) -> list[bool]:
        """Return whether decoding each line's pieces gives another text, spaces aside."""
        doubtful = [row for row, line in enumerate(lines) if _SPACE in line or not self._spells_all]
        decoded: list[str] = self._processor.decode([pieces[row] for row in doubtful], num_threads=threads)
        altered = [False] * len(lines)
        for row, text in zip(doubtful, map(_spaced, decoded), strict=True):
            altered[row] = lines[row] != text and " ".join(filter(None, lines[row].split(" "))) != text
        return altered


def _spaced(text: str) -> str:
    """Replace the marks of spaces that are left in decoded text: models of words spell them, too, as bytes."""
    return text.replace(_SPACE, " ").strip(" ") if _SPACE in text else text


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of both sides; with a joint vocabulary they differ only in the folding of source text."""

    source: Tokenizer
    target: Tokenizer

    @cached_property
    def joint(self) -> bool:
        """Whether both sides share one vocabulary; they may still have two models, which segment differently."""
        source, target = self.source, self.target
        return source.processor is target.processor or (
            source.size == target.size
            and all(source.piece(piece) == target.piece(piece) for piece in range(source.size))
        )

    @classmethod
    def load(cls, folder: Path, advice: str = PREPARE_AGAIN) -> "Tokenizers":
        """Load joint.model, or source.model and target.model, and the source's folding.model.

        Raises: DataError as `Tokenizer.load`.
        """
        folding, path = None, folder / "folding.model"
        if os.path.lexists(path):
            try:
                folding = Folding(path.read_bytes())
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror}; {advice}") from error
            except (RuntimeError, ValueError) as error:
                raise DataError(f"{path} is not a readable sentencepiece model; {advice}") from error
        if (folder / "joint.model").is_file():
            joint = Tokenizer.load(folder / "joint.model", advice=advice)
            return cls(joint if folding is None else Tokenizer(joint.processor, folding), joint)
        source = Tokenizer.load(folder / "source.model", folding, advice)
        return cls(source, Tokenizer.load(folder / "target.model", advice=advice))
