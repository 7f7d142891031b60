"""Word alignment: links between the words of lines and of their translations, by the attention to the source.

Links are in Pharaoh form: 0-0 1-2, source word first, from 0. Each word of a translation is linked to the word of its
line with the most attention: the weights of the word's pieces are summed, by each piece's bytes in the word. Words that
one piece spells together have equal weights, and are all linked. A line that was translated in parts is linked within
each part; lines that were translated together are linked line by line.

Attention to the source is often on the word that a piece translates, in some layers and heads, either when the piece
is predicted or a step later, when it is read (Chen et al., "Accurate Word Alignment Induction from Neural Machine
Translation", EMNLP 2020, arXiv 2004.14837). Heads are therefore chosen on validation pairs: the largest weight of a
target piece should lie on the source piece that translates it by IBM Model 1 (`mtkit.decoding.lexicon`).
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mtkit.decoding.forced import Layers, check_pairs, over_segments
from mtkit.decoding.held_out import HeldOut, held_out
from mtkit.decoding.lexicon import Probabilities, learn_probabilities, training_text
from mtkit.decoding.lines.segments import Segment, Source, Window
from mtkit.decoding.lines.source import SourceLines
from mtkit.decoding.translate import Translation
from mtkit.errors import MtkitError, RunError
from mtkit.model.network import Network
from mtkit.runs import Run
from mtkit.storage.files import digest, inside, write_json
from mtkit.storage.records import read_stored
from mtkit.terminal import ProgressBar, silent
from mtkit.text.tokenizer import BREAK, EOS, Tokenizers
from mtkit.text.words import word_shares, word_starts

FILE = "heads.json"
"""Name of the heads' file in a run's folder."""

PAIRS = 200
"""Maximum validation pairs for the choice of heads."""

LONGEST = 500
"""Maximum pieces per side of such a pair."""

MOST = 8
"""Maximum number of heads whose mean is tried."""

ALIKE = 1e-6
"""Relative difference to the largest weight up to which a weight counts as equal."""

Links = list[tuple[int, int]]
"""Numbers of a source word and of a target word, from 0, in order."""


def pharaoh(links: Links) -> str:
    """The links as a line of text: 0-0 1-2."""
    return " ".join(f"{source}-{target}" for source, target in links)


@dataclass(frozen=True)
class Heads:
    """Heads of the attention to the source whose mean weights align pieces."""

    members: tuple[tuple[int, int], ...] = ()
    """Layer and head, both from 0; empty: all heads of the last layer that has weights."""
    shifted: bool = False
    """Whether a piece is aligned by the weights of the step that reads it, not of the step that predicts it."""
    agreement: float | None = None
    """The share of validation pieces whose largest weight is on their translation; None if unknown."""
    weights: str = ""
    """The hash of the model's weights for which they were chosen."""

    def rows(self, layers: Layers) -> Tensor:
        """(T, S): the mean weights of these heads in the cross layers (H, T, S), a row for each piece of the target."""
        if self.members:
            heads = [weights[head] for layer, head in self.members if (weights := layers[layer]) is not None]
            return self.of_steps(torch.stack(heads).float().mean(0))
        return self.of_steps([layer for layer in layers if layer is not None][-1].float().mean(0))

    def of_steps(self, weights: Tensor) -> Tensor:
        """The rows that align each piece, from weights (..., T, S) of the steps that predict each piece."""
        return torch.cat([weights[..., 1:, :], weights[..., -1:, :]], -2) if self.shifted else weights

    def __str__(self) -> str:
        """Layers and heads, numbered from 1."""
        if not self.members:
            return "the mean of the last layer's heads"
        layers = dict.fromkeys(layer for layer, _ in self.members)
        return ", ".join(
            f"layer {layer + 1} head {' + '.join(str(head + 1) for other, head in self.members if other == layer)}"
            for layer in layers
        )


def heads_of(run: Run, checkpoint: str) -> Heads | None:
    """The stored heads for these weights of the run, if any. Raises: RunError if the file is damaged."""
    path = run.folder / FILE
    if not path.exists():
        return None
    heads = read_stored(path, Heads, "delete it, and heads will be chosen again", error=RunError)
    return heads if heads.weights == digest(run.weights(checkpoint)) else None


def heads_for(
    run: Run,
    network: Network,
    checkpoint: str,
    folder: Path,
    *,
    say: Callable[[str], object] = lambda message: None,
    progress: ProgressBar = silent,
) -> Heads:
    """The stored heads for a checkpoint of the run; at first use they are chosen by prepared data in `folder`.

    Without the data that the run was trained on, the mean of the last layer's heads. `say` gets messages on both.

    Raises: RunError for a damaged file of heads.
    """
    stored = heads_of(run, checkpoint)
    if stored is not None:
        return stored
    try:
        prepared = training_text(run, folder)
        probabilities, side = learn_probabilities(prepared, progress), held_out(prepared, "valid").sample(PAIRS)
    except MtkitError as error:
        say(f"words are aligned by {Heads()}: {error}")
        return Heads()
    chosen = replace(best_heads(network, run.tokenizers, side, probabilities), weights=digest(run.weights(checkpoint)))
    follows = "" if chosen.agreement is None else f", which follows the lexicon in {chosen.agreement:.0%} of its pieces"
    try:
        write_json(inside(run.folder, FILE), asdict(chosen))
        where = f"kept in {run.folder / FILE}"
    except MtkitError as error:
        where = f"not kept: {error}"
    say(f"words are aligned by {chosen}, chosen on the validation side{follows}; {where}")
    return chosen


def best_heads(network: Network, tokenizers: Tokenizers, side: HeldOut, probabilities: Probabilities) -> Heads:
    """The heads whose mean follows the lexicon best, among the best head, the best two, and so on to `MOST`.

    The mean of the last layer's heads if no validation piece has a translation by the lexicon.
    """
    pairs = _pairs(network, tokenizers, side, probabilities)

    def hits_of_heads(index: int, layers: Layers) -> dict[tuple[bool, int, int], int]:
        return {
            (shifted, layer, head): hits
            for layer, weights in enumerate(layers)
            if weights is not None
            for shifted in (False, True)
            for head, hits in enumerate(pairs[index].hits(Heads(shifted=shifted).of_steps(weights)))
        }

    segments, targets = [pair.segment for pair in pairs], [pair.target for pair in pairs]
    hits = sum(map(Counter, over_segments(network, segments, targets, hits_of_heads)), Counter[tuple[bool, int, int]]())
    if not hits:
        return Heads()
    ranked = sorted(hits, key=lambda key: (-hits[key], key))
    shifted = ranked[0][0]
    order = [(layer, head) for other, layer, head in ranked if other == shifted][:MOST]
    tried = [Heads(tuple(sorted(order[:count])), shifted) for count in range(1, len(order) + 1)]

    def hits_of_means(index: int, layers: Layers) -> list[int]:
        return [pairs[index].hits(heads.rows(layers)[None])[0] for heads in tried]

    means = np.array(over_segments(network, segments, targets, hits_of_means)).sum(0)
    best = int(means.argmax())  # of equal ones the fewest heads
    return replace(tried[best], agreement=float(means[best]) / sum(pair.count for pair in pairs))


@dataclass(frozen=True)
class _Pair:
    """A validation pair, and the alignment of its target pieces by the lexicon."""

    segment: Segment
    target: list[int]
    """With EOS."""
    begin: int
    """Number of pieces before the text: the tag of the direction."""
    likeliest: Tensor
    """(target pieces, source pieces) bool: the likeliest source of each target piece, every time it occurs; none if the
    end mark is likelier, which translates no piece."""

    @property
    def count(self) -> int:
        """The target pieces that have a source."""
        return int(self.likeliest.any(1).sum())

    def hits(self, rows: Tensor) -> list[int]:
        """For each head of rows (H, T, S), the target pieces with the largest weight on their likeliest source."""
        texts = rows[:, : len(self.likeliest), self.begin : self.begin + self.likeliest.shape[1]]
        largest = texts.argmax(2)
        return self.likeliest.expand(len(rows), -1, -1).gather(2, largest[..., None]).sum((1, 2)).tolist()


def _pairs(network: Network, tokenizers: Tokenizers, side: HeldOut, probabilities: Probabilities) -> list[_Pair]:
    """The pairs of a side that the model can translate unsplit, and that are not longer than `LONGEST`."""
    front = Source(SourceLines(side.sources, side.directions), tokenizers.source, network.longest_source)
    pairs = []
    longest = min(LONGEST, front.longest or LONGEST), min(LONGEST, (network.longest_target or LONGEST) - 1)
    encoded = front.encoded, tokenizers.target.encode_lines(side.references)
    for line, (source, target) in enumerate(zip(*encoded, strict=True)):
        if 0 < len(source) <= longest[0] and 0 < len(target) <= longest[1]:
            likely = torch.from_numpy(probabilities.of([*source, EOS], target))
            best = likely.max(1, keepdim=True).values
            likeliest = (likely[:, :-1] == best) & (best > 0) & (likely[:, -1:] < best)
            pairs.append(_Pair(front.segment(line, source), [*target, EOS], len(front.tag(line)), likeliest))
    return pairs


def link_lines(
    network: Network,
    tokenizers: Tokenizers,
    heads: Heads,
    lines: SourceLines | Sequence[str],
    translations: Sequence[Translation],
) -> list[Links]:
    """The links of each line with its translation; a blank line has none.

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
    """The links of each line with a given translation; none if one of the two is blank.

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
    """The segments as which the lines were translated; segments without a translation are left out."""
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
    """The pieces of a line that later lines read again; none if it was translated by itself."""
    return () if translations[number].fell_back else translations[number].pieces


def _joined(source: Source, window: Window, translations: Sequence[Translation]) -> _Linked:
    """The lines of a window, which were translated as one segment."""
    target: list[int] = []
    blocks, begin = [], 0
    known = window.known(partial(_pieces_of, translations))
    numbers = [*known, *window.lines]
    for number in numbers:
        begin += len(source.tag(number))
        pieces = _without_eos(translations[number])
        source_side = _side(begin, source.encoded[number], source.lines[number])
        block = _Block(number, source_side, _side(len(target), pieces, translations[number].text))
        blocks += [] if number in window.context else [block]
        begin += len(source.encoded[number]) + 1  # the break
        target += [*pieces, BREAK]
    return _Linked(source.join_lines(numbers), [*target[:-1], EOS], blocks)


def _parts(source: Source, number: int, whole: Translation) -> Iterator[_Linked]:
    """The parts of a line, or the line itself; each is a segment."""
    source_at = target_at = 0
    line, parts = source.lines[number], source.parts(number)
    translations = whole.of_parts or (whole,) * len(parts)  # one or none
    for part, ((text, pieces), translation) in enumerate(zip(parts, translations, strict=True)):
        segment = source.segment(number, pieces, part)
        source_at, target_at = line.index(text, source_at), whole.text.index(translation.text, target_at)
        tag = len(source.tag(number))
        source_side = _side(tag, segment.pieces[tag:-1], text, line, source_at)
        target_side = _side(0, _without_eos(translation), translation.text, whole.text, target_at)
        source_at, target_at = source_at + len(text), target_at + len(translation.text)
        if source_side.numbers and target_side.numbers:
            yield _Linked(segment, list(translation.pieces), [_Block(number, source_side, target_side)])


def _side(begin: int, pieces: Sequence[int], text: str, line: str | None = None, at: int = 0) -> _Side:
    """The side of a line's text, or of a text that starts at the character `at` of a line."""
    starts = word_starts(text if line is None else line)
    return _Side(begin, pieces, text, [bisect_right(starts, at + start) - 1 for start in word_starts(text)])


def _without_eos(translation: Translation) -> list[int]:
    return [piece for piece in translation.pieces if piece != EOS]


def _links(block: _Block, rows: np.ndarray, tokenizers: Tokenizers) -> Links:
    """The links of a line, or a part of it, by the weights of a segment (T, S)."""
    source, target = block.source, block.target
    weights = rows[target.begin : target.begin + len(target.pieces), source.begin : source.begin + len(source.pieces)]
    source_shares = word_shares(tokenizers.source, source.pieces, source.text, normalised=True)
    target_shares = word_shares(tokenizers.target, target.pieces, target.text, normalised=False)
    sizes = tokenizers.target.bytes[np.asarray(target.pieces, dtype=np.int64)]
    of_words = (target_shares * sizes[:, None]).T @ weights @ source_shares
    largest = of_words.max(1, keepdims=True, initial=0.0)
    chosen = (of_words >= largest * (1 - ALIKE)) & (largest > 0)
    return [(source.numbers[word], target.numbers[row]) for row, word in np.argwhere(chosen)]
