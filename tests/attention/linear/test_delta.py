"""Delta rule: a memory that can be written, read and overwritten, and its constant step."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention.linear.delta import Writes, dpfp, memory_after, read, read_causal
from tests.attention.small import maker, refusals

make = maker("delta", "decoder")


def one_hot(*keys: int) -> Tensor:
    """(1, 1, S, 6): the memory has six places."""
    return torch.eye(6, dtype=torch.float64)[list(keys)].view(1, 1, -1, 6)


def values(count: int) -> Tensor:
    return torch.randn(1, 1, count, 5, dtype=torch.float64)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 8, 64])
def test_a_place_written_again_holds_what_was_written_last(chunk: int) -> None:
    places, v = [0, 3, 0, 5, 3, 3, 0, 1], values(8)
    writes = Writes(one_hot(*places), v, torch.ones(1, 1, 8, 1, dtype=torch.float64))
    found = read_causal(one_hot(*([3] * 8)), writes, chunk)
    last = [None, 1, 1, 1, 4, 5, 5, 5]
    wanted = torch.stack([torch.zeros(5).double() if j is None else v[0, 0, j] for j in last])
    torch.testing.assert_close(found[0, 0], wanted)
    memory = memory_after(writes, chunk)
    torch.testing.assert_close(read(one_hot(0, 1, 3, 5, 2), memory)[0, 0, :4], v[0, 0, [6, 7, 5, 3]])
    assert not read(one_hot(2, 4), memory).any()


@pytest.mark.parametrize("chunk", [2, 64])
def test_keys_at_right_angles_add_up_like_linear_attention_without_a_denominator(chunk: int) -> None:
    keys = 0.3 * one_hot(4, 0, 2, 1)
    v, beta = values(4), torch.full((1, 1, 4, 1), 0.7, dtype=torch.float64)
    wanted = keys.transpose(-1, -2) @ (0.7 * v)
    torch.testing.assert_close(memory_after(Writes(keys, v, beta), chunk), wanted)


def test_a_spread_key_is_overwritten_only_as_far_as_its_norm_goes() -> None:
    key, v = torch.full((1, 1, 2, 6), 1 / 6, dtype=torch.float64), values(2)
    memory = memory_after(Writes(key, v, torch.ones(1, 1, 2, 1, dtype=torch.float64)), 2)
    norm = key[0, 0, 0].square().sum()
    wanted = norm * ((1 - norm) * v[0, 0, 0] + v[0, 0, 1])
    torch.testing.assert_close(read(key[:, :, :1], memory)[0, 0, 0], wanted)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 37])
@pytest.mark.parametrize("options", [{}, {"nu": 3}, {"feature_map": "elu1"}, {"projection": "multi-query"}])
def test_chunks_are_the_recurrence(length: int, options: dict[str, Any]) -> None:
    delta, x = make(chunk=8, **options).double(), torch.randn(2, length, 32, dtype=torch.float64)
    torch.testing.assert_close(delta(x).output, delta.naive(x).output, rtol=1e-12, atol=1e-12)


def test_dpfp_multiplies_neighbours_of_both_signs() -> None:
    x = torch.tensor([2.0, -3.0, 5.0])
    r = [2.0, 0.0, 5.0, 0.0, 3.0, 0.0]
    products = [r[i] * r[(i + shift) % 6] for shift in (1, 2) for i in range(6)]
    assert dpfp(x, 2).tolist() == products


def test_alternating_signs_that_have_no_feature_write_nothing_and_give_no_nan() -> None:
    """An odd width without two neighbours of one sign: every product of dpfp is zero."""
    assert not dpfp(torch.tensor([1.0, -2.0, 3.0]), 1).any()
    delta = make(d_model=3, heads=1)
    with torch.no_grad():
        delta.k_proj.weight.zero_()
        delta.k_proj.bias.copy_(torch.tensor([1.0, -2.0, 3.0]))
    output = delta(torch.randn(1, 5, 3)).output
    torch.testing.assert_close(output, delta.out_proj.bias.expand(1, 5, 3))


def test_one_token_gives_its_value_by_beta_and_its_match_with_the_query() -> None:
    delta, x = make(), torch.randn(1, 1, 32)
    with torch.no_grad():
        delta.out_proj.weight.copy_(torch.eye(32))
    keys, v, beta = delta._writes(x, None)
    match = (delta._reads(x) * keys).sum(-1, keepdim=True)
    wanted = (beta * match * v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(delta(x).output, wanted)


@torch.no_grad()
def test_the_source_is_the_memory_that_a_decoder_has_after_it() -> None:
    cross, decoder = make("cross", chunk=4), make()
    decoder.load_state_dict(cross.state_dict())
    x = torch.randn(2, 11, 32)
    torch.testing.assert_close(cross(x[:, -1:], x).output, decoder(x).output[:, -1:])


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"feature_map": "dpf"}, "did you mean 'dpfp'"),
    ({"nu": 0}, "nu = 0"),
    ({"nu": 16}, "be from 1 to 15"),
    ({"chunk": 0}, "chunk = 0"),
    ({"role": "encoder"}, "encoder"),
)
