"""The slot `nearby`: the convolution of the values, compared with sums over positions, in all mechanisms."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention import Attention, build, mechanisms
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.construction import check_slots
from mtkit.attention.mixed_heads import as_full
from mtkit.attention.nearby import Convolution, convolved
from mtkit.errors import MtkitError

KERNEL = 5
OPTIONS = {"group": {"context_layers": 0}}
"""Options without which a gate scales the outputs."""

NEARBY = {"nearby": {"name": "convolution", "kernel": KERNEL}}


def takes(name: str) -> bool:
    """Whether a mechanism can have the slot."""
    try:
        check_slots(mechanisms()[name], NEARBY)
    except MtkitError:
        return False
    return True


TAKING = [name for name in mechanisms() if takes(name)]


def make(name: str, **arguments: Any) -> Attention:
    torch.manual_seed(5)
    options: dict[str, Any] = {"role": "encoder", "d_model": 32, "heads": 4, "max_length": 64}
    return build(name, **options | OPTIONS.get(name, {}) | NEARBY | arguments).eval()


def summed(values: Tensor, kernel: Tensor) -> Tensor:
    """The sum of w_j v_(t + j - k // 2), position by position; values (H, T, V), kernel (H, k)."""
    heads, length, _ = values.shape
    rows = torch.zeros(heads, length, values.shape[2], dtype=values.dtype)
    for h in range(heads):
        for t in range(length):
            for j in range(kernel.shape[1]):
                place = t + j - kernel.shape[1] // 2
                if 0 <= place < length:
                    rows[h, t] += kernel[h, j] * values[h, place]
    return rows


@pytest.mark.parametrize("kernel", [1, 3, 33, 65])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65, 130, 200])
def test_blocks_give_the_sums_of_all_positions(kernel: int, length: int) -> None:
    values = torch.randn(2, 3, length, 4, dtype=torch.float64)
    weights = torch.randn(3, kernel, dtype=torch.float64)
    expected = torch.stack([summed(one, weights) for one in values])
    torch.testing.assert_close(convolved(values, weights), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("heads", "kernel", "length"),
    [(1, 33, 12), (2, 65, 70), (4, 3, 1), (2, 33, 64), (2, 33, 65), (1, 33, 96), (2, 5, 131), (1, 65, 300)],
)
def test_gradients_are_those_of_the_sums(heads: int, kernel: int, length: int) -> None:
    """In one product, or in several blocks, the last of which is full or not."""
    values, wanted = torch.randn(4, heads, length, 5, requires_grad=True), torch.zeros(4, heads, length, 5).double()
    weights, read = torch.randn(heads, kernel, requires_grad=True), torch.randn(4, heads, length, 5)
    padded = F.pad(values.double(), (0, 0, kernel // 2, kernel // 2))
    for place in range(kernel):
        wanted = wanted + padded[:, :, place : place + length] * weights.double()[:, place, None, None]
    found = convolved(values, weights)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    ours, expected = (torch.autograd.grad((x * read).sum(), [values, weights]) for x in (found, wanted))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TAKING)
def test_it_adds_the_convolution_to_the_heads(name: str) -> None:
    """Without a merge that is not linear, the outputs differ by W_o of the sums of each segment's real tokens."""
    if mechanisms()[name].slot == "merge":
        pytest.skip("its output is not linear in the heads")
    attention = make(name).double()
    plain = make(name, nearby=None).double()
    state = {key: value for key, value in attention.state_dict().items() if not key.startswith("nearby.")}
    plain.load_state_dict(state)
    assert isinstance(attention, HeadAttention)
    assert isinstance(attention.nearby, Convolution)
    x, lengths = torch.randn(3, 21, 32, dtype=torch.float64), [21, 1, 14]
    valid = torch.arange(21) < torch.tensor(lengths).unsqueeze(1)
    with torch.no_grad():
        added = attention(x, query_valid=valid).output - plain(x, query_valid=valid).output
        for row, length in enumerate(lengths):
            values = values_of(attention, x[row : row + 1, :length])
            heads = summed(values.repeat_interleave(4 // len(values), 0), attention.nearby.weight)
            merged = heads.transpose(0, 1).flatten(1)
            expected = merged @ attention.out_proj.weight.T
            torch.testing.assert_close(added[row, :length], expected, rtol=1e-9, atol=1e-10)


def values_of(attention: Any, tokens: Tensor) -> Tensor:
    """(G, T, V) of tokens (1, T, D)."""
    if hasattr(attention, "v_up_proj"):
        values = attention.v_up_proj(attention.latent(tokens))
    else:
        values = attention.v_proj(tokens)
    return attention.projection.values(values)[0]


@pytest.mark.parametrize("name", TAKING)
def test_gradients_reach_the_kernel(name: str) -> None:
    attention = make(name).train()
    attention(torch.randn(2, 21, 32)).output.square().sum().backward()
    gradient = attention.nearby.weight.grad
    assert gradient.isfinite().all()
    assert (gradient != 0).all()


@pytest.mark.parametrize("name", ["full", "band", "linear"])
@pytest.mark.parametrize("length", [20, 150])
def test_bfloat16_is_near_float32(name: str, length: int) -> None:
    attention, x, found = make(name, nearby="convolution"), torch.randn(2, length, 32), []
    for enabled in (False, True):
        attention.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = attention(x).output
        output.float().square().sum().backward()
        found.append((output.float().detach(), attention.nearby.weight.grad.clone()))
    for exact, rounded in zip(*found, strict=True):
        assert (rounded - exact).norm() < 0.02 * exact.norm()


def test_only_encoders_have_it() -> None:
    with pytest.raises(MtkitError, match="nearby 'convolution' cannot play the role 'decoder'; it can play: encoder"):
        make("full", role="decoder")
    with pytest.raises(MtkitError, match="kernel = 4 must be odd"):
        make("full", nearby={"name": "convolution", "kernel": 4})
    with pytest.raises(MtkitError, match="did you mean 'convolution'"):
        make("full", nearby="convolutoin")
    with pytest.raises(MtkitError, match="cannot combine with nearby=convolution"):
        make("nystrom")


def test_nystrom_with_a_landmark_for_each_token_is_full_attention_with_it() -> None:
    """Section 4 of Xiong et al.: the convolution is the same, and the softmax of all pairs is exact."""
    full = make("full", nearby={"name": "convolution", "kernel": 33}).double()
    nystrom = make("nystrom", nearby=None, landmarks=32).double()
    nystrom.adopt(full.state_dict())
    x = torch.randn(2, 30, 32, dtype=torch.float64)
    torch.testing.assert_close(nystrom(x).output, full(x).output, rtol=1e-10, atol=1e-10)


def test_heads_of_a_mix_have_their_own() -> None:
    mix: Any = make("full:2+band:2")
    assert [part.nearby.weight.shape for part in mix.parts] == [(2, KERNEL), (2, KERNEL)]
    one: Any = make("full:2+band:2", nearby=None, **{"band.nearby": "convolution"})
    assert [part.nearby is None for part in one.parts] == [True, False]


def test_a_state_without_it_gives_the_same_outputs() -> None:
    """Training can continue from a run without the convolution; a state that has it is loaded as it is."""
    x = torch.randn(2, 21, 32)
    plain, continued = make("full", nearby=None), make("full")
    continued.adopt(plain.state_dict())
    assert torch.equal(continued(x).output, plain(x).output)
    state = make("full").state_dict()
    state["nearby.weight"] = torch.randn(4, KERNEL)
    continued.adopt(state)
    assert torch.equal(continued.nearby.weight, state["nearby.weight"])
    mix: Any = make("full:2+band:2")
    mix.adopt(plain.state_dict())
    assert all(torch.equal(part.nearby.weight, torch.zeros(2, KERNEL)) for part in mix.parts)


def test_learned_numbers_are_the_kernels() -> None:
    attention = make("longformer")
    assert isinstance(attention.nearby, nn.Module)
    assert torch.equal(attention.learned_numbers()["kernel by distance"], attention.nearby.weight)


@pytest.mark.parametrize(("before", "after"), [(5, 9), (9, 5), (5, 5)])
def test_a_kernel_of_another_size_keeps_its_middle(before: int, after: int) -> None:
    old, new = (make("full", nearby={"name": "convolution", "kernel": kernel}) for kernel in (before, after))
    kernel = old.nearby.weight.detach().clone()
    new.adopt(old.state_dict())
    for distance in range(-(after // 2), after // 2 + 1):
        known = abs(distance) <= before // 2
        expected = kernel[:, before // 2 + distance] if known else torch.zeros(4)
        assert torch.equal(new.nearby.weight[:, after // 2 + distance], expected)
    old.adopt(old.state_dict())
    assert torch.equal(old.nearby.weight, kernel)


def test_kernels_pass_between_full_and_a_mix() -> None:
    x, full = torch.randn(2, 21, 32), make("full")
    mix, back = make("full:1+full:3"), make("full")
    mix.adopt(full.state_dict())
    torch.testing.assert_close(mix(x).output, full(x).output, atol=1e-6, rtol=1e-5)
    mix.adopt(as_full(mix.state_dict()))
    torch.testing.assert_close(mix(x).output, full(x).output, atol=1e-6, rtol=1e-5)
    back.adopt(as_full(mix.state_dict()))
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in full.state_dict().items())


def test_learned_kernels_of_three_sizes_in_a_mix_have_three_names() -> None:
    kernels = {"full": 3, "multi-query": 5, "fixed-head-size": 7}
    options = {f"{name}.nearby": {"name": "convolution", "kernel": kernel} for name, kernel in kernels.items()}
    mix = make("full:1+multi-query:1+fixed-head-size:2", nearby=None, **options)
    assert sorted(rows.shape[1] for rows in mix.learned_numbers().values()) == [3, 5, 7]


@pytest.mark.parametrize("name", [name for name in TAKING if mechanisms()[name].slot == "merge"])
def test_merges_get_the_heads_with_the_convolution(name: str) -> None:
    attention, plain = make(name).double(), make(name, nearby=None).double()
    plain.load_state_dict(attention.state_dict(), strict=False)
    x, given = torch.randn(1, 21, 32, dtype=torch.float64), list[Tensor]()
    for each in (attention, plain):
        each.merge.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0][0]))
        each(x)
    expected = summed(values_of(attention, x), attention.nearby.weight)
    torch.testing.assert_close(given[0] - given[1], expected, rtol=1e-9, atol=1e-10)
