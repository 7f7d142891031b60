"""The soft alignment of Bahdanau et al., 2015: which source pieces a model attends to for each piece it predicts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtkit.data.tokenizer import BOS, EOS, Tokenizers
from mtkit.decoding.batches import padded, tasks_of
from mtkit.decoding.engines.arithmetic import decoding_with
from mtkit.decoding.lines.segments import Directions, Source
from mtkit.errors import DataError, MtkitError
from mtkit.model.network import Model

END = "</s>"


@dataclass(frozen=True)
class Alignment:
    """A translation's pieces, and where the attention of the last layer lay when each was predicted."""

    source: list[str]
    """S pieces, after the tag of the direction where there is one; the end mark last."""
    target: list[str]
    """T pieces, the end mark last."""
    weights: Tensor
    """(T, S), the mean over heads; rows sum to 1."""


def align(
    model: Model, tokenizers: Tokenizers, source: str, target: str, *, directions: Directions | None = None
) -> Alignment:
    """The attention of the model from each piece of `target` to those of `source`, `target` given.

    `directions` holds the one of this line for a model trained on several.

    Raises: MtkitError where the model's attention to the source has no weights; DataError for a blank source and for
    a text that is too long.
    """
    if not model.has_weights:
        raise MtkitError(
            "this run's attention to the source has no weights to show; train with one that has, as "
            "--cross-attention full or --model rnn"
        )
    front = Source(tokenizers.source, model.longest_source, directions)
    words = tokenizers.source.encode(source)
    pieces = [*tokenizers.target.encode(target), EOS]
    if not source.strip():
        raise DataError("there is nothing to align: the source is blank")
    for side, length, longest in (("source", len(words), front.longest), ("target", len(pieces), model.longest_target)):
        if longest is not None and length > longest:
            raise DataError(f"the {side} has {length:,} pieces, and the model takes {longest:,}; shorten it")
    segment = front.segment(0, words)
    with decoding_with(model, None) as device:
        batch = padded([segment.pieces], device)
        state = model.start(model.encode(batch, task=tasks_of([segment.task], device)))
        rows = []
        for piece in [BOS, *pieces[:-1]]:
            _, state, weights = model.step(torch.tensor([[piece]], device=device), state, need_weights=True)
            assert weights is not None  # the model has weights
            rows.append(weights[0, 0].float().cpu())
    names = [tokenizers.source.piece(piece) for piece in segment.pieces[:-1]]
    spelt = [tokenizers.target.piece(piece) for piece in pieces[:-1]]
    return Alignment([*names, END], [*spelt, END], torch.stack(rows))
