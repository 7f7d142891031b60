"""A model that translates every source into itself, and remembers what it was asked."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from mtkit.model.network import Logits
from mtkit.text.tokenizer import BREAK, EOS, PAD, UNK


class Echo(nn.Module):
    """Copies source pieces, without their tag; of a source with a `stubborn` piece, breaks are left out."""

    has_weights = False
    longest_target: int | None = None

    def __init__(
        self, vocabulary: int, *, longest: int | None = None, tags: int = 0, stubborn: Collection[int] = ()
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.longest_source = longest
        self._vocabulary, self._tags, self._stubborn = vocabulary, tags, stubborn
        self.seen: list[tuple[list[int], int | None]] = []
        """Each source and its task, in the order in which they came."""

    def encode(self, source: Tensor, source_valid: Tensor | None = None, *, task: Tensor | None = None) -> Tensor:
        tasks = [None] * len(source) if task is None else task.tolist()
        copies = torch.full_like(source, PAD)
        for row, (pieces, of) in enumerate(zip(source.tolist(), tasks, strict=True)):
            real = [piece for piece in pieces if piece != PAD]
            self.seen.append((real, of))
            breaks = not set(real) & set(self._stubborn)
            copy = [piece for piece in real[self._tags :] if breaks or piece != BREAK]
            copies[row, : len(copy)] = torch.tensor(copy)
        return copies

    def start(self, encoded: Tensor, *, hypotheses: int = 1, pieces: Tensor | None = None) -> dict[str, Any]:
        assert pieces is None
        return {"position": 0, "shared": {"copy": encoded}}

    def step(
        self, token: Tensor, state: dict[str, Any], *, need_weights: bool = False
    ) -> tuple[Logits, dict[str, Any], Tensor | None]:
        copy, position = state["shared"]["copy"], state["position"]
        wanted = copy[:, position] if position < copy.shape[1] else torch.full_like(copy[:, 0], EOS)
        wanted = wanted.masked_fill((wanted == PAD) | (wanted == UNK), EOS)
        logits = torch.zeros(*token.shape, self._vocabulary)
        logits.scatter_(2, wanted[:, None, None].expand(*token.shape, 1), 30.0)
        return Logits.known(logits), {"position": position + 1, "shared": state["shared"]}, None
