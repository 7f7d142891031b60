"""Sparse attention written literally: loops over heads, queries and keys, for the tests of mechanisms beside it."""

from collections.abc import Callable

import torch
from torch import Tensor

from mtkit.attention import Attention, build

Sees = Callable[[int, int, int], bool]
"""Whether the query at i sees the key at j in a head: (head, i, j), padding and future aside."""


def make(name: str, role: str, *, heads: int = 4, **given: object) -> Attention:
    """The mechanism in float64, with biases that are not zero."""
    torch.manual_seed(5)
    attention = build(name, role=role, d_model=16, heads=heads, **given).double().eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return attention


def literal(attention: Attention, x: Tensor, valid: Tensor, sees: Sees) -> Tensor:
    """softmax(q k^T / sqrt(K)) v over the keys seen, one query at a time; a query without any gives zeros."""
    heads, causal = attention.site.heads, attention.site.role == "decoder"
    q, k, v = (
        getattr(attention, name)(x).unflatten(-1, (heads, -1)).transpose(1, 2)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    segments = []
    for b in range(len(x)):
        rows = []
        for head in range(heads):
            for i in range(x.shape[1]):
                seen = [j for j in range(x.shape[1]) if sees(head, i, j) and valid[b, j] and not (causal and j > i)]
                scores = k[b, head, seen] @ q[b, head, i] / k.shape[-1] ** 0.5
                rows.append(scores.softmax(0) @ v[b, head, seen])
        segments.append(torch.stack(rows).view(heads, x.shape[1], -1))
    return attention.out_proj(torch.stack(segments).transpose(1, 2).flatten(2))  # type: ignore[no-any-return, operator]


def agrees(attention: Attention, sees: Sees, *, length: int = 41, shorter: int = 23) -> None:
    """Asserts that outputs, and the gradients of the tokens and of all parameters, are those of the loops."""
    x = torch.randn(2, length, attention.site.d_model, dtype=torch.float64, requires_grad=True)
    valid = torch.arange(length) < torch.tensor([[length], [shorter]])
    weight = torch.randn(length, attention.site.d_model, dtype=torch.float64)
    results = []
    for output in (attention(x, query_valid=valid).output, literal(attention, x, valid, sees)):
        inputs = [x, *attention.parameters()]
        results.append([output[valid], *torch.autograd.grad((output * weight)[valid].sum(), inputs)])
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-10, rtol=1e-8)


@torch.no_grad()
def is_full(attention: Attention, *, length: int = 37) -> None:
    """Asserts the exactness limit: with these options the mechanism is full attention."""
    site = attention.site
    full = build("full", role=site.role, d_model=site.d_model, heads=site.heads).double().eval()
    full.load_state_dict(attention.state_dict())
    x = torch.randn(2, length, site.d_model, dtype=torch.float64)
    torch.testing.assert_close(attention(x).output, full(x).output, atol=1e-10, rtol=0)


@torch.no_grad()
def is_own_value(attention: Attention, *, length: int = 37) -> None:
    """Asserts that every token sees itself alone."""
    x = torch.randn(2, length, attention.site.d_model, dtype=torch.float64)
    wanted = attention.out_proj(attention.v_proj(x))  # type: ignore[operator]
    torch.testing.assert_close(attention(x).output, wanted, atol=1e-10, rtol=0)


@torch.no_grad()
def reached(attention: Attention, position: int, *, length: int = 60) -> set[int]:
    """The outputs that change with the token at a position."""
    x = torch.randn(1, length, attention.site.d_model, dtype=torch.float64)
    other = x.clone()
    other[:, position] += 1
    changed = (attention(other).output - attention(x).output).abs().amax((0, 2)) > 0
    return set(changed.nonzero().flatten().tolist())


def kept(attention: Attention, steps: int) -> int:
    """The tokens for which the state has room after so many steps, in all groups of heads together."""
    state, _ = attention.start(1)
    with torch.no_grad():
        for _ in range(steps):
            _, state = attention.step(torch.randn(1, 1, attention.site.d_model, dtype=torch.float64), state)
    return sum(int(group["keys"].shape[3]) for group in state["groups"])
