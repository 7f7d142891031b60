"""Sub-layers in int8 by compiled loops: the same bits as by the modules that they replace, and layer norm."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention import reorder
from mtkit.attention.kernels.cpu.product import has_byte_tiles
from mtkit.model import compiled_steps
from mtkit.model.build import build_model
from mtkit.model.compiled_steps import CompiledAttentions, CompiledFeedForward, compiled_methods, compiled_norm
from mtkit.model.decoding_products import products
from mtkit.model.sublayers import LayerNorm
from mtkit.model.transformer import Transformer
from mtkit.recipe import load_recipe

pytestmark = pytest.mark.skipif(not has_byte_tiles(), reason="the loops need AVX2, or AVX-512 with VNNI")


def network(attention: str = "full", **changes: Any) -> Transformer:
    sizes = {"d_model": 40, "heads": 2, "feed_forward": 72, "encoder_layers": 1, "decoder_layers": 2, "max_length": 64}
    recipe = load_recipe(None, {"model": sizes | changes, "attention": {"decoder": attention}})
    net = build_model(recipe, source_vocabulary=40, target_vocabulary=40).eval()
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return net


@torch.no_grad()
def logits(net: Transformer, segments: int, hypotheses: int, steps: int = 4, padded: bool = True) -> Tensor:
    """The logits (steps, B, N, V) of a beam that branches off after its first step."""
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(4, 40, (segments, 9), generator=generator)
    valid = torch.arange(9) < torch.randint(0, 10, (segments, 1), generator=generator) if padded else None
    found = []
    with products(net, torch.int8), torch.inference_mode():
        state = net.start(net.encode(source, valid), hypotheses=1)
        state = reorder(state, torch.zeros(segments, hypotheses, dtype=torch.long))
        for _ in range(steps):
            token = torch.randint(4, 40, (segments, hypotheses), generator=generator)
            some, state, _ = net.step(token, state)
            found.append(some.whole())
    return torch.stack(found)


@pytest.fixture
def only_norms(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Leave feed-forward layers and attentions to the modules from now on."""

    def some(module: nn.Module, int8_of: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
        return compiled_methods(module, int8_of) if isinstance(module, LayerNorm) else iter(())

    return lambda: monkeypatch.setattr(compiled_steps, "compiled_methods", some)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize(
    ("segments", "hypotheses", "padded"), [(1, 1, False), (3, 2, True), (7, 5, True), (60, 3, True), (200, 1, True)]
)
def test_loops_and_modules_have_the_same_bits(
    norm: str, segments: int, hypotheses: int, padded: bool, only_norms: Callable[[], None]
) -> None:
    net = network(norm=norm)
    found = logits(net, segments, hypotheses, padded=padded)
    only_norms()
    assert found.isfinite().all()
    assert torch.equal(found, logits(net, segments, hypotheses, padded=padded))


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    net = network()
    alone = logits(net, 100, 2)
    torch.set_num_threads(2)
    assert torch.equal(alone, logits(net, 100, 2))


def calls(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> tuple[int, int]:
    """The attention and feed-forward sub-layers that loops compute in a step of two layers, and an encoder layer."""
    from mtkit.attention.kernels.cpu import sublayer_loops

    count = {"attend": 0, "feed_forward": 0}

    def counted(name: str) -> None:
        loop = getattr(sublayer_loops, name)

        def call(*arguments: Any) -> None:
            count[name] += 1
            loop(*arguments)

        monkeypatch.setattr(sublayer_loops, name, call)

    for name in count:
        counted(name)
    logits(network(**changes), 3, 2, steps=1)
    return count["attend"], count["feed_forward"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (4, 3)),
        ({"activation": "gelu"}, (4, 0)),
        ({"attention": "average"}, (2, 3)),
        ({"norm": "pre", "reversible": True}, (0, 0)),
    ],
)
def test_loops_compute_what_they_can(
    changes: dict[str, Any], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert calls(monkeypatch, changes) == expected


def test_steps_whose_weights_are_needed_are_left_to_the_modules() -> None:
    net = network()
    source, token = torch.randint(4, 40, (3, 9)), torch.randint(4, 40, (3, 2))
    with products(net, torch.int8), torch.inference_mode():
        state = net.start(net.encode(source), hypotheses=2)
        _, state, weights = net.step(token, state, need_weights=True)
        after, _, _ = net.step(token, state)
    assert weights is not None
    assert weights.sum(-1).allclose(torch.ones(3, 2))
    assert after.whole().isfinite().all()


def test_a_bad_hypothesis_does_not_change_others() -> None:
    net = network()
    source, token = torch.randint(4, 40, (2, 9)), torch.randint(4, 40, (2, 3))
    found = []
    for value in (0.0, float("nan")):
        with products(net, torch.int8), torch.inference_mode():
            state = net.start(net.encode(source), hypotheses=3)
            _, state, _ = net.step(token, state)
            layer = net.decoder[0]
            x = torch.ones(2, 3, 40)
            x[0, 1] = value
            stack = compiled_steps.StackPass()
            _, after, _ = layer.attend_step("decoder", x, state["layer0"]["self"], stack)
            # the products of the modules multiply all rows by weights, those of hidden rows by 0
            layer.__dict__.pop("attend_step")
            x = torch.ones(2, 3, 40)
            found.append(layer.attend_step("decoder", x, after, stack, need_weights=True)[0])
    good = torch.tensor([[True, False, True], [True, True, True]])
    assert torch.equal(found[0][good], found[1][good])


@pytest.mark.parametrize("width", [1, 5, 64, 257])
def test_the_norm_is_layer_norm(width: int) -> None:
    norm = LayerNorm(width)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(3, 7, width) * 3 + 5
    weight, bias = norm.weight.double(), norm.bias.double()
    exact = F.layer_norm(x.double(), (width,), weight, bias, norm.eps)
    assert torch.allclose(compiled_norm(norm)(x).double(), exact, rtol=2e-5, atol=2e-5)


def test_nan_stays(only_norms: Callable[[], None]) -> None:
    net = network()
    with products(net, torch.int8), torch.inference_mode():
        layer, residual = net.decoder[0].feed_forward, net.decoder[0].feed_forward_residual
        assert isinstance(layer.__dict__["around"], CompiledFeedForward)
        assert isinstance(net.decoder[0].__dict__["attend_step"], CompiledAttentions)
        x = torch.randn(4, 1, 40)
        x[2, 0, 7] = float("nan")
        found = layer.around(x, residual)
    assert found.isnan().all(-1).flatten().tolist() == [False, False, True, False]
    assert "around" not in layer.__dict__
