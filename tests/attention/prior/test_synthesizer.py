"""Synthesizer: each variant's scores written out, its limits, its parameters, and what its state holds."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build
from mtkit.errors import MtkitError
from tests.attention.small import maker, refusals

VARIANTS = ["random", "factorized-random", "dense", "factorized-dense"]

make = maker("synthesizer", max_length=16, stir=0.3)


def full(role: str = "encoder") -> Any:
    return build("full", role=role, d_model=32, heads=4, max_length=16).eval()


def predicted(part: Any, x: Tensor, head: int, j: int) -> Tensor:
    """F(x)_j of one head for one token."""
    rows = slice(8 * head, 8 * head + 8)
    hidden = (part.hidden.weight[rows] @ x + part.hidden.bias[rows]).clamp(min=0)
    return part.weight[head, j] @ hidden + part.bias[head, j]


def score(part: Any, variant: str, x: Tensor, head: int, i: int, j: int) -> Tensor:
    """One score, from position and the query's token."""
    if variant == "random":
        return part.map[head, i, j]
    if variant == "factorized-random":
        return sum(part.left[head, i, n] * part.right[head, j, n] for n in range(part.left.shape[2]))
    if variant == "dense":
        return predicted(part, x, head, j)
    alpha, beta = predicted(part.alpha, x, head, j % part.inner), predicted(part.beta, x, head, j // part.inner)
    return alpha * beta


@torch.no_grad()
@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_the_softmax_of_the_scores_written_out(variant: str, role: str) -> None:
    attention = make(role, variant=variant, factor_rank=3, factor_a=3)
    x, memory = torch.randn(1, 7, 32), torch.randn(1, 5, 32) if role == "cross" else None
    weights = attention(x, memory, need_weights=True).weights
    part = attention.synthetic[variant]
    for head in range(4):
        for i in range(7):
            seen = 5 if role == "cross" else i + 1 if role == "decoder" else 7
            row = torch.stack([score(part, variant, x[0, i], head, i, j) for j in range(seen)]).softmax(0)
            torch.testing.assert_close(weights[0, head, i, :seen], row)


@torch.no_grad()
def test_a_mixture_is_the_weighted_sum_of_its_parts() -> None:
    attention, x = make(variant="mixture", mix="factorized-random,dense,dot"), torch.randn(1, 6, 32)
    shares = attention.mix_weight.softmax(0)
    q, k = (p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj))
    scores = shares[2] * (q @ k.mT)[0] / 8**0.5
    for share, variant in zip(shares, ("factorized-random", "dense"), strict=False):
        part = attention.synthetic[variant]
        for head in range(4):
            for i in range(6):
                for j in range(6):
                    scores[head, i, j] += share * score(part, variant, x[0, i], head, i, j)
    torch.testing.assert_close(attention(x, need_weights=True).weights[0], scores.softmax(-1))


@torch.no_grad()
@pytest.mark.parametrize("mix", ["random,dense,dot", "dot,factorized-dense"])
@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
def test_a_mixture_with_all_weight_on_products_is_full_attention(role: str, mix: str) -> None:
    attention, plain = make(role, variant="mixture", mix=mix), full(role)
    attention.adopt(plain.state_dict())
    attention.mix_weight[-1] = 100.0  # the part of the products is the last
    x, memory = torch.randn(2, 9, 32), torch.randn(2, 7, 32) if role == "cross" else None
    torch.testing.assert_close(attention(x, memory).output, plain(x, memory).output, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_map_of_zeros_is_the_mean_and_one_of_full_scores_is_full_attention() -> None:
    attention, plain, x = make("decoder"), full("decoder"), torch.randn(1, 9, 32)
    attention.adopt(plain.state_dict())
    q, k = (p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in (plain.q_proj, plain.k_proj))
    attention.synthetic["random"].map[:, :9, :9] = (q @ k.mT)[0] / 8**0.5
    torch.testing.assert_close(attention(x).output, plain(x).output, rtol=1e-5, atol=1e-5)
    attention.synthetic["random"].map.zero_()
    mean = attention.v_proj(x).cumsum(1) / torch.arange(1, 10).unsqueeze(-1)
    torch.testing.assert_close(attention(x).output, attention.out_proj(mean), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_factors_give_as_many_scores_as_their_product_and_positions_that_are_prime_fit() -> None:
    attention = make(variant="factorized-dense", factor_a=4)
    scores = attention.synthetic["factorized-dense"](torch.randn(1, 1, 32), None, 16)
    assert len(scores[0, 0, 0].unique()) == 16
    prime = make(variant="factorized-dense", max_length=13)
    part = prime.synthetic["factorized-dense"]
    assert (part.alpha.weight.shape[1], part.beta.weight.shape[1]) == (4, 4)
    assert prime(torch.randn(1, 13, 32)).output.isfinite().all()


@torch.no_grad()
def test_a_factorised_map_has_the_rank_asked_for() -> None:
    scores = make(variant="factorized-random", factor_rank=3).synthetic["factorized-random"](
        torch.randn(1, 16, 32), None, 16
    )
    assert scores.shape == (1, 4, 16, 16)
    assert torch.linalg.matrix_rank(scores[0]).tolist() == [3] * 4


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_of_a_query_do_not_depend_on_other_tokens(variant: str) -> None:
    attention, x = make(variant=variant), torch.randn(1, 9, 32)
    before = attention(x, need_weights=True).weights
    x[:, 4] += 3.0
    change = (attention(x, need_weights=True).weights - before).abs().amax((0, 1, 3))
    assert change[torch.arange(9) != 4].max() < 1e-6
    assert (change[4] > 1e-3) == ("dense" in variant)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_token_alone_gets_its_value(variant: str) -> None:
    attention, x = make(variant=variant), torch.randn(2, 1, 32)
    torch.testing.assert_close(attention(x).output, attention.out_proj(attention.v_proj(x)))


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({"variant": "random"}, 4 * 16 * 16),
        ({"variant": "factorized-random", "factor_rank": 3}, 4 * 2 * 16 * 3),
        ({"variant": "dense"}, 33 * 32 + 4 * 16 * 9),
        ({"variant": "factorized-dense", "factor_a": 2}, 2 * 33 * 32 + 4 * (2 + 8) * 9),
        ({"variant": "mixture", "mix": "random,dot"}, 2 * 33 * 32 + 4 * 16 * 16 + 2),
        ({"variant": "mixture", "mix": "dot"}, 2 * 33 * 32),
    ],
)
def test_parameters_are_those_of_the_scores_besides_values_and_output(options: dict[str, Any], extra: int) -> None:
    assert sum(each.numel() for each in make(**options).parameters()) == 2 * 33 * 32 + extra


@pytest.mark.parametrize("variant", ["dense", "factorized-dense"])
def test_hidden_layers_are_as_wide_as_the_head_in_a_mix_too(variant: str) -> None:
    mix = build("full:3+synthesizer:1", role="encoder", d_model=32, heads=4, **{"synthesizer.variant": variant})
    hidden = [name for name, _ in mix.named_parameters() if name.endswith("hidden.weight")]
    assert hidden
    assert all(mix.get_parameter(name).shape == (8, 32) for name in hidden)


def test_a_map_is_trained_unless_it_is_fixed_and_saved_either_way() -> None:
    for variant in ("random", "factorized-random"):
        trained, fixed = make(variant=variant), make(variant=variant, fixed=True)
        names = {name for name in trained.state_dict() if name.startswith("synthetic")}
        assert names == {name for name in fixed.state_dict() if name.startswith("synthetic")}
        assert names
        assert names <= {name for name, _ in trained.named_parameters()}
        assert not names & {name for name, _ in fixed.named_parameters()}


@torch.no_grad()
def test_keys_are_kept_for_products_alone() -> None:
    for options, names in (({}, {"values"}), ({"variant": "mixture"}, {"keys", "values"})):
        attention = make("decoder", **options)
        _, state = attention.step(torch.randn(2, 1, 32), attention.start(2)[0])
        assert {name for name, value in state.items() if isinstance(value, Tensor)} == names


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_more_positions_than_it_was_built_for_are_refused(variant: str) -> None:
    decoder, cross = make("decoder", variant=variant), make("cross", variant=variant, memory_length=5)
    assert (decoder.longest, cross.longest) == (16, 5)
    with pytest.raises(MtkitError, match="built for 16 positions, not 17"):
        decoder(torch.randn(1, 17, 32))
    state, _ = decoder.start(1)
    for _ in range(16):
        _, state = decoder.step(torch.randn(1, 1, 32), state)
    with pytest.raises(MtkitError, match="built for 16 positions, not 17"):
        decoder.step(torch.randn(1, 1, 32), state)
    assert cross(torch.randn(1, 16, 32), torch.randn(1, 5, 32)).output.shape == (1, 16, 32)
    with pytest.raises(MtkitError, match="built for 5 positions, not 6"):
        cross(torch.randn(1, 16, 32), torch.randn(1, 6, 32))


test_what_cannot_be_is_refused = refusals(
    make,
    ({"variant": "denser"}, "did you mean 'dense'"),
    ({"mix": "random,dots"}, "did you mean 'dot'"),
    ({"variant": "mixture", "mix": "dot,dot"}, "name each part once"),
    ({"variant": "dense", "fixed": True}, "be false if no part is random"),
    ({"variant": "factorized-dense", "factor_a": 17}, "factor_a = 17 must be at most the 16 positions"),
    ({"positions": "rotary"}, "cannot combine with positions=rotary"),
)
