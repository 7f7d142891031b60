"""Normalisation of source text, in the way of the model that normalised the training text."""

import re
import unicodedata
from collections.abc import Sequence
from functools import cache

import sentencepiece

from mtkit.data.lines.invisible import each_visible, visible

_SIMPLE = (range(0x500), range(0x2010, 0x2028))
"""Characters of Latin, Greek and Cyrillic text, and its dashes and quotes.

Rules of folding join a character with a combining one that follows, or rewrite it alone: where each character of these
is kept and none is a combining one, the text of them is kept.
"""


class Folding:
    """Normalises source text before it is cut into pieces.

    Control and invisible characters are dropped or become spaces (`mtkit.data.lines.invisible`). Then a sentencepiece
    model that only normalises writes full-width characters, ligatures and their like as others that stand for them.
    """

    def __init__(self, rule: str | bytes) -> None:
        """A rule by its name, as nfkc, or a model. Raises: RuntimeError or ValueError where it is neither."""
        given = {"rule_name": rule} if isinstance(rule, str) else {"model_proto": rule}
        self._normalizer = sentencepiece.SentencePieceNormalizer(
            **given, add_dummy_prefix=False, escape_whitespaces=False, remove_extra_whitespaces=False
        )
        simple = [chr(each) for some in _SIMPLE for each in some if not unicodedata.combining(chr(each))]
        kept = [each for each in simple if each == self(each)]
        self._keeps_ascii = {chr(each) for each in range(32, 127)} <= {*kept}
        self._others = re.compile(f"[^{re.escape(''.join(kept))}]")

    @property
    def model(self) -> bytes:
        """What another `Folding` is made of."""
        proto: bytes = self._normalizer.serialized_model_proto()
        return proto

    @property
    def whole_model(self) -> bytes:
        """A sentencepiece model that does all of it for other programs, U+0000 and joiners aside; made in seconds."""
        return _with_invisible(self.model)

    def __call__(self, text: str) -> str:
        folded: str = self._normalizer.normalize(visible(text))
        return folded

    def lines(self, texts: Sequence[str]) -> list[str]:
        """Many texts, in less time than one by one."""
        doubtful = [
            not (self._keeps_ascii and text.isascii() and text.isprintable()) and self._others.search(text)
            for text in texts
        ]
        others = [visible(text) for text, each in zip(texts, doubtful, strict=True) if each]
        rest = iter(self._normalizer.normalize(others))
        return [next(rest) if each else text for text, each in zip(texts, doubtful, strict=True)]


@cache
def _with_invisible(content: bytes) -> bytes:
    """The model with rules for control and invisible characters too."""
    rules = dict(sentencepiece.SentencePieceNormalizer(model_proto=content).Decompile()) | each_visible()
    del rules["\0"]  # it would end the key
    sentencepiece.set_min_log_level(2)  # it reports the size of the map
    made: bytes = sentencepiece.SentencePieceNormalizer(norm_map=list(rules.items())).serialized_model_proto()
    return made
