"""The weights of a model by their places, for programs that have the same model under other names."""

from typing import Any

import torch
from torch import Tensor, nn

from mtkit.errors import MtkitError
from mtkit.model.build import label_attention
from mtkit.model.network import Network
from mtkit.recipe import Recipe


def check_plain(recipe: Recipe, program: str) -> None:
    """Raises: MtkitError where the model has attentions that other programs do not have."""
    if label_attention(recipe) != "full" or recipe.attention.options:
        raise MtkitError(
            f"{program} has no such attention: --beside {program} takes runs trained with full attention, no options"
        )


class Weights:
    """The weights of a model whose attentions are all `full`."""

    def __init__(self, model: Network) -> None:
        self._model = model
        self.output = model.output_weight
        """(V, D)."""

    def module(self, name: str) -> Any:
        """The peer's module with this dotted name."""
        return self._model.get_submodule(name)

    def projections(self, name: str) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
        """Those of queries, keys, values and output of the attention of that name."""
        attention = self.module(name)
        return attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj

    def norm_around(self, name: str) -> nn.LayerNorm:
        """The layer norm before or after the attention of that name."""
        norm: nn.LayerNorm = self.module(f"{name.removesuffix('_attention')}_residual.norm")
        return norm

    def tokens(self, side: str) -> Tensor:
        """(V, D), the token embeddings of "encoder" or "decoder", before they are scaled by sqrt(D)."""
        return self._embedding(side).tokens.weight.detach().float().cpu()

    def positions(self, side: str) -> Tensor:
        """(max_length, D), what is added to the scaled embedding at each position."""
        settings, positions = self._model.settings, self._embedding(side).positions
        if positions is None:
            return torch.zeros(settings.max_length, settings.d_model)
        return positions(0, settings.max_length).detach().float().cpu()

    def _embedding(self, side: str) -> Any:
        return self._model.source_embedding if side == "encoder" else self._model.target_embedding
