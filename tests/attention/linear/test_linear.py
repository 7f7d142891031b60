"""Linear attention: the degenerate cases in which it is softmax attention, and its constant step."""

from typing import Any

import pytest
import torch

from tests.attention.small import ROLES, adopting, check_zero_keys, maker, refusals

make = maker("linear")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("options", [{}, {"chunk": 3}, {"projection": "multi-query"}])
def test_keys_that_are_all_the_same_give_the_uniform_mean(role: str, options: dict[str, Any]) -> None:
    check_zero_keys(make, role, **options)


@pytest.mark.parametrize("role", ROLES)
def test_one_visible_key_is_its_value(role: str) -> None:
    full = make(role, "full")
    x, memory = torch.randn(2, 1, 32), torch.randn(2, 1, 32) if role == "cross" else None
    torch.testing.assert_close(adopting(make, full)(x, memory).output, full(x, memory).output, rtol=1e-5, atol=1e-5)


def test_it_is_not_softmax_attention_elsewhere() -> None:
    full, x = make("encoder", "full"), torch.randn(2, 9, 32)
    assert not torch.allclose(adopting(make, full)(x).output, full(x).output, atol=1e-2)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("feature_map", ["elu1", "relu"])
@pytest.mark.parametrize("projection", [None, {"name": "grouped-query", "kv_heads": 2}])
def test_forward_is_the_equation_written_out(role: str, feature_map: str, projection: Any) -> None:
    positions = None if role == "cross" else "rotary"
    linear = make(role, feature_map=feature_map, projection=projection, positions=positions, chunk=4).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    memory = torch.randn(2, 9, 32, dtype=torch.float64) if role == "cross" else None
    valid = torch.tensor([[True] * 9, [True] * 5 + [False] * 4])
    masks = {"query_valid": valid} if memory is None else {"memory_valid": valid}
    torch.testing.assert_close(linear(x, memory, **masks).output, linear.naive(x, memory, **masks).output)


def test_the_state_of_the_source_does_not_grow_with_it() -> None:
    cross = make("cross")
    shapes = {
        length: [tuple(x.shape) for x in cross.start(2, torch.randn(2, length, 32))[0]["shared"]["sums"]]
        for length in (4, 5, 500)
    }
    assert shapes[5] == shapes[500] == [(2, 4, 8, 9)]
    assert shapes[4] == [(2, 4, 8, 4), (2, 4, 4, 9)], "of a short one, features and values are fewer numbers"


def test_dropout_acts_on_the_heads_outputs() -> None:
    linear = make("encoder", dropout=0.5).train()
    seen = []
    linear.out_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    linear(torch.randn(2, 40, 32))
    assert 0.4 < (seen[0] == 0).float().mean().item() < 0.6


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"feature_map": "elu"}, "one of elu1, relu"),
    ({"chunk": 0}, "chunk = 0"),
    role="decoder",
)
