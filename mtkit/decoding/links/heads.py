"""Words of a text by number, and which pieces spell them.

Words are what white space parts, as Python's str.split does. In scripts that put no space between words (Chinese,
Japanese, Thai, Lao, Khmer, Burmese) every character is a word of its own, together with the marks that combine with it
and the characters without a shape around it, such as U+200B.

The attention heads that align words, chosen by how well they follow the lexicon.

Attention to the source often lies on what a piece translates, in some layers and heads, either when the piece is
predicted or a step later, when it is read (Chen et al., "Accurate Word Alignment Induction from Neural Machine
Translation", EMNLP 2020, arXiv 2004.14837). Which heads do so shows on validation pairs: there the largest weight of a
target piece should lie on the source piece that translates it by IBM Model 1 (`mtkit.decoding.lexicon`).
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unicodedata import category

import numpy as np
import torch
from torch import Tensor

from mtkit.decoding.alignment import Layers, over_segments
from mtkit.decoding.held_out import HeldOut, held_out
from mtkit.decoding.lexicon import Probabilities, learn_probabilities, training_text
from mtkit.decoding.lines.source import Segment, Source
from mtkit.errors import MtkitError, RunError
from mtkit.model.network import Network
from mtkit.runs import Run
from mtkit.storage.files import digest, inside, write_json
from mtkit.storage.records import read_stored
from mtkit.terminal import ProgressBar, silent
from mtkit.text.tokenizer import EOS, UNK, Tokenizer, Tokenizers

_UNSPACED = (
    (0x2E80, 0x2FDF),  # radicals
    (0x3001, 0x30FF),  # punctuation, kana
    (0x3100, 0x312F),  # Bopomofo
    (0x31A0, 0x31FF),
    (0x3400, 0x4DBF),  # ideographs
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
    (0xFF01, 0xFF0F),  # full-width punctuation, without letters and digits
    (0xFF1A, 0xFF20),
    (0xFF3B, 0xFF40),
    (0xFF5B, 0xFF9F),  # and half-width kana
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
)
"""First and last character of the ranges in which each character is a word."""

_ALONE = "".join(f"{chr(first)}-{chr(last)}" for first, last in _UNSPACED)
_MARKS = "".join(
    chr(code)
    for first, last in (*_UNSPACED, (0x0300, 0x036F), (0xFE00, 0xFE0F), (0xE0100, 0xE01EF))
    if last - first < 0x400  # not the ideographs, which have none
    for code in range(first, last + 1)
    if category(chr(code)).startswith("M")
)
_VOICED = "\uff9e\uff9f"  # the half-width marks, which are letters by their category
_SHAPELESS = "\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb"
"""Soft hyphens, joiners, marks of direction and their like, of category Cf."""
_WORD = re.compile(rf"[{_SHAPELESS}]*+[{_ALONE}][{_MARKS}{_VOICED}{_SHAPELESS}]*+|[^\s{_ALONE}]++")
_STRETCH = re.compile(r"\s++|\S++")

_SPACES = str.maketrans("", "", " \u2581")
"""Takes out what sentencepiece writes as a space."""


def words(text: str) -> list[str]:
    """The words of a text, in order; their numbers, from 0, are those of the links."""
    return _WORD.findall(text)


def begins(text: str) -> list[int]:
    """Where each word of a text begins, in characters."""
    return [match.start() for match in _WORD.finditer(text)]


def shares(tokenizer: Tokenizer, pieces: Sequence[int], text: str, *, normalised: bool) -> np.ndarray:
    """Which share of each piece spells which word of the text, counted in bytes: (pieces, words) float64.

    Tags, breaks, the end mark and spaces spell nothing. `normalised`: the pieces come from the text, as the tokenizer
    normalises it; otherwise the text comes from the pieces, and unknown ones spell nothing.
    """
    spans = _spans(text, tokenizer.normal if normalised else str)
    sizes = tokenizer.bytes[np.asarray(pieces, dtype=np.int64)].astype(np.float64)
    if normalised and UNK in pieces:
        sizes[np.asarray(pieces) == UNK] = _unknown(tokenizer, pieces, text)
    after = np.cumsum(sizes)
    before = after - sizes
    inside = np.minimum(after[:, None], spans[:, 1]) - np.maximum(before[:, None], spans[:, 0])
    return inside.clip(min=0) / np.maximum(sizes, 1e-9)[:, None]


def _spans(text: str, normal: Callable[[str], str]) -> np.ndarray:
    """First byte and end of each word (words, 2), of the text as it is normalised, without spaces.

    Within a stretch of several words that changes its length, as one of half-width kana does, words keep their share.
    """
    spans, position = [], 0
    for match in _STRETCH.finditer(text):
        stretch = match[0]
        size = _size(normal(stretch))
        sizes = [_size(word) for word in words(stretch)]
        scale, within = size / max(sum(sizes), 1), 0
        for each in sizes:
            spans.append((position + within * scale, position + (within + each) * scale))
            within += each
        position += size
    return np.array(spans, dtype=np.float64).reshape(-1, 2)


def _unknown(tokenizer: Tokenizer, pieces: Sequence[int], text: str) -> list[int]:
    """The bytes of each unknown piece: those up to where the known pieces behind it, to the next unknown, stand."""
    runs = [""]
    for piece in pieces:
        if piece == UNK:
            runs.append("")
        elif tokenizer.bytes[piece]:
            runs[-1] += tokenizer.piece(piece).translate(_SPACES)
    spelt, position, sizes = tokenizer.normal(text).translate(_SPACES), len(runs[0]), []
    for run in runs[1:]:
        at = spelt.find(run, position + 1) if run else len(spelt)
        sizes.append(len(spelt[position:at].encode()) if at >= 0 else 0)
        position = (at if at >= 0 else position) + len(run)
    return sizes


def _size(text: str) -> int:
    """Its bytes without what sentencepiece writes as a space."""
    return len(text.translate(_SPACES).encode())


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
