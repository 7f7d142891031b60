"""Vocabularies of Hugging Face's Marian models as mtkit's.

vocab.json numbers the pieces of one or two sentencepiece models in its own order. In mtkit the special pieces come
first, then the others in that order. A sentencepiece piece that vocab.json lacks, which Marian reads as unknown, gets
an id too, with the weights of the unknown piece.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from mtkit.errors import DataError, RunError
from mtkit.text.model_file import ModelFile, ModelPiece, PieceType
from mtkit.text.tokenizer import BOS, BREAK, EOS, PAD, SPECIALS, UNK

FIRST = len(SPECIALS)
"""Id of the first piece after the special ones."""

MARKS = {PAD: "<pad>", UNK: "<unk>", EOS: "</s>"}
"""Marian's spelling of the special pieces."""

NEVER = -100.0
"""Output bias of a piece that Marian's model lacks: its probability is 0 in float32."""

UNUSED_TYPE = {"unigram": PieceType.UNUSED, "bpe": PieceType.CONTROL}
"""Type of vocabulary pieces that the sentencepiece model lacks. In BPE, any other type would change the merges."""


def ordinary(model: ModelFile) -> dict[str, ModelPiece]:
    """Return the pieces that occur in segmented text, by their spelling."""
    text = (PieceType.NORMAL, PieceType.USER_DEFINED, PieceType.BYTE)
    return {piece.text: piece for piece in model.pieces if piece.type in text}


def renumbered(model: ModelFile, vocabulary: Sequence[str], marks: Sequence[str] = ()) -> ModelFile:
    """Return the model with mtkit's special pieces first, then the vocabulary in its order. It segments text as before.

    The vocabulary has all `ordinary` pieces of the model; its other pieces never occur in segmented text, and `marks`
    among them are decoded as the empty string.

    Raises: ValueError if a piece is missing, repeated or special, and if the model is neither unigram nor bpe.
    """
    if model.kind not in UNUSED_TYPE:
        raise ValueError(f"it cuts text by the algorithm {model.kind}, not unigram or bpe")
    known, silent, other = ordinary(model), set(marks), UNUSED_TYPE[model.kind]
    every = [*SPECIALS, *vocabulary]
    if len(set(every)) < len(every) or "" in every:
        twice = next(piece for place, piece in enumerate(every) if not piece or piece in every[:place])
        raise ValueError(f"the piece {twice!r} is empty or comes twice")
    if missing := known.keys() - set(every):
        raise ValueError(f"its piece {min(missing)!r} is not in the vocabulary")
    types = [PieceType.UNKNOWN if place == UNK else PieceType.CONTROL for place in range(FIRST)]
    specials = [ModelPiece(text, type=kind) for text, kind in zip(SPECIALS, types, strict=True)]
    others = (
        known.get(text, ModelPiece(text, type=PieceType.CONTROL if text in silent else other)) for text in vocabulary
    )
    return model.with_specials((*specials, *others))


@dataclass(frozen=True)
class Numbering:
    """Pieces of one side, numbered by mtkit's ids."""

    pieces: tuple[str, ...]
    """Pieces after the special ones."""
    rows: tuple[int | None, ...]
    """Row of Marian's weights for each id; None if Marian has none."""
    added: frozenset[int]
    """Ids that share a row with another id, or have none: the model never predicts them."""

    @property
    def languages(self) -> list[str]:
        """Target languages that the first piece of a source can select, e.g. fra for >>fra<<."""
        return [piece[2:-2] for piece in self.pieces if is_tag(piece)]

    @property
    def marks(self) -> list[str]:
        """Pieces that are not text: tags, and rows without a name."""
        return [piece for piece in self.pieces if is_tag(piece) or piece.startswith("< ")]

    def embeddings(self, weight: Tensor) -> Tensor:
        """Reorder Marian's rows (V', D) to mtkit's (V, D), zeros for missing rows. Raises: RunError for another V'."""
        self._check(len(weight), "embeddings")
        zeros = weight.new_zeros(1, weight.shape[1])
        index = [len(weight) if row is None else row for row in self.rows]
        return torch.cat([weight, zeros])[index]

    def biases(self, bias: Tensor, excluded: Set[int] = frozenset()) -> Tensor:
        """Reorder Marian's logit biases (V',) to mtkit's (V,): `NEVER` for rows in `excluded` and ids in `added`."""
        self._check(len(bias), "biases")
        reordered = bias[[row or 0 for row in self.rows]].clone()
        never = [number for number, row in enumerate(self.rows) if number in self.added or row in excluded]
        reordered[never] = NEVER
        return reordered

    @property
    def count(self) -> int:
        """Number of rows in Marian's weights."""
        return max(row for row in self.rows if row is not None) + 1

    def _check(self, count: int, what: str) -> None:
        if count != self.count:
            raise RunError(f"the weights have {count:,} {what}, but config.json has {self.count:,}")


def is_tag(piece: str) -> bool:
    """Return whether a piece selects a target language."""
    return piece.startswith(">>") and piece.endswith("<<")


def number(
    vocabulary: Mapping[str, int], models: Sequence[ModelFile], *, size: int, pad: int, eos: int, start: int
) -> Numbering:
    """Number the pieces of a vocabulary {piece: id} with `size` rows, and the models' pieces that it lacks.

    Raises: DataError if the ids are not a valid Marian vocabulary.
    """
    names = {row: piece for piece, row in vocabulary.items()}
    if len(names) < len(vocabulary):
        raise DataError("two of its pieces have one id")
    if MARKS[UNK] not in vocabulary:
        raise DataError(f"it has no piece {MARKS[UNK]}")
    unknown = vocabulary[MARKS[UNK]]
    if outside := [piece for piece, row in vocabulary.items() if not 0 <= row < size]:
        raise DataError(f"the id {vocabulary[outside[0]]} of {outside[0]} is outside the {size:,} rows of the weights")
    if beyond := [row for row in (pad, eos, start) if not 0 <= row < size]:
        raise DataError(f"the id {beyond[0]} of a special piece is outside the {size:,} rows of the weights")
    if vocabulary.get(MARKS[EOS], eos) != eos:
        raise DataError(f"{MARKS[EOS]} has the id {vocabulary[MARKS[EOS]]}, but eos_token_id is {eos}")
    special = {PAD: pad, UNK: unknown, EOS: eos, BOS: start, BREAK: vocabulary.get(SPECIALS[BREAK])}
    taken: dict[int | None, int] = {}
    for mark, row in special.items():  # the first mark with a row owns it
        taken.setdefault(row, mark)
    added = {mark for mark, row in special.items() if row is None or taken[row] != mark}
    rows: list[int | None] = [special[mark] for mark in range(FIRST)]
    others = [row for row in range(size) if row not in taken]
    pieces = [names.get(row, f"< {row}>") for row in others]
    known = {*pieces, *(names[row] for row in taken if row in names)}
    of_models = dict.fromkeys(piece for model in models for piece in ordinary(model))
    more = [piece for piece in of_models if piece not in known]
    added |= set(range(FIRST + len(pieces), FIRST + len(pieces) + len(more)))
    return Numbering((*pieces, *more), (*rows, *others, *[unknown] * len(more)), frozenset(added))
