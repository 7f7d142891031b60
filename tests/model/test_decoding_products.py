"""Prepared products: what they compute, how long they are kept, and that nothing of them stays in the model."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mtkit.attention import State, build
from mtkit.attention.bases.feature_attention import FeatureAttention
from mtkit.attention.bases.product_attention import ProductAttention
from mtkit.attention.kernels.cpu import product
from mtkit.attention.kernels.cpu.product import Float32, Low, Tiled, in_few_counts
from mtkit.attention.kernels.cpu.product_tiles import FLOATS, has
from mtkit.attention.states import tensors_of
from mtkit.model import decoding_products
from mtkit.model.build import build_model
from mtkit.model.decoding_products import products
from mtkit.model.transformer import Transformer
from mtkit.recipe import load_recipe

DTYPES = [torch.float32, torch.bfloat16, torch.int8]


def network(attention: str = "full") -> Transformer:
    settings = {"model": {"d_model": 32, "heads": 2, "feed_forward": 64}, "attention": {"name": attention}}
    return build_model(load_recipe(None, settings), source_vocabulary=40, target_vocabulary=40).eval()


def logits(net: Transformer) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    source, token = (torch.randint(4, 40, shape, generator=generator) for shape in ((6, 9), (6, 2)))
    state = net.start(net.encode(source), hypotheses=2)
    for _ in range(3):
        found, state, _ = net.step(token, state)
    return found.whole()


@torch.no_grad()
@pytest.mark.parametrize(
    "attention", ["full", "multi-query", "longformer", "average", "reformer", "native-sparse", "sac", "gated-delta"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_is_near_the_plain_one(attention: str, dtype: torch.dtype) -> None:
    net = network(attention)
    exact = logits(net)
    with products(net, dtype):
        found = logits(net)
    assert found.dtype == torch.float32
    off = (exact - found).norm() / exact.norm()
    assert off < (1e-5 if dtype == torch.float32 else 0.05)


@torch.no_grad()
@pytest.mark.parametrize("name", ["reformer", "native-sparse", "sac", "gated-delta"])
def test_maps_on_which_no_choice_depends_are_rounded(name: str) -> None:
    layer = build(name, role="decoder", d_model=32, heads=2)
    assert layer.roundable <= {child for child, _ in layer.named_children()}
    with products(layer, torch.bfloat16):
        products_of = {
            path: vars(part).get("forward") for path, part in layer.named_modules() if type(part) is nn.Linear
        }
    assert {path for path, product in products_of.items() if isinstance(product, Low)} == layer.roundable


@torch.no_grad()
@pytest.mark.parametrize("faster", [Float32, Tiled])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_maps_that_must_not_be_rounded_are_multiplied_by_the_faster_float32(
    dtype: torch.dtype, faster: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding_products, "_float32", lambda *_: faster)
    layer = build("gated-delta", role="decoder", d_model=32, heads=2).eval()
    tokens, maps = torch.randn(3, 7, 32), (layer.q_proj, layer.k_proj, layer.v_proj)
    expected = [linear(tokens) for linear in maps]
    with products(layer, dtype):
        assert isinstance(vars(layer.q_proj)["forward"], faster)
        found = *(linear(tokens) for linear in maps), *layer.projected(tokens, *maps)
    torch.testing.assert_close(list(found), expected * 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "path"), [("performer", "directions"), ("rfa", "sigma"), ("rfa", "fixed"), ("sac", "")]
)
@torch.inference_mode()
def test_weights_of_loops_are_laid_out_again_after_a_change(name: str, path: str) -> None:
    with torch.inference_mode(False):
        layer = build(name, role="decoder", d_model=32, heads=2).eval()
        owner, changed = (layer, path) if path else (layer.predictor, "recurrent")
    with products(layer, torch.int8):
        first = owner.weights_of_loop()
        assert owner.weights_of_loop() is first
    with products(layer, torch.int8):
        assert owner.weights_of_loop() is first
    with torch.inference_mode(False), torch.no_grad():
        getattr(owner, changed).mul_(2)
    with products(layer, torch.int8):
        assert np.array_equal(owner.weights_of_loop(), 2 * first)


def attentions(net: Transformer) -> list[ProductAttention | FeatureAttention]:
    return [part for part in net.modules() if isinstance(part, ProductAttention | FeatureAttention)]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("attention", ["full", "multi-query", "group", "performer", "rfa"])
@pytest.mark.parametrize("hypotheses", [1, 3, 17])
@pytest.mark.parametrize("need_weights", [False, True])
def test_low_types_keep_keys_and_values_in_bfloat16(
    need_weights: bool, hypotheses: int, attention: str, dtype: torch.dtype
) -> None:
    """More than 16 hypotheses have a cache each; weights are computed without the loop that reads bfloat16."""
    net = network(attention)
    source, tokens = torch.randint(4, 40, (3, 9)), torch.randint(4, 40, (4, 3, hypotheses))
    valid = torch.arange(9) < torch.tensor([9, 5, 7])[:, None]

    def last() -> tuple[Tensor, State]:
        state = net.start(net.encode(source, valid), hypotheses=hypotheses)
        for token in tokens:
            found, state, _ = net.step(token, state, need_weights=need_weights)
        return found.whole(), state

    with products(net, dtype):
        found, state = last()
        assert torch.bfloat16 in {tensor.dtype for tensor in tensors_of(state)}
        for part in attentions(net):
            part.cache_type = None
        expected, state = last()
        assert torch.bfloat16 not in {tensor.dtype for tensor in tensors_of(state)}
    assert 0 < (found - expected).norm() < 0.02 * expected.norm()


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        maps = (torch.ops.aten.addmm, torch.ops.aten.linear, torch.ops.aten.mm, torch.ops.mkldnn._linear_pointwise)
        self.count += func.overloadpacket in maps
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_step_multiplies_a_layers_tokens_by_queries_keys_and_values_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_products, "tiles_float32", lambda: False)  # tiles are no operations of PyTorch's
    net = network()
    token, state = torch.full((6, 2), 5), net.start(net.encode(torch.full((6, 9), 7)), hypotheses=2)
    with _Products() as plain:
        _, state, _ = net.step(token, state)
    with products(net, torch.float32), _Products() as joint:
        net.step(token, state)
    assert joint.count == plain.count - 2 * len(net.decoder)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_afterwards_the_model_is_as_it_was(dtype: torch.dtype) -> None:
    net = network()
    before, attributes = logits(net), {name: set(each.__dict__) for name, each in net.named_modules()}
    with products(net, dtype):
        logits(net)
    with pytest.raises(KeyError), products(net, dtype):
        raise KeyError
    assert torch.equal(logits(net), before)
    assert {name: set(each.__dict__) for name, each in net.named_modules()} == attributes


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_have_changed_are_prepared_anew(dtype: torch.dtype) -> None:
    net = network()

    def found() -> Tensor:
        with products(net, dtype):
            return logits(net)

    before = found()
    assert torch.equal(found(), before)
    bias = net.get_parameter("decoder.0.self_attention.v_proj.bias")
    bias += 1
    once = found()
    assert not torch.equal(once, before)
    bias.data = bias.data - 1  # as a moving average of the weights does
    torch.testing.assert_close(found(), before)
    net.load_state_dict({name: torch.randn_like(value) for name, value in net.state_dict().items()})
    assert not torch.allclose(found(), before)


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimisers_step_is_a_change(fused: bool) -> None:
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
    for _ in range(2):
        with torch.no_grad(), products(net, torch.float32):
            logits(net)
        for each in net.parameters():
            each.grad = torch.randn_like(each)
        optimizer.step()
    with torch.no_grad():
        plain = logits(net)
        with products(net, torch.float32):
            torch.testing.assert_close(logits(net), plain)


def test_an_optimisers_step_frees_what_was_prepared() -> None:
    net = network()
    with products(net, torch.float32), torch.inference_mode():
        logits(net)
        prepared = weakref.ref(decoding_products._CACHE[net][torch.float32])
    assert prepared() is not None
    torch.optim.AdamW(net.parameters()).step()
    assert prepared() is None


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_prepared_serves_later_contexts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    made, prepared = list[object](), decoding_products._preparation

    def counted(*arithmetic: object) -> object:
        prepare = prepared(*arithmetic)  # type: ignore[arg-type]
        return lambda *weights: made.append(weights) or prepare(*weights)

    monkeypatch.setattr(decoding_products, "_preparation", counted)
    with products(net, dtype), torch.inference_mode():
        logits(net)
    once = len(made)
    assert once
    with products(net, torch.int8 if dtype == torch.float32 else torch.float32):  # one does not drop the other's
        pass
    made.clear()
    with products(net, dtype):
        logits(net)
    assert not made


def test_a_model_goes_with_its_last_user() -> None:
    net = network()
    with products(net, torch.int8), torch.inference_mode():
        logits(net)
    watched = weakref.ref(net)
    del net
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("count", [1, 15, 16, 17, 100, 545, 8191])
def test_rows_come_in_few_counts(count: int) -> None:
    rows = torch.randn(count, 3)
    wider = in_few_counts(rows, torch.float32)
    assert torch.equal(wider[:count], rows)
    assert len(wider) <= max(count + 15, count * 9 / 8)


def test_hundreds_of_counts_become_dozens() -> None:
    assert len({len(in_few_counts(torch.empty(count, 1), torch.int8)) for count in range(1, 513)}) <= 24


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("rows", [0, 7, 8, 20])
@pytest.mark.parametrize("bias", [True, False])
def test_many_rows_are_multiplied_in_blocks(
    dtype: torch.dtype, rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, x = nn.Linear(32, 24, bias), torch.randn(rows, 2, 32)
    with products(nn.Sequential(linear), dtype):
        whole = linear(x)
        monkeypatch.setattr("mtkit.attention.kernels.cpu.product.BLOCK", 16)
        parts = linear(x)
    assert whole.shape == (rows, 2, 24)
    torch.testing.assert_close(parts, whole)


@torch.no_grad()
@pytest.mark.parametrize("by", [Float32, Tiled, type(None)])
@pytest.mark.parametrize("threads", [1, 2])
def test_float32_is_float32_however_it_is_multiplied(by: type, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if by is Tiled and not has(FLOATS):
        pytest.skip("this processor has no such instruction")
    monkeypatch.setattr(decoding_products, "packs_float32", lambda: by is Float32)
    monkeypatch.setattr(decoding_products, "tiles_float32", lambda: by is Tiled)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    linear, x = nn.Linear(200, 24), torch.randn(37, 200)
    with products(nn.Sequential(linear), torch.float32):
        assert isinstance(linear.__dict__.get("forward"), by)
        found = linear(x)
    torch.testing.assert_close(found.double(), linear.double()(x.double()), atol=2e-6, rtol=0)


@pytest.mark.parametrize("capability", ["AVX2", "AVX512", "DEFAULT"])
def test_tiles_multiply_float32_where_that_was_measured(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert product.tiles_float32.__wrapped__() is (capability == "AVX2" and has(FLOATS))


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 7, 16, 40, 100])
def test_a_row_packed_in_float32_does_not_depend_on_those_beside_it(count: int) -> None:
    weight, x = torch.randn(300, 256), torch.randn(100, 256)
    packed = Float32(weight, torch.randn(300))
    assert torch.equal(packed(x[:count]), packed(x)[:count])
    some = torch.tensor([5, 299, 0])
    torch.testing.assert_close(packed.of(some)(x), packed(x)[:, some], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("vendor", "capability", "packs"),
    [("AuthenticAMD", "AVX512", True)]
    + [
        (vendor, capability, False)
        for vendor, capability in (("GenuineIntel", "AVX512"), ("AuthenticAMD", "AVX2"), ("", "AVX512"))
    ],
)
def test_onednn_multiplies_float32_where_mkl_leaves_units_idle(
    vendor: str, capability: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert product.packs_float32.__wrapped__() is packs


@torch.no_grad()
def test_a_layer_of_another_class_is_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    net = network()
    attention = net.decoder[0].self_attention
    attention.k_proj.__class__ = Doubled
    before = logits(net)
    with products(net, torch.float32):
        torch.testing.assert_close(logits(net), before)
