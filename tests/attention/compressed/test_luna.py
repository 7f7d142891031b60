"""Luna: its closed forms, its memory carried through the stack and into the decoder, and its step's state."""

import math
from typing import Any

import pytest
import torch

from mtkit.attention.compressed.luna import Packed, softplus2
from mtkit.errors import MtkitError
from mtkit.model.build import build_model
from mtkit.model.transformer import Transformer
from mtkit.recipe import load_recipe
from tests.attention.small import maker, refusals

make = maker("luna", length=3, chunk=4)


def stack(role: str, **arguments: Any) -> list[Any]:
    return [make(role, layer=layer, layers=2, **arguments) for layer in range(2)]


@torch.no_grad()
def silence(luna: Any) -> None:
    """A memory that asks for nothing: its queries are zero."""
    luna.packed_q_proj.weight.zero_()
    luna.packed_q_proj.bias.zero_()


@pytest.mark.parametrize("tie_kv", [True, False])
@pytest.mark.parametrize("role", ["encoder", "cross"])
def test_one_slot_gives_every_position_the_projected_context_it_attended_to(role: str, tie_kv: bool) -> None:
    """l = 1: the weights of unpacking are 1; with queries of zero the context is the mean of the real values."""
    luna = make(role, length=1, tie_kv=tie_kv)
    x, valid = torch.randn(2, 7, 32), torch.arange(7) < torch.tensor([[7], [4]])
    memory = None if role == "encoder" else torch.randn(2, 7, 32)
    context = x if memory is None else memory
    masks = {"query_valid": valid} if memory is None else {"memory_valid": valid}
    output = luna(x, memory, **masks).output
    assert (output - output[:, :1]).abs().max() < 1e-5
    silence(luna)
    mean = torch.stack([luna.v_proj(context[row, :length]).mean(0) for row, length in enumerate((7, 4))])
    expected = luna.out_proj(luna.packed_v_proj(mean)).unsqueeze(1).expand(2, 7, 32)
    torch.testing.assert_close(luna(x, memory, **masks).output, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("activation", ["softplus2", "elu1"])
def test_in_the_decoder_a_silent_memory_gives_the_running_mean(activation: str) -> None:
    """omega(0) = 1 for both: every slot packs the sum of all values so far, and 1/t makes it their mean."""
    luna = make("decoder", activation=activation)
    silence(luna)
    x = torch.randn(2, 11, 32)
    mean = luna.v_proj(x).cumsum(1) / torch.arange(1, 12).unsqueeze(-1)
    torch.testing.assert_close(luna(x).output, luna.out_proj(mean), atol=1e-5, rtol=0)


def test_in_the_decoder_one_slot_gives_the_mean_of_weighted_values() -> None:
    """l = 1: y_t = (1/t) sum_{j<=t} log2(1 + 2^(x_j W P)) v_j."""
    luna = make("decoder", length=1)
    x = torch.randn(2, 11, 32)
    heads = []
    for head in range(4):
        part = slice(8 * head, 8 * head + 8)
        asks = luna.packed_q_proj(math.sqrt(32) * luna.seeds)[:, part]  # (1, 8)
        weights = torch.log2(1 + 2 ** (luna.context_proj(x)[..., part] @ asks.T / 8**0.5))  # (2, 11, 1)
        heads.append((weights * luna.v_proj(x)[..., part]).cumsum(1) / torch.arange(1, 12).unsqueeze(-1))
    torch.testing.assert_close(luna(x).output, luna.out_proj(torch.cat(heads, -1)), atol=1e-5, rtol=0)


def test_the_activation_is_the_softplus_of_base_2() -> None:
    x = torch.linspace(-30, 30, 61, dtype=torch.float64)
    torch.testing.assert_close(softplus2(x), torch.log2(1 + 2**x), atol=1e-12, rtol=0)
    assert softplus2(torch.tensor([-1e4, 1e4])).tolist() == [0.0, 1e4]


def test_a_segment_unpacks_no_more_slots_than_it_has_tokens() -> None:
    """Two tokens among five slots: what the slots from the third on ask for changes nothing."""
    x, valid = torch.randn(2, 6, 32), torch.arange(6) < torch.tensor([[2], [6]])
    for dynamic in (True, False):
        luna = make(length=5, dynamic_length=dynamic)
        before = luna(x, query_valid=valid).output
        with torch.no_grad():
            luna.seeds[2:] += torch.randn(3, 32)
        moved = (luna(x, query_valid=valid).output - before).abs().amax((1, 2))
        assert moved[1] > 1e-3
        assert (moved[0] < 1e-6) == dynamic
        alone = luna(x[:1, :2]).output
        torch.testing.assert_close(alone, luna(x, query_valid=valid).output[:1, :2], atol=1e-5, rtol=0)


@pytest.mark.parametrize("role", ["encoder", "cross"])
def test_the_memory_goes_up_the_layers_and_grows_by_what_it_packs(role: str) -> None:
    first, second = stack(role)
    assert second.seeds is None
    x, memory = torch.randn(2, 7, 32), torch.randn(2, 5, 32) if role == "cross" else None
    packed = first(x, memory).carry
    assert packed.slots.shape == (2, 3, 32)
    torch.testing.assert_close(packed.slots.mean(-1), torch.zeros(2, 3), atol=1e-5, rtol=0)  # LN(P + Y_P)
    attended = second(x, memory, carry=packed)
    assert not torch.allclose(attended.carry.slots, packed.slots, atol=1e-2)
    attended.output.square().sum().backward()
    assert first.seeds.grad.any()
    assert first.packed_q_proj.weight.grad.any()
    with pytest.raises(MtkitError, match="layer below"):
        second(x, memory)


def test_no_target_token_moves_the_memory_of_the_decoder() -> None:
    first, second = stack("decoder")
    x = torch.randn(2, 7, 32)
    packed = first(x).carry
    torch.testing.assert_close(packed.slots, first(torch.randn(2, 9, 32)).carry.slots)
    torch.testing.assert_close(second(x, carry=packed).carry.slots, packed.slots)


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
def test_a_local_memory_is_learned_in_every_layer_and_goes_nowhere(role: str) -> None:
    x, memory = torch.randn(2, 7, 32), torch.randn(2, 5, 32) if role == "cross" else None
    for layer in stack(role, memory="local"):
        attended = layer(x, memory)
        assert attended.carry is None
        other = Packed(torch.randn(2, 3, 32))
        assert torch.equal(layer(x, memory, carry=other, memory_carry=other).output, attended.output)


def test_the_first_layer_starts_its_own_memory_whatever_stands_below() -> None:
    luna, x, memory = make("cross"), torch.randn(2, 7, 32), torch.randn(2, 5, 32)
    expected = luna(x, memory).output
    for foreign in (torch.randn(2, 3, 32), {"scores": torch.randn(2, 4, 7, 7)}, Packed(torch.randn(2, 3, 32))):
        assert torch.equal(luna(x, memory, carry=foreign).output, expected)
    for unfit in (torch.randn(2, 3, 32), Packed(torch.randn(2, 3, 24))):  # of another mechanism, of another width
        assert torch.equal(luna(x, memory, memory_carry=unfit).output, expected)


@pytest.mark.parametrize("role", ["decoder", "cross"])
@torch.no_grad()
def test_the_memory_of_the_encoder_is_where_the_decoder_starts(role: str) -> None:
    """Of another number of slots too; forward and steps alike, two layers high."""
    encoder, layers = make("encoder", length=4), stack(role)
    source, x = torch.randn(2, 9, 32), torch.randn(2, 7, 32)
    memory, packed = source if role == "cross" else None, encoder(source).carry
    assert (layers[0](x, memory, memory_carry=packed).output - layers[0](x, memory).output).abs().max() > 1e-3
    carry, whole = None, []
    for layer in layers:
        attended = layer(x, memory, carry=carry, memory_carry=packed)
        carry = attended.carry
        whole.append(attended.output)
    assert carry.slots.shape == (2, 4, 32)
    carry = None
    for layer, expected in zip(layers, whole, strict=True):
        state, carry = layer.start(2, memory, carry=carry, memory_carry=packed, hypotheses=1)
        for position in range(7):
            attended, state = layer.step(x[:, position : position + 1], state)
            torch.testing.assert_close(attended.output[:, 0], expected[:, position], atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_step_keeps_sums_of_one_size() -> None:
    luna = make("decoder")
    state, _ = luna.start(2, hypotheses=5)
    for _ in range(3):
        _, state = luna.step(torch.randn(2, 5, 32), state)
        assert state["keys"].shape == state["values"].shape == (2, 5, 4, 3, 8)
        assert state["shared"]["asks"].shape == (2, 4, 3, 8)
    cross, _ = make("cross").start(2, torch.randn(2, 50, 32), hypotheses=5)
    assert {key: tuple(value.shape) for key, value in cross["shared"].items() if value is not None} == {
        "keys": (2, 4, 3, 8),
        "values": (2, 4, 3, 8),
    }


@torch.no_grad()
def test_dropout_acts_on_packing_and_unpacking() -> None:
    luna, x = make(dropout=0.5).train(), torch.randn(1, 12, 32)
    assert not torch.equal(luna(x).carry.slots, luna(x).carry.slots), "packing"
    silence(luna)
    luna.v_proj.weight.zero_()  # what is packed is zero whatever is dropped
    luna.packed_v_proj.bias.fill_(1.0)
    assert not torch.equal(luna(x).output, luna(x).output), "unpacking"
    assert torch.equal(luna.eval()(x).output, luna(x).output)


def model(**overrides: Any) -> Transformer:
    sizes = {"d_model": 16, "heads": 2, "feed_forward": 24, "max_length": 32, "encoder_layers": 2, "decoder_layers": 2}
    recipe = load_recipe(None, {"model": sizes, "attention": overrides})
    return build_model(recipe, source_vocabulary=24, target_vocabulary=24).eval()


@pytest.mark.parametrize(
    "attention",
    [
        {"name": "luna", "options": {"length": 4, "chunk": 4}},
        {"name": "luna", "options": {"length": 4, "memory": "local"}},
        {"encoder": "full", "decoder": ["realformer", "luna"], "cross": ["realformer", "luna"]},
        {"encoder": "realformer", "decoder": "full", "cross": "luna"},  # its scores are no packed memory
        {"encoder": "luna", "decoder": "luna", "cross": "full"},
    ],
    ids=["luna", "local", "after-realformer", "over-realformer", "full-cross"],
)
@torch.no_grad()
def test_a_model_decodes_step_by_step_what_it_gives_whole(attention: dict[str, Any]) -> None:
    net = model(**attention)
    source, target = torch.randint(4, 24, (3, 7)), torch.randint(4, 24, (3, 6))
    valid = torch.arange(7) < torch.tensor([[7], [4], [2]])
    whole = net(source, target, source_valid=valid).hidden @ net.output_weight.T
    state = net.start(net.encode(source, valid), hypotheses=2)
    for position in range(6):
        step, state, _ = net.step(target[:, position, None].expand(-1, 2), state)
        torch.testing.assert_close(step.whole(), whole[:, position, None].expand(-1, 2, -1), atol=1e-4, rtol=0)


def test_in_a_model_the_encoders_memory_reaches_the_decoder() -> None:
    net = model(name="luna", options={"length": 4})
    source, target = torch.randint(4, 24, (3, 7)), torch.randint(4, 24, (3, 6))
    encoded = net.encode(source)
    assert encoded.carry.slots.shape == (3, 4, 16)
    net(source, target).hidden.square().sum().backward()
    last: Any = net.encoder[-1].attention
    assert last.packed_norm.weight.grad.any(), "only what the decoder reads of the last layer's memory moves it"


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"memory": "cary"}, "did you mean 'carry'"),
    ({"activation": "elu"}, "did you mean 'elu1'"),
    ({"length": 0}, "length = 0 must"),
    ({"projection": "multi-query"}, "multi-query"),
)
