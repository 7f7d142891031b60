"""Links between the words of lines and of their translations, in Pharaoh form: 0-0 1-2, source word first, from 0.

Each word of a translation is linked to the word of its line with the most attention: the weights of the word's pieces
are summed, by the bytes that each piece has in a word. Words that one piece spells together are alike, and all linked.
A line that was translated in parts, or together with others of its document, is linked within its part, or itself.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mtkit.decoding.alignment import Layers, over_segments
from mtkit.decoding.lines.source import Directions, Documents, Segment, Source, TrainedOn, join_lines
from mtkit.decoding.links.heads import Heads, begins, shares
from mtkit.decoding.translate import Translation
from mtkit.model.network import Network
from mtkit.text.tokenizer import BREAK, EOS, Tokenizers

ALIKE = 1e-6
"""Share of the largest weight by which a weight may be less and still count as equal."""

Links = list[tuple[int, int]]
"""Pairs of the number of a source word and that of a target word, from 0, in order."""


def pharaoh(links: Links) -> str:
    """The links as a line of text: 0-0 1-2."""
    return " ".join(f"{source}-{target}" for source, target in links)


def link_lines(
    network: Network,
    tokenizers: Tokenizers,
    heads: Heads,
    lines: Sequence[str],
    translations: Sequence[Translation],
    *,
    directions: Directions | None = None,
    documents: Documents | None = None,
    trained_on: TrainedOn | None = None,
) -> list[Links]:
    """The links of each line with its translation; none of a blank one.

    `translations` are those that `mtkit.decoding.translate.translate_lines` gives for the lines with the same
    `directions`, `documents` and `trained_on`, by this network or, as far as the limits of length go, a like one.
    """
    source = Source(tokenizers.source, network.longest_source, directions, trained_on)
    work = [*_segments(source, lines, translations, documents)]
    found: list[Links] = [[] for _ in lines]

    def linked(index: int, layers: Layers) -> list[tuple[int, Links]]:
        rows = heads.rows(layers).numpy()
        return [(block.line, _links(block, rows, tokenizers)) for block in work[index].blocks]

    segments, targets = [each.segment for each in work], [each.target for each in work]
    for blocks in over_segments(network, segments, targets, linked):
        for line, links in blocks:
            found[line] += links
    return [sorted(set(links)) for links in found]


@dataclass(frozen=True)
class _Side:
    """What a segment holds of one side of a line."""

    begin: int
    """The place of its first piece in the segment."""
    pieces: Sequence[int]
    text: str
    numbers: list[int]
    """The number that each word of the text has in the line."""


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


def _segments(
    source: Source, lines: Sequence[str], translations: Sequence[Translation], documents: Documents | None
) -> Iterator[_Linked]:
    """The segments that the lines were translated by, without those that have no translation."""
    encoded = source.encode(lines)
    together = {number for number, each in enumerate(translations) if each.together > 1 and not each.fell_back}
    for group in [] if documents is None else documents.groups(source, source.whole(lines, encoded)):
        if together.issuperset(group):
            yield _joined(source, encoded, group, lines, translations)
    for number, whole in enumerate(translations):
        if number not in together and encoded[number]:
            yield from _parts(source, lines[number], encoded[number], number, whole)


def _joined(
    source: Source,
    encoded: Sequence[list[int]],
    group: Sequence[int],
    lines: Sequence[str],
    translations: Sequence[Translation],
) -> _Linked:
    """The lines of a group, which were translated as one segment."""
    target: list[int] = []
    blocks, at = [], 0
    for number in group:
        at += len(source.tag(number))
        pieces = _text(translations[number])
        blocks.append(
            _Block(
                number,
                _side(at, encoded[number], lines[number]),
                _side(len(target), pieces, translations[number].text),
            )
        )
        at += len(encoded[number]) + 1  # the break
        target += [*pieces, BREAK]
    return _Linked(join_lines(source, encoded, group), [*target[:-1], EOS], blocks)


def _parts(source: Source, line: str, encoded: list[int], number: int, whole: Translation) -> Iterator[_Linked]:
    """The parts of a line, or the line itself; each is a segment."""
    begin = after = 0
    parts = source.parts(line, encoded, number)
    translations = whole.of_parts or (whole,) * len(parts)  # one or none
    for part, ((text, pieces), found) in enumerate(zip(parts, translations, strict=True)):
        segment = source.segment(number, pieces, part)
        begin, after = line.index(text, begin), whole.text.index(found.text, after)
        tag = len(source.tag(number))
        own = _side(tag, segment.pieces[tag:-1], text, line, begin)
        other = _side(0, _text(found), found.text, whole.text, after)
        begin, after = begin + len(text), after + len(found.text)
        if own.numbers and other.numbers:
            yield _Linked(segment, list(found.pieces), [_Block(number, own, other)])


def _side(begin: int, pieces: Sequence[int], text: str, line: str | None = None, at: int = 0) -> _Side:
    """The side of a line's text, or of the text at the character `at` of a line."""
    starts = begins(text if line is None else line)
    return _Side(begin, pieces, text, [bisect_right(starts, at + each) - 1 for each in begins(text)])


def _text(translation: Translation) -> list[int]:
    return [piece for piece in translation.pieces if piece != EOS]


def _links(block: _Block, rows: np.ndarray, tokenizers: Tokenizers) -> Links:
    """The links of a line, or a part of it, by the weights of a segment (T, S)."""
    source, target = block.source, block.target
    inside = rows[target.begin : target.begin + len(target.pieces), source.begin : source.begin + len(source.pieces)]
    into = shares(tokenizers.source, source.pieces, source.text, normalised=True)
    out_of = shares(tokenizers.target, target.pieces, target.text, normalised=False)
    sizes = tokenizers.target.bytes[np.asarray(target.pieces, dtype=np.int64)]
    weights = (out_of * sizes[:, None]).T @ inside @ into
    largest = weights.max(1, keepdims=True, initial=0.0)
    chosen = (weights >= largest * (1 - ALIKE)) & (largest > 0)
    return [(source.numbers[word], target.numbers[row]) for row, word in np.argwhere(chosen)]
