"""Word alignment: links between the words of lines and of their translations, by the attention to the source.

Links are in Pharaoh form: 0-0 1-2, source word first, from 0. Each word of a translation is linked to the word of its
line with the most attention: the weights of the word's pieces are summed, by each piece's bytes in the word. Words that
one piece spells together have equal weights, and are all linked. A line that was translated in parts is linked within
each part; lines that were translated together are linked line by line.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mtkit.decoding.alignment_heads import Heads
from mtkit.decoding.forced import Layers, check_pairs, over_segments
from mtkit.decoding.lines.segments import Segment, Source, Window
from mtkit.decoding.lines.source import SourceLines
from mtkit.decoding.translation import Translation
from mtkit.model.network import Network
from mtkit.text.tokenizer import BREAK, EOS, Tokenizers
from mtkit.text.words import word_shares, word_starts

ALIKE = 1e-6
"""Relative difference to the largest weight up to which a weight counts as equal."""

Links = list[tuple[int, int]]
"""Numbers of a source word and of a target word, from 0, in order."""


def pharaoh(links: Links) -> str:
    """Return the links as a line of text: 0-0 1-2."""
    return " ".join(f"{source}-{target}" for source, target in links)


def link_lines(
    network: Network,
    tokenizers: Tokenizers,
    heads: Heads,
    lines: SourceLines | Sequence[str],
    translations: Sequence[Translation],
) -> list[Links]:
    """Return the links of each line with its translation; a blank line has none.

    `translations` are the result of `mtkit.decoding.translate.translate_lines` for the lines, by this network or by one
    with the same limits of length.
    """
    source = Source(lines, tokenizers.source, network.longest_source)
    work = [*_segments(source, translations)]
    links: list[Links] = [[] for _ in source.lines]

    def linked(index: int, layers: Layers) -> list[tuple[int, Links]]:
        rows = heads.rows(layers).numpy()
        return [(block.line, _links(block, rows, tokenizers)) for block in work[index].blocks]

    segments, targets = [item.segment for item in work], [item.target for item in work]
    for blocks in over_segments(network, segments, targets, linked):
        for line, its_links in blocks:
            links[line] += its_links
    return [sorted(set(its_links)) for its_links in links]


def link_targets(
    network: Network, tokenizers: Tokenizers, heads: Heads, lines: SourceLines | Sequence[str], targets: Sequence[str]
) -> list[Links]:
    """Return the links of each line with a given translation; none if one of the two is blank.

    Raises: DataError for unequal numbers of lines, and for a line that is too long for the model.
    """
    lines = SourceLines.of(lines)
    unsplit = SourceLines(lines.lines, lines.directions, numbers=lines.numbers)
    _, encoded = check_pairs(network, tokenizers, unsplit, targets)
    texts = zip(targets, encoded, strict=True)
    return link_lines(
        network, tokenizers, heads, unsplit, [Translation(text, 0.0, 0.0, (*p, EOS)) for text, p in texts]
    )


@dataclass(frozen=True)
class _Side:
    """One side of a line within a segment."""

    begin: int
    """The index of its first piece in the segment."""
    pieces: Sequence[int]
    text: str
    numbers: list[int]
    """Each word's number in the line."""


@dataclass(frozen=True)
class _Block:
    """A line, or a part of it, with its translation, within a segment."""

    line: int
    source: _Side
    target: _Side


@dataclass(frozen=True)
class _Linked:
    """A segment with the pieces of its translation, EOS at the end."""

    segment: Segment
    target: list[int]
    blocks: list[_Block]


def _segments(source: Source, translations: Sequence[Translation]) -> Iterator[_Linked]:
    """Yield the segments as which the lines were translated; segments without a translation are left out."""
    together = {number for number, line in enumerate(translations) if line.together > 1 and not line.fell_back}
    windows = source.windows()
    while windows:
        window = windows.pop()
        size = len(window.lines) + len(window.known(partial(_pieces_of, translations)))
        if all(number in together and translations[number].together == size for number in window.lines):
            yield _joined(source, window, translations)
        else:
            windows += window.halves()
    for number, translation in enumerate(translations):
        if number not in together and source.encoded[number]:
            yield from _parts(source, number, translation)


def _pieces_of(translations: Sequence[Translation], number: int) -> tuple[int, ...]:
    """Return the pieces of a line that later lines read again; none if it was translated by itself."""
    return () if translations[number].fell_back else translations[number].pieces


def _joined(source: Source, window: Window, translations: Sequence[Translation]) -> _Linked:
    """Return the lines of a window, which were translated as one segment."""
    target: list[int] = []
    blocks, begin = [], 0
    known = window.known(partial(_pieces_of, translations))
    numbers = [*known, *window.lines]
    for number in numbers:
        begin += len(source.tag(number))
        pieces = _without_eos(translations[number])
        line, text = source.lines[number], translations[number].text
        source_side = _side(begin, source.encoded[number], line, word_starts(line))
        block = _Block(number, source_side, _side(len(target), pieces, text, word_starts(text)))
        blocks += [] if number in window.context else [block]
        begin += len(source.encoded[number]) + 1  # the break
        target += [*pieces, BREAK]
    return _Linked(source.join_lines(numbers), [*target[:-1], EOS], blocks)


def _parts(source: Source, number: int, whole: Translation) -> Iterator[_Linked]:
    """Yield the parts of a line, or the line itself; each is a segment."""
    source_at = target_at = 0
    line, parts = source.lines[number], source.parts(number)
    source_starts, target_starts = word_starts(line), word_starts(whole.text)
    translations = whole.of_parts or (whole,) * len(parts)  # one or none
    for part, ((text, pieces), translation) in enumerate(zip(parts, translations, strict=True)):
        segment = source.segment(number, pieces, part)
        source_at, target_at = line.index(text, source_at), whole.text.index(translation.text, target_at)
        tag = len(source.tag(number))
        source_side = _side(tag, segment.pieces[tag:-1], text, source_starts, source_at)
        target_side = _side(0, _without_eos(translation), translation.text, target_starts, target_at)
        source_at, target_at = source_at + len(text), target_at + len(translation.text)
        if source_side.numbers and target_side.numbers:
            yield _Linked(segment, list(translation.pieces), [_Block(number, source_side, target_side)])


def _side(begin: int, pieces: Sequence[int], text: str, starts: Sequence[int], at: int = 0) -> _Side:
    """Return the side of a line's text, or of a text from character `at` of a line with these word starts."""
    return _Side(begin, pieces, text, [bisect_right(starts, at + start) - 1 for start in word_starts(text)])


def _without_eos(translation: Translation) -> list[int]:
    return [piece for piece in translation.pieces if piece != EOS]


def _links(block: _Block, rows: np.ndarray, tokenizers: Tokenizers) -> Links:
    """Return the links of a line, or a part of it, by the weights of a segment (T, S)."""
    source, target = block.source, block.target
    weights = rows[target.begin : target.begin + len(target.pieces), source.begin : source.begin + len(source.pieces)]
    source_shares = word_shares(tokenizers.source, source.pieces, source.text, normalised=True)
    target_shares = word_shares(tokenizers.target, target.pieces, target.text, normalised=False)
    sizes = tokenizers.target.bytes[np.asarray(target.pieces, dtype=np.int64)]
    of_words = (target_shares * sizes[:, None]).T @ weights @ source_shares
    largest = of_words.max(1, keepdims=True, initial=0.0)
    chosen = (of_words >= largest * (1 - ALIKE)) & (largest > 0)
    return [(source.numbers[word], target.numbers[row]) for row, word in np.argwhere(chosen)]
