"""Weights of plain Transformers for programs that have the same model under other names: CTranslate2, Hugging Face."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mtkit.attention.registry import find
from mtkit.attention.slots import SLOTS, Projection
from mtkit.errors import MtkitError
from mtkit.model.build import choose_attention
from mtkit.model.network import Network
from mtkit.recipe import Recipe

GROUPED = ("multi-query", "grouped-query")
"""Projections whose heads share keys and values."""


def unlike_plain(recipe: Recipe, *, extra: Collection[str] = ()) -> str | None:
    """Return the first part of the model that a plain Transformer lacks, in a recipe's words; None if there is none.

    Regularisers only add a loss. `extra`: names of projections and positions that count as plain.
    """
    if recipe.model.architecture != "transformer":
        return f"model.architecture {recipe.model.architecture}"
    for setting in ("reversible", "sentence_positions"):
        if getattr(recipe.model, setting):
            return f"model.{setting}"
    if recipe.model.position_width:
        return f"model.position_width {recipe.model.position_width} (concatenated positions)"
    for role, choices in choose_attention(recipe).items():
        for choice in choices:
            slot = find(choice.name).slot
            if slot is None and choice.name != "full":
                return f"{role} attention {choice.name}"
            filled = {key: value for key, value in choice.options.items() if key in SLOTS and value is not None}
            if slot is not None:
                filled[slot] = choice.name
            for key, value in filled.items():
                name = value["name"] if isinstance(value, Mapping) else value
                if key != "regularizer" and name not in extra:
                    return f"{role} attention with {key} {name}"
    return None


def check_plain(recipe: Recipe, option: str) -> None:
    """Raises: MtkitError that names the `option` if the model is no plain Transformer (`unlike_plain`)."""
    part = unlike_plain(recipe)
    if part is not None:
        raise MtkitError(f"{option} takes runs with full attention, and this one has {part}; leave it out")


def for_each_head(weight: Tensor, projection: Projection) -> Tensor:
    """Return the rows of keys or values, repeated if several heads share them: one share of rows for each head."""
    shares = weight.unflatten(0, (projection.key_heads, -1))
    return shares.repeat_interleave(projection.heads // projection.key_heads, 0).flatten(0, 1)


class Weights:
    """The weights of a model whose attentions are all `full`, by the dotted names of its modules."""

    def __init__(self, model: Network) -> None:
        self._model = model
        self.output = model.output_weight
        """(V, D)."""
        self.output_bias = model.output_bias
        """(V,), or None."""

    def module(self, name: str) -> Any:
        """Return a module of the model."""
        return self._model.get_submodule(name)

    def projections(self, name: str) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
        """Return the projections of an attention's queries, keys, values and output."""
        attention = self.module(name)
        return attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj

    def norm_around(self, name: str) -> nn.LayerNorm:
        """Return the layer norm before or after an attention."""
        norm: nn.LayerNorm = self.module(f"{name.removesuffix('_attention')}_residual.norm")
        return norm

    def tokens(self, side: str) -> Tensor:
        """(V, D), the token embeddings of "encoder" or "decoder", before they are scaled by sqrt(D)."""
        return self._embedding(side).tokens.weight.detach().float().cpu()

    def positions(self, side: str) -> Tensor:
        """(max_length, D), the vectors that are added to the scaled embedding at each position."""
        settings, positions = self._model.settings, self._embedding(side).positions
        if positions is None:
            return torch.zeros(settings.max_length, settings.d_model)
        return positions.table.detach().float().cpu()

    def _embedding(self, side: str) -> Any:
        return self._model.source_embedding if side == "encoder" else self._model.target_embedding
