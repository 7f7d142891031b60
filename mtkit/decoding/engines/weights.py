"""The context of decoding: number type, evaluation mode and inference mode.

The weights of a model by their places, for programs that have the same model under other names.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from mtkit.attention.registry import find
from mtkit.attention.slots import SLOTS, Positions, Projection
from mtkit.device import autocast, check_default_type, varied_shapes
from mtkit.errors import MtkitError, shown
from mtkit.memory import GIVES_OUT, is_oom
from mtkit.model.build import choose_attention
from mtkit.model.decoding_products import is_low, products
from mtkit.model.network import Model, Network
from mtkit.recipe import Recipe

DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
"""The arithmetic by name; auto is float32, whose results do not depend on the batch. In int8, and in bfloat16 on the
CPU, linear layers alone compute (`mtkit.model.decoding_products`); the rest is in float32."""


def find_dtype(name: str) -> torch.dtype | None:
    """The number type of that name, None for auto. Raises: MtkitError for an unknown name."""
    if name not in DTYPES:
        raise MtkitError(f"no dtype {shown(name)}; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


@contextmanager
def decoding_with(model: Model, dtype: torch.dtype | None) -> Iterator[torch.device]:
    """A context with the model in evaluation mode, inference mode and computation in `dtype`; gives its device.

    The model is restored on exit and serves one call at a time. None stands for float32.

    Raises: MtkitError for int8 on a GPU, where memory runs out although batches have been halved (`Halving`), and as
    `mtkit.device.check_default_type`.
    """
    check_default_type()
    training, device = model.training, next(model.parameters()).device
    model.train(False)
    try:
        # weights are rounded outside inference mode, as normal tensors
        with varied_shapes(), _computing(model, dtype, device), torch.inference_mode():
            yield device
    except GIVES_OUT as error:
        if not is_oom(error):
            raise
        raise MtkitError(
            f"the memory of {device} does not hold the model and a single segment to translate; lower decoding.beam "
            "or decoding.max_pieces, or take another --device"
        ) from error
    finally:
        model.train(training)


@contextmanager
def _computing(model: Model, dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """The linear layers in `dtype`; on a GPU, in types below float32, all that autocast knows."""
    dtype = dtype or torch.float32
    automatic = dtype not in (torch.float32, torch.int8) and not is_low(dtype, device)
    with (
        products(cast(nn.Module, model), dtype),
        autocast(device, dtype if automatic else None),
    ):
        yield


GROUPED = ("multi-query", "grouped-query")
"""Projections whose heads share keys and values."""


def unlike_plain(recipe: Recipe, *, besides: Collection[str] = ()) -> str | None:
    """The first part of the model that a plain Transformer does not have, as a recipe names it; None: there is none.

    Regularisers add nothing but a loss. `besides`: names of projections and positions that count as plain.
    """
    if recipe.model.architecture != "transformer":
        return f"model.architecture {recipe.model.architecture}"
    if recipe.model.reversible:
        return "model.reversible"
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
                if key != "regularizer" and name not in besides:
                    return f"{role} attention with {key} {name}"
    return None


def check_plain(recipe: Recipe, option: str) -> None:
    """Raises: MtkitError naming the `option` where the model is no plain Transformer (`unlike_plain`)."""
    part = unlike_plain(recipe)
    if part is not None:
        raise MtkitError(f"{option} takes runs with full attention, and this one has {part}; leave it out")


class Weights:
    """The weights of a model whose attentions are all `full`."""

    def __init__(self, model: Network) -> None:
        self._model = model
        self.output = model.output_weight
        """(V, D)."""
        self.output_bias = model.output_bias
        """(V,), or None."""

    def module(self, name: str) -> Any:
        """The module of the model with this dotted name."""
        return self._model.get_submodule(name)

    def projections(self, name: str) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
        """Those of queries, keys, values and output of the attention of that name."""
        attention = self.module(name)
        return attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj

    def projection(self, name: str) -> Projection:
        """The shape of the heads of the attention of that name."""
        projection: Projection = self.module(name).projection
        return projection

    def relative_positions(self, name: str) -> Positions | None:
        """What fills the slot `positions` of the attention of that name."""
        positions: Positions | None = self.module(name).positions
        return positions

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
