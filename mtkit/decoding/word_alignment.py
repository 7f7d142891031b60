"""The attention heads that align words, chosen by how well they follow the lexicon.

Attention to the source often lies on what a piece translates, in some layers and heads, either when the piece is
predicted or a step later, when it is read (Chen et al., "Accurate Word Alignment Induction from Neural Machine
Translation", EMNLP 2020, arXiv 2004.14837). Which heads do so shows on validation pairs: there the largest weight of a
target piece should lie on the source piece that translates it by IBM Model 1 (`mtkit.decoding.lexicon`).

Links between the words of lines and of their translations, in Pharaoh form: 0-0 1-2, source word first, from 0.

Each word of a translation is linked to the word of its line with the most attention: the weights of the word's pieces
are summed, by the bytes that each piece has in a word. Words that one piece spells together are alike, and all linked.
A line that was translated in parts, or together with others of its document, is linked within its part, or itself.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mtkit.decoding.alignment import Layers, over_segments
from mtkit.decoding.held_out import HeldOut, held_out
from mtkit.decoding.lexicon import Probabilities, learn_probabilities, training_text
from mtkit.decoding.lines.source import Directions, Documents, Segment, Source, TrainedOn, join_lines
from mtkit.decoding.translate import Translation
from mtkit.errors import MtkitError, RunError
from mtkit.model.network import Network
from mtkit.runs import Run
from mtkit.storage.files import digest, inside, write_json
from mtkit.storage.records import read_stored
from mtkit.terminal import ProgressBar, silent
from mtkit.text.tokenizer import BREAK, EOS, Tokenizers
from mtkit.text.words import begins, shares

FILE = "heads.json"
"""Its name in a run's folder."""

PAIRS = 200
"""Validation pairs that heads are chosen by, at most."""

LONGEST = 500
"""Pieces of a side of such a pair, at most."""

MOST = 8
"""Heads whose mean is tried, at most."""


@dataclass(frozen=True)
class Heads:
    """Heads of the attention to the source whose mean weights align pieces."""

    members: tuple[tuple[int, int], ...] = ()
    """Layer and head, both from 0; none at all stands for all heads of the last layer that has weights."""
    shifted: bool = False
    """Whether a piece's weights are those of the step that reads it, not of the one that predicts it."""
    agreement: float | None = None
    """The share of validation pieces on whose translation the largest weight lies; None where that is not known."""
    weights: str = ""
    """The hash of the model's weights that they were chosen for."""

    def rows(self, layers: Layers) -> Tensor:
        """(T, S): the mean weights of these heads in the cross layers (H, T, S), a row for each piece of the target."""
        if self.members:
            heads = [weights[head] for layer, head in self.members if (weights := layers[layer]) is not None]
            return self.of_steps(torch.stack(heads).float().mean(0))
        return self.of_steps([each for each in layers if each is not None][-1].float().mean(0))

    def of_steps(self, weights: Tensor) -> Tensor:
        """(..., T, S) of the steps that predict each piece: to the rows of the steps that align it."""
        return torch.cat([weights[..., 1:, :], weights[..., -1:, :]], -2) if self.shifted else weights

    def __str__(self) -> str:
        """Numbered from 1, as people count."""
        if not self.members:
            return "the mean of the last layer's heads"
        layers = dict.fromkeys(layer for layer, _ in self.members)
        return ", ".join(
            f"layer {layer + 1} head {' + '.join(str(head + 1) for at, head in self.members if at == layer)}"
            for layer in layers
        )


def heads_of(run: Run, checkpoint: str) -> Heads | None:
    """The heads chosen for these weights of the run, if they were. Raises: RunError where the file is damaged."""
    path = run.folder / FILE
    if not path.exists():
        return None
    found = read_stored(path, Heads, "delete it, and heads will be chosen again", error=RunError)
    return found if found.weights == digest(run.weights(checkpoint)) else None


def heads_for(
    run: Run,
    network: Network,
    checkpoint: str,
    folder: Path,
    *,
    say: Callable[[str], object] = lambda message: None,
    progress: ProgressBar = silent,
) -> Heads:
    """The heads that were chosen for a checkpoint of the run; at first use they are, by prepared data in `folder`.

    Without the data that the run was trained on, the mean of the last layer's heads. `say` gets messages on both.

    Raises: RunError for a damaged file of heads.
    """
    kept = heads_of(run, checkpoint)
    if kept is not None:
        return kept
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
    """The heads whose mean follows the lexicon best: the best head, the best two, and so on to `MOST` are compared.

    The mean of the last layer's heads where no validation piece has a translation by the lexicon.
    """
    pairs = _pairs(network, tokenizers, side, probabilities)

    def of_each(index: int, layers: Layers) -> dict[tuple[bool, int, int], int]:
        return {
            (shifted, layer, head): hits
            for layer, weights in enumerate(layers)
            if weights is not None
            for shifted in (False, True)
            for head, hits in enumerate(pairs[index].hits(Heads(shifted=shifted).of_steps(weights)))
        }

    segments, targets = [each.segment for each in pairs], [each.target for each in pairs]
    hits = sum(map(Counter, over_segments(network, segments, targets, of_each)), Counter[tuple[bool, int, int]]())
    if not hits:
        return Heads()
    ranked = sorted(hits, key=lambda key: (-hits[key], key))
    shifted = ranked[0][0]
    order = [(layer, head) for other, layer, head in ranked if other == shifted][:MOST]
    tried = [Heads(tuple(sorted(order[:count])), shifted) for count in range(1, len(order) + 1)]

    def of_means(index: int, layers: Layers) -> list[int]:
        return [pairs[index].hits(heads.rows(layers)[None])[0] for heads in tried]

    means = np.array(over_segments(network, segments, targets, of_means)).sum(0)
    best = int(means.argmax())  # the fewest heads of those that are alike
    return replace(tried[best], agreement=float(means[best]) / sum(each.count for each in pairs))


@dataclass(frozen=True)
class _Pair:
    """A validation pair, and where its target pieces lie in the source by the lexicon."""

    segment: Segment
    target: list[int]
    """With EOS."""
    begin: int
    """Pieces before those of the text: the tag of the direction."""
    likeliest: Tensor
    """(pieces of the target, pieces of the source) bool: whether it is the likeliest source of the target piece, which
    may come several times; nowhere where the end mark is likelier, which stands for no piece."""

    @property
    def count(self) -> int:
        """The pieces of the target that have a source."""
        return int(self.likeliest.any(1).sum())

    def hits(self, rows: Tensor) -> list[int]:
        """For each head of rows (H, T, S), the target pieces with the largest weight on their likeliest source."""
        texts = rows[:, : len(self.likeliest), self.begin : self.begin + self.likeliest.shape[1]]
        largest = texts.argmax(2)
        return self.likeliest.expand(len(rows), -1, -1).gather(2, largest[..., None]).sum((1, 2)).tolist()


def _pairs(network: Network, tokenizers: Tokenizers, side: HeldOut, probabilities: Probabilities) -> list[_Pair]:
    """The pairs of a side that heads are chosen by: those that the model takes whole, and that are not too long."""
    front, pairs = Source(tokenizers.source, network.longest_source, side.directions), []
    for line, (source, target) in enumerate(
        zip(front.encode(side.sources), tokenizers.target.encode_lines(side.references), strict=True)
    ):
        longest = (min(LONGEST, front.longest or LONGEST), min(LONGEST, (network.longest_target or LONGEST) - 1))
        if 0 < len(source) <= longest[0] and 0 < len(target) <= longest[1]:
            likely = torch.from_numpy(probabilities.of([*source, EOS], target))
            best = likely.max(1, keepdim=True).values
            likeliest = (likely[:, :-1] == best) & (best > 0) & (likely[:, -1:] < best)
            pairs.append(_Pair(front.segment(line, source), [*target, EOS], len(front.tag(line)), likeliest))
    return pairs


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
