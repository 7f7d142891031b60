import re
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mtkit.attention import mechanisms
from mtkit.data.batches import make_batch
from mtkit.data.prepared import Prepared
from mtkit.errors import MtkitError
from mtkit.experiments.cost import Budget, matched, parameters_of, state_bytes
from mtkit.model.build import build_model
from mtkit.model.network import Network
from mtkit.recipe import Recipe, make_recipe, merged
from mtkit.training import flops
from mtkit.training.data_loader import DataLoader
from mtkit.training.device_batch import DeviceBatch
from mtkit.training.flops import FORMULAS, flops_of, flops_per_token, without_onednn
from mtkit.training.world import World

RNN = {"architecture": "rnn"}


@pytest.fixture(autouse=True)
def _two_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """All mechanisms are counted here: two batches of each are enough."""
    monkeypatch.setattr(flops, "BATCHES", 2)


def tiny(**groups: dict[str, Any]) -> Recipe:
    """A small recipe with these groups laid over it."""
    sizes = {"d_model": 32, "heads": 2, "feed_forward": 32, "encoder_layers": 1, "decoder_layers": 1}
    return make_recipe(merged({"model": sizes, "training": {"batch_tokens": 200}}, groups))


def model_of(recipe: Recipe) -> Network:
    return build_model(recipe, source_vocabulary=50, target_vocabulary=50).eval()


class Products(TorchDispatchMode):
    """Gathers the operations whose names are those of products."""

    def __init__(self) -> None:
        super().__init__()
        self.met: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if re.search(r"mm_?$|mv|dot|conv|solve|inv|bilinear|rnn|lstm", func.overloadpacket.__name__):
            self.met.add(func.overloadpacket)
        return func(*args, **(kwargs or {}))


def three_forward_passes(recipe: Recipe, prepared: Prepared) -> float:
    """The products of the forward pass three times per target token, of the batches that are counted."""
    model = build_model(
        recipe,
        source_vocabulary=prepared.tokenizers.source.size,
        target_vocabulary=prepared.tokenizers.target.size,
    )
    loader, operations, tokens = DataLoader(recipe, prepared, 1024, World("cpu")), 0, 0
    for rows in loader.spread(flops.BATCHES):
        batch = DeviceBatch.of(make_batch(loader.side(0), rows, 1024), torch.device("cpu"))

        def forward(batch: DeviceBatch = batch) -> None:
            _ = batch.predicting(model(**batch.inputs).hidden) @ model.output_weight.T

        with without_onednn(), torch.no_grad():
            operations += 3 * flops_of(forward)
        tokens += len(batch.target)
    return operations / tokens


CHOICES = {"clustered", "improved-clustered", "hard-coded", "performer", "sac"}
"""Their choices, fixed weights or random features have no gradient, so that the backward pass costs less."""


@pytest.mark.parametrize("name", [*mechanisms(), "gru", "lstm"])
def test_training_costs_what_three_forward_passes_cost(name: str, prepared: Prepared) -> None:
    """No product is hidden in a compiled loop, and none is an operation that the counter does not know."""
    groups = {"model": RNN | {"cell": name}} if name in ("gru", "lstm") else {"attention": {"name": name}}
    recipe = tiny(**groups, training={"batch_tokens": 600})
    with Products() as products:
        counted = flops_per_token(recipe, prepared)
    assert products.met <= {*flop_registry, *FORMULAS}
    lowest = 0.6 if name in CHOICES else 0.99  # no gradient flows to the zeros that begin an LSTM
    # rows of logits are rounded up, and fused kernels compute scores again
    assert lowest < counted / three_forward_passes(recipe, prepared) < 1.2


def test_the_state_of_full_holds_a_key_and_a_value_of_each_token() -> None:
    width, layers = 32, 2
    model = model_of(tiny(model={"decoder_layers": layers}))
    for tokens, source in ((1, 1), (100, 100), (100, 7), (37, 200)):
        rows = 2 * width * 4 * (tokens + source)
        marks = (8 + 1) * tokens  # each row's position, and whether a hypothesis sees it
        assert state_bytes(model, tokens, source) == layers * (rows + marks)


def test_the_state_of_a_window_and_of_sums_does_not_grow() -> None:
    band = {"decoder": "band", "options": {"decoder.window_radius": 5}}
    model = model_of(tiny(attention=band))
    assert state_bytes(model, 100, 10) == state_bytes(model, 1000, 10) == 2 * 32 * 4 * (6 + 10)
    linear = model_of(tiny(attention={"decoder": "linear"}))
    sums = 2 * (16 * 16 + 16) * 4 + 8  # of two heads: features by values, and features; their number
    rows = 8 * (2 * (16 + 16 + 1) * 4 + 8 + 1)  # the latest ones, with their position and mask
    assert state_bytes(linear, 100, 10) == state_bytes(linear, 1000, 10) == sums + rows + 2 * 32 * 4 * 10


def test_the_state_of_the_rnn_is_its_cells_and_the_source() -> None:
    model = model_of(tiny(model=RNN | {"cell": "lstm"}))
    few, many = (state_bytes(model, tokens, 10) for tokens in (3, 1000))
    assert few == many
    longer = state_bytes(model, 3, 11)
    assert few is not None
    assert longer is not None
    assert few == 2 * 32 * 4 + 10 * (longer - few)


def test_a_length_that_the_model_does_not_take_has_no_state() -> None:
    model = model_of(tiny(model={"max_length": 100}))
    assert state_bytes(model, 100) == 2 * 2 * 32 * 4 * 100 + 9 * 100
    assert state_bytes(model, 101, 100) is None
    assert state_bytes(model, 100, 101) is None


def test_the_state_leaves_model_and_random_numbers_as_they_are() -> None:
    model = model_of(tiny(model={"dropout": 0.5})).train()
    before = torch.get_rng_state()
    assert state_bytes(model, 5) == state_bytes(model, 5)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", mechanisms())
def test_every_mechanism_has_a_state_at_a_hundred_tokens(name: str) -> None:
    model = model_of(tiny(attention={"name": name}))
    held = state_bytes(model, 100)
    assert held is not None
    widest = 9 if name == "fixed-head-size" else 4  # its heads are as wide as the model; sac keeps edges
    assert 0 < held < widest * 2 * 2 * 32 * 4 * 100


def width_of(recipe: Recipe) -> int:
    return recipe.model.feed_forward


@pytest.mark.parametrize("name", mechanisms())
def test_every_mechanism_matches_parameters(name: str, prepared: Prepared) -> None:
    first, recipe = tiny(model={"feed_forward": 2048}), tiny(attention={"name": name})
    target = parameters_of(first, prepared)
    fixed = parameters_of(tiny(model={"feed_forward": 1}, attention={"name": name}), prepared)
    if fixed > 1.01 * target:
        with pytest.raises(MtkitError, match=rf"^{name} cannot be matched: .* its other layers already cost more"):
            matched(recipe, first, "parameters", prepared)
        return
    found = matched(recipe, first, "parameters", prepared)
    assert abs(parameters_of(found, prepared) - target) <= 0.01 * target
    assert width_of(found) % 8 == 0
    assert found.model_copy(update={"model": recipe.model}) == recipe


@pytest.mark.parametrize("name", ["fixed-head-size", "sac", "longformer"])
def test_mechanisms_match_training_flops(name: str, prepared: Prepared) -> None:
    first, recipe = tiny(model={"feed_forward": 4096}), tiny(attention={"name": name})
    found = matched(recipe, first, "flops", prepared)
    target = flops_per_token(first, prepared)
    assert abs(flops_per_token(found, prepared) - target) <= 0.01 * target


def test_an_entry_of_equal_cost_keeps_its_width(prepared: Prepared) -> None:
    for what, width in product(("parameters", "flops"), (32, 30)):
        first = tiny(model={"feed_forward": width})
        budget: Budget = "flops" if what == "flops" else "parameters"
        assert matched(first, first, budget, prepared) == first


def test_a_small_model_may_need_a_width_that_is_no_multiple_of_eight(prepared: Prepared) -> None:
    small = {"d_model": 32, "feed_forward": 28, "encoder_layers": 3, "decoder_layers": 3, "tie": "all"}
    first, recipe = tiny(model=small), tiny(model=small | {"feed_forward": 500})
    target = parameters_of(first, prepared)
    assert abs(parameters_of(tiny(model=small | {"feed_forward": 32}), prepared) - target) > 0.01 * target
    assert width_of(matched(recipe, first, "parameters", prepared)) == 28


def test_what_cannot_be_matched_is_named(prepared: Prepared) -> None:
    first = tiny()
    with pytest.raises(MtkitError, match=r"^fixed-head-size cannot be .* model.feed_forward = 1, .* already cost more"):
        matched(tiny(attention={"name": "fixed-head-size"}), first, "parameters", prepared)
    with pytest.raises(MtkitError, match=r"^rnn cannot be matched: .*the rnn has no feed-forward sub-layer"):
        matched(tiny(model=RNN), first, "parameters", prepared)
    assert matched(tiny(model=RNN), tiny(model=RNN), "parameters", prepared) == tiny(model=RNN)
