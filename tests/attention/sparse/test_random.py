"""Random attention: its limit, its equation pair by pair, and what its draws depend on."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import ROLES, build
from mtkit.attention.kernels.reproducible import hashed, random_key
from tests.attention.small import maker

LENGTHS = [29, 11, 1]

make = maker("random", d_model=16, heads=2, layers=2, random_keys=4)


def drawn(i: int, head: int, candidates: int, *, keys: int, role: str, seed: int, layer: int) -> set[int]:
    """floor(u * candidates) for each slot, by the hash of seed, role, layer, head, position and slot, one by one."""
    if keys >= candidates:
        return set(range(candidates))
    start = hashed(torch.tensor(random_key(seed, ROLES.index(role), layer) + head))
    draws = (hashed(hashed(start + i) + slot) for slot in range(keys))
    return {int(draw) * candidates // 2**32 for draw in draws}


def naive(
    attention: Any, query: Tensor, memory: Tensor | None, lengths: list[int], *, keys: int = 4, shared: bool = False
) -> Tensor:
    """The output (B, T, D), one query, head and segment at a time; zeros at padding."""
    role, heads, width = attention.site.role, attention.site.heads, query.shape[2] // attention.site.heads
    source = query if memory is None else memory
    q, k, v = attention.q_proj(query), attention.k_proj(source), attention.v_proj(source)
    where = {"keys": keys, "role": role, "seed": attention.site.seed, "layer": attention.site.layer}
    segments = []
    for b, length in enumerate(lengths):
        rows = []
        for i in range(query.shape[1]):
            if role != "cross" and i >= length:
                rows.append(query.new_zeros(heads * width))
                continue
            outputs = []
            for h in range(heads):
                own = slice(h * width, (h + 1) * width)
                seen = drawn(i, 0 if shared else h, i + 1 if role == "decoder" else length, **where)
                at = sorted(seen if role == "cross" else seen | {i})
                weights = (k[b, at, own] @ q[b, i, own] / width**0.5).softmax(0)
                outputs.append(weights @ v[b, at, own])
            rows.append(torch.cat(outputs))
        segments.append(torch.stack(rows))
    output: Tensor = attention.out_proj(torch.stack(segments))
    return output


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("shared", [False, True])
def test_it_is_the_equation_with_gradients(role: str, shared: bool) -> None:
    attention = make(role, random_shared_heads=shared, layer=1, seed=5).double()
    query = torch.randn(3, 29, 16, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(3, 29, 16, dtype=torch.float64, requires_grad=True) if role == "cross" else None
    valid = torch.arange(29) < torch.tensor(LENGTHS).unsqueeze(1)
    masks = {"query_valid": valid} if memory is None else {"memory_valid": valid}
    real = valid if memory is None else torch.ones_like(valid)
    outputs = [attention(query, memory, **masks).output, naive(attention, query, memory, LENGTHS, shared=shared)]
    torch.testing.assert_close(outputs[0][real], outputs[1][real])
    weight = torch.randn_like(outputs[0]) * real.unsqueeze(-1)
    inputs = [query, *([] if memory is None else [memory]), *attention.parameters()]
    fast, literal = (torch.autograd.grad((each * weight).sum(), inputs) for each in outputs)
    for one, other in zip(fast, literal, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
@torch.no_grad()
def test_as_many_draws_as_keys_are_full_attention(role: str) -> None:
    attention, full = make(role, random_keys=40), build("full", role=role, d_model=16, heads=2).eval()
    full.load_state_dict(attention.state_dict())
    x, valid = torch.randn(2, 40, 16), torch.arange(40) < torch.tensor([[40], [13]])
    given = {"memory": x.flip(1), "memory_valid": valid} if role == "cross" else {"query_valid": valid}
    real = torch.ones_like(valid) if role == "cross" else valid
    torch.testing.assert_close(attention(x, **given).output[real], full(x, **given).output[real], atol=1e-5, rtol=0)


@torch.no_grad()
def test_draws_differ_by_seed_layer_and_head_and_by_nothing_else() -> None:
    x = torch.randn(1, 200, 16)

    def pairs(**site: Any) -> Tensor:
        weights = make(**site)(x, need_weights=True).weights
        return weights > 0

    once = pairs()
    assert once.sum(-1).float().mean() > 4.8  # four and the token itself, less a few that were drawn twice
    state = torch.get_rng_state()
    assert torch.equal(once, pairs())
    assert torch.equal(once, pairs(dropout=0.1))
    make()(x)
    torch.manual_seed(0)
    assert torch.equal(once, pairs())
    assert not torch.equal(once, pairs(seed=2))
    assert not torch.equal(once, pairs(layer=1))
    assert not torch.equal(once[:, 0], once[:, 1])
    shared = pairs(random_shared_heads=True)
    assert torch.equal(shared[:, 0], shared[:, 1])
    torch.set_rng_state(state)


def test_another_process_draws_the_same() -> None:
    code = (
        "import torch; from mtkit.attention import build; "
        "a = build('random', role='encoder', d_model=16, heads=2, random_keys=4); "
        "w = a(torch.zeros(1, 50, 16), need_weights=True).weights; print((w > 0).nonzero().flatten().tolist())"
    )
    made = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
        for env in ({**os.environ, "PYTHONHASHSEED": "1"}, {**os.environ, "PYTHONHASHSEED": "2"})
    ]
    own = make()(torch.zeros(1, 50, 16), need_weights=True).weights > 0
    assert made[0] == made[1] == f"{own.nonzero().flatten().tolist()}\n"


@torch.no_grad()
def test_a_step_reads_what_was_drawn_for_its_position() -> None:
    attention, x, memory = make("cross"), torch.randn(1, 3, 16), torch.randn(1, 30, 16)
    whole = attention(x, memory, need_weights=True).weights
    state, _ = attention.start(1, memory)
    for t in range(3):
        attended, state = attention.step(x[:, t : t + 1], state, need_weights=True)
        torch.testing.assert_close(attended.weights[:, :, 0], whole[:, :, t])
