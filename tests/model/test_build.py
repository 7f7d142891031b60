"""A model from a recipe."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mtkit.errors import MtkitError
from mtkit.model.build import build_model
from mtkit.recipe import make_recipe

SIZES = {"d_model": 16, "heads": 2, "feed_forward": 16, "encoder_layers": 1, "decoder_layers": 1}


@pytest.mark.parametrize("attention", ["full", "performer", "routing", "synthesizer", "differential", "rnn"])
def test_weights_of_another_model_replace_everything_that_was_not_drawn(attention: str) -> None:
    architecture = {"architecture": "rnn"} if attention == "rnn" else {}
    chosen = {} if attention == "rnn" else {"encoder": attention}
    recipe = make_recipe({"model": SIZES | architecture, "attention": chosen})
    sizes = {"source_vocabulary": 32, "target_vocabulary": 32}
    trained, loaded = build_model(recipe, **sizes), build_model(recipe, **sizes, drawn=False)
    loaded.load_state_dict(trained.state_dict())
    for (name, one), (_, other) in zip(trained.named_buffers(), loaded.named_buffers(), strict=True):
        assert torch.equal(one, other), name
    source, target = torch.randint(4, 32, (2, 7)), torch.randint(4, 32, (2, 5))
    trained.eval(), loaded.eval()
    assert torch.equal(trained(source, target).hidden, loaded(source, target).hidden)


class Draws(TorchDispatchMode):
    """Context that collects the names of operators that draw random numbers into a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names |= {func.overloadpacket.__name__} & {"normal_", "uniform_"}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("drawn", "names"), [(True, {"normal_", "uniform_"}), (False, set())])
def test_no_number_is_drawn_for_weights_that_a_file_replaces(drawn: bool, names: set[str]) -> None:
    with Draws() as draws:
        build_model(make_recipe({"model": SIZES}), source_vocabulary=32, target_vocabulary=32, drawn=drawn)
    assert draws.names == names


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
