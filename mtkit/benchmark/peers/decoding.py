"""Decoding with another program's model: mtkit's tokenizers, and batches of similar lengths."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from mtkit.benchmark.decoding import Decoded
from mtkit.decoding.engines.plain import check_plain
from mtkit.decoding.lines.batches import padded
from mtkit.decoding.lines.source import TrainedOn
from mtkit.errors import MtkitError
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
    arithmetics: ClassVar[Mapping[str, Sequence[str]]] = {"cpu": ("float32",), "cuda": ("float32",)}
    """Measured arithmetics by device."""

    def __init__(self, run: Run, model: Network, settings: DecodingSettings, arithmetic: str) -> None:
        """Raises: MtkitError if the model is no plain Transformer."""
        check_plain(run.recipe, f"--beside {self.program}")
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


def vocabulary_sizes(model: Network) -> tuple[int, int]:
    """Return the numbers of source and target pieces."""
    return len(model.source_embedding.tokens.weight), len(model.target_embedding.tokens.weight)


def renamed(model: Network, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the model's weights and `output_weight`, with the parts `names` of their names replaced in turn."""
    weights = {**model.state_dict(), "output_weight": model.output_weight.detach()}
    weights.pop("output.weight", None)  # the same
    for old, new in names.items():
        weights = {name.replace(old, new): weight for name, weight in weights.items()}
    return weights


def load(program: str, built: nn.Module, weights: Mapping[str, Tensor], constant: tuple[str, ...]) -> None:
    """Load the weights into another program's model; names that end in `constant` keep their values.

    mtkit's epsilon of layer norms replaces the program's. Raises: MtkitError if the model has other weights.
    """
    missing, unknown = built.load_state_dict(weights, strict=False)
    missing = [name for name in missing if not name.endswith(constant)]
    if missing or unknown:
        raise MtkitError(f"--beside {program}: its model has other weights ({', '.join([*missing, *unknown])})")
    for module in built.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = nn.LayerNorm(1).eps
