"""Nadaraya-Watson attention: the estimator itself, where it is full attention, and the limits of the width."""

import pytest
import torch
from torch import Tensor

from tests.attention.small import ROLES, VALID, maker, refusals
from tests.contract.counting import count

WIDTHS = {"scalar": (1, 1), "per-head": (4, 1), "per-dim": (4, 8)}

make = maker("nadaraya-watson")


def inputs(role: str) -> tuple[Tensor, Tensor | None]:
    return torch.randn(2, 7, 32).double(), torch.randn(2, 7, 32).double() if role == "cross" else None


def masks(role: str) -> dict[str, Tensor]:
    return {"memory_valid" if role == "cross" else "query_valid": VALID}


def test_it_is_the_estimator_of_a_function_of_one_variable() -> None:
    """sum_j K((x - x_j) w) y_j / sum_j K((x - x_j) w), with the kernel K(u) = e^(-u²/2) / sqrt(2 pi)."""
    attention = make("cross", d_model=1, heads=1, memory_width=2).double()
    weights = {"q_proj": [1.0], "k_proj": [1.0, 0.0], "v_proj": [0.0, 1.0], "out_proj": [1.0]}
    for name, weight in weights.items():
        attention.get_submodule(name).weight.data = torch.tensor([weight]).double()
    attention.width.data.fill_(1.7)
    known = torch.rand(50).double() * 5
    values = 2 * known.sin() + known**0.8
    at = torch.linspace(0, 5, 20).double()
    kernel = torch.distributions.Normal(0.0, 1.0).log_prob((at[:, None] - known) * 1.7).exp()
    expected = (kernel * values).sum(-1) / kernel.sum(-1)
    estimated = attention(at.view(1, -1, 1), torch.stack([known, values], -1).unsqueeze(0)).output
    torch.testing.assert_close(estimated.flatten(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("role", ROLES)
def test_with_keys_of_one_length_it_is_full_attention(role: str) -> None:
    attention, full, (x, memory) = make(role).double(), make(role, "full").double(), inputs(role)
    full.load_state_dict({name: value for name, value in attention.state_dict().items() if name != "width"})

    def apart() -> float:
        both = [each(x, memory, **masks(role)).output for each in (attention, full)]
        return float((both[0] - both[1]).detach().abs().max())

    assert apart() > 1e-3
    for each in (attention, full):  # keys (±1, ...), by the signs of what the projection gives
        each.k_proj.register_forward_hook(lambda module, given, keys: keys.sign())
    assert apart() < 1e-5


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("width", WIDTHS)
def test_without_a_width_the_mean_is_left_and_with_a_large_one_the_nearest_key(role: str, width: str) -> None:
    attention, (x, memory) = make(role, width=width).double(), inputs(role)
    assert attention.width.shape == WIDTHS[width]
    context = x if memory is None else memory
    q, k = attention.q_proj(x).unflatten(-1, (4, 8)), attention.k_proj(context).unflatten(-1, (4, 8))
    seen = torch.ones(7, 7, dtype=torch.bool).tril() if role == "decoder" else VALID[:, None, None]
    distance = torch.cdist(q.transpose(1, 2), k.transpose(1, 2)).masked_fill(~seen, torch.inf)

    def weights() -> Tensor:
        found: Tensor = attention(x, memory, need_weights=True, **masks(role)).weights
        return found

    attention.width.data.zero_()
    expected = seen.expand_as(distance) / seen.expand_as(distance).sum(-1, keepdim=True)
    torch.testing.assert_close(weights(), expected.double(), rtol=1e-5, atol=1e-6)
    attention.width.data.fill_(1e4)
    assert torch.equal(weights().argmax(-1), distance.argmin(-1))
    torch.testing.assert_close(weights().amax(-1), torch.ones(2, 4, 7).double(), rtol=1e-5, atol=1e-5)


def test_weights_fall_with_the_distance_and_do_not_depend_on_the_sign_of_the_width() -> None:
    """Squaring after negating would let them grow."""
    attention, (x, _) = make().double(), inputs("encoder")
    q, k = (p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj))
    weights = attention(x, need_weights=True).weights
    assert torch.equal(weights.argsort(-1, descending=True), torch.cdist(q, k).argsort(-1))
    attention.width.data.neg_()
    assert torch.equal(attention(x, need_weights=True).weights, weights)


def test_the_width_starts_at_the_scale_of_full_attention() -> None:
    for width, shape in WIDTHS.items():
        torch.testing.assert_close(make(width=width).width.square(), torch.full(shape, 8**-0.5))


@pytest.mark.parametrize("width", WIDTHS)
def test_heads_that_share_keys_have_widths_of_their_own(width: str) -> None:
    attention = make("decoder", width=width, projection={"name": "grouped-query", "kv_heads": 2}).double()
    torch.nn.init.normal_(attention.width)
    x, _ = inputs("decoder")
    torch.testing.assert_close(attention(x).output, attention.naive(x).output)
    state, _ = attention.start(2)
    for i in range(7):
        attended, state = attention.step(x[:, i : i + 1], state)
        torch.testing.assert_close(attended.output, attention(x).output[:, i : i + 1])


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_a_token_estimated_from_the_others_does_not_see_itself(role: str) -> None:
    attention, (x, _) = make(role, exclude_self=True).double(), inputs(role)
    attention.k_proj.load_state_dict(attention.q_proj.state_dict())  # so that each token is nearest to itself
    attended = attention(x, need_weights=True, query_valid=VALID)
    assert not attended.weights.diagonal(dim1=2, dim2=3).any()
    plain = make(role).double()
    plain.load_state_dict(attention.state_dict())
    weights = plain(x, need_weights=True, query_valid=VALID).weights
    nearest = weights.argmax(-1).movedim(1, -1)[VALID]  # (real tokens, heads)
    assert torch.equal(nearest, torch.arange(7).expand(2, 7)[VALID].unsqueeze(-1).expand(-1, 4))
    others = weights * (1 - torch.eye(7))
    others = others / others.sum(-1, keepdim=True).clamp(min=1e-300)
    torch.testing.assert_close(attended.weights, others, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(attention(x[:, :1]).output, attention.out_proj.bias.expand(2, 1, 32))


def test_no_tensor_of_differences_is_held() -> None:
    attention, x = make(heads=1), torch.randn(1, 64, 32)
    counted, _ = count(lambda: attention(x).output.sum().backward())
    assert counted.largest <= 64 * 64


test_what_means_nothing_is_refused = refusals(
    make,
    ({"width": "wide"}, "scalar, per-head, per-dim"),
    ({"role": "cross", "exclude_self": True}, "in the cross role"),
    ({"width": "per-dim", "positions": {"name": "rotary"}}, "width = 'per-dim' must be another"),
)
