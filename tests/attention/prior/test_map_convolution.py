"""Convolved maps: what the convolution reads in each role, what travels up, what a step keeps, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build, reorder
from mtkit.attention.prior._map_convolution import Carried
from mtkit.errors import MtkitError

NAMES = ["predictive", "evolving"]
ROLES = ["encoder", "decoder", "cross"]
VALID = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])


def make(name: str, role: str, layer: int = 1, **arguments: Any) -> Any:
    attention = build(name, **{"role": role, "layer": layer, "d_model": 8, "heads": 2, "layers": 4} | arguments)
    if attention.convolution is not None:
        torch.nn.init.normal_(attention.convolution.weight)
        torch.nn.init.normal_(attention.convolution.bias)
    return attention.double().eval()


def shown(role: str) -> Tensor:
    """Which scores (B, T, S) the convolution may read."""
    columns = VALID[:, None, :].expand(2, 5, 5)
    if role == "encoder":
        return columns & VALID[:, :, None]
    return columns.tril() if role == "decoder" else columns


def convolved(image: Tensor, attention: Any) -> Tensor:
    """Sums over the kernel written out, place by place; in the roles that step, no row below is read."""
    weight, bias, role = attention.convolution.weight, attention.convolution.bias, attention.site.role
    reach, out, mask = weight.shape[3] // 2, torch.zeros_like(image), shown(role)
    below = reach if role == "encoder" else 0
    for b, i, j in torch.cartesian_prod(torch.arange(2), torch.arange(5), torch.arange(5)).tolist():
        total = bias
        for row in range(max(i - reach, 0), min(i + below, 4) + 1):
            for column in range(max(j - reach, 0), min(j + reach, 4) + 1):
                if mask[b, row, column]:
                    total = total + weight[:, :, row - i + reach, column - j + reach] @ image[b, :, row, column]
        out[b, :, i, j] = total.relu()
    return out


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_map_is_the_equation_with_the_convolution_written_out(name: str, role: str, kernel: int) -> None:
    attention = make(name, role, kernel=kernel, alpha=0.3)
    x, memory = torch.randn(2, 5, 8).double(), torch.randn(2, 5, 8).double() if role == "cross" else None
    below = torch.randn(2, 2, 5, 5).double() * shown(role).unsqueeze(1)
    source = x if memory is None else memory
    q, k, v = (
        p(y).unflatten(-1, (2, 4)).transpose(1, 2)
        for p, y in ((attention.q_proj, x), (attention.k_proj, source), (attention.v_proj, source))
    )
    scores = q @ k.transpose(-1, -2) / 2
    if name == "predictive":
        logits = 0.3 * scores + 0.7 * convolved(below, attention)
    else:
        image = 0.3 * below + 0.7 * scores
        logits = 0.1 * convolved(image, attention) + 0.9 * image
    hidden = ~shown(role).unsqueeze(1)
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    masks = {"memory_valid" if role == "cross" else "query_valid": VALID}
    attended = attention(x, memory, carry=Carried(below), need_weights=True, **masks)
    output = attention.out_proj((weights @ v).transpose(1, 2).flatten(2))
    real = torch.ones_like(VALID) if role == "cross" else VALID
    torch.testing.assert_close(attended.output[real], output[real])
    torch.testing.assert_close(attended.weights.transpose(1, 2)[real], weights.transpose(1, 2)[real])
    rows = real[:, None, :, None]
    torch.testing.assert_close(attended.carry.map * rows, logits.masked_fill(hidden, 0.0) * rows)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_first_layer_is_full_attention_whatever_stands_below(name: str, role: str) -> None:
    first, full = make(name, role, layer=0), build("full", role=role, d_model=8, heads=2).double().eval()
    assert first.convolution is None
    first.load_state_dict(full.state_dict())
    x, memory = torch.randn(2, 5, 8).double(), torch.randn(2, 5, 8).double() if role == "cross" else None
    for carry in (None, torch.randn(2, 3, 5, 5)):
        torch.testing.assert_close(first(x, memory, carry=carry).output, full(x, memory).output)


@pytest.mark.parametrize("name", NAMES)
def test_above_the_first_layer_the_map_below_is_needed(name: str) -> None:
    with pytest.raises(MtkitError, match="layer 1 of a run"):
        make(name, "encoder")(torch.randn(2, 5, 8).double())


def stack(name: str, role: str, **arguments: Any) -> list[Any]:
    return [make(name, role, layer, **arguments) for layer in range(4)]


def through(layers: list[Any], x: Tensor, memory: Tensor | None) -> Tensor:
    carry = None
    for layer in layers:
        attended = layer(x, memory, carry=carry)
        x, carry = x + attended.output, attended.carry
    return x


@pytest.mark.parametrize("share_conv", [False, True])
@pytest.mark.parametrize("role", ["decoder", "cross"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_deep_stack_steps_as_it_attends(name: str, role: str, share_conv: bool) -> None:
    layers = stack(name, role, share_conv=share_conv, kernel=5, alpha=0.5)
    x, memory = torch.randn(3, 9, 8).double(), torch.randn(1, 7, 8).double() if role == "cross" else None
    states = [layer.start(1, memory, hypotheses=3)[0] for layer in layers]
    outputs = []
    for t in range(9):
        y, carry = x[None, :, t], None
        for each, layer in enumerate(layers):
            attended, states[each] = layer.step(y, states[each], carry=carry)
            y, carry = y + attended.output, attended.carry
        outputs.append(y[0])
        states = [reorder(state, torch.tensor([[1, 2, 0]])) for state in states]
        x = x[[1, 2, 0]]
        outputs = [output[[1, 2, 0]] for output in outputs]
    wanted = through(layers, x, None if memory is None else memory.expand(3, -1, -1))
    torch.testing.assert_close(torch.stack(outputs, 1), wanted)


@pytest.mark.parametrize("role", ["decoder", "cross"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_step_keeps_the_rows_that_the_kernel_reads_and_no_more(name: str, role: str) -> None:
    memory = torch.randn(2, 7, 8).double() if role == "cross" else None
    lower, upper = make(name, role, layer=0, kernel=5), make(name, role, kernel=5)
    below, state = (layer.start(2, memory, hypotheses=3)[0] for layer in (lower, upper))
    assert "rows" not in below
    for t in range(6):
        assert state["rows"].shape == (2, 3, 2, 2, 7 if role == "cross" else t)
        x = torch.randn(2, 3, 8).double()
        attended, below = lower.step(x, below)
        _, state = upper.step(x, state, carry=attended.carry)
    if role == "decoder":
        assert state["rows"][:, :, :, 0, 5].abs().max() == 0, "a row is zero beyond its own position"
        assert state["rows"][:, :, :, 1, 5].abs().min() > 0


@pytest.mark.parametrize("name", NAMES)
def test_one_convolution_serves_all_layers_where_they_share_it(name: str) -> None:
    layers, x = stack(name, "encoder", share_conv=True, act="leaky"), torch.randn(2, 5, 8).double()
    assert [layer.convolution is not None for layer in layers] == [False, True, False, False]
    alone = [make(name, "encoder", layer, act="leaky") for layer in range(4)]
    assert [layer.convolution is not None for layer in alone] == [False, True, True, True]
    for one, other in zip(layers, alone, strict=True):
        one.load_state_dict({name: value for name, value in other.state_dict().items() if name in one.state_dict()})
        if other.convolution is not None:
            other.convolution.load_state_dict(layers[1].convolution.state_dict())
    torch.testing.assert_close(through(layers, x, None), through(alone, x, None))


@pytest.mark.parametrize("name", NAMES)
def test_maps_are_convolved_in_float32_under_autocast(name: str) -> None:
    attention, x = make(name, "encoder").float(), torch.randn(2, 5, 8)
    below = Carried(torch.randn(2, 2, 5, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = attention(x, carry=below)
    assert low.carry.map.dtype == torch.float32
    high = attention(x, carry=below)
    assert (low.output.float() - high.output).norm() < 0.02 * high.output.norm()


@pytest.mark.parametrize("name", NAMES)
def test_the_bias_of_the_positions_enters_the_softmax_alone(name: str) -> None:
    plain, biased = (make(name, "encoder", positions=positions) for positions in (None, "alibi"))
    biased.load_state_dict(plain.state_dict(), strict=False)
    x, below = torch.randn(2, 5, 8).double(), Carried(torch.randn(2, 2, 5, 5).double())
    one, other = (attention(x, carry=below, need_weights=True) for attention in (plain, biased))
    torch.testing.assert_close(one.carry.map, other.carry.map)
    assert not torch.allclose(one.weights, other.weights, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_flow_down_through_the_maps(name: str) -> None:
    lower, upper = (make(name, "decoder", layer, act="leaky") for layer in range(2))
    x = torch.randn(2, 5, 8).double()
    upper(x, carry=lower(x).carry).output.square().sum().backward()
    assert lower.q_proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize("wrong", [{"kernel": 2}, {"kernel": 0}, {"act": "rely"}, {"alpha": 1.5}, {"alpha": -0.1}])
@pytest.mark.parametrize("name", NAMES)
def test_options_without_a_meaning_are_refused_by_name(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(MtkitError, match=str(next(iter(wrong.values())))):
        make(name, "encoder", **wrong)
