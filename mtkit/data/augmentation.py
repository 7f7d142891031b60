"""Training pairs in capitals and sources with typing errors, other ones in each epoch.

A model whose training text has few of them translates them badly: "A RED HOUSE" is cut into single letters, and a
letter too few makes another word (Belinkov and Bisk, ICLR 2018, arXiv 1711.02173). The prepared data have pieces, not
text, so the chosen rows are decoded and encoded again.
"""

import re
from random import Random

import numpy as np

from mtkit.data.columns import Tokens
from mtkit.data.prepared import Side
from mtkit.text.languages import languages_of
from mtkit.text.segments import mix, uniform
from mtkit.text.tokenizer import UNK, Tokenizer, Tokenizers

WORDS_PER_TYPO = 10
"""A line of up to so many words gets one error, of up to twice as many two, and so on."""

SHORTEST = 4
"""Minimum letters of a word that gets an error."""

_DOTTED = frozenset({"tr", "tur", "turkish", "az", "aze", "azj", "azb", "azerbaijani"})
"""Languages with a dotted and a dotless i."""


class Augmentation:
    """Changes the text of a random part of the training rows."""

    def __init__(self, tokenizers: Tokenizers, *, capitals: float, typos: float, longest: int, seed: int) -> None:
        """`capitals` and `typos` are probabilities of a row.

        A row stays as it is if one of its sides would have more than `longest` pieces, end mark counted.
        """
        self._tokenizers, self._capitals, self._typos = tokenizers, capitals, typos
        self._longest, self._seed = longest, seed
        self._marks = {
            tokenizer: [piece for piece in range(tokenizer.size) if tokenizer.processor.is_control(piece)]
            for tokenizer in {tokenizers.source, tokenizers.target}
        }

    def of(self, side: Side, rows: np.ndarray, copies: np.ndarray, *, epoch: int) -> Side:
        """Return these rows, some of them changed: a pure function of seed, epoch, row and copy.

        `copies`, (rows,): how often each came before in this epoch; a row that comes twice is drawn twice.
        """
        (base,) = np.random.SeedSequence((self._seed, epoch, 3)).generate_state(1, np.uint64)
        keys = mix(mix(base + rows.astype(np.uint64)) + copies.astype(np.uint64))
        capitals, typos = uniform(keys, 1) < self._capitals, uniform(keys, 2) < self._typos
        sources, targets = dict[int, list[int]](), dict[int, list[int]]()
        for place in np.flatnonzero(capitals | typos).tolist():
            source, target = side.source[rows[place]], side.target[rows[place]]
            draw = Random(int(keys[place])) if typos[place] else None
            direction = side.directions[0 if side.tasks is None else int(side.tasks[rows[place]])]
            capital = [language if capitals[place] else None for language in languages_of(direction)]
            pair = (
                self._changed(self._tokenizers.source, source, capital[0], draw),
                self._changed(self._tokenizers.target, target, capital[1], None),
            )
            if max(map(len, pair)) < self._longest:
                sources[place], targets[place] = pair
        return side.with_tokens(rows, _replaced(side.source, rows, sources), _replaced(side.target, rows, targets))

    def _changed(
        self, tokenizer: Tokenizer, pieces: np.ndarray, capitals: str | None, draw: Random | None
    ) -> list[int]:
        """The pieces of the changed text; tags and breaks stay, and rows with an unknown piece, whose text is lost.

        `capitals` is the language of a text that becomes capitals.
        """
        if (pieces == UNK).any() or (capitals is None and draw is None):
            return pieces.tolist()
        changed: list[int] = []
        is_mark = np.isin(pieces, self._marks[tokenizer])
        for stretch in np.split(pieces, np.flatnonzero(is_mark[1:] != is_mark[:-1]) + 1):
            if not len(stretch) or stretch[0] in self._marks[tokenizer]:
                changed += stretch.tolist()
                continue
            text = tokenizer.decode(stretch.tolist())
            text = text if draw is None else with_typos(text, draw)
            changed += tokenizer.encode_lines([text if capitals is None else in_capitals(text, capitals)], threads=1)[0]
        return changed


def in_capitals(text: str, language: str) -> str:
    """Return the text in capitals; in Turkish and Azeri, the capital of i is İ."""
    main = re.split("[-_]", language.lower())[0]
    return (text.replace("i", "İ") if main in _DOTTED else text).upper()


def with_typos(text: str, draw: Random) -> str:
    """Return the text with typing errors: letters exchanged, left out, doubled, or replaced by others of the word."""
    words = text.split(" ")
    long = [
        number for number, word in enumerate(words) if sum(map(str.isalpha, word)) >= SHORTEST and _letter_pairs(word)
    ]
    for number in draw.sample(long, min(len(long), -(-len(words) // WORDS_PER_TYPO))):
        word = words[number]
        place = draw.choice(_letter_pairs(word))
        first, second = word[place], word[place + 1]
        changes = [first, first + first + second]
        if first != second:
            changes.append(second + first)
        if others := [letter for letter in word if letter.isalpha() and letter != second]:
            changes.append(first + draw.choice(others))
        words[number] = word[:place] + draw.choice(changes) + word[place + 2 :]
    return " ".join(words)


def _letter_pairs(word: str) -> list[int]:
    """Return the places of letters before another letter."""
    return [place for place in range(len(word) - 1) if word[place : place + 2].isalpha()]


def _replaced(tokens: Tokens, rows: np.ndarray, others: dict[int, list[int]]) -> Tokens:
    """The rows of the tokens, with other pieces at some places of `rows`."""
    selected = tokens.take(rows)
    starts, lengths = selected.starts, selected.lengths.copy()
    places = np.array(list(others), dtype=np.int64)
    sizes = np.array([len(pieces) for pieces in others.values()], dtype=np.int64)
    starts[places], lengths[places] = len(selected.flat) + np.cumsum(sizes) - sizes, sizes
    flat = [np.array(pieces, dtype=np.int32) for pieces in others.values()]
    # at least one element: padding is gathered from some place
    return Tokens(np.concatenate([selected.flat, *flat, np.zeros(1, dtype=np.int32)]), starts, lengths)
