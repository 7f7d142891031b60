"""Costs of a trial that are counted, not timed, and recipes of equal cost."""

from collections.abc import Callable
from typing import Literal

import torch

from mtkit.attention.bases.caches import exact_capacity
from mtkit.data.prepared import Prepared
from mtkit.errors import MtkitError
from mtkit.memory import held_bytes
from mtkit.model.build import build_model, label_attention
from mtkit.model.network import Network
from mtkit.recipe import Recipe
from mtkit.training.flops import flops_per_token

Budget = Literal["parameters", "flops"]

TOLERANCE = 0.01
"""Largest relative difference of matched costs."""

MULTIPLE = 8
"""Feed-forward widths are multiples of this if `TOLERANCE` allows: kernels are faster then."""


@torch.no_grad()
def state_bytes(model: Network, tokens: int, source: int | None = None) -> int | None:
    """Return the bytes of one hypothesis's decoding state after `tokens` target tokens, or None if they are too many.

    The source has `source` tokens, by default as many as the target. Measured by `start` and as many steps; everything
    that later steps read is counted, such as the projected source, but neither the model's weights nor the memory that
    caches reserve for later tokens.
    """
    source = tokens if source is None else source
    if source > model.longest_source or tokens > model.longest_target:
        return None
    training, weight = model.training, model.output_weight
    model.eval()
    random = torch.Generator().manual_seed(1)
    source_pieces, pieces = (
        torch.randint(len(embedding.tokens.weight), (1, length), generator=random).to(weight.device)
        for embedding, length in ((model.source_embedding, source), (model.target_embedding, tokens))
    )
    with exact_capacity():
        state = model.start(model.encode(source_pieces))
        for piece in pieces.split(1, dim=1):
            _, state, _ = model.step(piece, state)
    model.train(training)
    return held_bytes(state, without=[*model.parameters(), *model.buffers()])


def parameters_of(recipe: Recipe, prepared: Prepared) -> int:
    """Return the number of parameters in the recipe's model. Raises: RecipeError and MtkitError like `build_model`."""
    model = build_model(prepared.applied_to(recipe), **prepared.model_sizes)
    return sum(parameter.numel() for parameter in model.parameters())


MEASURES: dict[Budget, Callable[[Recipe, Prepared], float]] = {
    "parameters": parameters_of,
    "flops": flops_per_token,
}
_KNOWN: dict[tuple[Budget, str, str], float] = {}
"""Costs by measure, recipe and data: the first entry's is needed for each of the others."""

UNITS: dict[Budget, str] = {"parameters": "parameters", "flops": "training FLOPs per token"}


def matched(recipe: Recipe, first: Recipe, what: Budget, prepared: Prepared) -> Recipe:
    """Return the recipe with the `model.feed_forward` that makes it cost what `first` costs, to within `TOLERANCE`.

    The width stays if no other is nearer; else it is the nearest multiple of `MULTIPLE`, or the nearest whole number
    if that multiple is not near enough.

    Raises: MtkitError naming the recipe's attention if no width is near enough, and as the measures do.
    """
    width = recipe.model.feed_forward
    target, cost = _cost(first, what, prepared), _cost(recipe, what, prepared)
    if recipe.model.architecture == "rnn":
        return _checked(recipe, cost, target, what, "the rnn has no feed-forward sub-layer to adjust")
    slope = (_cost(_with_width(recipe, width + 64), what, prepared) - cost) / 64
    exact = width + (target - cost) / slope  # costs are linear in the width
    nearest = max(round(exact), 1)
    multiple = max(MULTIPLE * round(exact / MULTIPLE), MULTIPLE)
    if nearest == width or abs(multiple - exact) * slope > TOLERANCE * target:
        multiple = nearest
    scaled = _with_width(recipe, multiple)
    why = "its other layers already cost more" if exact < 1 else "no width is near enough"
    return _checked(scaled, _cost(scaled, what, prepared), target, what, why)


def _cost(recipe: Recipe, what: Budget, prepared: Prepared) -> float:
    """Return the recipe's cost, measured once in a process."""
    key = what, recipe.model_dump_json(), prepared.fingerprint
    if key not in _KNOWN:
        _KNOWN[key] = MEASURES[what](recipe, prepared)
    return _KNOWN[key]


def _checked(recipe: Recipe, cost: float, target: float, what: Budget, why: str) -> Recipe:
    """Return the recipe. Raises: MtkitError if its cost differs from the target by more than `TOLERANCE`."""
    if abs(cost - target) <= TOLERANCE * target:
        return recipe
    name, width = label_attention(recipe), recipe.model.feed_forward
    raise MtkitError(
        f"{name} cannot be matched: it has {cost:,.0f} {UNITS[what]} at model.feed_forward = {width}, and the first "
        f"entry has {target:,.0f}; {why}. Leave the entry out, or change the size of the first"
    )


def _with_width(recipe: Recipe, width: int) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"feed_forward": width})})
