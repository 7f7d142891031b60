"""A tiny recurrent model with the interface of the Transformer, whose state holds all that came before."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtkit.decoding.contract import SourceBatch
from mtkit.model.layers import Weights
from mtkit.model.network import Logits
from mtkit.text.tokenizer import BOS, EOS, PAD

FIRST_WORD = EOS + 1


@dataclass
class Encoded:
    memory: Tensor
    valid: Tensor


@dataclass
class Output:
    hidden: Tensor


class TinyModel(nn.Module):
    """Logits depend on every source piece and every target piece so far; a state moved wrongly gives other logits."""

    has_weights = True

    def __init__(self, vocabulary: int = 8, width: int = 12, sharpness: float = 2.0, seed: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def matrix(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator))

        self.source, self.target = matrix(vocabulary, width), matrix(vocabulary, width)
        self.recurrence = matrix(width, width)
        self.weight = nn.Parameter(matrix(vocabulary, width) * sharpness / width**0.5)
        self.longest_source: int | None = None
        self.longest_target: int | None = None
        self.steps: list[int] = []  # rows of each step, to see segments leave

    @property
    def output_weight(self) -> Tensor:
        return self.weight

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.T

    def encode(self, source: Tensor, source_valid: Tensor | None = None, *, task: Tensor | None = None) -> Encoded:
        assert source_valid is not None
        return Encoded(self.source[source], source_valid)

    def start(self, encoded: Encoded, *, hypotheses: int = 1, pieces: Tensor | None = None) -> dict[str, Any]:
        size, width = encoded.memory.shape[0], encoded.memory.shape[2]
        hidden = encoded.memory.new_zeros(size, hypotheses, width)
        assert pieces is None
        return {"hidden": hidden, "shared": {"memory": encoded.memory, "valid": encoded.valid}}

    def step(
        self, token: Tensor, state: dict[str, Any], *, need_weights: bool = False
    ) -> tuple[Logits, dict[str, Any], Tensor | None]:
        self.steps.append(len(token))
        hidden, weights = self._advance(token, state["hidden"], **state["shared"])
        logits = Logits(hidden, self.logits, len(self.weight))
        return logits, {"hidden": hidden, "shared": state["shared"]}, weights if need_weights else None

    def forward(
        self,
        source: Tensor,
        target_in: Tensor,
        *,
        source_valid: Tensor,
        target_valid: Tensor | None = None,
        task: Tensor | None = None,
        weights: Weights | None = None,
    ) -> Output:
        encoded = self.encode(source, source_valid)
        hidden = self.start(encoded)["hidden"]
        outputs = []
        for position in range(target_in.shape[1]):
            hidden, _ = self._advance(target_in[:, position : position + 1], hidden, encoded.memory, encoded.valid)
            outputs.append(hidden)
        return Output(torch.cat(outputs, 1))

    def _advance(self, token: Tensor, hidden: Tensor, memory: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """hidden and token of (B, N), memory (B, S, D)."""
        query = hidden @ self.recurrence / 3 + self.target[token]
        scores = (query @ memory.mT).masked_fill(~valid[:, None], -torch.inf)
        weights = scores.softmax(-1)
        return torch.tanh(query + weights @ memory), weights


def batch_of(sources: list[list[int]], limits: list[int] | int, keys: list[int] | None = None) -> SourceBatch:
    """The sources, EOS put behind each, as a batch."""
    width = max(map(len, sources)) + 1
    rows = [[*source, EOS] + [PAD] * (width - 1 - len(source)) for source in sources]
    each = limits if isinstance(limits, list) else [limits] * len(sources)
    return SourceBatch(torch.tensor(rows), each, torch.tensor(keys or list(range(len(sources)))))


def random_sources(count: int, seed: int = 0, vocabulary: int = 8, longest: int = 9) -> list[list[int]]:
    """Sources of 1 to `longest` words."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(FIRST_WORD, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def log_prob_of(model: TinyModel, source: list[int], pieces: list[int]) -> float:
    """The log-probability of the pieces, EOS among them, step by step through a fresh state, in float64."""
    batch = batch_of([source], 1)
    state = model.start(model.encode(batch.source, batch.valid))
    total, last = 0.0, BOS
    for piece in pieces:
        logits, state, _ = model.step(torch.tensor([[last]]), state)
        total += logits.whole()[0, 0].double().log_softmax(-1)[piece].item()
        last = piece
    return total
