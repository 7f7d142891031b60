"""A model from a recipe."""

import pytest
import torch
from torch import nn

from mtkit.errors import MtkitError
from mtkit.model.build import build_model
from mtkit.recipe import make_recipe

SIZES = {"d_model": 16, "heads": 2, "feed_forward": 16, "encoder_layers": 1, "decoder_layers": 1}


def test_building_leaves_the_generators_alone_and_touches_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("get_rng_state", "set_rng_state", "manual_seed_all", "manual_seed"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: touched.append(arguments))
    before = torch.get_rng_state()
    one, same, other = (
        build_model(make_recipe({"model": SIZES, "seed": seed}), source_vocabulary=32, target_vocabulary=32)
        for seed in (1, 1, 2)
    )
    assert touched == []
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.output_weight, same.output_weight)
    assert not torch.equal(one.output_weight, other.output_weight)


@pytest.mark.parametrize(
    "model",
    [
        {"d_model": 2**30, "heads": 1},
        {"feed_forward": 2**31 - 1, "d_model": 2048},
        {"encoder_layers": 10_000, "d_model": 8192, "heads": 1},
        {"max_length": 2**31 - 1, "d_model": 2048},
    ],
)
def test_weights_beyond_the_memory_are_refused_before_they_are_made(model: dict[str, int]) -> None:
    with pytest.raises(MtkitError, match=r"would take [\d.]+ \w+ of memory or more, and [\d.]+ \w+ are avail"):
        build_model(make_recipe({"model": model}), source_vocabulary=1_000, target_vocabulary=1_000)


@pytest.mark.parametrize("architecture", ["transformer", "rnn"])
def test_all_weights_count_together_before_they_are_filled(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    recipe = make_recipe({"model": {"d_model": 64, "heads": 1, "architecture": architecture}})

    def build() -> int:
        return sum(each.nbytes for each in build_model(recipe, source_vocabulary=9, target_vocabulary=9).parameters())

    size = build()
    monkeypatch.setattr("mtkit.memory.available_bytes", lambda: size)
    assert build() == size, "tied weights count once"
    monkeypatch.setattr("mtkit.memory.available_bytes", lambda: size - 1)
    with pytest.raises(MtkitError, match=r"are available here: lower model\.d_model"):
        build()
    monkeypatch.setattr(nn.Embedding, "reset_parameters", lambda self: torch.empty(1 << 50))
    with pytest.raises(MtkitError, match="the model's weights do not fit in memory: lower "):
        build()


@pytest.mark.parametrize("architecture", ["transformer", "rnn"])
def test_a_name_that_no_role_takes_is_checked_too(architecture: str) -> None:
    roles = {"cross": "full"} | ({"encoder": "full", "decoder": "full"} if architecture == "transformer" else {})
    recipe = make_recipe({"model": {"architecture": architecture}, "attention": {"name": "bannd", **roles}})
    with pytest.raises(MtkitError, match="did you mean 'band'"):
        build_model(recipe, source_vocabulary=32, target_vocabulary=32)
