"""Heads of the attention to the source that align words: chosen on validation pairs, and kept with the run.

Attention to the source is often on the word that a piece translates, in some layers and heads, either when the piece
is predicted or a step later, when it is read (Chen et al., "Accurate Word Alignment Induction from Neural Machine
Translation", EMNLP 2020, arXiv 2004.14837). Heads are therefore chosen on validation pairs: the largest weight of a
target piece should lie on the source piece that translates it by IBM Model 1 (`mtkit.decoding.ibm_model_1`).
"""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mtkit.decoding.forced import Layers, over_segments
from mtkit.decoding.held_out import HeldOut, held_out
from mtkit.decoding.ibm_model_1 import Probabilities, learn_probabilities
from mtkit.decoding.lexicon import training_text
from mtkit.decoding.lines.segments import Segment, Source
from mtkit.decoding.lines.source import SourceLines
from mtkit.errors import MtkitError, RunError
from mtkit.model.network import Network
from mtkit.runs import Run
from mtkit.storage.files import inside, write_json
from mtkit.storage.records import read_stored
from mtkit.terminal import ProgressBar, Say, quiet, silent
from mtkit.text.tokenizer import EOS, Tokenizers

FILE = "heads.json"
"""Name of the heads' file in a run's folder."""

PAIRS = 200
"""Maximum validation pairs for the choice of heads."""

LONGEST = 500
"""Maximum pieces per side of such a pair."""

MOST = 8
"""Maximum number of heads whose mean is tried."""


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
        """Return the rows that align each piece, from weights (..., T, S) of the steps that predict each piece."""
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


def heads_of(run: Run, weights: str) -> Heads | None:
    """Return the stored heads for the weights with this hash, if any. Raises: RunError if the file is damaged."""
    path = run.folder / FILE
    if not path.exists():
        return None
    heads = read_stored(path, Heads, "delete it, and heads will be chosen again", error=RunError)
    return heads if heads.weights == weights else None


def heads_for(
    run: Run,
    network: Network,
    weights: str,
    folder: Path,
    *,
    say: Say = quiet,
    progress: ProgressBar = silent,
) -> Heads:
    """Return the stored heads for the network; at first use they are chosen by prepared data in `folder`.

    `weights` is the hash of the network's weights when it was loaded: a training may have replaced the files since.

    Without the data that the run was trained on, the mean of the last layer's heads. `say` gets messages on both.

    Raises: RunError for a damaged file of heads.
    """
    stored = heads_of(run, weights)
    if stored is not None:
        return stored
    try:
        prepared = training_text(run, folder)
        probabilities, side = learn_probabilities(prepared, progress), held_out(prepared, "valid").sample(PAIRS)
    except MtkitError as error:
        say(f"words are aligned by {Heads()}: {error}")
        return Heads()
    chosen = replace(best_heads(network, run.tokenizers, side, probabilities), weights=weights)
    follows = "" if chosen.agreement is None else f"; they follow the lexicon in {chosen.agreement:.0%} of the pieces"
    try:
        if not run.folder.is_dir():  # a new folder with this file alone would be in the way of a new training
            raise MtkitError(f"{run.folder} was removed")
        write_json(inside(run.folder, FILE), asdict(chosen))
        where = f"stored in {run.folder / FILE}"
    except MtkitError as error:
        where = f"not stored: {error}"
    say(f"words are aligned by {chosen}: chosen on the validation side{follows}; {where}")
    return chosen


def best_heads(network: Network, tokenizers: Tokenizers, side: HeldOut, probabilities: Probabilities) -> Heads:
    """Return the heads whose mean follows the lexicon best, among the best head, the best two, and so on to `MOST`.

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
    """Return the pairs of a side that the model can translate unsplit, and that are not longer than `LONGEST`."""
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
