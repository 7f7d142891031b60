"""The whole model: sizes of the paper's models, padding, steps, tying, and taking over another model's weights."""

import copy
from typing import Any

import pytest
import torch

from mtkit.attention import Attention, reorder
from mtkit.errors import RecipeError
from mtkit.model.build import build_model
from mtkit.model.embedding import Sinusoidal
from mtkit.model.network import build_attention
from mtkit.model.transformer import Transformer
from mtkit.recipe import load_recipe
from mtkit.text.tokenizer import BREAK

SMALL = {"d_model": 16, "heads": 2, "feed_forward": 24, "max_length": 32}


def model(**overrides: object) -> Transformer:
    recipe = load_recipe(None, {"model": SMALL, **overrides})
    return build_model(recipe, source_vocabulary=24, target_vocabulary=24).eval()


def logits(net: Transformer, source: torch.Tensor, target: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return net(source, target, source_valid=valid).hidden @ net.output_weight.T


@pytest.mark.parametrize(("preset", "millions"), [("base", 63.1), ("big", 214.2)])
def test_presets_are_the_papers_models(preset: str, millions: float) -> None:
    with torch.device("meta"):
        net = build_model(load_recipe(None, {"preset": preset}), source_vocabulary=37_000, target_vocabulary=37_000)
    assert round(sum(each.numel() for each in net.parameters()) / 1e6, 1) == millions


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize(
    "positions",
    [
        {"positions": "sinusoidal"},
        {"positions": "learned"},
        {"positions": "sinusoidal", "position_width": 6},
        {"positions": "learned", "position_width": 5, "reversible": True},
        {"positions": "learned", "sentence_positions": True},
        {"positions": "sinusoidal", "position_width": 6, "sentence_positions": True},
    ],
)
def test_steps_are_the_whole_and_padding_changes_nothing(norm: str, positions: dict[str, Any]) -> None:
    net = model(model={**SMALL, **positions, "norm": "pre" if "reversible" in positions else norm})
    source, target = torch.randint(5, 24, (3, 7)), torch.randint(5, 24, (3, 6))
    source[0, 2] = target[0, 1] = target[2, 4] = BREAK
    valid = torch.arange(7) < torch.tensor([[7], [4], [2]])
    whole = logits(net, source, target, valid)
    torch.testing.assert_close(whole[1:2], logits(net, source[1:2, :4], target[1:2], valid[1:2, :4]), atol=1e-5, rtol=0)
    state = net.start(net.encode(source, valid), hypotheses=2)
    for position in range(6):
        step, state, weights = net.step(target[:, position, None].expand(-1, 2), state, need_weights=True)
        torch.testing.assert_close(step.whole(), whole[:, position, None].expand(-1, 2, -1), atol=1e-4, rtol=0)
        torch.testing.assert_close(weights.sum(-1), torch.ones(target.shape[0], 2))
        if position == 2:  # drop a segment, turn the others round, swap hypotheses
            kept = torch.tensor([2, 0])
            state = reorder(reorder(state, kept), torch.tensor([[1, 0], [1, 1]]))
            whole, target = whole[kept], target[kept]


def test_concatenated_positions_take_channels_from_the_embeddings() -> None:
    net = model(model={**SMALL, "position_width": 6})
    assert net.settings.tie == "none"
    assert [tuple(side.tokens.weight.shape) for side in (net.source_embedding, net.target_embedding)] == [(24, 10)] * 2
    assert net.output_weight.shape == (24, 16)
    states = net.state_dict()
    assert all(not name.endswith("positions.table") for name in states)
    encoded = net.source_embedding(torch.tensor([[7, 7, 9]]))
    assert torch.equal(encoded[0, 0, :10], encoded[0, 1, :10])
    assert torch.equal(encoded[0, 0, :10], states["source_embedding.tokens.weight"][7] * 10**0.5)
    assert torch.equal(encoded[0, :, 10:], Sinusoidal(32, 6).table[:3])


def test_a_later_target_token_changes_nothing_earlier() -> None:
    net = model()
    source, target, valid = (
        torch.randint(4, 24, (2, 5)),
        torch.randint(4, 24, (2, 6)),
        torch.ones(2, 5, dtype=torch.bool),
    )
    other = target.clone()
    other[:, 3] = (other[:, 3] - 3) % 20 + 4
    before, after = logits(net, source, target, valid), logits(net, source, other, valid)
    assert torch.equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] - after[:, 3:]).abs().amax((0, 2)).min() > 1e-4


def test_tied_weights_are_one_parameter_and_stay_so() -> None:
    net = model()
    assert net.output_weight is net.source_embedding.tokens.weight is net.target_embedding.tokens.weight
    again = copy.deepcopy(net)
    again.load_state_dict(net.state_dict())
    assert again.output_weight is again.source_embedding.tokens.weight
    two_way = model(model={**SMALL, "tie": "decoder"})
    assert two_way.output_weight is two_way.target_embedding.tokens.weight
    assert two_way.output_weight is not two_way.source_embedding.tokens.weight
    counts = [sum(p.numel() for p in model(model={**SMALL, "tie": t}).parameters()) for t in ("none", "decoder", "all")]
    assert counts[0] - counts[1] == counts[1] - counts[2] == 24 * 16


def test_the_seed_alone_decides_and_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = model(), model(), model(seed=2)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.output_weight, other.output_weight)


def test_another_mechanism_goes_on_from_a_full_models_weights() -> None:
    full, wide_band = model(), model(seed=2, attention={"name": "band", "options": {"window_radius": 32}})
    assert wide_band.adopt(full.state_dict()).unfit == []
    source, target, valid = (
        torch.randint(4, 24, (2, 5)),
        torch.randint(4, 24, (2, 6)),
        torch.ones(2, 5, dtype=torch.bool),
    )
    torch.testing.assert_close(
        logits(wide_band, source, target, valid), logits(full, source, target, valid), atol=1e-5, rtol=0
    )


def test_three_way_tying_needs_one_vocabulary() -> None:
    with pytest.raises(RecipeError, match="one vocabulary"):
        model(data={"tokenizer": {"joint": False}})


@pytest.mark.parametrize("tie", ["all", "none"])
def test_an_output_bias_is_added_to_the_logits_of_training_search_and_shortlists(tie: str) -> None:
    net = model(model={**SMALL, "output_bias": True, "tie": tie})
    assert not net.output_bias.any()
    torch.nn.init.normal_(net.output_bias)
    hidden, pieces = torch.randn(3, 16), torch.tensor([0, 5, 23])
    expected = hidden @ net.output_weight.T + net.output_bias
    rows, matrix = net.factors(hidden)
    torch.testing.assert_close(rows @ matrix.T, expected)
    torch.testing.assert_close(net.logits(hidden), expected)
    torch.testing.assert_close(net.logits_of(pieces)(hidden), expected[:, pieces])
    (rows @ matrix.T).square().sum().backward()
    torch.testing.assert_close(net.output_bias.grad, 2 * expected.sum(0))


@torch.no_grad()
def test_steps_get_what_the_encoder_and_the_layer_below_carry() -> None:
    net = model(model={**SMALL, "encoder_layers": 2, "decoder_layers": 2}, attention={"name": "luna"})
    source, target, valid = torch.randint(4, 24, (2, 7)), torch.randint(4, 24, (2, 5)), torch.ones(2, 7).bool()
    whole, state = logits(net, source, target, valid), net.start(net.encode(source, valid))
    for position in range(5):
        step, state, _ = net.step(target[:, position, None], state)
        torch.testing.assert_close(step.whole(), whole[:, position, None], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("role", "limits"), [("encoder", (9, 32)), ("cross", (9, 32)), ("decoder", (32, 9))])
def test_the_shortest_limit_of_an_attention_is_that_of_its_side(
    role: str, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(name: str, *given: object, **site: object) -> Attention:
        attention = build_attention(name, *given, **site)
        attention.longest = 9 if given[0] == role else None
        return attention

    monkeypatch.setattr("mtkit.model.network.build_attention", build)
    net = model()
    assert (net.longest_source, net.longest_target) == limits
