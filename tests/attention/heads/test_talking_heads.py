"""Talking heads: the equation with loops, its limits, and a mask that stays out of the mixes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention import build
from mtkit.errors import MtkitError
from tests.attention.small import ROLES, VALID, maker

make = maker("talking-heads", double=True, seed=3)


def stirred(role: str, **arguments: Any) -> Any:
    """With mixes that are not the identity."""
    talking = make(role, **arguments)
    with torch.no_grad():
        for parameter in talking.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return talking


def given(role: str) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Tokens (2, 7, 32), a memory in the cross role, and a mask of the keys."""
    x, memory = torch.randn(2, 2, 7, 32, dtype=torch.float64)
    return (x, memory, {"memory_valid": VALID}) if role == "cross" else (x, None, {"query_valid": VALID})


def visible(role: str, segment: int, i: int) -> list[int]:
    """The keys that a query sees."""
    return [j for j in range(7) if VALID[segment, j] and not (role == "decoder" and j > i)]


def literal(talking: Any, role: str, x: Tensor, memory: Tensor | None, hk: int, h: int, hv: int) -> Tensor:
    """One query, and one head of each kind, at a time."""
    q, k = talking.q_proj(x).unflatten(-1, (hk, -1)), talking.k_proj(x if memory is None else memory)
    k, v = k.unflatten(-1, (hk, -1)), talking.v_proj(x if memory is None else memory).unflatten(-1, (hv, -1))
    output = torch.zeros_like(x)
    for b in range(2):
        for i in range(7):
            seen = visible(role, b, i)
            scores = [k[b, seen, a] @ q[b, i, a] / (32 // hk) ** 0.5 for a in range(hk)]
            weights = []
            for c in range(h):
                logits = sum((scores[a] * talking.scores_mix[a, c] for a in range(hk)), torch.zeros(len(seen)))
                weights.append(logits.softmax(0))
            heads = []
            for e in range(hv):
                mixed = sum((weights[c] * talking.weights_mix[c, e] for c in range(h)), torch.zeros(len(seen)))
                heads.append(mixed @ v[b, seen, e])
            output[b, i] = talking.out_proj(torch.cat(heads))
    return output


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("numbers", [(4, 4, 4), (2, 8, 4), (8, 2, 1), (1, 3, 16)])
def test_it_is_the_equation(role: str, numbers: tuple[int, int, int]) -> None:
    options = dict(zip(("key_heads", "softmax_heads", "value_heads"), numbers, strict=True))
    talking, (x, memory, masks) = stirred(role, **options), given(role)
    real = ... if role == "cross" else VALID
    wanted = literal(talking, role, x, memory, *numbers)
    torch.testing.assert_close(talking(x, memory, **masks).output[real], wanted[real], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "slots",
    [{}, {"positions": "rotary"}, {"positions": "alibi"}, {"projection": "multi-query"}, {"merge": "em-routing"}],
)
def test_it_starts_as_full_attention(role: str, slots: dict[str, str]) -> None:
    if role == "cross":
        slots = {slot: name for slot, name in slots.items() if slot != "positions"}
    full, talking = make(role, "full", **slots), make(role, **slots)
    missing = talking.load_state_dict(full.state_dict(), strict=False).missing_keys
    assert set(missing) == {"scores_mix", "weights_mix"}
    x, memory, masks = given(role)
    got, wanted = (each(x, memory, **masks, need_weights=True) for each in (talking, full))
    torch.testing.assert_close(got.output, wanted.output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.weights, wanted.weights, rtol=1e-5, atol=1e-5)


def test_scores_that_are_added_up_are_those_of_a_wide_head() -> None:
    """Two heads of 16 channels, whose summed products are those of one of 32 but for the scale."""
    talking, one = make("encoder", heads=1, key_heads=2), make("encoder", "full", heads=1)
    one.load_state_dict({name: x for name, x in talking.state_dict().items() if name in one.state_dict()})
    with torch.no_grad():
        talking.scores_mix.fill_(0.5**0.5)
    x, _, masks = given("encoder")
    torch.testing.assert_close(talking(x, **masks).output, one(x, **masks).output, rtol=1e-9, atol=1e-10)


def test_mixes_of_different_numbers_leave_no_two_heads_equal() -> None:
    talking = make("encoder", key_heads=2, softmax_heads=4)
    x, _, masks = given("encoder")
    talking(x, **masks).output.square().sum().backward()
    for columns in (talking.scores_mix.T, talking.scores_mix.grad.T):
        distances = torch.cdist(columns, columns) + torch.eye(4)
        assert distances.min() > 1e-6


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_one_token_gives_its_value_times_the_sums_of_the_columns(role: str) -> None:
    talking, x = stirred(role), torch.randn(2, 1, 32, dtype=torch.float64)
    value = talking.v_proj(x).unflatten(-1, (4, 8)) * talking.weights_mix.sum(0).unsqueeze(-1)
    torch.testing.assert_close(talking(x).output, talking.out_proj(value.flatten(2)))


def test_a_source_without_tokens_gives_zeros_before_the_last_projection() -> None:
    talking, (x, memory, _) = stirred("cross"), given("cross")
    output = talking(x, memory, memory_valid=torch.zeros(2, 7, dtype=torch.bool)).output
    torch.testing.assert_close(output, talking.out_proj.bias.expand_as(output))


def test_large_scores_of_hidden_keys_do_not_reach_other_heads() -> None:
    talking, (x, _, masks) = stirred("encoder"), given("encoder")
    other = x.clone()
    other[1, 4:] *= 1e6
    torch.testing.assert_close(talking(other, **masks).output[1, :4], talking(x, **masks).output[1, :4])


def test_dropout_acts_after_the_second_mix() -> None:
    """Whole weights go to zero or double. Before the mix, every mixed weight would keep a part."""
    talking, x = stirred("encoder", dropout=0.5).train(), torch.randn(1, 5, 32, dtype=torch.float64)
    with torch.no_grad():  # each head's output is then its dropped weights
        talking.v_proj.weight.zero_()
        talking.v_proj.bias.fill_(1.0)
        talking.weights_mix.fill_(0.25)
        talking.out_proj.weight.copy_(torch.eye(32))
        talking.scores_mix.zero_()  # all weights are 1/5
        talking.out_proj.bias.zero_()
    sums = talking(x).output * 5 / 2
    torch.testing.assert_close(sums, sums.round(), rtol=0, atol=1e-9)


def test_mixes_stay_in_float32_under_autocast() -> None:
    talking = build("talking-heads", role="encoder", d_model=32, heads=4).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert talking.mixed(torch.rand(1, 4, 3, 3)).dtype == torch.float32
        pairs = talking.pairs(torch.randn(1, 3, 32))
        assert talking.logits(pairs, None)[0].dtype == torch.float32


@pytest.mark.parametrize("option", ["key_heads", "value_heads"])
def test_heads_that_do_not_divide_the_width_are_refused(option: str) -> None:
    with pytest.raises(MtkitError, match=f"{option} = 5 must divide the width of all heads, 32"):
        make("encoder", **{option: 5})


@pytest.mark.parametrize(
    "slot",
    [{"positions": "alibi"}, {"projection": "multi-query"}, {"merge": "em-routing"}, {"regularizer": "disagreement"}],
)
@pytest.mark.parametrize("option", ["key_heads", "softmax_heads", "value_heads"])
def test_what_has_a_part_for_each_head_is_refused_where_the_numbers_differ(slot: dict[str, str], option: str) -> None:
    (name, value), *_ = slot.items()
    with pytest.raises(MtkitError, match=f"value_heads must be the 4 heads with {name}={value}"):
        make("encoder", **slot, **{option: 2})
    make("encoder", positions="rotary", **{option: 2})


@pytest.mark.peer
@pytest.mark.parametrize("causal", [False, True])
def test_it_agrees_with_x_transformers(causal: bool) -> None:
    """It adds the mixed scores to those before, and its softmax is in float32.

    pip install --no-deps x-transformers torch-einops-utils einops einx frozendict loguru
    """
    peer = pytest.importorskip("x_transformers.attend")
    talking, (x, _, masks) = stirred("decoder" if causal else "encoder"), given("encoder")
    theirs = peer.Attend(heads=4, causal=causal, pre_talking_heads=True, post_talking_heads=True).double().eval()
    with torch.no_grad():
        theirs.pre_softmax_talking_heads.weight.copy_((talking.scores_mix.T - torch.eye(4))[:, :, None, None])
        theirs.post_softmax_talking_heads.weight.copy_(talking.weights_mix.T[:, :, None, None])
    maps = (talking.q_proj, talking.k_proj, talking.v_proj)
    q, k, v = (F.linear(x, each.weight, each.bias).unflatten(-1, (4, 8)).transpose(1, 2) for each in maps)
    heads, _ = theirs(q, k, v, mask=VALID)
    wanted = talking.out_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(talking(x, **masks).output[VALID], wanted[VALID], rtol=1e-5, atol=1e-5)
