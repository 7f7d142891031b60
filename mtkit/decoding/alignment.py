"""Soft alignment (Bahdanau et al., 2015) in every layer and head: the attention when each piece is predicted."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mtkit.attention.contract import ROLES
from mtkit.decoding.engines.model_engine import decoding_with
from mtkit.decoding.forced import forced_weights
from mtkit.decoding.lines.segments import Segment, Source
from mtkit.decoding.lines.source import Directions, SourceLines
from mtkit.errors import DataError, MtkitError
from mtkit.model.layers import Weights
from mtkit.model.network import Network
from mtkit.text.characters import is_blank
from mtkit.text.tokenizer import EOS, Tokenizers

SHOWN = 80
"""Maximum pieces of a side in tables and pictures: more cannot be read."""

BEGIN = "<s>"


@dataclass(frozen=True)
class Alignment:
    """The pieces of a translation, and the attention of every layer and head when each was predicted."""

    source: list[str]
    """S pieces, after the tag of the direction if there is one; the end mark last."""
    target: list[str]
    """T pieces, the end mark last."""
    layers: Weights
    """float32 weights of each layer by role: "encoder" (H, S, S), "decoder" (H, T, T) and "cross" (H, T, S); None for a
    layer whose mechanism has none. A recurrent model has only the role "cross"."""

    @property
    def read(self) -> list[str]:
        """The T pieces of the target that the decoder attends to: the begin mark, and those before the end mark."""
        return [BEGIN, *self.target[:-1]]

    def first(self, most: int = SHOWN) -> "Alignment":
        """Return the first `most` pieces of both sides, with their weights."""
        source, target = self.source[:most], self.target[:most]
        sizes = {"encoder": (len(source),) * 2, "decoder": (len(target),) * 2, "cross": (len(target), len(source))}
        layers: Weights = {
            role: [layer if layer is None else layer[:, : sizes[role][0], : sizes[role][1]] for layer in stack]
            for role, stack in self.layers.items()
        }
        return Alignment(source, target, layers)

    def left_out(self, most: int = SHOWN) -> str:
        """Return a note on the pieces that `first` leaves out; empty if there are none."""
        sides = {"source": len(self.source), "target": len(self.target)}
        cut = [f"{most} of {length:,} {side} pieces" for side, length in sides.items() if length > most]
        return f"only the first {' and '.join(cut)} are shown" if cut else ""

    @property
    def weights(self) -> Tensor:
        """(T, S): the mean over the heads of the last cross attention that has weights.

        Rows sum to 1; the rows of `hard-coded` are densities.
        """
        return [layer for layer in self.layers["cross"] if layer is not None][-1].mean(0)


def align(
    network: Network,
    tokenizers: Tokenizers,
    source: str,
    target: str | Sequence[int],
    *,
    directions: Directions | None = None,
    roles: Sequence[str] = ROLES,
) -> Alignment:
    """Return the attention of the network while it predicts each piece of a target: a text, or pieces with EOS.

    `directions` holds the direction of this line, for a model trained on several. Only attention of these `roles` has
    its weights computed.

    Raises: MtkitError if the attention to the source has no weights; DataError for a blank source and for a text
    that is too long.
    """
    check_weights(network)
    segment, pieces = forced_pair(network, tokenizers, source, target, directions)
    with decoding_with(network, None) as device:
        weights = forced_weights(network, [segment.pieces], [pieces], [segment.task], device, roles)
    layers: Weights = {
        role: [None if layer is None else layer[0].float().cpu() for layer in stack]
        for role, stack in weights.items()
        if stack
    }
    return Alignment([*map(tokenizers.source.name, segment.pieces)], [*map(tokenizers.target.name, pieces)], layers)


def forced_pair(
    network: Network, tokenizers: Tokenizers, source: str, target: str | Sequence[int], directions: Directions | None
) -> tuple[Segment, list[int]]:
    """Return the segment of a source line and the pieces of its target, end mark included; pieces stay as they are.

    Raises: DataError for a blank source and for a text that is too long.
    """
    front = Source(SourceLines([source], directions), tokenizers.source, network.longest_source)
    words = tokenizers.source.encode(source)
    pieces = [*tokenizers.target.encode(target), EOS] if isinstance(target, str) else list(target)
    if is_blank(source):
        raise DataError("the source is blank; give a line of text")
    limits = (("source", len(words), front.longest), ("target", len(pieces), network.longest_target))
    for side, length, longest in limits:
        if longest is not None and length > longest:
            raise DataError(f"the {side} has {length:,} pieces, and the model takes {longest:,}; shorten it")
    return front.segment(0, words), pieces


def check_weights(network: Network) -> None:
    """Raises: MtkitError if the attention to the source has weights in no layer."""
    if not any(attention.weights for _, attention in network.attentions() if attention.site.role == "cross"):
        raise MtkitError(
            "this run's attention to the source has no weights to show; train with one that has, as "
            "--cross-attention full or --model rnn"
        )
