"""Adaptive span: the ramp, the limits of the span, what a short span saves, and how spans are trained."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention.heads.adaptive_span import _SpanRamp
from tests.attention.small import maker, refusals
from tests.contract.counting import Count

ROLES = ["encoder", "decoder"]
each_role = pytest.mark.parametrize("role", ROLES)

make = maker("adaptive-span", "decoder")


def with_spans(role: str, *spans: float, ramp: int = 4, max_span: int = 50) -> Any:
    """Built so that its heads have these spans, in positions."""
    attention = make(role, max_span=max_span, ramp=ramp, span_per="head" if len(spans) > 1 else "layer")
    with torch.no_grad():
        attention.span.fraction.copy_(torch.tensor(spans) / max_span)
    return attention


def weights_of(attention: Any, x: Tensor) -> Tensor:
    weights: Tensor = attention(x, need_weights=True).weights.detach()
    return weights


@each_role
def test_a_span_over_all_is_full_attention(role: str) -> None:
    full, ours = make(role, "full"), make(role, max_span=8, span_init=1.0, ramp=2)
    ours.adopt(full.state_dict())
    x = torch.randn(2, 9, 32)
    torch.testing.assert_close(ours(x).output, full(x).output, rtol=1e-5, atol=1e-5)
    longer = torch.randn(2, 30, 32)
    assert not torch.allclose(ours(longer).output, full(longer).output, atol=1e-4)


@each_role
def test_weights_are_those_of_the_equation_and_sum_to_one(role: str) -> None:
    """Of equal scores, so that the ramp alone is left: 1 up to the span, down to 0 at the ramp's end."""
    attention = with_spans(role, 0.0, 1.0, 2.5, 6.0)
    torch.nn.init.zeros_(attention.q_proj.weight)
    weights, i = weights_of(attention, torch.randn(1, 40, 32))[0], 20
    ramps = [
        [1, 3 / 4, 2 / 4, 1 / 4],  # a span of zero is no window of one
        [1, 1, 3 / 4, 2 / 4, 1 / 4],
        [1, 1, 1, 3.5 / 4, 2.5 / 4, 1.5 / 4, 0.5 / 4],
        [1, 1, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4],
    ]
    for head, ramp in enumerate(ramps):
        expected = torch.zeros(40)
        for distance, share in enumerate(ramp):
            expected[i - distance] = share
            if role == "encoder":
                expected[i + distance] = share
        torch.testing.assert_close(weights[head, i], expected / expected.sum())


@each_role
def test_the_ramp_multiplies_the_exponentials(role: str) -> None:
    """Against full's weights times the ramp, divided by their sum."""
    full, ours = make(role, "full"), with_spans(role, 7.0, ramp=5)
    ours.adopt(full.state_dict())
    x, i = torch.randn(2, 33, 32), torch.arange(33)
    ramped = weights_of(full, x) * (1 - ((i[:, None] - i).abs() - 7) / 5).clamp(0, 1)
    torch.testing.assert_close(weights_of(ours, x), ramped / ramped.sum(-1, keepdim=True))


@each_role
def test_one_token_gets_its_own_value(role: str) -> None:
    attention, x = make(role), torch.randn(2, 1, 32)
    torch.testing.assert_close(attention(x).output, attention.out_proj(attention.v_proj(x)))


def test_padding_beyond_a_span_is_finite() -> None:
    """Padded rows that see keys beyond their head's span alone, in the window of a head with a wider one."""
    attention = with_spans("encoder", 0.0, 0.0, 0.0, 30.0).train()
    x, valid = torch.randn(2, 60, 32, requires_grad=True), torch.arange(60) < torch.tensor([[60], [1]])
    output = attention(x, query_valid=valid).output
    output.sum().backward()
    assert output.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def cost(attention: Any, length: int = 600) -> Count:
    with Count() as counted:
        attention(torch.randn(1, length, 32)).output.sum().backward()
    return counted


@each_role
def test_what_lies_beyond_the_widest_span_costs_nothing(role: str) -> None:
    """The scores held are those of the window: the same whatever the longest span allowed is, more for a wider one."""
    short, allowed = (with_spans(role, 0.0, 5.0, 9.0, 2.0, max_span=each) for each in (10, 100_000))
    wide = with_spans(role, 0.0, 0.0, 400.0, 0.0, max_span=400)
    assert cost(short).touched == cost(allowed).touched
    assert cost(short).largest < 600 * 4 * 64
    assert cost(wide).touched > 5 * cost(short).touched
    assert cost(wide).largest > 5 * cost(short).largest


@each_role
def test_a_window_of_the_largest_span_gives_what_one_of_the_widest_gives(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window of an accelerator in training, where the spans are not read."""
    attention, x = with_spans(role, 0.0, 5.0, 9.0, 2.0), torch.randn(2, 70, 32, requires_grad=True)
    found = []
    assert attention.span.reach == 12
    largest = copy.deepcopy(attention).to("meta").train().span.reach
    assert largest == 53
    for reach in (12, largest):
        monkeypatch.setattr(_SpanRamp, "reach", reach)
        output = attention(x).output
        found.append((output, *torch.autograd.grad(output.square().sum(), [x, *attention.parameters()])))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("spans", "kept"), [((0.0,), 32), ((0.0, 7.0, 3.0, 1.0), 39), ((6.2,), 39)])
def test_decoding_keeps_the_widest_span_and_its_ramp(spans: tuple[float, ...], kept: int) -> None:
    """ceil(z) + R tokens; more than these would change nothing."""
    attention = with_spans("decoder", *spans, ramp=32)
    state, _ = attention.start(1)
    for _ in range(100):
        _, state = attention.step(torch.randn(1, 1, 32), state)
    assert state["groups"][0]["keys"].shape[3] == kept


def raise_in_place(attention: Any) -> None:
    with torch.no_grad():
        attention.span.fraction.fill_(0.6)


def write_through_data(attention: Any) -> None:
    attention.span.fraction.data.fill_(0.6)


def step_of_a_fused_optimizer(attention: Any) -> None:
    """It changes parameters without telling their versions, which `after_update` makes good."""
    optimizer = torch.optim.AdamW([attention.span.fraction], lr=0.4, fused=True)
    attention.span.fraction.grad = torch.full_like(attention.span.fraction, -1.0)
    optimizer.step()
    attention.after_update(1, 10)


def restore(attention: Any) -> None:
    attention.load_state_dict({**attention.state_dict(), "span.fraction": torch.full((4,), 0.6)})


@pytest.mark.parametrize("change", [raise_in_place, write_through_data, step_of_a_fused_optimizer, restore])
@each_role
def test_the_window_follows_the_spans(role: str, change: Any) -> None:
    attention, x = make(role, max_span=40, ramp=4), torch.randn(1, 60, 32)
    before = attention(x).output
    change(attention)
    assert attention.span.fraction.min() > 0.3
    output = attention(x).output
    torch.testing.assert_close(output, attention.naive(x).output, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(output, before, atol=1e-3)
    copied = copy.deepcopy(attention)
    torch.testing.assert_close(copied(x).output, output)


@torch.inference_mode()
def test_an_attention_built_in_inference_mode_attends() -> None:
    attention, x = make(), torch.randn(1, 9, 32)
    torch.testing.assert_close(attention(x).output, attention.naive(x).output, rtol=1e-5, atol=1e-5)
    elsewhere = make(max_span=40, ramp=4).to("meta")  # its fractions cannot be read
    assert elsewhere.span.reach == 43


@pytest.mark.parametrize("per", ["head", "layer"])
def test_the_loss_is_the_mean_span_in_training_and_none_in_validation(per: str) -> None:
    attention = make(max_span=50, span_init=0.5, span_loss=0.01, span_per=per)
    with torch.no_grad():
        attention.span.fraction[0] += 0.1
    x = torch.randn(2, 9, 32)
    assert attention(x).losses == {}
    loss = attention.train()(x).losses["span"]
    assert loss.item() == pytest.approx(0.01 * 50 * (0.525 if per == "head" else 0.6))
    loss.backward()
    slope = torch.full_like(attention.span.fraction, 0.01 * 50 / len(attention.span.fraction))
    torch.testing.assert_close(attention.span.fraction.grad, slope)


def test_the_loss_is_one_for_the_model_whatever_the_batch() -> None:
    attention = make(span_init=0.5, span_loss=1.0).train()
    losses = [attention(torch.randn(*shape, 32)).losses["span"] for shape in ((1, 3), (4, 20))]
    assert losses[0] == losses[1]


def test_spans_are_clamped_after_each_update() -> None:
    attention = make()
    with torch.no_grad():
        attention.span.fraction.copy_(torch.tensor([-0.2, 0.4, 1.0, 1.7]))
    attention.after_update(1, 10)
    assert attention.span.fraction.tolist() == pytest.approx([0.0, 0.4, 1.0, 1.0])


def test_spans_grow_from_zero_where_far_keys_matter() -> None:
    """Towards what full attention gives; the loss of the spans alone takes them back."""
    full, ours = make(name="full"), make(max_span=30, ramp=4, span_loss=1.0)
    ours.adopt(full.state_dict())
    x, fraction = torch.randn(8, 30, 32), ours.span.fraction
    target = full(x).output.detach()
    optimizer = torch.optim.Adam([fraction], lr=0.03)

    def update(loss: Tensor) -> float:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ours.after_update(1, 10)
        return loss.item()

    errors = [update((ours(x).output - target).square().mean()) for _ in range(15)]
    assert errors[-1] < 0.3 * errors[0]
    assert fraction.min() > 0.2
    ours.train()
    for _ in range(60):
        update(ours(x).losses["span"])
    assert fraction.max() == 0.0


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"role": "cross"}, "encoder, decoder"),
    ({"ramp": 1}, "ramp = 1 must"),
    ({"span_init": 1.5}, "span_init = 1.5 must"),
    ({"span_per": "heads"}, "did you mean 'head'"),
)
