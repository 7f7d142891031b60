"""Localness: where it is full attention, what predicts the bell, and that no bell knows of later tokens or padding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build
from tests.attention.small import refusals

ROLES = ["encoder", "decoder", "cross"]
WINDOWS = ["query", "layer", "fixed"]
VALID = torch.tensor([[True] * 9, [True] * 4 + [False] * 5])


def make(role: str = "encoder", name: str = "localness", **arguments: Any) -> Any:
    attention = build(name, **{"role": role, "d_model": 32, "heads": 4} | arguments).eval()
    if hasattr(attention, "width_vector"):
        torch.nn.init.normal_(attention.width_vector)
    return attention


def masks(role: str) -> dict[str, Tensor]:
    return {"memory_valid" if role == "cross" else "query_valid": VALID}


def inputs(role: str) -> tuple[Tensor, Tensor | None]:
    return torch.randn(2, 9, 32), torch.randn(2, 9, 32) if role == "cross" else None


def apart(one: Any, role: str) -> float:
    """How far it is from full attention of the same weights."""
    full, (x, memory) = make(role, "full"), inputs(role)
    full.load_state_dict({name: value for name, value in one.state_dict().items() if name in full.state_dict()})
    real = VALID if role != "cross" else slice(None)
    difference = one(x, memory, **masks(role)).output - full(x, memory, **masks(role)).output
    return float(difference[real].detach().abs().max())


def bell(attention: Any, x: Tensor, memory: Tensor | None = None, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """P and D of every query, (B, heads, T, 1)."""
    centre, width = attention.bell(attention.pairs(x, memory, valid))
    return centre, width.expand_as(centre)


@pytest.mark.parametrize("role", ROLES)
def test_a_wide_fixed_window_is_full_attention(role: str) -> None:
    """The bias is at most 2 (T/D)² in size, so that it falls with the square of the window."""
    assert apart(make(role, window="fixed", fixed_window=450 * 9), role) < 1e-5
    wide, wider = (apart_in_double(role, 9 * times) for times in (20, 40))
    assert wide > 1e-5
    assert 3.5 < wide / wider < 4.5


def apart_in_double(role: str, fixed_window: int) -> float:
    torch.manual_seed(3)
    attention, full = make(role, window="fixed", fixed_window=fixed_window).double(), make(role, "full").double()
    full.load_state_dict({name: value for name, value in attention.state_dict().items() if name in full.state_dict()})
    torch.manual_seed(4)
    x, memory = (None if each is None else each.double() for each in inputs(role))
    return float((attention(x, memory).output - full(x, memory).output).detach().abs().max())


@pytest.mark.parametrize("window", WINDOWS)
def test_lower_layers_are_local_and_those_above_full_attention(window: str) -> None:
    layers = [make(layer=layer, layers=5, window=window) for layer in range(5)]
    assert [apart(each, "encoder") < 1e-6 for each in layers] == [False, False, False, True, True]
    assert layers[3].state_dict().keys() == make(name="full").state_dict().keys()
    assert apart(make(layer=1, layers=5, window=window, apply_layers=1), "encoder") < 1e-6


def test_some_heads_are_local_and_the_others_those_of_full_attention() -> None:
    attention, full, x = make(local_heads=3), make(name="full"), torch.randn(2, 9, 32)
    attention.adopt(full.state_dict())
    got, plain = (each(x, need_weights=True).weights for each in (attention, full))
    torch.testing.assert_close(got[:, 3], plain[:, 3])
    assert ((got - plain).abs().amax((0, 2, 3))[:3] > 1e-3).all()


def test_the_bell_is_that_of_the_equations() -> None:
    attention, x = make().double(), torch.randn(2, 9, 32).double()
    torch.nn.init.zeros_(attention.k_proj.weight)  # no scores but the bias
    centre, width = bell(attention, x, valid=VALID)
    weights = attention(x, query_valid=VALID, need_weights=True).weights
    for b, n in ((0, 9), (1, 4)):
        j = torch.arange(n).double()
        sigma = width[b] / 2
        expected = (-((j - centre[b]) ** 2) / (2 * sigma**2)).softmax(-1)
        torch.testing.assert_close(weights[b, :, :, :n], expected)
        assert 0 <= centre[b].min() <= centre[b].max() <= n - 1
        assert 0.1 <= width[b].min() <= width[b].max() <= n + 0.1


def test_at_the_start_windows_are_half_the_length() -> None:
    for window in ("query", "layer"):
        attention = build("localness", role="encoder", d_model=32, heads=4, window=window)
        _, width = bell(attention, torch.randn(2, 9, 32), valid=VALID)
        torch.testing.assert_close(width[:, 0, 0, 0], torch.tensor([4.6, 2.1]))


@pytest.mark.parametrize("window", ["query", "layer"])
def test_in_the_decoder_the_bell_is_that_of_the_prefix_alone(window: str) -> None:
    """A length counted over the target, or over its padding, would tell of tokens to come."""
    attention, x = make("decoder", window=window), torch.randn(2, 9, 32)
    whole = bell(attention, x, valid=VALID)
    for length in (1, 4):
        prefix = bell(make_like(attention), x[:, :length])
        for one, other in zip(whole, prefix, strict=True):
            torch.testing.assert_close(one[:, :, :length], other)
    assert not whole[0][:, :, 0].any()  # the first token sees one key, at position 0


def make_like(attention: Any) -> Any:
    """The same in another object, which has seen no other length."""
    other = make("decoder", window=attention.window)
    other.load_state_dict(attention.state_dict())
    return other


@pytest.mark.parametrize("role", ["encoder", "cross"])
@pytest.mark.parametrize("window", ["query", "layer"])
def test_padding_counts_for_no_length_and_no_mean(role: str, window: str) -> None:
    attention, (x, memory) = make(role, window=window), inputs(role)
    context = x if memory is None else memory
    context[1, 4:] = 100.0
    padded = bell(attention, x, memory, VALID)
    alone = bell(attention, x[1:, :4], None if memory is None else memory[1:, :4])
    for one, other in zip(padded, alone, strict=True):
        torch.testing.assert_close(one[1:, :, :4], other)


def test_the_layers_window_is_the_same_for_all_queries_and_read_from_the_mean_of_the_keys() -> None:
    attention, x = make(window="layer").double(), torch.randn(2, 9, 32).double()
    _, width = bell(attention, x)
    torch.testing.assert_close(width, width[:, :, :1].expand_as(width))
    mean = attention.k_proj(x).mean(1).view(2, 4, 8)
    for head in range(4):
        hidden = (mean[:, head] @ attention.mean_hidden[head]).tanh()
        expected = 9 * (hidden @ attention.width_vector[head]).sigmoid() + 0.1
        torch.testing.assert_close(width[:, head, 0], expected)


def test_heads_that_share_keys_share_their_mean_and_not_their_window() -> None:
    attention = make(window="layer", projection={"name": "grouped-query", "kv_heads": 2}).double()
    x = torch.randn(2, 9, 32).double()
    _, width = bell(attention, x)
    assert (width[:, 0] - width[:, 1]).abs().min() > 1e-3
    for each in (attention.mean_hidden, attention.width_vector):
        each.data[1] = each.data[0]
    _, width = bell(attention, x)
    torch.testing.assert_close(width[:, 0], width[:, 1])
    torch.testing.assert_close(attention(x).output, attention.naive(x).output)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_single_token_is_its_value(window: str) -> None:
    attention, x = make("decoder", window=window), torch.randn(2, 1, 32)
    torch.testing.assert_close(attention(x).output, attention.out_proj(attention.v_proj(x)))


test_options_that_mean_nothing_are_refused = refusals(
    make,
    ({"window": "wide"}, "query, layer, fixed"),
    ({"fixed_window": 0}, "fixed_window = 0 must"),
    ({"local_heads": 5}, "local_heads = 5 must be at most the 4 heads"),
    ({"apply_layers": -1}, "apply_layers = -1"),
)
