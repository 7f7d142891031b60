"""Sentencepiece models whose pieces have other numbers: those of a vocabulary beside them.

Models that were trained elsewhere have their own order of pieces, often in a file beside one or two sentencepiece
models. `renumbered` makes of such a model one with that order, and mtkit's special pieces first, so that from then on
it is a tokenizer like any other.
"""

from collections.abc import Sequence

from mtkit.data.subword.model_file import ModelFile, ModelPiece, PieceType
from mtkit.data.tokenizer import SPECIALS, UNK

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
