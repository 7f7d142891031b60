import numpy as np
import pytest
import torch

from mtkit.attention import mechanisms
from mtkit.benchmark.machine import decoding_operations
from mtkit.data.prepared import Prepared
from mtkit.model.build import build_model
from mtkit.model.transformer import Transformer
from mtkit.recipe import make_recipe
from mtkit.training import flops
from mtkit.training.flops import training_operations

D, F, V = 16, 32, 400
ATTENTION, FEED_FORWARD = 4 * D * D, 2 * D * F
"""Multiplications of a token in the four projections, and in the two maps."""


@pytest.fixture
def model() -> Transformer:
    sizes = {"d_model": D, "heads": 2, "feed_forward": F, "encoder_layers": 1, "decoder_layers": 2}
    return build_model(make_recipe({"model": sizes}), source_vocabulary=V, target_vocabulary=V)


def test_training_takes_three_times_the_products_of_a_forward_pass(model: Transformer, prepared: Prepared) -> None:
    row, side = 5, prepared.train
    s, t = int(side.source.lengths[row]) + 1, int(side.target.lengths[row]) + 1
    encoder = s * (ATTENTION + FEED_FORWARD) + 2 * s * s * D
    cross = t * 2 * D * D + s * 2 * D * D + 2 * t * s * D
    decoder = 2 * (t * (ATTENTION + FEED_FORWARD) + 2 * t * t * D + cross) + t * V * D
    assert training_operations(model, side, np.array([row])) == pytest.approx(3 * 2 * (encoder + decoder) / t)
    assert model.training


def test_decoding_encodes_once_and_steps_with_every_hypothesis_but_for_the_first(model: Transformer) -> None:
    model.eval()

    def cost(s: int, t: int, beam: int) -> float:
        return decoding_operations(model, [(s, t)], beam)

    projections = 2 * (ATTENTION + 2 * D * D + FEED_FORWARD) + V * D
    step = cost(6, 1, 1) - cost(6, 0, 1)
    # beside the projections there is attention to the 6 source tokens and to the tokens so far, in both layers
    assert step >= 2 * (projections + 2 * 2 * 6 * D)
    assert step < 1.3 * 2 * (projections + 2 * 2 * (6 + 1) * D)
    assert cost(6, 0, 1) == cost(6, 0, 3) == 2 * (6 * (ATTENTION + FEED_FORWARD + 2 * 2 * D * D) + 2 * 6 * 6 * D)
    assert cost(6, 1, 3) == cost(6, 1, 1)
    assert cost(6, 9, 3) - cost(6, 1, 3) == 3 * (cost(6, 9, 1) - cost(6, 1, 1))
    assert cost(6, 9, 2) >= (1 + 2 * 8) * step + cost(6, 0, 2)


def test_counting_changes_no_weights_and_no_random_state(model: Transformer, prepared: Prepared) -> None:
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    training_operations(model, prepared.train, np.arange(40))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_error_leaves_the_model_in_training_mode(
    model: Transformer, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(flops, "flops_of", fail)
    with pytest.raises(torch.OutOfMemoryError):
        training_operations(model, prepared.train, np.arange(3))
    assert model.training


@pytest.mark.parametrize("name", mechanisms())
def test_the_operations_of_every_mechanism_can_be_counted(name: str, prepared: Prepared) -> None:
    """Also where a learned tensor goes into a module, and no gradients are kept."""
    sizes = {"d_model": D, "heads": 2, "feed_forward": F, "encoder_layers": 1, "decoder_layers": 1, "max_length": 64}
    recipe = make_recipe({"model": sizes, "attention": {"name": name}})
    built = build_model(recipe, source_vocabulary=V, target_vocabulary=V)
    assert training_operations(built, prepared.train, np.arange(2)) > 0
    assert decoding_operations(built.eval(), [(6, 3)], 2) > 0
