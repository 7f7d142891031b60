from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mtkit.data.batches import make_batch
from mtkit.data.prepared import Prepared
from mtkit.recipe import Recipe
from mtkit.training import flops
from mtkit.training.data_loader import DataLoader
from mtkit.training.flops import flops_of, flops_per_token, without_onednn
from mtkit.training.loss import STEP
from mtkit.training.world import World
from tests.training.conftest import tiny


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda: leaf(3, 4) @ leaf(4, 5), 2 * 60),
        (lambda: (leaf(3, 4) @ leaf(4, 5)).sum().backward(), 3 * 2 * 60),
        (lambda: leaf(3, 4) @ leaf(4), 2 * 12),
        (lambda: torch.ones(3, 5).addmm_(torch.ones(3, 4), torch.ones(4, 5)), 2 * 60),
        (lambda: torch.ones(2, 3, 5).baddbmm_(torch.ones(2, 3, 4), torch.ones(2, 4, 5)), 2 * 2 * 60),
        # 6 channels in 3 groups, 7 outputs, 5 taps: forward, and a gradient of the input and one of the kernel
        (lambda: F.conv1d(leaf(2, 6, 11), leaf(6, 2, 5), groups=3).sum().backward(), 3 * 2 * 2 * 6 * 2 * 5 * 7),
        (lambda: F.conv1d(torch.ones(2, 6, 11), leaf(6, 1, 5), groups=6).sum().backward(), 2 * 2 * 2 * 6 * 5 * 7),
        # a triangle of 4 x 4 against 3 columns: 4 * 3 / 2 multiplications with additions, and 4 divisions, a column
        (lambda: torch.linalg.solve_triangular(torch.eye(4), torch.ones(4, 3), upper=False), 4 * 4 * 3),
        # a decomposition of a 3 x 3 matrix takes 2/3 of 27, each of two matrices, and then there are two triangles
        (lambda: torch.linalg.solve(torch.eye(3).expand(2, 3, 3), torch.ones(2, 3, 5)), 2 * (18 + 2 * 9 * 5)),
    ],
)
def test_products_are_counted_two_for_a_multiplication_with_its_addition(
    compute: Callable[[], Any], expected: int
) -> None:
    assert flops_of(compute) == expected


def test_the_counter_sees_both_kinds_of_recurrent_layers() -> None:
    """Without oneDNN: it has one operation for the layers of an LSTM, in which no products show."""
    x = torch.randn(2, 7, 4)
    with without_onednn():
        counted = [flops_of(lambda kind=kind: kind(4, 5, batch_first=True)(x)) for kind in (nn.GRU, nn.LSTM)]
    assert counted == [2 * 2 * 7 * gates * 5 * (4 + 5) for gates in (3, 4)]


def by_hand(recipe: Recipe, prepared: Prepared) -> float:
    """The products of a Transformer with full attention: three for each weight, seven for each pair of tokens."""
    model, loader = recipe.model, DataLoader(recipe, prepared, recipe.model.max_length, World("cpu"))
    vocabulary, width, inner = prepared.tokenizers.target.size, model.d_model, model.feed_forward
    operations = tokens = 0
    for rows in loader.spread(flops.BATCHES):
        batch = make_batch(loader.side(0), rows, model.max_length)
        (segments, source), target = batch.source.shape, batch.target_in.shape[1]
        encoder = model.encoder_layers * source * (4 * width**2 + 2 * width * inner)
        # the attention to the source projects queries and outputs of the target, keys and values of the source
        decoder = model.decoder_layers * (
            target * (4 * width**2 + 2 * width**2 + 2 * width * inner) + source * 2 * width**2
        )
        pairs = model.encoder_layers * source**2 + model.decoder_layers * (target**2 + target * source)
        predicted = -(-batch.target_tokens // STEP) * STEP
        operations += 2 * segments * (3 * (encoder + decoder) + 7 * pairs * width)
        # the sum of a token's logits, for the smoothing, is one product with the sum of the weights
        operations += 2 * predicted * (3 * vocabulary * width + width)
        tokens += batch.target_tokens
    return operations / tokens


@pytest.mark.parametrize("preset", [{}, {"d_model": 24, "heads": 3, "encoder_layers": 3, "decoder_layers": 2}])
def test_a_transformer_costs_what_its_formula_says_to_the_digit(prepared: Prepared, preset: dict[str, Any]) -> None:
    recipe = tiny(model=preset)
    assert flops_per_token(recipe, prepared) == by_hand(recipe, prepared)


def test_the_number_depends_on_nothing_but_recipe_and_data(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny(attention={"name": "random"})
    counted = flops_per_token(recipe, prepared)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    other = recipe.model_copy(update={"seed": 7})
    other = other.model_copy(update={"training": other.training.model_copy(update={"precision": "bfloat16"})})
    torch.set_num_threads(2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert flops_per_token(other, prepared) == counted
    assert torch.equal(torch.get_rng_state(), before)


def test_what_an_update_computes_twice_counts_twice(prepared: Prepared) -> None:
    once = flops_per_token(tiny(), prepared)
    twice = flops_per_token(tiny(training={"r_drop": 1.0}), prepared)
    assert twice == pytest.approx(2 * once, rel=0.03)  # rows of logits are rounded up to a multiple of 64
    plain, reversible = (flops_per_token(tiny(model={"reversible": on}), prepared) for on in (False, True))
    assert 1.1 * plain < reversible < 4 / 3 * plain  # all but the loss a third more
    checkpointed = flops_per_token(tiny(training={"checkpoint_activations": True}), prepared)
    assert 1.1 * plain < checkpointed <= reversible  # the last product of a layer is not needed again


def test_frozen_parts_need_no_gradients(prepared: Prepared) -> None:
    frozen = flops_per_token(tiny(training={"freeze": ["encoder", "embeddings"]}), prepared)
    assert frozen < 0.75 * flops_per_token(tiny(), prepared)


def test_a_large_batch_is_counted_in_part(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(
        flops, "make_batch", lambda side, rows, longest: sizes.append(len(rows)) or make_batch(side, rows, longest)
    )
    recipe = tiny(training={"batch_tokens": 1_600})
    whole = flops_per_token(recipe, prepared)
    counted = sizes.copy()
    monkeypatch.setattr(flops, "MOST_TOKENS", 400)
    assert flops_per_token(recipe, prepared) == pytest.approx(whole, rel=0.1)
    assert sum(counted) > 3 * sum(sizes[len(counted) :])
