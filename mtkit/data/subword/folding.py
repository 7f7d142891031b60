"""Normalisation of source text, in the way of the model that normalised the training text."""

import re
import unicodedata
from collections.abc import Sequence

import sentencepiece

_SIMPLE = (range(0x500), range(0x2010, 0x2028))
"""Characters of Latin, Greek and Cyrillic text, and its dashes and quotes.

Rules of folding join a character with a combining one that follows, or rewrite it alone: where each character of these
is kept and none is a combining one, the text of them is kept.
"""


class Folding:
    """Writes characters of the source text as others that stand for them, before it is cut: full-width ones, ligatures.

    It is a sentencepiece model that only normalises, so what was folded in training is folded in the same way for ever.
    """

    def __init__(self, rule: str | bytes) -> None:
        """A rule by its name, as nfkc, or a model. Raises: RuntimeError or ValueError where it is neither."""
        given = {"rule_name": rule} if isinstance(rule, str) else {"model_proto": rule}
        self._normalizer = sentencepiece.SentencePieceNormalizer(
            **given, add_dummy_prefix=False, escape_whitespaces=False, remove_extra_whitespaces=False
        )
        simple = [chr(each) for some in _SIMPLE for each in some if not unicodedata.combining(chr(each))]
        kept = [one for one, folded in zip(simple, self._normalizer.normalize(simple), strict=True) if one == folded]
        self._keeps_ascii = {chr(each) for each in range(128)} <= {*kept}
        self._others = re.compile(f"[^{re.escape(''.join(kept))}]")

    @property
    def model(self) -> bytes:
        """What another `Folding` is made of."""
        proto: bytes = self._normalizer.serialized_model_proto()
        return proto

    def __call__(self, text: str) -> str:
        folded: str = self._normalizer.normalize(text)
        return folded

    def lines(self, texts: Sequence[str]) -> list[str]:
        """Many texts, in less time than one by one."""
        doubtful = [not (self._keeps_ascii and text.isascii()) and self._others.search(text) for text in texts]
        rest = iter(self._normalizer.normalize([text for text, each in zip(texts, doubtful, strict=True) if each]))
        return [next(rest) if each else text for text, each in zip(texts, doubtful, strict=True)]
