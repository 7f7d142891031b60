"""Hard-coded attention: the published numbers, its limits, its ring, and the ratio of lengths that training counts."""

import math

import pytest
import torch
from torch import Tensor, distributed
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mtkit.attention import build, reorder
from tests.attention.small import maker, refusals

make = maker("hard-coded")


def density(distance: float, std: float = 1.0) -> float:
    return math.exp(-0.5 * (distance / std) ** 2) / (std * math.sqrt(2 * math.pi))


def row_sums(role: str, offset: int) -> Tensor:
    x = torch.randn(1, 6, 32)
    weights: Tensor = make(role, offsets=offset)(x, need_weights=True).weights
    return weights[0, 0].sum(-1)


@pytest.mark.parametrize(
    ("role", "offset", "sums"),
    [
        ("encoder", 0, [0.70, 0.94, 0.995, 0.995, 0.94, 0.70]),
        ("decoder", -1, [0.24, 0.64, 0.88, 0.94, 0.94, 0.94]),
    ],
)
def test_weights_are_densities_and_do_not_add_up_to_one(role: str, offset: int, sums: list[float]) -> None:
    torch.testing.assert_close(row_sums(role, offset), torch.tensor(sums), rtol=0.0, atol=0.006)


@torch.no_grad()
def test_it_is_a_convolution_with_a_gaussian() -> None:
    attention, x = make(std=1.5), torch.randn(2, 40, 32)
    values = attention.v_proj(x).transpose(1, 2)
    kernel = torch.tensor([[density(d - offset, 1.5) for d in range(-12, 13)] for offset in (-1, 1, -1, 1)])
    heads = F.conv1d(values, kernel.repeat_interleave(8, 0).unsqueeze(1), padding=12, groups=32)
    expected = attention.out_proj(heads.transpose(1, 2))
    torch.testing.assert_close(attention(x).output, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_offsets_go_round_the_heads_and_one_token_gets_its_density() -> None:
    for role, offsets in (("encoder", [-1, 1, -1, 1]), ("decoder", [-1, 0, -1, 0]), ("cross", [-1, 1, -1, 1])):
        attention, memory = make(role), torch.randn(1, 9, 32) if role == "cross" else None
        x = torch.randn(1, 9, 32)
        peaks = attention(x, memory, need_weights=True).weights[0, :, 4].argmax(-1)
        assert (peaks - 4).tolist() == offsets
    one, x = make(offsets=0), torch.randn(1, 1, 32)
    expected = one.out_proj(density(0) * one.v_proj(x))
    torch.testing.assert_close(one(x).output, expected)


@torch.no_grad()
def test_far_wide_weights_that_add_up_to_one_are_full_attention_without_scores() -> None:
    full, x = build("full", role="decoder", d_model=32, heads=4), torch.randn(2, 4, 32)
    full.get_submodule("q_proj").weight.zero_()  # type: ignore[operator]
    attention = make("decoder", std=1000.0, renormalise=True, offsets=0)
    attention.adopt(full.state_dict())
    torch.testing.assert_close(attention(x).output, full(x).output, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_narrow_weights_that_add_up_to_one_pick_the_centre() -> None:
    x = torch.randn(2, 6, 32)
    attention = make("decoder", std=0.1, renormalise=True, offsets=-2)
    values = F.pad(attention.v_proj(x), (0, 0, 2, 0))[:, :6]
    torch.testing.assert_close(attention(x).output, attention.out_proj(values))


@torch.no_grad()
@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
def test_what_five_deviations_leave_out_does_not_count_and_two_do(role: str) -> None:
    x, memory = torch.randn(1, 50, 32), torch.randn(1, 50, 32) if role == "cross" else None
    whole = make(role, truncate=10.0)
    for truncate, near in ((5.0, True), (2.0, False)):
        cut = make(role, truncate=truncate)
        cut.load_state_dict(whole.state_dict())
        difference = (cut(x, memory).output - whole(x, memory).output).abs().max()
        assert (difference < 1e-5) == near


@torch.no_grad()
def test_in_the_cross_role_the_centre_stays_within_each_source() -> None:
    attention, x, memory = make("cross", ratio=3.0), torch.randn(2, 9, 32), torch.randn(2, 8, 32)
    valid = torch.arange(8) < torch.tensor([[8], [3]])
    weights = attention(x, memory, memory_valid=valid, need_weights=True).weights
    for segment, length in enumerate([8, 3]):
        for t in range(9):
            for head, offset in enumerate([-1, 1, -1, 1]):
                centre = min(3.0 * t + offset, length - 1)
                expected = [density(j - centre) if j < length and abs(j - centre) <= 5 else 0.0 for j in range(8)]
                torch.testing.assert_close(weights[segment, head, t], torch.tensor(expected))


@torch.no_grad()
def test_training_counts_the_ratio_of_lengths() -> None:
    attention, query, memory = make("cross"), torch.randn(2, 5, 32), torch.randn(2, 9, 32)
    memory_valid = torch.arange(9) < torch.tensor([[9], [6]])  # 15 source tokens, 10 target tokens
    before = attention(query, memory).output
    attention.after_update(1, 10)
    assert torch.equal(attention(query, memory).output, before), "evaluation counts nothing"
    for update in range(100):
        attention.train()(query, memory, memory_valid=memory_valid)
        attention.after_update(update, 100)
    assert attention.counted.tokens.tolist() == [1501, 1001]
    fixed = make("cross", ratio=1501 / 1001)
    fixed.load_state_dict({name: value for name, value in attention.state_dict().items() if name != "counted.tokens"})
    expected = fixed(query, memory).output
    torch.testing.assert_close(attention.eval()(query, memory).output, expected)
    assert (expected - before).abs().max() > 1e-3
    restored = make("cross")
    restored.load_state_dict(attention.state_dict())
    assert torch.equal(restored(query, memory).output, expected)
    assert restored.bfloat16().counted.tokens.tolist() == [1501, 1001]


def test_recomputed_activations_are_counted_once_and_processes_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, query = make("cross").train(), torch.randn(2, 5, 32)
    memory = torch.randn(2, 9, 32, requires_grad=True)
    output = checkpoint(lambda *given: attention(*given).output, query, memory, use_reentrant=False)
    output.sum().backward()
    assert attention.counted.new_tokens.tolist() == [18, 10]
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor: tensor.mul_(3))
    attention.after_update(1, 10)
    assert attention.counted.tokens.tolist() == [55, 31]
    assert not attention.counted.new_tokens.any()


@torch.no_grad()
def test_a_step_keeps_the_tokens_that_a_later_one_can_see() -> None:
    attention = make("decoder", std=2.0)
    state, _ = attention.start(1, hypotheses=2)
    for _ in range(50):
        _, state = attention.step(torch.randn(1, 2, 32), state)
    assert state["values"].shape == (1, 2, 4, 12, 8)  # the query's own position, one before, and five deviations


@torch.no_grad()
def test_a_step_over_the_source_serves_all_hypotheses() -> None:
    attention = make("cross")
    state, _ = attention.start(2, torch.randn(2, 9, 32), hypotheses=3)
    output = attention.step(torch.randn(2, 3, 32), state)[0].output
    assert torch.equal(output, output[:, :1].expand(-1, 3, -1))
    assert reorder(state, torch.tensor([[2, 0, 1]] * 2))["shared"] is state["shared"]


def test_it_has_no_queries_and_keys_and_reads_the_rest_from_full() -> None:
    attention, full = make(), build("full", role="encoder", d_model=32, heads=4)
    assert {name for name, _ in attention.named_parameters()} == {
        f"{part}_proj.{kind}" for part in ("v", "out") for kind in ("weight", "bias")
    }
    attention.adopt(full.state_dict())
    assert torch.equal(attention.v_proj.weight, full.state_dict()["v_proj.weight"])


test_what_cannot_be_is_refused = refusals(
    make,
    ({"role": "decoder", "offsets": [-1, 1]}, "at most 0 in the decoder role"),
    ({"offsets": []}, "one value for each of the 4 heads, or fewer"),
    ({"offsets": "1,2,3,4,5"}, "one value for each of the 4 heads, or fewer"),
    ({"offsets": "1,--2"}, "offsets = '1,--2' must be"),
    ({"std": 0.0}, "std = 0.0 must be a number from 0.1"),
    ({"role": "cross", "ratio": 0}, "ratio = 0 must be a number from 0.01"),
    ({"positions": "rotary"}, "cannot combine with positions=rotary"),
)
