"""The ratio of source to target tokens, counted in training and saved with the model."""

import torch
from torch import Tensor, distributed, nn


class LengthRatio(nn.Module):
    """Source tokens per target token in all training so far; 1 before it."""

    tokens: Tensor
    new_tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        # source and target; whole numbers, which no cast of the model rounds
        self.register_buffer("tokens", torch.ones(2, dtype=torch.long))
        # empty between updates, when checkpoints are written
        self.register_buffer("new_tokens", torch.zeros(2, dtype=torch.long), persistent=False)

    @property
    def value(self) -> Tensor:
        """The ratio, a scalar in float64."""
        return self.tokens[0].double() / self.tokens[1].clamp(min=1)

    @torch.no_grad()
    def gather(self, source: Tensor, source_valid: Tensor | None, target: Tensor, target_valid: Tensor | None) -> None:
        """Count real tokens for the next update, in training, where nothing is computed twice.

        Activations are recomputed while a backward pass runs, and only there.
        """
        if not self.training or torch._C._current_graph_task_id() != -1:
            return
        for place, x, valid in ((0, source, source_valid), (1, target, target_valid)):
            self.new_tokens[place] += x.shape[:2].numel() if valid is None else valid.sum()

    @torch.no_grad()
    def update(self) -> None:
        """Apply what was counted since the last update, by all processes together."""
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(self.new_tokens)
        self.tokens += self.new_tokens
        self.new_tokens.zero_()
