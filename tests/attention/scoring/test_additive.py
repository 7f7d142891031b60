"""Additive attention: what single weights do to it, how its memory is held, and another form of its equation."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build
from mtkit.attention.kernels.tiled_softmax import scores_at_once
from mtkit.attention.scoring import additive
from tests.attention.small import refusals
from tests.contract.counting import count

ROLES = ["encoder", "decoder", "cross"]
VALID = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])


def make(role: str = "encoder", **arguments: Any) -> Any:
    attention = build("additive", **{"role": role, "d_model": 32, "heads": 4} | arguments).eval()
    torch.nn.init.normal_(attention.score_vector)
    return attention


def weights_of(attention: Any, x: Tensor, memory: Tensor | None = None) -> Tensor:
    masks = {"query_valid" if memory is None else "memory_valid": VALID}
    weights: Tensor = attention(x, memory, need_weights=True, **masks).weights
    return weights


def means(role: str) -> Tensor:
    """Equal weights for what each query sees, (B, 1, 7, 7)."""
    seen = VALID[:, None, None].expand(2, 1, 7, 7) if role != "decoder" else torch.ones(2, 1, 7, 7).tril()
    return seen / seen.sum(-1, keepdim=True)


def inputs(role: str) -> tuple[Tensor, Tensor | None]:
    return torch.randn(2, 7, 32), torch.randn(2, 7, 32) if role == "cross" else None


@pytest.mark.parametrize("role", ROLES)
def test_scores_are_those_of_a_loop_over_pairs_and_heads(role: str) -> None:
    attention, (x, memory) = make(role, additive_dim=3).double(), inputs(role)
    x, context = x.double(), (x if memory is None else memory).double()
    weights = weights_of(attention, x, None if memory is None else context)
    w_q, w_k = (each.weight.view(4, 3, 32) for each in (attention.q_proj, attention.k_proj))
    bias = (attention.q_proj.bias + attention.k_proj.bias).view(4, 3)
    for b, h, i in [(0, 0, 0), (0, 3, 6), (1, 1, 2), (1, 2, 3)]:
        last = i + 1 if role == "decoder" else int(VALID[b].sum())
        both = [torch.cat([x[b, i], context[b, j]]) for j in range(last)]
        joint = torch.cat([w_q[h], w_k[h]], dim=1)  # one layer that reads the two side by side
        scores = torch.stack([attention.score_vector[h] @ (joint @ each + bias[h]).tanh() for each in both])
        torch.testing.assert_close(weights[b, h, i, :last], scores.softmax(0))
        assert not weights[b, h, i, last:].any()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("zero", ["score_vector", "k_proj.weight"])
def test_without_a_score_vector_or_keys_the_mean_is_left(role: str, zero: str) -> None:
    attention, given = make(role), inputs(role)
    expected = means(role).expand(-1, 4, -1, -1)
    assert not torch.allclose(weights_of(attention, *given), expected, atol=1e-3)
    attention.get_parameter(zero).data.zero_()
    torch.testing.assert_close(weights_of(attention, *given), expected, rtol=1e-5, atol=1e-6)


def test_training_starts_from_the_mean() -> None:
    fresh = build("additive", role="cross", d_model=32, heads=4)
    torch.testing.assert_close(weights_of(fresh, *inputs("cross")), means("cross").expand(-1, 4, -1, -1))


def test_the_query_cancels_as_the_hidden_layer_becomes_linear() -> None:
    """tanh(x) = x - x³/3 + ...: what a query changes falls with the third power of the weights."""
    attention, x, memory = make("cross").double(), torch.randn(2, 7, 32).double(), torch.randn(2, 7, 32).double()
    changes = []
    for scale in (0.1, 0.05):
        small = make("cross").double()
        small.load_state_dict(attention.state_dict())
        for each in (small.q_proj, small.k_proj):
            each.weight.data.mul_(scale)
        weights = weights_of(small, x, memory)
        changes.append((weights - weights[:, :, :1]).abs().max().item())
    assert changes[0] > 1e-6
    assert 6.5 < changes[0] / changes[1] < 9


def test_memory_of_another_width_and_hidden_layers_of_another_size() -> None:
    attention = make("cross", heads=1, memory_width=20, additive_dim=50)
    assert attention.q_proj.weight.shape == (50, 32)
    assert attention.k_proj.weight.shape == (50, 20)
    assert attention(torch.randn(2, 3, 32), torch.randn(2, 7, 20)).output.shape == (2, 3, 32)


def test_neither_pass_holds_the_hidden_layers_of_all_pairs() -> None:
    attention, x = make(d_model=64, heads=1), torch.randn(1, 256, 64)
    counted, _ = count(lambda: attention(x).output.sum().backward())
    assert counted.largest <= max(scores_at_once(x.device), 256 * 256)
    assert counted.largest < 256 * 256 * 64


def test_parts_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x, results = make("decoder").double(), torch.randn(2, 7, 32).double(), []
    for size in (1, 3 * 2 * 7 * 32, 1 << 20):  # one query at a time, three, all
        monkeypatch.setattr(additive, "scores_at_once", lambda _, size=size: size)
        attention.zero_grad()
        output = attention(x).output
        output.square().sum().backward()
        results.append([output, *(each.grad for each in attention.parameters())])
    for one, other, whole in zip(*results, strict=True):
        torch.testing.assert_close(one, whole)
        torch.testing.assert_close(other, whole)


def test_gradients_pass_through_steps() -> None:
    """A recurrent decoder trains by steps, as each query is made of what the one before read."""
    attention, x, memory = make("cross"), torch.randn(2, 3, 32), torch.randn(2, 7, 32)
    attention(x, memory, memory_valid=VALID).output.square().sum().backward()
    expected = [each.grad.clone() for each in attention.parameters()]
    attention.zero_grad()
    state, _ = attention.start(2, memory, VALID)
    loss = torch.zeros(())
    for each in x.split(1, dim=1):
        attended, state = attention.step(each, state)
        loss = loss + attended.output.square().sum()
    loss.backward()
    for parameter, wanted in zip(attention.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-5)


def test_scores_are_of_float32_under_autocast() -> None:
    attention, x = make(), torch.randn(2, 7, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pairs = attention.pairs(x)
        scores = attention.scores(pairs)
    assert pairs.q.dtype == torch.bfloat16
    assert scores.dtype == torch.float32
    hidden = (pairs.q.float().unsqueeze(3) + pairs.keys.float().unsqueeze(2)).tanh()
    torch.testing.assert_close(scores, (hidden * attention.score_vector[:, None, None]).sum(-1), rtol=1e-5, atol=1e-5)


test_what_means_nothing_here_is_refused = refusals(
    make,
    ({"additive_dim": 0}, "additive_dim = 0 must"),
    ({"positions": "rotary"}, "cannot combine with positions=rotary"),
    ({"projection": "multi-query"}, "cannot combine with projection=multi-query"),
)
