"""Low-rank adapters against the equation, merged against unmerged, in mechanisms of every kind."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtkit.attention import mechanisms
from mtkit.errors import RecipeError
from mtkit.model.adaptation import AdaptedLinear, adapt, merged_in_place, merged_weights
from mtkit.model.build import build_model
from mtkit.model.network import Network
from mtkit.recipe.settings import LoraSettings
from tests.training.conftest import tiny

ALL = ("query", "key", "value", "output", "feed_forward")


def network(attention: dict[str, Any] | None = None, **model: Any) -> Network:
    recipe = tiny(model={"dropout": 0.0, "max_length": 64, **model}, attention=attention or {})
    return build_model(recipe, source_vocabulary=24, target_vocabulary=24)


def moved(model: Network) -> Network:
    """With adapters that are not zero."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def logits(model: Network, source: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        return model.logits(model(source, target).hidden)


def tokens(length: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    source, target = (torch.randint(5, 24, (3, length), generator=generator) for _ in range(2))
    return source, target


@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (12.0, 4.0)])
def test_the_equation_in_float64(alpha: float | None, scale: float) -> None:
    torch.manual_seed(0)
    base = nn.Linear(5, 7).double()
    layer = AdaptedLinear(base, LoraSettings(rank=3, alpha=alpha), torch.Generator().manual_seed(1))
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    assert torch.equal(layer(x), base(x))
    with torch.no_grad():
        layer.lora_b.normal_()
    found = layer(x)
    for row in range(2):
        for position in range(4):
            for out in range(7):
                low = [sum(layer.lora_a[r, i] * x[row, position, i] for i in range(5)) for r in range(3)]
                delta = scale * sum(layer.lora_b[out, r] * low[r] for r in range(3))
                wanted = sum(base.weight[out, i] * x[row, position, i] for i in range(5)) + base.bias[out] + delta
                torch.testing.assert_close(found[row, position, out], wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.merged()(x), found, rtol=1e-12, atol=1e-12)


def test_a_is_drawn_with_the_scale_of_its_input_and_b_is_zero() -> None:
    layer = AdaptedLinear(nn.Linear(400, 30), LoraSettings(rank=64), torch.Generator().manual_seed(1))
    assert abs(float(layer.lora_a.detach().std()) * 400**0.5 - 1.0) < 0.02
    assert not layer.lora_b.any()


def test_the_number_of_trained_parameters() -> None:
    model = network()  # one layer on each side, width 16, inner width 32
    adapt(model, LoraSettings(rank=3, targets=("query", "value")), seed=1)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert sum(each.numel() for each in trained.values()) == 3 * 2 * (3 * 16 + 16 * 3)
    assert {name.rpartition(".")[2] for name in trained} == {"lora_a", "lora_b"}
    model = network(activation="swiglu")
    adapt(model, LoraSettings(rank=2, targets=("feed_forward",)), seed=1)
    assert sum(each.numel() for each in model.parameters() if each.requires_grad) == 2 * 3 * 2 * (16 + 32)


MECHANISMS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"name": "full"}, ALL),
    ({"encoder": "longformer", "decoder": "longformer"}, ALL),
    ({"encoder": "multi-query", "decoder": "multi-query", "cross": "multi-query"}, ALL),
    ({"encoder": "talking-heads", "decoder": "talking-heads", "cross": "talking-heads"}, ALL),
    ({"encoder": "collaborative", "cross": "collaborative"}, ALL),
    ({"encoder": "poolingformer", "decoder": "linear"}, ALL),
    ({"encoder": "low-rank-band", "decoder": "delta"}, ALL),
    ({"encoder": "etc", "decoder": "reformer"}, ("query", "value", "output")),
    ({"encoder": "star", "decoder": "hard-coded"}, ("value", "output")),
    ({"options": {"positions": "rotary"}}, ALL),
]


@pytest.mark.parametrize(("attention", "targets"), MECHANISMS, ids=lambda each: "-".join(map(str, each)))
def test_merged_weights_compute_what_adapters_do(attention: dict[str, Any], targets: tuple[str, ...]) -> None:
    settings = LoraSettings.model_validate({"rank": 2, "alpha": 3, "targets": targets})
    plain, adapted = network(attention).eval(), network(attention).eval()
    plain.requires_grad_(False)  # for which some kernels are others
    adapt(adapted, settings, seed=1)
    before, now = logits(plain, *tokens()), logits(adapted, *tokens())
    assert torch.equal(before, now)
    moved(adapted)
    changed = logits(adapted, *tokens())
    assert not torch.allclose(changed, before, atol=1e-3)
    plain.load_state_dict(merged_weights(adapted.state_dict(), settings))
    torch.testing.assert_close(logits(plain, *tokens()), changed, rtol=1e-4, atol=1e-5)
    with merged_in_place(adapted):
        assert torch.equal(logits(adapted, *tokens()), logits(plain, *tokens()))
        assert not [each for each in adapted.modules() if isinstance(each, AdaptedLinear)]
    assert torch.equal(logits(adapted, *tokens()), changed)


@pytest.mark.parametrize(("attention", "targets"), MECHANISMS, ids=lambda each: "-".join(map(str, each)))
def test_gradients_reach_adapters_alone(attention: dict[str, Any], targets: tuple[str, ...]) -> None:
    model = network(attention).train()
    adapt(model, LoraSettings.model_validate({"rank": 2, "targets": targets}), seed=1)
    output = moved(model)(*tokens())
    (output.hidden.square().sum() + sum(output.losses.values())).backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.endswith(("lora_a", "lora_b"))
        assert (parameter.grad is not None and bool(parameter.grad.any())) == parameter.requires_grad, name


def test_reversible_layers_train_adapters() -> None:
    found = []
    for reversible in (True, False):
        model = network(reversible=reversible).train()
        adapt(model, LoraSettings(rank=2, targets=ALL), seed=1)
        moved(model)(*tokens()).hidden.square().sum().backward()
        found.append([name for name, each in model.named_parameters() if each.grad is not None and each.grad.any()])
    assert found[0] == found[1]


def test_adapters_are_a_function_of_the_seed_and_draw_from_no_global_generator() -> None:
    torch.manual_seed(9)
    before = torch.get_rng_state()
    states = []
    for seed in (1, 1, 2):
        model = network()
        adapt(model, LoraSettings(), seed)
        states.append(model.state_dict()["encoder.0.attention.q_proj.lora_a"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("attention", "target", "message"),
    [
        ({"decoder": "average"}, "query", "average in the decoder role has no query projection; it has: "),
        ({"encoder": "reformer"}, "key", "reformer in the encoder role has no key projection; it has: query, value"),
        ({"encoder": "synthesizer"}, "query", "synthesizer in the encoder role has no query projection"),
    ],
)
def test_a_mechanism_without_the_projection_is_refused_by_name(
    attention: dict[str, Any], target: str, message: str
) -> None:
    model = network(attention)
    with pytest.raises(RecipeError, match=message):
        adapt(model, LoraSettings.model_validate({"targets": [target]}), seed=1)
    assert all(each.requires_grad for each in model.parameters())


def test_the_rnn_has_attention_to_adapt_and_no_feed_forward() -> None:
    recipe = tiny(model={"architecture": "rnn", "dropout": 0.0})
    with pytest.raises(RecipeError, match="the rnn has no feed_forward"):
        adapt(build_model(recipe, source_vocabulary=24, target_vocabulary=24), LoraSettings(targets=ALL), seed=1)
    model = build_model(recipe, source_vocabulary=24, target_vocabulary=24)
    adapt(model, LoraSettings(), seed=1)
    assert {name.partition(".")[0] for name, each in model.named_parameters() if each.requires_grad} == {"attention"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(mechanisms()))
def test_every_mechanism_computes_with_its_adapters(name: str) -> None:
    """In each of its roles, with every projection that it has: those of no effect would be lost in training."""
    roles = {role: name for role in mechanisms()[name].roles}
    for target in ("query", "key", "value", "output"):
        model = network(roles).train()
        try:
            adapt(model, LoraSettings.model_validate({"targets": [target]}), seed=1)
        except RecipeError:
            continue
        output = moved(model)(*tokens(20))
        (output.hidden.square().sum() + sum(output.losses.values())).backward()
        silent = [n for n, each in model.named_parameters() if n.endswith("lora_a") and each.grad is None]
        assert not silent, silent


def test_a_projection_that_two_attentions_share_has_one_adapter() -> None:
    model = network(encoder_layers=2)
    one, other = [attention for name, attention in model.attentions() if name.startswith("encoder")]
    other.q_proj = one.q_proj
    adapt(model, LoraSettings(targets=("query",)), seed=1)
    assert isinstance(one.q_proj, AdaptedLinear)
    assert other.q_proj is one.q_proj
