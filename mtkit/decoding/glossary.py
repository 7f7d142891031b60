"""Glossaries: terms of the source language with the translations that they must get.

A file has a term per line: source term, tab, target term. A line with one column names a term that is not translated.
Empty lines, and lines that begin with #, are ignored.

A term matches whole words. It matches as it is written, with a capital first letter, and in capitals; a term in
capitals does not match in small letters. The longest term at a word is used. The target term may begin with a capital,
as at the start of a sentence, and may be in capitals if the source is.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Self
from unicodedata import category, normalize

import sentencepiece
import torch

from mtkit.decoding.contract import RequiredTerms, Term
from mtkit.errors import DataError
from mtkit.text.characters import visible
from mtkit.text.model_file import ModelFile
from mtkit.text.text_files import Lines
from mtkit.text.tokenizer import UNK, Tokenizer
from mtkit.text.words import is_unspaced, words

Spellings = tuple[str, ...]
"""The spellings of a target term; a translation may use any of them."""


class Glossary:
    """The terms of a glossary for a model's target vocabulary."""

    def __init__(self, entries: Iterable[tuple[str, str, str]], tokenizer: Tokenizer) -> None:
        """`entries` are source term, target term, and a place that errors name.

        Raises: DataError for a source term with two targets, and for a target that the vocabulary cannot spell.
        """
        self._tokenizer = tokenizer
        self._forms_of: dict[str, list[tuple[int, ...]]] = {}
        self._tokens_of: dict[tuple[int, ...], tuple[str, ...]] = {}
        self._targets: dict[tuple[str, ...], tuple[str, bool]] = {}
        """The target term, and whether it may be in capitals, by the tokens of the source."""
        self._longest: dict[str, int] = {}
        """The maximum number of tokens of the terms that begin with a token."""
        exact: dict[tuple[str, ...], tuple[str, str]] = {}
        for written, target, place in entries:
            key = tuple(tokens(written))
            known_target, known_place = exact.setdefault(key, (target, place))
            if known_target != target:
                raise DataError(
                    f"{place}: the term {written!r} has another translation in {known_place}; remove one of them"
                )
            if not self._forms(target):
                raise DataError(f"{place}: the model's vocabulary cannot spell {target!r}; remove the line")
        for source, (target, _) in exact.items():
            # a term of one letter is the same in both forms, and then begins a sentence
            self._targets |= {_upper(source): (target, True), _capitalised(source): (target, False)}
        self._targets |= {source: (target, False) for source, (target, _) in exact.items()}
        for first, *others in self._targets:
            self._longest[first] = max(1 + len(others), self._longest.get(first, 0))
        self.size = len(exact)
        self.fingerprint = hashlib.sha256(repr(sorted(self._targets.items())).encode()).hexdigest()

    @classmethod
    def read(cls, path: Path, tokenizer: Tokenizer) -> Self:
        """Read a file. Raises: DataError, naming file and line, for a line that is no term, and as `__init__`."""
        return cls(_read(path), tokenizer)

    def terms(self, text: str) -> tuple[Term, ...]:
        """Return the terms that the translation of a source text must contain."""
        return tuple(Term(self._pieces(spellings), count) for spellings, count in self._required(text).items())

    def missed(self, terms: Iterable[Term], text: str) -> dict[Term, int]:
        """Return the terms that a translation's text lacks, each with the number of missing occurrences."""
        missed, text_tokens = dict[Term, int](), tokens(text)
        for term in terms:
            spellings = {self._tokens(form) for form in term.forms}
            count = sum(_occurrences(text_tokens, list(spelling)) for spelling in spellings)
            if count < term.count:
                missed[term] = term.count - count
        return missed

    def count(self, source: str, target: str) -> tuple[int, int]:
        """Return the number of terms that a translation must contain, and how many its text lacks."""
        terms = self.terms(source)
        return sum(term.count for term in terms), sum(self.missed(terms, target).values())

    def of_batch(self, terms: Sequence[tuple[Term, ...]], device: torch.device) -> RequiredTerms:
        """Return the terms of the segments in a batch, on the device."""
        starts, ends = self._inside
        return RequiredTerms(list(terms), starts.to(device), ends.to(device))

    def _required(self, text: str) -> dict[Spellings, int]:
        """Return the target terms of a source text, from left to right, with the number of their occurrences."""
        counts, upper = Counter[str](), set[str]()
        place, text_tokens = 0, tokens(text)
        while place < len(text_tokens):
            longest = self._longest.get(text_tokens[place], 0)
            candidates = (tuple(text_tokens[place : place + size]) for size in range(longest, 0, -1))
            term = next((term_tokens for term_tokens in candidates if term_tokens in self._targets), None)
            if term is None:
                place += 1
            else:
                target, in_capitals = self._targets[term]
                counts[target] += 1
                upper |= {target} if in_capitals else set()
                place += len(term)
        return {_spellings(target, upper=target in upper): count for target, count in counts.items()}

    def _pieces(self, spellings: Spellings) -> tuple[tuple[int, ...], ...]:
        return tuple(dict.fromkeys(form for spelling in spellings for form in self._forms(spelling)))

    def _forms(self, spelling: str) -> list[tuple[int, ...]]:
        """Return a term's pieces after a space and directly after other text, without forms that lose a character."""
        if spelling not in self._forms_of:
            forms = [tuple(self._tokenizer.encode(spelling)), tuple(self._within_text.encode(spelling))]
            spelled = tuple(tokens(spelling))
            self._forms_of[spelling] = [form for form in forms if UNK not in form and self._tokens(form) == spelled]
        return self._forms_of[spelling]

    def _tokens(self, form: tuple[int, ...]) -> tuple[str, ...]:
        if form not in self._tokens_of:
            self._tokens_of[form] = tuple(tokens(self._tokenizer.decode(form)))
        return self._tokens_of[form]

    @cached_property
    def _within_text(self) -> Tokenizer:
        """A tokenizer that adds no space before a text."""
        model = ModelFile.read(self._tokenizer.processor.serialized_model_proto()).without_first_space()
        return Tokenizer(sentencepiece.SentencePieceProcessor(model_proto=model.written()))

    @cached_property
    def _inside(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether the first, and the last, character of each piece is a letter or digit of a word."""
        texts, is_byte = map(self._tokenizer.piece, range(self._tokenizer.size)), self._tokenizer.is_byte
        spelt = [
            ("a" if byte else text) if size else " "
            for text, byte, size in zip(texts, is_byte, self._tokenizer.bytes, strict=True)
        ]
        first, last = ([_is_inside(text[end]) for text in spelt] for end in (0, -1))
        return torch.tensor(first), torch.tensor(last)


def tokens(text: str) -> list[str]:
    """Return the words of a text, and its other visible characters one by one, in Unicode's form NFKC.

    Scripts without spaces between words have a token per character. Soft hyphens, zero-width spaces and other
    characters that the model does not read are left out.
    """
    result: list[str] = []
    for word in words(visible(normalize("NFKC", text))):
        if is_unspaced(word):
            result.append(word)
            continue
        for inside, group in groupby(word, _is_inside):
            characters = list(group)
            result += ["".join(characters)] if inside else characters
    return result


def _is_inside(character: str) -> bool:
    """Return whether a character is a letter, mark or digit of a script with spaces between words."""
    return category(character)[0] in "LMN" and not is_unspaced(character)


def _occurrences(text: Sequence[str], term: Sequence[str]) -> int:
    """Return the number of times that a term's tokens occur, without overlap."""
    count = place = 0
    while place + len(term) <= len(text):
        same = text[place : place + len(term)] == term
        count, place = count + same, place + (len(term) if same else 1)
    return count


def _capitalised(term: Sequence[str]) -> tuple[str, ...]:
    """Return the tokens of a source term with a capital first letter."""
    return (term[0][:1].upper() + term[0][1:], *term[1:])


def _upper(term: Sequence[str]) -> tuple[str, ...]:
    return tuple(token.upper() for token in term)


def _spellings(target: str, *, upper: bool) -> Spellings:
    """Return the spellings of a target term; `upper` if the source text is in capitals."""
    first = target.split(maxsplit=1)[0]
    capital = target[0].upper() + target[1:] if first == first.lower() else target
    return tuple(dict.fromkeys((target, capital, *([target.upper()] if upper else []))))


def _read(path: Path) -> Iterable[tuple[str, str, str]]:
    for number, line in enumerate(Lines(path), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        place, columns = f"{path}, line {number}", [column.strip() for column in line.split("\t")]
        if len(columns) > 2:
            raise DataError(f"{place}: {len(columns)} columns; a line is a source term, a tab and a target term")
        for column, side in zip(columns, ("source", "target"), strict=False):
            if not tokens(column):
                raise DataError(f"{place}: the {side} term is empty; write a term, or remove the line")
        yield columns[0], columns[-1], place
