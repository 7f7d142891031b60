"""Sentencepiece models whose pieces have other numbers: those of a vocabulary beside them.

Models that were trained elsewhere have their own order of pieces, often in a file beside one or two sentencepiece
models. `renumbered` makes of such a model one with that order, and mtkit's special pieces first, so that from then on
it is a tokenizer like any other.

Maps the vocabulary of a Marian model to mtkit's piece ids and to rows of Marian's weights.

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
"""The number of the first piece of the vocabulary."""

NEVER_CUT = {"unigram": PieceType.UNUSED, "bpe": PieceType.CONTROL}
"""What pieces are that the model itself does not know. In BPE any other type would take part in merges."""


def ordinary(model: ModelFile) -> dict[str, ModelPiece]:
    """The pieces that text can be cut into, by their spelling."""
    text = (PieceType.NORMAL, PieceType.USER_DEFINED, PieceType.BYTE)
    return {each.text: each for each in model.pieces if each.type in text}


def renumbered(model: ModelFile, vocabulary: Sequence[str], marks: Sequence[str] = ()) -> ModelFile:
    """The model with mtkit's special pieces, then the vocabulary in its order.

    It cuts text as before. The vocabulary has all `ordinary` pieces of the model; into its others text is never cut,
    and `marks` among them are decoded as nothing.

    Raises: ValueError where a piece is missing, comes twice or is one of the special ones, and for a model of another
    kind than unigram and bpe.
    """
    if model.kind not in NEVER_CUT:
        raise ValueError(f"it cuts text by the algorithm {model.kind}, not unigram or bpe")
    known, silent, other = ordinary(model), set(marks), NEVER_CUT[model.kind]
    every = [*SPECIALS, *vocabulary]
    if len(set(every)) < len(every) or "" in every:
        twice = next(each for place, each in enumerate(every) if not each or each in every[:place])
        raise ValueError(f"the piece {twice!r} is empty or comes twice")
    if missing := known.keys() - set(every):
        raise ValueError(f"its piece {min(missing)!r} is not in the vocabulary")
    types = [PieceType.UNKNOWN if place == UNK else PieceType.CONTROL for place in range(FIRST)]
    specials = [ModelPiece(text, type=kind) for text, kind in zip(SPECIALS, types, strict=True)]
    others = (
        known.get(text, ModelPiece(text, type=PieceType.CONTROL if text in silent else other)) for text in vocabulary
    )
    return model.with_specials((*specials, *others))


MARKS = {PAD: "<pad>", UNK: "<unk>", EOS: "</s>"}
"""Spelling of the special pieces in Marian."""

NEVER = -100.0
"""Output bias of a piece that Marian's model lacks: its probability is 0 in float32."""


@dataclass(frozen=True)
class Numbering:
    """Pieces of one side, numbered by mtkit's ids."""

    pieces: tuple[str, ...]
    """Pieces after the special ones."""
    rows: tuple[int | None, ...]
    """Row of Marian's weights for each id; None if Marian has none."""
    added: frozenset[int]
    """Ids without a row of their own: the model never predicts them."""

    @property
    def languages(self) -> list[str]:
        """Target languages that a source can select by its first piece, as fra for >>fra<<."""
        return [each[2:-2] for each in self.pieces if is_tag(each)]

    @property
    def marks(self) -> list[str]:
        """Pieces that are not text: tags, and rows without a name."""
        return [each for each in self.pieces if is_tag(each) or each.startswith("< ")]

    def embeddings(self, weight: Tensor) -> Tensor:
        """Reorder Marian's rows (V', D) to mtkit's (V, D), zeros for missing rows. Raises: RunError for another V'."""
        self._check(len(weight), "embeddings")
        zeros = weight.new_zeros(1, weight.shape[1])
        index = [len(weight) if row is None else row for row in self.rows]
        return torch.cat([weight, zeros])[index]

    def biases(self, bias: Tensor, without: Set[int] = frozenset()) -> Tensor:
        """Reorder Marian's logit biases (V',) to mtkit's (V,): `NEVER` for rows in `without` and ids in `added`."""
        self._check(len(bias), "biases")
        found = bias[[row or 0 for row in self.rows]].clone()
        found[[number for number, row in enumerate(self.rows) if number in self.added or row in without]] = NEVER
        return found

    def _check(self, there: int, what: str) -> None:
        rows = max(row for row in self.rows if row is not None) + 1
        if there != rows:
            raise RunError(f"the weights have {there:,} {what}, and config.json says {rows:,}")


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
        raise DataError(f"{MARKS[EOS]} has the id {vocabulary[MARKS[EOS]]}, and eos_token_id is {eos}")
    special = {PAD: pad, UNK: unknown, EOS: eos, BOS: start, BREAK: vocabulary.get(SPECIALS[BREAK])}
    taken: dict[int | None, int] = {}
    for mark, row in special.items():  # the first mark with a row owns it
        taken.setdefault(row, mark)
    added = {mark for mark, row in special.items() if row is None or taken[row] != mark}
    rows: list[int | None] = [special[mark] for mark in range(FIRST)]
    others = [row for row in range(size) if row not in taken]
    pieces = [names.get(row, f"< {row}>") for row in others]
    known = {*pieces, *(names[row] for row in taken if row in names)}
    more = [
        piece for piece in dict.fromkeys(each for model in models for each in ordinary(model)) if piece not in known
    ]
    added |= set(range(FIRST + len(pieces), FIRST + len(pieces) + len(more)))
    return Numbering((*pieces, *more), (*rows, *others, *[unknown] * len(more)), frozenset(added))
