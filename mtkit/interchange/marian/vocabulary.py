"""The vocabulary of a Marian model: its pieces with mtkit's numbers, and which row of the weights each has.

vocab.json numbers the pieces of one or two sentencepiece models in an order of its own. mtkit's special pieces come
first, then the others in that order. A piece that sentencepiece cuts and vocab.json lacks, which Marian reads as
unknown, gets a number too, with the weights of the unknown piece.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from mtkit.data.subword.model_file import ModelFile
from mtkit.data.subword.renumbered import FIRST, ordinary
from mtkit.data.tokenizer import BOS, BREAK, EOS, PAD, SPECIALS, UNK
from mtkit.errors import DataError, RunError

MARKS = {PAD: "<pad>", UNK: "<unk>", EOS: "</s>"}
"""How Marian spells its special pieces."""

NEVER = -100.0
"""Output bias of a piece that the model never had: its probability is 0 in float32."""


@dataclass(frozen=True)
class Numbering:
    """The pieces of one side with mtkit's numbers."""

    pieces: tuple[str, ...]
    """Those behind the special ones."""
    rows: tuple[int | None, ...]
    """For each number, the row of Marian's weights; None: it has none there."""
    added: frozenset[int]
    """Numbers without a row of their own: the model never predicts them."""

    @property
    def languages(self) -> list[str]:
        """The target languages that a source can ask for by a first piece, as fra of >>fra<<."""
        return [each[2:-2] for each in self.pieces if is_tag(each)]

    @property
    def marks(self) -> list[str]:
        """The pieces that are no text: tags, and rows that have no name."""
        return [each for each in self.pieces if is_tag(each) or each.startswith("< ")]

    def embeddings(self, weight: Tensor) -> Tensor:
        """Marian's rows (V', D) as mtkit's (V, D): zeros where there is no row. Raises: RunError for another V'."""
        self._check(len(weight), "embeddings")
        zeros = weight.new_zeros(1, weight.shape[1])
        index = [len(weight) if row is None else row for row in self.rows]
        return torch.cat([weight, zeros])[index]

    def biases(self, bias: Tensor, without: Set[int] = frozenset()) -> Tensor:
        """Marian's biases of the logits (V',) as mtkit's (V,): `NEVER` in rows `without`, and where there is none."""
        self._check(len(bias), "biases")
        found = bias[[row or 0 for row in self.rows]].clone()
        found[[number for number, row in enumerate(self.rows) if number in self.added or row in without]] = NEVER
        return found

    def _check(self, there: int, what: str) -> None:
        rows = max(row for row in self.rows if row is not None) + 1
        if there != rows:
            raise RunError(f"the weights have {there:,} {what}, and config.json says {rows:,}")


def is_tag(piece: str) -> bool:
    """Whether a piece asks for a target language."""
    return piece.startswith(">>") and piece.endswith("<<")


def number(
    vocabulary: Mapping[str, int], models: Sequence[ModelFile], *, size: int, pad: int, eos: int, start: int
) -> Numbering:
    """The numbering of a vocabulary by piece, of `size` rows, into whose pieces the models cut text.

    Raises: DataError where the ids are not those of Marian.
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
    for mark, row in special.items():  # the first that has a row owns it
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
