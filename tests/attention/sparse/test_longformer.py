"""Longformer: its limits, its global tokens and their own projections."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build, reorder
from mtkit.attention.marks import marks_from
from mtkit.errors import MtkitError
from tests.attention.small import maker

make = maker("longformer", d_model=16, heads=2)


def reached(attention: Any, length: int, position: int) -> set[int]:
    """The outputs that change with the token at a position."""
    x = torch.randn(1, length, 16)
    other = x.clone()
    other[:, position] += 1
    changed: Tensor = (attention(other).output - attention(x).output).abs().amax((0, 2)) > 0
    return set(changed.nonzero().flatten().tolist())


@pytest.mark.parametrize(
    ("role", "tokens"), [("encoder", 0), ("encoder", 1), ("encoder", 3), ("decoder", 0), ("decoder", 3)]
)
@pytest.mark.parametrize("separate", [True, False])
@torch.no_grad()
def test_a_wide_window_with_tied_globals_is_full_attention(role: str, tokens: int, separate: bool) -> None:
    attention = make(role, window_radius=150, global_tokens=tokens, global_separate_proj=separate)
    full = build("full", role=role, d_model=16, heads=2).eval()
    attention.adopt(full.state_dict())  # the global projections too
    x, valid = torch.randn(2, 150, 16), torch.arange(150) < torch.tensor([[150], [90]])
    one, other = (each(x, query_valid=valid).output for each in (attention, full))
    torch.testing.assert_close(one[valid], other[valid], atol=1e-5, rtol=0)


def test_where_an_earlier_run_has_global_projections_of_another_shape_they_are_copies_again() -> None:
    many, one = make(), make(projection="multi-query")
    torch.nn.init.normal_(many.global_q_proj.weight)
    one.adopt(many.state_dict())
    assert torch.equal(one.global_q_proj.weight, many.global_q_proj.weight)
    for name in ("k_proj", "v_proj"):
        assert torch.equal(getattr(one, f"global_{name}").weight, getattr(one, name).weight)


def test_global_projections_start_as_copies_and_are_parameters_of_their_own() -> None:
    attention = make()
    for name in ("q_proj", "k_proj", "v_proj"):
        own, copied = getattr(attention, name), getattr(attention, f"global_{name}")
        assert torch.equal(own.weight, copied.weight)
        assert own.weight is not copied.weight
    assert not any("global" in name for name, _ in make("decoder").named_parameters())  # no global tokens there


@torch.no_grad()
def test_global_queries_read_only_their_own_projections() -> None:
    attention, x = make(window_radius=2, global_tokens=2), torch.randn(1, 60, 16)
    before = attention(x).output
    attention.global_v_proj.weight.mul_(2)
    changed = (attention(x).output - before).abs().amax((0, 2)) > 0
    assert changed.nonzero().flatten().tolist() == [0, 1]


@torch.no_grad()
def test_a_dilated_window_reaches_every_other_token_and_globals_reach_all() -> None:
    attention = make(window_radius=2, dilation=3, global_tokens=1)
    assert reached(attention, 90, 40) == {34, 37, 40, 43, 46, 0}
    assert reached(attention, 90, 0) == set(range(90))


@torch.no_grad()
def test_in_the_decoder_globals_reach_only_what_comes_later() -> None:
    attention = make("decoder", window_radius=2, global_tokens=2)
    assert reached(attention, 90, 1) == set(range(1, 90))
    assert reached(attention, 90, 40) == {40, 41, 42}


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@torch.no_grad()
def test_a_global_key_inside_the_window_counts_once(role: str) -> None:
    attention, x = make(role, window_radius=4, global_tokens=1), torch.randn(1, 60, 16)
    weights = attention(x, need_weights=True).weights
    blocks = weights @ attention.v_proj(x).view(1, 60, 2, 8).transpose(1, 2)
    rows = slice(1, None)  # those of the window
    wanted = attention.out_proj(blocks.transpose(1, 2).flatten(2))[:, rows]
    torch.testing.assert_close(attention(x).output[:, rows], wanted)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 60))


@torch.no_grad()
def test_pads_are_never_global() -> None:
    attention, x = make(window_radius=2, global_tokens=5), torch.randn(1, 3, 16)
    padded = torch.cat([x, torch.randn(1, 40, 16)], dim=1)
    valid = (torch.arange(43) < 3).unsqueeze(0)
    torch.testing.assert_close(attention(padded, query_valid=valid).output[:, :3], attention(x).output)


@pytest.mark.parametrize("layer", [0, 1])
@torch.no_grad()
def test_window_and_dilation_are_listed_by_layer(layer: int) -> None:
    attention = make(window_radius=[1, 3], dilation=[2, 1], global_tokens=0, layer=layer, layers=2)
    assert reached(attention, 50, 20) == ({18, 20, 22} if layer == 0 else set(range(17, 24)))


@pytest.mark.parametrize("tokens", [1, 9])
@torch.no_grad()
def test_a_segment_of_padding_gives_zero_before_out_proj(tokens: int) -> None:
    """With one global token, whose query is carried to the tokens, and with more than the model is wide for that."""
    attention, valid = make(global_tokens=tokens), torch.arange(12) < torch.tensor([[0], [12]])
    for bias in (attention.v_proj.bias, attention.global_v_proj.bias):
        bias.fill_(1.0)
    assert attention._maps_queries is (tokens == 1)
    output = attention(torch.randn(2, 12, 16), query_valid=valid).output
    torch.testing.assert_close(output[0], attention.out_proj.bias.expand(12, 16))
    assert (output[1] - attention.out_proj.bias).abs().max() > 0.1


@pytest.mark.parametrize(("dilation", "tokens", "separate"), [(1, 1, True), (2, 3, True), (1, 3, False)])
@torch.no_grad()
def test_a_token_sees_its_window_and_the_global_tokens(dilation: int, tokens: int, separate: bool) -> None:
    """Written out pair by pair, since the naive form takes its mask from the same pattern as the kernel."""
    options = {"window_radius": 3, "dilation": dilation, "global_tokens": tokens, "global_separate_proj": separate}
    attention = build("longformer", role="encoder", d_model=16, heads=2, **options).eval()
    weights = attention(torch.randn(1, 40, 16), need_weights=True).weights
    for i in range(40):
        for j in range(40):
            near = abs(i - j) <= 3 * dilation and (i - j) % dilation == 0
            assert bool(weights[0, 0, i, j] > 0) == (near or i < tokens or j < tokens), (i, j)


@torch.no_grad()
def test_separators_are_global_tokens_of_their_segment() -> None:
    """A token sees its window and every separator; a separator sees, and is seen by, all real tokens."""
    attention = build("longformer", role="encoder", d_model=16, heads=2, window_radius=2, global_at="separators").eval()
    marks = marks_from(torch.tensor([[j in (9, 30) for j in range(40)], [j in (5, 20, 25) for j in range(40)]]))
    valid = torch.arange(40) < torch.tensor([[40], [22]])
    attended = attention(torch.randn(2, 40, 16), query_valid=valid, query_marks=marks, need_weights=True)
    for segment, (length, breaks) in enumerate(((40, {9, 30}), (22, {5, 20}))):  # the break at 25 is padding
        for i in range(length):
            seen = (attended.weights[segment, :, i] > 0).all(0).nonzero().flatten().tolist()
            near = set(range(max(i - 2, 0), min(i + 3, length)))
            assert set(seen) == (set(range(length)) if i in breaks else near | breaks)


@torch.no_grad()
def test_first_tokens_and_separators_may_both_be_global() -> None:
    options = {"role": "encoder", "d_model": 16, "heads": 2, "window_radius": 2, "global_tokens": 2}
    both = build("longformer", **options, global_at="both").eval()
    first = build("longformer", **options).eval()
    first.load_state_dict(both.state_dict())
    x = torch.randn(2, 130, 16)
    torch.testing.assert_close(both(x).output, first(x).output, atol=1e-5, rtol=0)
    as_breaks = torch.zeros(2, 130, dtype=torch.long)
    as_breaks[:, :2] = 1  # the first tokens again: no key is counted twice
    torch.testing.assert_close(both(x, query_marks=as_breaks).output, first(x).output, atol=1e-5, rtol=0)


def test_what_separators_cannot_combine_with_is_refused() -> None:
    options = {"d_model": 16, "heads": 2, "global_at": "separators"}
    with pytest.raises(MtkitError, match="be first or separators in the decoder role"):
        build("longformer", role="decoder", **(options | {"global_at": "both"}))
    with pytest.raises(MtkitError, match="be first with positions"):
        build("longformer", role="encoder", positions="alibi", **options)
    with pytest.raises(MtkitError, match="global_at"):
        build("longformer", role="encoder", **{**options, "global_at": "last"})
    assert build("longformer", role="encoder", positions="rotary", **options).reads_marks
    assert not build("longformer", role="encoder", d_model=16, heads=2).reads_marks


@pytest.mark.parametrize("dilation", [1, 2])
@torch.no_grad()
def test_in_the_decoder_separators_are_seen_by_all_later_tokens(dilation: int) -> None:
    """Against a loop over pairs; each step gives the same outputs and weights, whatever its hypothesis has seen."""
    options = {"window_radius": 2, "dilation": dilation, "global_at": "separators"}
    attention = build("longformer", role="decoder", d_model=16, heads=2, **options).eval()
    assert not any("global" in name for name, _ in attention.named_parameters())
    x, breaks = torch.randn(3, 20, 16), torch.zeros(3, 20, dtype=torch.bool)
    breaks[0, [3, 4, 11]] = breaks[2, [1, 17]] = True
    whole = attention(x, query_marks=marks_from(breaks), need_weights=True)
    seen = torch.zeros(3, 20, 20, dtype=torch.bool)
    for segment in range(3):
        for i in range(20):
            near = {i, i - dilation, i - 2 * dilation}
            for j in range(i + 1):
                seen[segment, i, j] = j in near or bool(breaks[segment, j])
    q, (k, v) = attention.queries(x), attention.keys_values(x)
    weights = ((q @ k.mT) * 8**-0.5).masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(-1)
    expected = attention.out_proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(whole.output, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole.weights, weights, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(attention(x, query_marks=marks_from(breaks)).output, expected, atol=1e-5, rtol=1e-5)
    state, _ = attention.start(1, hypotheses=3)
    for t in range(20):
        marks = marks_from(breaks)[:, t].unsqueeze(0)
        attended, state = attention.step(x[:, t].unsqueeze(0), state, need_weights=True, query_marks=marks)
        torch.testing.assert_close(attended.output[0], expected[:, t], atol=1e-5, rtol=1e-5)
        assert attended.weights is not None
        torch.testing.assert_close(attended.weights[0].transpose(0, 1), weights[:, :, t, : t + 1], atol=1e-5, rtol=1e-5)
        if t == 12:  # the second hypothesis goes on from the first one's past
            state = reorder(state, torch.tensor([[0, 0, 2]]))
            x[1], breaks[1] = x[0], breaks[0]
            expected[1], weights[1] = expected[0], weights[0]
    assert state["listed"]["keys"].shape[3] <= 4
    assert state["window"]["keys"].shape[3] <= 8  # the first capacity of caches
