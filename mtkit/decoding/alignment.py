"""The soft alignment of Bahdanau et al., 2015, in every layer and head: what a model attends to for each piece."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from mtkit.decoding.engines.model_engine import decoding_with
from mtkit.decoding.lines.source import Directions, Segment, Source, is_blank
from mtkit.decoding.parallel import at_once, parallel_map
from mtkit.decoding.translate import padded, plan, tasks_of
from mtkit.errors import DataError, MtkitError
from mtkit.memory import Halving
from mtkit.model.layers import Weights
from mtkit.model.network import Network
from mtkit.text.tokenizer import BOS, EOS, PAD, Tokenizers

ROLES = ("encoder", "decoder", "cross")

TOKENS = 2048
"""Padded pieces of a side in a batch of `over_segments`, or one segment: each head has a weight for every pair."""

SHOWN = 80
"""Pieces of a side that tables and pictures show, at most: more cannot be read."""

Layers = list[Tensor | None]
"""The weights of each cross-attention layer; None for a mechanism that has none."""

Result = TypeVar("Result")

BEGIN, END = "<s>", "</s>"


@dataclass(frozen=True)
class Alignment:
    """A translation's pieces, and where the attention of every layer and head lay when each was predicted."""

    source: list[str]
    """S pieces, after the tag of the direction where there is one; the end mark last."""
    target: list[str]
    """T pieces, the end mark last."""
    layers: Weights
    """float32 weights of each layer by role: "encoder" (H, S, S), "decoder" (H, T, T) and "cross" (H, T, S); None for a
    layer whose mechanism has none. A recurrent model has the role "cross" alone."""

    @property
    def read(self) -> list[str]:
        """The T pieces that the decoder attends to among its own: the begin mark, and those before the end mark."""
        return [BEGIN, *self.target[:-1]]

    def first(self, most: int = SHOWN) -> "Alignment":
        """The first `most` pieces of both sides, with their weights."""
        source, target = self.source[:most], self.target[:most]
        sizes = {"encoder": (len(source),) * 2, "decoder": (len(target),) * 2, "cross": (len(target), len(source))}
        layers: Weights = {
            role: [each if each is None else each[:, : sizes[role][0], : sizes[role][1]] for each in stack]
            for role, stack in self.layers.items()
        }
        return Alignment(source, target, layers)

    def left_out(self, most: int = SHOWN) -> str:
        """A note on what `first` leaves out; empty if nothing."""
        sides = {"source": len(self.source), "target": len(self.target)}
        cut = [f"{most} of {length:,} {side} pieces" for side, length in sides.items() if length > most]
        return f"only the first {' and '.join(cut)} are shown" if cut else ""

    @property
    def weights(self) -> Tensor:
        """(T, S): the mean over the heads of the last cross attention that has weights; rows sum to 1, but for those
        of `hard-coded`, whose densities stay as they are."""
        return [each for each in self.layers["cross"] if each is not None][-1].mean(0)


def align(
    network: Network, tokenizers: Tokenizers, source: str, target: str, *, directions: Directions | None = None
) -> Alignment:
    """The attention of the network while it predicts each piece of `target`, `target` given.

    `directions` holds the one of this line for a model trained on several.

    Raises: MtkitError where the attention to the source has no weights; DataError for a blank source and for a text
    that is too long.
    """
    check_weights(network)
    front = Source(tokenizers.source, network.longest_source, directions)
    words = tokenizers.source.encode(source)
    pieces = [*tokenizers.target.encode(target), EOS]
    if is_blank(source):
        raise DataError("there is nothing to align: the source is blank")
    limits = (("source", len(words), front.longest), ("target", len(pieces), network.longest_target))
    for side, length, longest in limits:
        if longest is not None and length > longest:
            raise DataError(f"the {side} has {length:,} pieces, and the model takes {longest:,}; shorten it")
    segment = front.segment(0, words)
    with decoding_with(network, None) as device:
        found = forced_weights(network, [segment.pieces], [pieces], [segment.task], device, ROLES)
    layers: Weights = {
        role: [None if each is None else each[0].float().cpu() for each in stack]
        for role, stack in found.items()
        if stack
    }
    names = [tokenizers.source.piece(piece) for piece in segment.pieces[:-1]]
    spelt = [tokenizers.target.piece(piece) for piece in pieces[:-1]]
    return Alignment([*names, END], [*spelt, END], layers)


def forced_weights(
    network: Network,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    tasks: Sequence[int | None],
    device: torch.device,
    roles: Sequence[str] = ("cross",),
) -> Weights:
    """The attention weights of these roles, in all layers, of a batch of segments whose translations are given.

    sources and targets are pieces with EOS at the end; tasks are the segments'. Weights of padding mean nothing. To be
    called within `decoding_with`.
    """
    source, target = padded(sources, device), padded(targets, device)
    valid = target != PAD
    target_in = torch.cat([torch.full_like(target[:, :1], BOS), target[:, :-1]], 1)
    weights: Weights = {role: [] for role in roles}
    network.forward(
        source,
        target_in.masked_fill(~valid, PAD),
        source_valid=source != PAD,
        target_valid=valid,
        task=tasks_of(tasks, device),
        weights=weights,
    )
    return weights


def over_segments(
    network: Network,
    segments: Sequence[Segment],
    targets: Sequence[Sequence[int]],
    work: Callable[[int, Layers], Result],
) -> list[Result]:
    """What `work` makes of each segment, in order: of its index, and of the weights (H, T, S) of each cross layer.

    targets are the pieces of the segments' translations, EOS at the end. `work` may be called by several threads.
    """
    lengths = [max(len(each.pieces), len(target)) for each, target in zip(segments, targets, strict=True)]
    found: dict[int, Result] = {}
    with decoding_with(network, None) as device:

        def forced(rows: Sequence[int]) -> list[Result]:
            batch, answers = [segments[row] for row in rows], [targets[row] for row in rows]
            weights = forced_weights(
                network, [each.pieces for each in batch], answers, [each.task for each in batch], device
            )
            results = []
            for place, (row, segment, answer) in enumerate(zip(rows, batch, answers, strict=True)):
                inside = (place, slice(None), slice(len(answer)), slice(len(segment.pieces)))
                results.append(work(row, [each if each is None else each[inside].cpu() for each in weights["cross"]]))
            return results

        batches = plan(lengths, TOKENS, 1, at_once(device))
        parts = parallel_map(partial(Halving(lengths).run, forced), batches, device)
        for rows, results in zip(batches, parts, strict=True):
            found |= zip(rows, chain.from_iterable(results), strict=True)
    return [found[row] for row in range(len(segments))]


def check_weights(network: Network) -> None:
    """Raises: MtkitError where the attention to the source has weights in no layer."""
    if not any(each.weights for _, each in network.attentions() if each.site.role == "cross"):
        raise MtkitError(
            "this run's attention to the source has no weights to show; train with one that has, as "
            "--cross-attention full or --model rnn"
        )
