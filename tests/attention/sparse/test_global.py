"""Global nodes alone, internal and external."""

import pytest
import torch

from mtkit.attention import build, reorder
from tests.attention.small import maker, refusals

make = maker("global", d_model=16, heads=2)


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@torch.no_grad()
def test_as_many_global_tokens_as_tokens_are_full_attention(role: str) -> None:
    attention, full = make(role, global_tokens=40), build("full", role=role, d_model=16, heads=2).eval()
    full.load_state_dict(attention.state_dict())
    x = torch.randn(2, 40, 16)
    torch.testing.assert_close(attention(x).output, full(x).output, atol=1e-5, rtol=0)


@torch.no_grad()
def test_tokens_meet_only_in_the_global_ones() -> None:
    attention, x = make(global_tokens=2), torch.randn(1, 70, 16)
    other = x.clone()
    other[:, 40] += 1
    changed = (attention(other).output - attention(x).output).abs().amax((0, 2)) > 0
    assert changed.nonzero().flatten().tolist() == [0, 1, 40]


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("projection", [None, "multi-query"])
def test_external_nodes_are_the_equation_with_gradients(role: str, projection: str | None) -> None:
    attention = make(role, global_tokens=3, mode="external", projection=projection).double()
    x = torch.randn(2, 140, 16, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(2, 30, 16, dtype=torch.float64) if role == "cross" else None
    masks = {"query_valid": torch.arange(140) < torch.tensor([[140], [70]])}
    if memory is not None:
        masks["memory_valid"] = torch.arange(30) < torch.tensor([[30], [11]])
    real, parameters = masks["query_valid"], [x, *attention.parameters()]
    one, other = (form(x, memory, **masks).output[real] for form in (attention, attention.naive))
    torch.testing.assert_close(one, other)
    weight = torch.randn_like(one)
    gradients = [torch.autograd.grad((each * weight).sum(), parameters, allow_unused=True) for each in (one, other)]
    for fast, literal in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, literal)


@torch.no_grad()
def test_a_step_of_external_nodes_is_forward_also_after_reorder() -> None:
    attention, x = make("decoder", global_tokens=3, mode="external"), torch.randn(2, 3, 90, 16)
    order = torch.tensor([[2, 0, 0], [1, 1, 2]])
    state, _ = attention.start(2, hypotheses=3)
    for t in range(70):
        _, state = attention.step(x[:, :, t], state)
    state, x = reorder(state, order), x.take_along_dim(order[:, :, None, None], dim=1)
    whole = attention(x.flatten(0, 1)).output.unflatten(0, (2, 3))
    for t in range(70, 90):
        attended, state = attention.step(x[:, :, t], state)
        torch.testing.assert_close(attended.output, whole[:, :, t])
    assert sum(value.numel() for value in state.values()) == 2 * 3 * 2 * 3 * (1 + 8)  # sums alone, no tokens


@torch.no_grad()
def test_external_nodes_are_causal() -> None:
    attention, x = make("decoder", global_tokens=2, mode="external"), torch.randn(1, 150, 16)
    other = x.clone()
    other[:, 100] += 1
    changed = (attention(other).output - attention(x).output).abs().amax((0, 2)) > 0
    assert changed.nonzero().flatten().tolist() == list(range(100, 150))


test_what_cannot_be_is_refused = refusals(
    make,
    ({"role": "cross", "mode": "internal"}, "external in the cross role"),
    ({"role": "encoder", "mode": "inside"}, "internal, external"),
    ({"role": "encoder", "mode": "external", "positions": "alibi"}, "positions"),
    ({"role": "encoder", "global_tokens": -1}, "global_tokens"),
)


@pytest.mark.parametrize("count", [1, 3])
@torch.no_grad()
def test_a_token_sees_itself_and_the_internal_nodes(count: int) -> None:
    """The equation with its own mask, since the naive form takes its mask from the same pattern as the kernel."""
    attention, x = make(global_tokens=count), torch.randn(1, 40, 16)
    q, k, v = (getattr(attention, f"{name}_proj")(x).view(1, 40, 2, 8).transpose(1, 2) for name in "qkv")
    i, j = torch.arange(40)[:, None], torch.arange(40)
    seen = (i == j) | (i < count) | (j < count)
    weights = (q @ k.mT / 8**0.5).masked_fill(~seen, float("-inf")).softmax(-1)
    expected = attention.out_proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x).output, expected, atol=1e-5, rtol=0)
