"""Lazy attention: which layers compute weights, what the others do with them, and what a step keeps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.errors import MtkitError
from tests.attention.small import ROLES, VALID, maker

make = maker("lazy", layers=4)


def stack(role: str, layers: int = 4, **options: Any) -> list[Any]:
    torch.manual_seed(2)
    return [make(role, layer=layer, layers=layers, **options) for layer in range(layers)]


def given(role: str) -> tuple[Tensor | None, dict[str, Tensor]]:
    if role == "cross":
        return torch.randn(2, 7, 32), {"memory_valid": VALID}
    return None, {"query_valid": VALID}


def has_scores(layer: Any) -> bool:
    assert hasattr(layer, "q_proj") == hasattr(layer, "k_proj")
    return hasattr(layer, "q_proj")


@pytest.mark.parametrize(
    ("block", "layers", "leading"), [(1, 3, [0, 1, 2]), (2, 5, [0, 2, 4]), (3, 5, [0, 3]), (9, 4, [0])]
)
def test_the_first_layer_of_each_block_has_scores(block: int, layers: int, leading: list[int]) -> None:
    made = stack("encoder", layers, lazy_block=block)
    assert [number for number, layer in enumerate(made) if has_scores(layer)] == leading


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "slots", [{}, {"positions": "alibi"}, {"projection": "grouped-query"}, {"merge": "em-routing"}]
)
def test_a_leading_layer_is_full_attention(role: str, slots: dict[str, str]) -> None:
    if role == "cross":
        slots = {slot: name for slot, name in slots.items() if slot != "positions"}
    memory, masks = given(role)
    for layer, block in ((0, 2), (2, 2), (1, 1), (3, 1)):
        lazy, full = make(role, layer=layer, lazy_block=block, **slots), make(role, "full", **slots)
        lazy.load_state_dict(full.state_dict())
        x, foreign = torch.randn(2, 7, 32), torch.rand(2, 4, 7, 7)
        got = lazy(x, memory, carry=foreign, need_weights=True, **masks)
        wanted = full(x, memory, need_weights=True, **masks)
        torch.testing.assert_close(got.output, wanted.output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.weights, wanted.weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("role", ROLES)
def test_the_others_apply_the_weights_of_full_attention_to_their_own_values(role: str) -> None:
    made, full = stack(role, 5, lazy_block=3), make(role, "full")
    memory, masks = given(role)
    carry: Any = None
    for number, layer in enumerate(made):
        x = torch.randn(2, 7, 32)
        got = layer(x, memory, carry=carry, need_weights=True, **masks)
        if number in (0, 3):
            full.load_state_dict(layer.state_dict())
            map_ = full(x, memory, need_weights=True, **masks).weights
        values = layer.v_proj(x if memory is None else memory).unflatten(-1, (4, 8))
        heads = torch.einsum("bhts,bshv->bthv", map_, values)
        torch.testing.assert_close(got.output, layer.out_proj(heads.flatten(2)), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.weights, map_, rtol=1e-5, atol=1e-5)
        carry = got.carry
        assert (carry is None) == (number in (2, 4)), "weights go no farther than their block"


@pytest.mark.parametrize("role", ROLES)
def test_one_block_is_realformer_without_queries_above_the_first_layer(role: str) -> None:
    lazy = stack(role, lazy_block=4)
    real = [make(role, "realformer", layer=layer) for layer in range(4)]
    with torch.no_grad():
        for one, other in zip(lazy, real, strict=True):
            other.load_state_dict(one.state_dict(), strict=False)
            if other.site.layer:
                other.q_proj.weight.zero_()
                other.q_proj.bias.zero_()
    memory, masks = given(role)
    outputs = []
    for layers in (lazy, real):
        torch.manual_seed(4)
        x, carry = torch.randn(2, 7, 32), None
        for layer in layers:
            attended = layer(x, memory, carry=carry, **masks)
            x, carry = x + attended.output, attended.carry
        outputs.append(x)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)


def test_weights_travel_before_dropout_and_each_layer_draws_its_own() -> None:
    made, x = [layer.train() for layer in stack("encoder", 3, lazy_block=3, dropout=0.5)], torch.randn(2, 7, 32)
    carry = made[0](x).carry
    torch.testing.assert_close(carry.sum(-1), torch.ones(2, 4, 7))
    kept = []
    for layer in made[1:]:
        with torch.no_grad():
            layer.v_proj.weight.zero_()
            layer.v_proj.bias.fill_(1.0)
            layer.out_proj.weight.copy_(torch.eye(32))
        attended = layer(x, carry=carry)
        kept.append(attended.output)
        torch.testing.assert_close(attended.carry if attended.carry is not None else carry, carry)
    assert not torch.allclose(kept[0], torch.ones_like(kept[0]))
    assert not torch.allclose(kept[0], kept[1])


def test_gradients_reach_the_scores_from_every_layer_of_the_block() -> None:
    made, x = stack("encoder", 3, lazy_block=3), torch.randn(2, 7, 32)
    for above in (1, 2):
        made[0].zero_grad()
        carry = made[0](x).carry
        for layer in made[1:above]:
            carry = layer(x, carry=carry).carry
        made[above](x, carry=carry).output.square().sum().backward()
        assert made[0].q_proj.weight.grad.any()
        assert made[0].v_proj.weight.grad is None


@pytest.mark.parametrize("role", ["decoder", "cross"])
def test_only_leading_layers_keep_keys_in_the_state(role: str) -> None:
    made, memory = stack(role, 4, lazy_block=2), given(role)[0]
    states, carry = [], None
    for layer in made:
        state, _ = layer.start(2, memory, hypotheses=3)
        attended, state = layer.step(torch.randn(2, 3, 32), state, carry=carry)
        carry = attended.carry
        states.append(state["shared"] if role == "cross" else state)
    assert ["keys" in state for state in states] == [True, False, True, False]
    assert all("values" in state for state in states)


def test_weights_of_full_are_adopted_where_there_is_a_place_for_them() -> None:
    full, lazy = make("encoder", "full"), make("encoder", layer=1)
    lazy.adopt(full.state_dict())
    assert {name.partition(".")[0] for name in lazy.state_dict()} == {"v_proj", "out_proj"}
    for name, value in lazy.state_dict().items():
        assert torch.equal(value, full.state_dict()[name])


def test_a_layer_without_scores_says_what_it_lacks() -> None:
    with pytest.raises(MtkitError, match="layer 1 of lazy attention needs what the layer below carries"):
        make("encoder", layer=1)(torch.randn(1, 3, 32))


@pytest.mark.parametrize("slot", [{"positions": "shaw"}, {"positions": "relative"}])
def test_positions_with_parameters_of_the_scores_are_refused(slot: dict[str, str]) -> None:
    with pytest.raises(MtkitError, match=r"'lazy' cannot combine with positions=.* alibi, rotary"):
        make("encoder", **slot)


def test_a_block_of_no_layers_is_refused() -> None:
    with pytest.raises(MtkitError, match="lazy_block = 0 must be a whole number from 1"):
        make("encoder", lazy_block=0)
