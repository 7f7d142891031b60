"""Poolingformer: its exactness limits, what each level sees, how spans are pooled, and its state."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.small import maker, refusals

ROLES = ["encoder", "decoder"]
POOLS = ["ldconv", "mean", "max"]
each_role = pytest.mark.parametrize("role", ROLES)
each_pool = pytest.mark.parametrize("pool_type", POOLS)

make = maker("poolingformer")


def both(role: str, **options: Any) -> Any:
    """A mechanism whose second level has the projections of its first."""
    attention = make(role, **options)
    attention.pooled.load_state_dict({name: x for name, x in attention.state_dict().items() if "_proj" in name[:8]})
    return attention


def second_alone(attention: Any) -> None:
    """Makes the first level the identity: each token's own value, unchanged."""
    assert attention.radius == 0
    with torch.no_grad():
        for linear in (attention.v_proj, attention.out_proj):
            linear.weight.copy_(torch.eye(32))
            linear.bias.zero_()


@each_role
@each_pool
def test_it_begins_as_the_full_attention_that_it_adopts_within_its_window(role: str, pool_type: str) -> None:
    """The second level adds nothing at first, and learns: its output projection has a gradient."""
    full, ours = make(role, "full"), make(role, window_radius=8, pool_type=pool_type)
    ours.adopt(full.state_dict())
    x = torch.randn(2, 9, 32)
    output = ours(x).output
    torch.testing.assert_close(output, full(x).output, rtol=1e-5, atol=1e-5)
    output.square().sum().backward()
    assert ours.pooled.out_proj.weight.grad.abs().max() > 1e-3


@each_role
def test_it_adopts_both_levels_of_its_own_weights(role: str) -> None:
    one, other = make(role), make(role)
    other.adopt(one.state_dict())
    assert all(torch.equal(each, other.state_dict()[name]) for name, each in one.state_dict().items())


@each_role
@each_pool
def test_with_spans_of_one_token_the_second_level_is_full_attention_of_the_first(role: str, pool_type: str) -> None:
    """Y + full(Y), and not of the tokens themselves."""
    options = {"window_radius": 2, "pool_radius": 8, "pool_kernel": 1, "pool_stride": 1, "pool_type": pool_type}
    ours, band, full = make(role, **options), make(role, "band", window_radius=2), make(role, "full")
    band.adopt(ours.state_dict())
    full.load_state_dict({name: x for name, x in ours.pooled.state_dict().items() if "_proj" in name})
    x = torch.randn(2, 9, 32)
    y = band(x).output
    torch.testing.assert_close(ours(x).output, y + full(y).output, rtol=1e-5, atol=1e-5)


def reached(attention: Any, length: int, query: int) -> set[int]:
    """The positions whose values reach the second level's result for a query."""
    second_alone(attention)
    with torch.no_grad():
        attention.pooled.q_proj.weight.zero_()
        attention.pooled.q_proj.bias.zero_()
    x = torch.randn(1, length, 32, requires_grad=True)
    [gradient] = torch.autograd.grad((attention(x).output - x)[0, query].sum(), x)
    return set((gradient[0].abs().amax(-1) > 1e-5).nonzero().flatten().tolist())


@pytest.mark.parametrize(
    ("role", "query", "seen"),
    [
        ("encoder", 0, range(5)),  # spans 0-2 and 2-4; the next one reaches to 6
        ("encoder", 7, range(2, 13)),
        ("encoder", 13, range(8, 14)),  # spans 8-10, 10-12, and 12-14 as far as there are tokens
        ("decoder", 1, ()),
        ("decoder", 2, range(3)),
        ("decoder", 3, range(3)),
        ("decoder", 7, range(2, 7)),
        ("decoder", 8, range(4, 9)),
    ],
)
def test_a_query_sees_the_spans_that_lie_within_reach(role: str, query: int, seen: Any) -> None:
    options = {"window_radius": 0, "pool_radius": 5, "pool_kernel": 3, "pool_stride": 2, "pool_type": "mean"}
    assert reached(make(role, **options), 14, query) == set(seen)


@each_role
def test_the_first_level_is_added(role: str) -> None:
    """Without values in the second one, the band alone is left."""
    ours, band = make(role, window_radius=2), make(role, "band", window_radius=2)
    band.adopt(ours.state_dict())
    torch.nn.init.zeros_(ours.pooled.v_proj.weight)
    x = torch.randn(2, 30, 32)
    torch.testing.assert_close(ours(x).output, band(x).output)


def one_span(pool_type: str, x: Tensor, valid: Tensor | None = None) -> Tensor:
    """What stands for the one span of x (1, 4, 32), read through projections that change nothing."""
    options = {"window_radius": 0, "pool_radius": 8, "pool_kernel": 5, "pool_stride": 5}
    attention = make(pool_type=pool_type, **options)
    second_alone(attention)
    with torch.no_grad():
        for linear in (attention.pooled.v_proj, attention.pooled.out_proj):
            linear.weight.copy_(torch.eye(32))
        if pool_type == "ldconv":
            attention.value_taps.copy_(torch.arange(5.0).expand(4, 8, 5))
    pooled: Tensor = (attention(x, query_valid=valid).output - x)[0, 0]
    return pooled


@pytest.mark.parametrize("padding", [0, 3])
@each_pool
def test_a_span_pools_the_real_tokens_alone(pool_type: str, padding: int) -> None:
    """Four of five places are taken; ldconv weighs by softmax over these of what the middle token gives each place."""
    x = torch.randn(1, 4 + padding, 32)
    valid = torch.arange(4 + padding)[None] < 4 if padding else None
    middle = x[0, 2].view(4, 8).sum(-1, keepdim=True)  # each tap is the sum of the head's channels, times its place
    shares = (middle * torch.arange(4.0)).softmax(-1)  # (4 heads, 4 tokens)
    expected = {
        "mean": x[0, :4].mean(0),
        "max": x[0, :4].amax(0),
        "ldconv": torch.einsum("gt,tgk->gk", shares, x[0, :4].view(4, 4, 8)).flatten(),
    }
    torch.testing.assert_close(one_span(pool_type, x, valid), expected[pool_type])


def test_ldconv_is_the_mean_where_the_middle_lies_behind_the_end() -> None:
    x = torch.randn(1, 2, 32)
    torch.testing.assert_close(one_span("ldconv", x), x[0].mean(0))


@each_role
def test_ldconv_starts_as_the_mean(role: str) -> None:
    x, weights = torch.randn(2, 40, 32), make(role, window_radius=3).state_dict()
    one, other = make(role, window_radius=3), make(role, window_radius=3, pool_type="mean")
    one.load_state_dict(weights)
    other.load_state_dict({name: value for name, value in weights.items() if "taps" not in name})
    torch.testing.assert_close(one(x).output, other(x).output)


def test_one_token_reads_the_one_span_in_the_encoder_and_none_in_the_decoder() -> None:
    x = torch.randn(1, 1, 32)
    for role in ROLES:
        ours = both(role)
        y = ours.out_proj(ours.v_proj(x))
        z = ours.out_proj(ours.v_proj(y)) if role == "encoder" else 0.0
        torch.testing.assert_close(ours(x).output, y + z)


@torch.no_grad()
def test_decoding_keeps_the_spans_within_reach() -> None:
    options = {"window_radius": 3, "pool_radius": 40, "pool_kernel": 5, "pool_stride": 4}
    ours = make("decoder", **options)
    x, (state, _) = torch.randn(1, 150, 32), ours.start(1)
    outputs = []
    for token in x.split(1, dim=1):
        attended, state = ours.step(token, state)
        outputs.append(attended.output)
    assert state["pooled"]["spans"]["keys"].shape[3] == (40 + 1 - 5) // 4 + 1
    assert state["pooled"]["rows"]["keys"].shape[3] == 8  # the least there is room for
    torch.testing.assert_close(torch.cat(outputs, 1), ours(x).output, rtol=1e-4, atol=1e-4)


def test_the_loss_of_a_regularizer_is_the_mean_of_both_levels() -> None:
    """The second level's is that of the same regularizer around `full` with its weights, reading Y."""
    how = {"regularizer": {"name": "disagreement", "types": "subspace"}}
    ours, full = make(window_radius=2, **how).train(), make(name="full", **how).train()
    band = make(name="band", window_radius=2)
    band.adopt(ours.state_dict())
    x, losses = torch.randn(2, 9, 32), []
    for weights, tokens in ((ours.state_dict(), x), (ours.pooled.state_dict(), band(x).output)):
        full.adopt(weights)
        losses.append(full(tokens).losses["disagreement"])
    assert losses[0] != losses[1]
    torch.testing.assert_close(ours(x).losses["disagreement"], (losses[0] + losses[1]) / 2)


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"pool_type": "ldconf"}, "did you mean 'ldconv'"),
    ({"pool_radius": 3}, "pool_kernel = 5 must be at most pool_radius"),
    ({"pool_stride": 6}, "pool_stride = 6 must be at most pool_kernel"),
    ({"role": "cross"}, "encoder, decoder"),
)
