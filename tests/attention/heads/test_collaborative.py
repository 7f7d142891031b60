"""Collaborative heads: the paper's score, the weights of `full` taken over, one cache of keys, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.small import ROLES, maker, refusals

AROUND: dict[str, dict[str, Any]] = {
    "full": {},
    "band": {"window_radius": 2},
    "longformer": {"window_radius": 2, "global_tokens": 1},
    "talking-heads": {},
}

make = maker("collaborative")


def stirred(attention: Any) -> Any:
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return attention


def given(role: str) -> tuple[Tensor, Tensor | None]:
    return torch.randn(2, 7, 32), torch.randn(2, 9, 32) if role == "cross" else None


@pytest.mark.parametrize("shared_dim", [5, 32, 40])
def test_scores_are_those_of_the_paper(shared_dim: int) -> None:
    """((x_i W_Q * m_a) . (x_j W_K) + x_j . c_a) / sqrt(M / H), head by head."""
    attention, x = stirred(make("encoder", shared_dim=shared_dim)), torch.randn(2, 7, 32)
    weights = attention(x, need_weights=True).weights
    q = x @ attention.q_proj.weight.T + attention.q_proj.bias
    k, content = x @ attention.k_proj.weight[:shared_dim].T, attention.k_proj.weight[shared_dim:]
    for head in range(4):
        scores = (q * attention.projection.mixing[head]) @ k.mT + (x @ content[head]).unsqueeze(1)
        expected = (scores / (shared_dim / 4) ** 0.5).softmax(-1)
        torch.testing.assert_close(weights[:, head], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("role", ROLES)
def test_the_heads_of_full_are_taken_over(name: str, role: str) -> None:
    if role == "cross" and name in ("band", "longformer"):
        return
    full, inputs = stirred(make(role, "full")), given(role)
    plain = make(role, name, **AROUND[name])
    shared = make(role, name, projection={"name": "collaborative", "mixing_init": "normal"}, **AROUND[name])
    for each in (plain, shared):
        each.adopt(full.state_dict())
    torch.testing.assert_close(shared(*inputs).output, plain(*inputs).output, rtol=1e-5, atol=1e-5)


def test_a_bias_of_queries_is_a_bias_of_content() -> None:
    """The paper's c_a = W_K,a^T b_Q,a without a bias of queries gives what the bias gives."""
    full, shared, x = stirred(make("encoder", "full")), make("encoder"), torch.randn(2, 7, 32)
    shared.adopt(full.state_dict())
    with torch.no_grad():
        for head in range(4):
            rows = slice(8 * head, 8 * head + 8)
            shared.k_proj.weight[32 + head] = full.q_proj.bias[rows] @ full.k_proj.weight[rows]
        shared.q_proj.bias.zero_()
    torch.testing.assert_close(shared(x).output, full(x).output, rtol=1e-5, atol=1e-5)


def test_other_numbers_of_channels_take_over_what_has_their_shape() -> None:
    full, shared = stirred(make("encoder", "full")), make("encoder", shared_dim=16)
    before = {name: shared.get_submodule(name).weight.clone() for name in ("q_proj", "k_proj")}
    shared.adopt(full.state_dict())
    assert all(torch.equal(shared.get_submodule(name).weight, value) for name, value in before.items())
    assert torch.equal(shared.v_proj.weight, full.v_proj.weight)


def test_at_the_start_heads_have_channels_of_their_own_or_all_at_random() -> None:
    mixing = make("encoder", shared_dim=8).projection.mixing
    assert torch.equal(mixing, torch.eye(4).repeat_interleave(2, 1))
    assert make("encoder", shared_dim=2).projection.mixing.sum() == 2  # fewer channels than heads
    random = make("encoder", shared_dim=400, mixing_init="normal").projection.mixing
    assert random.std().item() == pytest.approx(0.2, rel=0.1)
    assert not make("encoder").k_proj.weight[32:].any()


@pytest.mark.parametrize("name", ["full", "band"])
def test_a_step_keeps_the_shared_keys_once(name: str) -> None:
    projection = {"name": "collaborative", "shared_dim": 6}
    attention = make("decoder", name, projection=projection, **AROUND[name])
    state, _ = attention.start(2, hypotheses=3)
    _, state = attention.step(torch.randn(2, 3, 32), state)
    cache = state["shared"] if name == "full" else state["groups"][0]
    assert cache["keys"].shape[-1] == 6 + 4
    assert cache["keys"].shape[-3] == 1
    assert cache["values"].shape[-3] == 4


@pytest.mark.parametrize("name", AROUND)
def test_it_combines_with_the_other_slots(name: str) -> None:
    """Scores get their bias, values their tables of another width, and steps give what forward gives."""
    slots = {"positions": "shaw", "merge": "dynamic-routing", "regularizer": "guided"}
    projection = {"name": "collaborative", "shared_dim": 6}
    attention = stirred(make("decoder", name, projection=projection, **slots, **AROUND[name])).double()
    x = torch.randn(2, 7, 32).double()
    output, state, stepped = attention(x).output, attention.start(2)[0], []
    for token in x.split(1, dim=1):
        attended, state = attention.step(token, state)
        stepped.append(attended.output)
    torch.testing.assert_close(torch.cat(stepped, 1), output, rtol=1e-8, atol=1e-9)
    assert attention.train()(x).losses["guided"] > 0


test_what_cannot_be_is_refused_by_name = refusals(
    make,
    ({"positions": "rotary"}, "projection=collaborative cannot combine with positions=rotary"),
    ({"name": "band", "projection": "collaborative", "positions": "rotary"}, "cannot combine with positions=rotary"),
    ({"name": "linear", "projection": "collaborative"}, "cannot combine with projection=collaborative; it can"),
    ({"name": "delta", "role": "decoder", "projection": "collaborative"}, "cannot combine with projection"),
    ({"mixing_init": "ones"}, "mixing_init = 'ones' must be one of concat, normal"),
    ({"shared_dim": 0}, "shared_dim = 0 must be a whole number from 1"),
)
