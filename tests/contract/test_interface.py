"""What the registry says of each mechanism is complete and true, and what cannot be built is refused by name."""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mtkit.attention import ROLES, Attended, Attention, build, mechanisms
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.registry import Mechanism
from mtkit.attention.slots import SLOTS, Slot
from mtkit.errors import MtkitError
from tests.contract.cases import Case, each, plain, steps, valid_mask
from tests.contract.stack import apart, make, memory_for, tokens

every_mechanism = pytest.mark.parametrize("mechanism", mechanisms().values(), ids=list(mechanisms()))


@every_mechanism
def test_the_registry_says_all(mechanism: Mechanism) -> None:
    assert mechanism.paper.strip()
    assert mechanism.summary.strip()
    assert mechanism.complexity.startswith("O(")
    assert mechanism.growth in (1, 1.5, 2)
    assert isinstance(mechanism.weights, bool)
    assert mechanism.roles
    assert mechanism.published <= mechanism.roles <= set(ROLES)


@every_mechanism
def test_a_role_that_it_cannot_play_is_refused_naming_those_it_can(mechanism: Mechanism) -> None:
    for role in set(ROLES) - mechanism.roles:
        with pytest.raises(MtkitError, match=role) as refusal:
            build(mechanism.name, role=role, d_model=32, heads=4)
        assert all(each in str(refusal.value) for each in mechanism.roles)


@every_mechanism
def test_an_unknown_option_is_refused_with_the_nearest(mechanism: Mechanism) -> None:
    role = min(mechanism.roles)
    for option in [*mechanism.options, "nothing"]:
        with pytest.raises(MtkitError, match=f"no option '{option}z'") as refusal:
            build(mechanism.name, role=role, d_model=32, heads=4, **{f"{option}z": 1})
        assert option == "nothing" or f"did you mean '{option}'" in str(refusal.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "ful"}, "did you mean 'full'"),
        ({"role": "encoders"}, "did you mean 'encoder'"),
        ({"positions": "rotery"}, "did you mean 'rotary'"),
        ({"positions": {"name": "shaw", "clop": 2}}, "did you mean 'clip'"),
        ({"projection": "nothing"}, "no projection 'nothing'"),
        ({"role": "cross", "positions": "rotary"}, "cross"),
        ({"heads": 5}, "5"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(wrong: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"name": "full", "role": "encoder", "d_model": 32, "heads": 4}
    with pytest.raises(MtkitError, match=message) as refusal:
        build(**(arguments | wrong))  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)


def check_attended(attention: Attention, query: Tensor, memory: Tensor | None) -> None:
    """Asks for tokens of the model's width, and for nothing that was not asked for."""
    attended = attention(query, memory)
    assert isinstance(attended, Attended)
    assert attended.output.shape == query.shape
    assert attended.weights is None
    assert attended.losses == {}, "losses are for training"
    assert attention.longest is None or attention.longest >= attention.site.max_length


def check_weights(attention: Attention, query: Tensor, memory: Tensor | None) -> None:
    """Asks for weights where they are declared, of real keys only, and for the same output with them."""
    role, valid = attention.site.role, valid_mask([6, 3], 6)
    masks = {"memory_valid": valid} if role == "cross" else {"query_valid": valid}
    plainly = attention(query, memory, **masks)
    attended = attention(query, memory, **masks, need_weights=True)
    assert apart(attended.output, plainly.output) < 1e-5
    if not attention.weights:
        assert attended.weights is None
        return
    maps = getattr(attention, "softmax_heads", 4)  # a mechanism may have another number of softmaxes
    assert attended.weights.shape == (2, maps, 6, 6)
    rows = slice(None) if role == "cross" else slice(3)
    assert attended.weights[1, :, rows, 3:].abs().max() == 0
    if role == "decoder":
        assert attended.weights.triu(1).abs().max() == 0


def check_carry(below: Attention, above: Attention, query: Tensor, memory: Tensor | None) -> None:
    """Asks the next layer to read what is carried, if something is."""
    carry = below(query, memory).carry
    if carry is None:
        return
    other = tree_map(lambda part: torch.randn_like(part) if torch.is_tensor(part) else part, carry)
    outputs = [above(query, memory, carry=each_carry).output for each_carry in (carry, other)]
    assert apart(*outputs) > 1e-3, "the next layer does not read what is carried"


@each()
@torch.no_grad()
def test_it_gives_tokens_weights_of_real_keys_and_a_carry_that_is_read(case: Case) -> None:
    layers = list(make(case).layers)
    query, memory = tokens(2, 6), memory_for(case, 2, 6)
    check_attended(layers[0], query, memory_for(case, 2, 5))
    check_weights(layers[0], query, memory)
    if len(layers) > 1:
        check_carry(*layers, query, memory)


@each(lambda case: steps(case) and case.mechanism.weights)
@torch.no_grad()
def test_steps_give_the_weights_of_forward(case: Case) -> None:
    attention = make(case).layers[0]
    query, memory = tokens(2, 6), memory_for(case, 2, 5)
    expected = attention(query, memory, need_weights=True).weights
    state, _ = attention.start(2, memory)
    for position in range(6):
        attended, state = attention.step(query[:, position : position + 1], state, need_weights=True)
        width = attended.weights.shape[-1]
        assert apart(attended.weights[:, :, 0], expected[:, :, position, :width]) < 1e-4
        assert width == 5 if case.role == "cross" else width >= position + 1


@each(plain)
def test_slots_hear_of_each_update_once(case: Case) -> None:
    attention = case.build()
    if not isinstance(attention, HeadAttention):
        pytest.skip("it has no slots")
    told = []
    for slot in SLOTS:
        part = getattr(attention, slot) or Slot(attention.site)
        part.after_update = lambda *when, slot=slot: told.append((slot, *when))
        setattr(attention, slot, part)
    attention.after_update(3, 10)
    assert sorted(told) == sorted((slot, 3, 10) for slot in SLOTS)
