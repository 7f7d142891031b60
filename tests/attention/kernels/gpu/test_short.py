"""Attention over few keys, by Triton's interpreter on the CPU, against the equation in float64."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mtkit.attention import build
from mtkit.attention.bases import product_attention
from mtkit.attention.kernels import dot_product
from mtkit.attention.kernels.dot_product import attend
from mtkit.attention.kernels.gpu.short import attend_short, attends_short

SCALE = 0.4


@pytest.fixture
def kernels(interpreted: Callable[[str], None]) -> None:
    interpreted("mtkit.attention.kernels.gpu.short_kernels")


def heads(batch: int, length: int, width: int, *, joined: bool) -> Tensor:
    """(B, 3, T, K); joined: a view of the heads of each token side by side, with other numbers after them."""
    if not joined:
        return torch.randn(batch, 3, length, width).half().requires_grad_()
    rows = torch.randn(batch, length, 5 * width).half().requires_grad_()
    return rows[:, :, : 3 * width].unflatten(2, (3, width)).transpose(1, 2)


def close(one: Tensor, other: Tensor) -> bool:
    return bool((one.double() - other).norm() <= 1.5e-3 * other.norm())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("masks", ["none", "causal", "padding"])
@pytest.mark.parametrize(("queries", "keys", "width", "values"), [(7, 7, 16, 16), (33, 33, 8, 24), (1, 40, 64, 64)])
def test_it_is_the_equation(queries: int, keys: int, width: int, values: int, masks: str, joined: bool) -> None:
    if masks == "causal":
        queries = keys
    qkv = [heads(3, n, size, joined=joined) for n, size in ((queries, width), (keys, width), (keys, values))]
    lengths = torch.tensor([keys, (keys + 1) // 2, 0]) if masks == "padding" else torch.full((3,), keys)
    valid = torch.arange(keys) < lengths.unsqueeze(1)
    visible = valid[:, None, None].expand(3, 1, queries, keys)
    if masks == "causal":
        visible = visible.tril()
    got = attend_short(*qkv, valid if masks == "padding" else None, scale=SCALE, causal=masks == "causal")
    q, k, v = wide = [x.detach().double().requires_grad_() for x in qkv]
    weights = (q @ k.mT * SCALE).masked_fill(~visible, -1e300).softmax(-1) * visible
    wanted = weights @ v
    assert close(got, wanted)
    upstream = torch.randn_like(got)
    gradients = [torch.autograd.grad(y, of, upstream.type_as(y)) for y, of in ((got, qkv), (wanted, wide))]
    for one, other in zip(*gradients, strict=True):
        assert one.dtype == torch.float16
        if queries > 1 or not other.abs().max() < 1e-9:
            assert close(one, other)
    if masks == "padding":
        assert not got[2].any()
        assert not any(one[2].any() for one in gradients[0])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
def test_from_tokens_to_heads_it_is_the_same_layer(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build("full", role=role, d_model=24, heads=3).half()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    wide = copy.deepcopy(layer).double()
    query, memory = (torch.randn(3, n, 24).half() for n in (5, 9))
    lengths = torch.tensor([9, 4, 0] if role == "cross" else [5, 4, 1])
    valid = torch.arange(9 if role == "cross" else 5) < lengths.unsqueeze(1)
    results, taken = [], []
    monkeypatch.setattr(
        product_attention, "projects_short", lambda x, *_: taken.append(len(x)) is None and x.dtype == torch.float16
    )
    for module in (layer, wide):
        tokens = [x.detach().to(module.out_proj.weight.dtype).requires_grad_() for x in (query, memory)]
        masks = {"memory_valid" if role == "cross" else "query_valid": valid}
        output = module(tokens[0], tokens[1] if role == "cross" else None, **masks).output
        (output * torch.arange(24).to(output)).sum().backward()
        gradients = [x.grad for x in (*tokens[: 2 if role == "cross" else 1], *module.parameters())]
        results.append([output, *gradients])
    assert taken == [3, 3]
    names = ["output", *(["query", "memory"] if role == "cross" else ["query"]), *dict(layer.named_parameters())]
    for name, one, other in zip(names, *results, strict=True):
        if name != "k_proj.bias":  # zero but for rounding
            assert (one.double() - other).norm() <= 6e-3 * other.norm(), name


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("causal", [True, False])
def test_attention_takes_it_where_it_may(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = [torch.randn(2, 4, 7, 8) for _ in range(3)]
    valid = torch.tensor([[True] * 7, [True] * 3 + [False] * 4])
    wanted, _ = attend(*qkv, scale=SCALE, causal=causal, valid=valid)
    monkeypatch.setattr(dot_product, "hides_all_keys", lambda q: True)
    taken: list[int] = []
    monkeypatch.setattr(dot_product, "attends_short", lambda q, k, v: taken.append(len(q)) is None)
    got, _ = attend(*qkv, scale=SCALE, causal=causal, valid=valid)
    torch.testing.assert_close(got, wanted)
    assert taken == [2]
    attend(*qkv, scale=SCALE, causal=causal, valid=valid, dropout=0.5)
    attend(*qkv, scale=SCALE, causal=causal, valid=valid[:, None].expand(2, 7, 7))
    assert taken == [2]


def test_a_cpu_has_no_such_kernel() -> None:
    assert not attends_short(*[torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16) for _ in range(3)])
