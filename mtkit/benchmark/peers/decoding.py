"""Decoding with another program's model: mtkit's tokenizers, and batches of similar lengths."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from mtkit.benchmark.decoding import Decoded
from mtkit.decoding.lines.source import TrainedOn
from mtkit.decoding.translate import padded
from mtkit.model.network import Network
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from mtkit.text.tokenizer import EOS

SIZES = (32, 64, 128)
"""Segments per batch; the fastest is chosen."""


class PeerDecoder(ABC):
    """Translates by the program's own search, which `generate` calls."""

    program: str
    shortlist = 0

    def __init__(self, run: Run, model: Network, settings: DecodingSettings, arithmetic: str) -> None:
        self.arithmetic, self.settings = arithmetic, settings
        self._tokenizers, self._trained_on = run.tokenizers, TrainedOn.of([run])
        self._longest = (model.longest_source, model.longest_target)
        self.device = model.output_weight.device

    @abstractmethod
    def generate(self, source: Tensor, beam: int, limit: int) -> list[list[int]]:
        """Return the pieces of translations (B, up to `limit`) of source (B, S), with or without EOS."""

    def sizes(self, beam: int) -> Sequence[int]:
        """Return the numbers of segments to choose from."""
        return SIZES

    @torch.no_grad()
    def translate(self, lines: Sequence[str], beam: int, size: int) -> list[Decoded]:
        """Translate the longest segments first; a batch has the highest piece limit of its segments."""
        encoded = [pieces[: self._longest[0] - 1] for pieces in self._tokenizers.source.encode_lines(lines)]
        order = sorted(range(len(lines)), key=lambda line: -len(encoded[line]))
        decoded: dict[int, Decoded] = {}
        for first in range(0, len(order), size):
            chosen = order[first : first + size]
            sources = [[*encoded[line], EOS] for line in chosen]
            most = self.settings.max_pieces
            limit = max(self._trained_on.limit(pieces, None, self._longest[1], most) for pieces in sources)
            generated = self.generate(padded(sources, self.device), beam, limit)
            for line, row in zip(chosen, generated, strict=True):
                pieces = row[: row.index(EOS)] if EOS in row else row
                decoded[line] = Decoded(self._tokenizers.target.decode(pieces), len(pieces) + 1)
        return [decoded[line] for line in range(len(lines))]
