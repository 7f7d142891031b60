"""The output distribution at each step of a given translation: the likeliest pieces and the piece that follows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtkit.decoding.alignment import forced_pair
from mtkit.decoding.engines.model_engine import decoding_with, forced_output
from mtkit.decoding.lines.batches import padded, tasks_of
from mtkit.decoding.lines.source import Directions
from mtkit.model.network import Network
from mtkit.text.tokenizer import Tokenizers


@dataclass(frozen=True)
class Step:
    """The distribution over target pieces at one step, given the source and the pieces before."""

    piece: str
    """The piece of the given translation."""
    probability: float
    """Its probability."""
    rank: int
    """1 if no piece is likelier."""
    entropy: float
    """Entropy of the distribution over all pieces, in nats."""
    top: tuple[tuple[str, float], ...]
    """The likeliest pieces with their probabilities, falling."""


def output_steps(
    network: Network,
    tokenizers: Tokenizers,
    source: str,
    target: str | Sequence[int],
    *,
    top: int = 5,
    directions: Directions | None = None,
) -> list[Step]:
    """Return a step for each piece of a target (a text, or pieces with EOS); `directions` holds the line's direction.

    Raises: DataError for a blank source and for a text that is too long.
    """
    segment, pieces = forced_pair(network, tokenizers, source, target, directions)
    with decoding_with(network, None) as device:
        lines = padded([segment.pieces], device), padded([pieces], device)
        hidden = forced_output(network, *lines, tasks_of([segment.task], device)).hidden[0]
        probabilities = network.logits(hidden).double().softmax(-1).cpu()  # (T, V)
    best, ids = probabilities.topk(min(top, probabilities.shape[1]))
    entropies, name = torch.special.entr(probabilities).sum(-1).tolist(), tokenizers.target.name
    return [
        Step(
            name(piece),
            float(row[piece]),
            1 + int((row > row[piece]).sum()),
            entropy,
            tuple((name(index), value) for index, value in zip(likeliest.tolist(), values.tolist(), strict=True)),
        )
        for piece, row, entropy, likeliest, values in zip(pieces, probabilities, entropies, ids, best, strict=True)
    ]
