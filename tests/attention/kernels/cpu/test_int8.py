"""Linear layers in 8-bit integers: exact where rounding is, near elsewhere, and gone afterwards."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from mtkit.attention.kernels.cpu.int8 import Int8, has_whole_products
from mtkit.attention.kernels.cpu.product_tiles import BYTES, has
from mtkit.errors import MtkitError
from mtkit.model.build import build_model
from mtkit.model.decoding_products import products
from mtkit.model.transformer import Transformer
from mtkit.recipe import load_recipe


def network(attention: str = "full") -> Transformer:
    settings = {"model": {"d_model": 32, "heads": 2, "feed_forward": 64}, "attention": {"name": attention}}
    return build_model(load_recipe(None, settings), source_vocabulary=40, target_vocabulary=40).eval()


@torch.no_grad()
@pytest.mark.parametrize("by", ["tiles", "onednn", "pytorch"])
def test_whole_numbers_within_the_range_are_multiplied_exactly(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not {"tiles": has(BYTES), "onednn": has_whole_products(), "pytorch": True}[by]:
        pytest.skip("this processor has no such products")
    monkeypatch.setattr("mtkit.attention.kernels.cpu.int8.tiles_are_faster", lambda *_: by == "tiles")
    monkeypatch.setattr("mtkit.attention.kernels.cpu.int8.has_whole_products", lambda: by == "onednn")
    linear = nn.Linear(96, 24)
    weight = torch.randint(-63, 64, (24, 96)).float()
    weight[:, 0] = 63  # so that each output's scale is 1
    weight[1] = 63
    linear.weight.copy_(weight)
    x = torch.randint(-127, 128, (5, 7, 96)).float()
    x[..., 0] = 127.0  # so that each row's scale is 1
    x[1] = 127.0  # the largest sums of pairs, which 16 bits must hold
    expected = x.double() @ weight.double().t() + linear.bias.double()
    with products(nn.Sequential(linear), torch.int8):
        torch.testing.assert_close(linear(x).double(), expected, rtol=1e-6, atol=1e-2)
    weight[:, 0] *= 100  # now the others round to 0 or 1
    linear.weight.copy_(weight)
    with products(nn.Sequential(linear), torch.int8):
        assert not torch.allclose(linear(x), nn.functional.linear(x, linear.weight, linear.bias), rtol=1e-4)


@pytest.mark.skipif(not has_whole_products(), reason="this processor has no such products")
@pytest.mark.parametrize("instructions", ["ALL", "AVX512_CORE_VNNI", "AVX2_VNNI"])
def test_no_product_takes_the_reference_loop_of_onednn(instructions: str) -> None:
    """It gives the same numbers after thousands of times as long, on the processors whose instructions do not fit."""
    lines = (
        "import torch",
        "from mtkit.attention.kernels.cpu.int8 import Int8",
        "torch.set_num_threads(2)",  # one thread would take tiles
        "Int8.rounded(torch.randn(24, 32), None)(torch.randn(80, 32))",
    )
    settings = {**os.environ, "ONEDNN_VERBOSE": "1", "ONEDNN_MAX_CPU_ISA": instructions}
    command = [sys.executable, "-c", "; ".join(lines)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=settings).stdout
    taken = [line.split(",") for line in said.splitlines() if ",exec,cpu,matmul," in line]
    assert taken
    assert not [fields for fields in taken if any(field.startswith("ref") for field in fields)]


@torch.no_grad()
@pytest.mark.parametrize("attention", ["full", "longformer", "performer", "reformer"])
def test_a_step_is_near_that_in_float32(attention: str) -> None:
    net = network(attention)
    source, token = torch.randint(4, 40, (6, 9)), torch.randint(4, 40, (6, 2))
    exact = net.step(token, net.start(net.encode(source), hypotheses=2))[0].whole()
    with products(net, torch.int8):
        rounded = net.step(token, net.start(net.encode(source), hypotheses=2))[0].whole()
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).norm() < 0.05 * exact.norm()


@torch.no_grad()
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    linear, x = nn.Linear(32, 24), torch.randn(6, 9, 32)
    x[1] *= 1000
    x[2] = 0
    with products(nn.Sequential(linear), torch.int8):
        together = linear(x)
        assert torch.equal(torch.stack([linear(each) for each in x]), together)
    assert together.isfinite().all()
    torch.testing.assert_close(together[2], linear.bias.expand(9, -1))


@torch.no_grad()
@pytest.mark.parametrize("attention", ["full", "linear", "average"])
def test_a_segment_gives_alone_what_it_gives_in_any_batch(attention: str) -> None:
    net, source, token = network(attention), torch.randint(4, 40, (6, 9)), torch.randint(4, 40, (6, 2))
    source[3] = 39  # of another size after the embedding
    next(net.parameters())[39] *= 50  # the table of pieces
    with products(net, torch.int8):
        together = net.step(token, net.start(net.encode(source), hypotheses=2))[0].whole()
        for each in range(6):
            one = slice(each, each + 1)
            alone = net.step(token[one], net.start(net.encode(source[one]), hypotheses=2))[0].whole()
            torch.testing.assert_close(alone, together[one], rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_logits_of_some_pieces_are_those_of_all_at_their_places(bias: bool) -> None:
    net, pieces, hidden = network(), torch.tensor([0, 3, 7, 38]), torch.randn(5, 2, 32)
    net.output_bias = torch.nn.Parameter(torch.randn(40)) if bias else None
    torch.testing.assert_close(net.logits_of(pieces)(hidden), net.logits(hidden)[..., pieces])
    with products(net, torch.int8):
        rounded = net.logits(hidden)[..., pieces]
        assert torch.equal(net.logits_of(pieces)(hidden), rounded)
    assert not torch.equal(net.logits_of(pieces)(hidden), rounded)


@torch.no_grad()
def test_attentions_that_must_not_round_stay_as_they_are() -> None:
    attention = next(each for _, each in network("routing").attentions())
    assert attention.unrounded
    assert not attention.roundable
    x = torch.randn(2, 5, 32)
    before = attention(x).output
    with products(attention, torch.int8):
        assert torch.equal(attention(x).output, before)


def test_a_model_elsewhere_is_refused() -> None:
    with (
        pytest.raises(MtkitError, match="int8 runs on CPUs only"),
        products(nn.Linear(2, 2, device="meta"), torch.int8),
    ):
        pass


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_left_in_units_is_the_product(bias: bool) -> None:
    product = Int8.rounded(torch.randn(40, 32), torch.randn(40) if bias else None)
    x = torch.randn(5, 2, 32) * torch.logspace(-3, 3, 10).view(5, 2, 1)
    sums, units, added = product.in_units(x)
    assert sums.shape == (5, 2, 40)
    assert units.shape == (5, 2)
    torch.testing.assert_close(sums * units[..., None] + added, product(x), rtol=1e-6, atol=1e-6)
