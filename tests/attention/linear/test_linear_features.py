"""Feature maps of linear attention: hedgehog and taylor against their kernels, their limits, and large exponents."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtkit.attention import build

ROLES = ["encoder", "decoder", "cross"]
GROUPED = {"name": "grouped-query", "kv_heads": 2}


def make(role: str, feature_map: str, **arguments: Any) -> Any:
    torch.manual_seed(0)
    options = {"role": role, "d_model": 32, "heads": 4, "chunk": 4, "feature_map": feature_map}
    attention = build("linear", **options | arguments).double().eval()
    for each in attention.parameters():
        nn.init.normal_(each, std=0.3)
    return attention


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, 32, dtype=torch.float64)


def memory_of(role: str, *shape: int) -> Tensor | None:
    return tokens(*shape) if role == "cross" else None


def vectors(attention: Any, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
    """Queries, keys and values (B, 4, T, ...), each head's own."""
    context = x if memory is None else memory
    split = []
    for linear, side in ((attention.q_proj, x), (attention.k_proj, context), (attention.v_proj, context)):
        width = attention.projection.value_width if linear is attention.v_proj else attention.projection.key_width
        heads = linear(side).unflatten(-1, (-1, width)).transpose(1, 2)
        split.append(heads.repeat_interleave(4 // heads.shape[1], 1))
    return tuple(split)


def output(attention: Any, kernel: Tensor, v: Tensor, eps: float) -> Tensor:
    kernel = kernel.tril() if attention.site.causal else kernel
    heads = kernel @ v / (kernel.sum(-1, keepdim=True) + eps)
    made: Tensor = attention.out_proj(heads.transpose(1, 2).flatten(2))
    return made


def mapped(attention: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """W x + b of each head, loop by loop; heads that share keys share the keys' map."""
    share = 4 // attention.projection.key_heads
    own, other = attention.query_map, attention.key_map
    queries = [q[:, h] @ own.weight[h].T + own.bias[h] for h in range(4)]
    keys = [k[:, h] @ other.weight[h // share].T + other.bias[h // share] for h in range(4)]
    return torch.stack(queries, 1), torch.stack(keys, 1)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("projection", [None, GROUPED])
@torch.no_grad()
def test_hedgehog_is_a_sum_of_hyperbolic_cosines(role: str, projection: Any) -> None:
    """exp(a) exp(b) + exp(-a) exp(-b) = 2 cosh(a + b)."""
    attention = make(role, "hedgehog", projection=projection)
    x, memory = tokens(2, 13), memory_of(role, 2, 9)
    q, k, v = vectors(attention, x, memory)
    q, k = mapped(attention, q, k)
    kernel = 2 * torch.cosh(q.unsqueeze(3) + k.unsqueeze(2)).sum(-1)
    torch.testing.assert_close(attention(x, memory).output, output(attention, kernel, v, 0.0), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_hedgehog_with_softmaxes_is_their_product(role: str) -> None:
    attention = make(role, "hedgehog", feature_norm="softmax")
    x, memory = tokens(2, 13), memory_of(role, 2, 9)
    q, k, v = vectors(attention, x, memory)
    one, other = (torch.cat([each.softmax(-1), (-each).softmax(-1)], -1) for each in mapped(attention, q, k))
    wanted = output(attention, one @ other.mT, v, 1e-6)
    torch.testing.assert_close(attention(x, memory).output, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_hedgehog_without_a_map_is_the_mean(role: str) -> None:
    attention, x, memory = make(role, "hedgehog"), tokens(2, 13), memory_of(role, 2, 9)
    for each in (*attention.query_map.parameters(), *attention.key_map.parameters()):
        each.zero_()
    _, _, v = vectors(attention, x, memory)
    wanted = output(attention, torch.ones(2, 4, 13, v.shape[2], dtype=torch.float64), v, 0.0)
    torch.testing.assert_close(attention(x, memory).output, wanted)


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_hedgehog_takes_exponents_beyond_float32(role: str) -> None:
    """Exp(100) is infinite in float32; products of vectors that point one way are the largest key's."""
    attention = make(role, "hedgehog").float()
    reference = make(role, "hedgehog")
    for each in (attention, reference):
        each.query_map.bias.fill_(60.0)
        each.key_map.bias.fill_(90.0)
    x, memory = tokens(2, 13), memory_of(role, 2, 9)
    got = attention(x.float(), None if memory is None else memory.float()).output
    torch.testing.assert_close(got.double(), reference(x, memory).output, rtol=1e-4, atol=1e-4)


def test_hedgehog_starts_as_the_identity() -> None:
    attention = build("linear", role="encoder", d_model=32, heads=4, feature_map="hedgehog")
    assert torch.equal(attention.query_map.weight, torch.eye(8).expand(4, 8, 8))
    assert not attention.key_map.bias.any()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("options", [{}, {"feature_width": 3}, {"projection": GROUPED}])
@torch.no_grad()
def test_taylor_is_the_series_of_the_exponential_to_its_square(role: str, options: dict[str, Any]) -> None:
    attention = make(role, "taylor", **options)
    x, memory = tokens(2, 13), memory_of(role, 2, 9)
    q, k, v = vectors(attention, x, memory)
    score = q @ k.mT / math.sqrt(options.get("feature_width", 8))
    wanted = output(attention, 1 + score + score.square() / 2, v, 1e-6)
    torch.testing.assert_close(attention(x, memory).output, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_taylor_is_full_attention_where_scores_are_small(role: str) -> None:
    """What is missing of exp(s) is below |s|^3 / 6, 1.4e-6 at 0.02."""
    full = build("full", role=role, d_model=32, heads=4).double().eval()
    full.q_proj.weight.mul_(0.003)
    attention = make(role, "taylor")
    attention.adopt(full.state_dict())
    x, memory = tokens(2, 13), memory_of(role, 2, 9)
    q, k, _ = vectors(attention, x, memory)
    assert 1e-3 < (q @ k.mT / math.sqrt(8)).abs().max() < 0.02
    torch.testing.assert_close(attention(x, memory).output, full(x, memory).output, rtol=0, atol=1e-5)


def test_taylor_narrows_queries_and_keys_to_sixteen() -> None:
    """With 1 + 16 + 136 features, and values as wide as before."""
    attention = build("linear", role="decoder", d_model=128, heads=4, feature_map="taylor")
    assert attention.q_proj.out_features == attention.k_proj.out_features == 64
    rows = attention.start(1)[0]["recent"]["shared"]
    assert (rows["keys"].shape[-1], rows["values"].shape[-1]) == (153, 33)
    rows = build("linear", role="decoder", d_model=32, heads=4, feature_map="hedgehog").start(1)[0]["recent"]["shared"]
    assert (rows["keys"].shape[-1], rows["values"].shape[-1]) == (16, 9)


def test_maps_are_learned_and_their_biases_do_not_decay() -> None:
    attention = make("cross", "hedgehog")
    attention(tokens(2, 5), tokens(2, 4)).output.square().sum().backward()
    for part in (attention.query_map, attention.key_map):
        assert part.undecayed == ("bias",)
        assert all(each.grad.abs().max() > 1e-9 for each in part.parameters())
