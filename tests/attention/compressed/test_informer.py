"""Informer: its exactness limits, its samples and ranks, and the queries that get a mean."""

import math
from typing import Any

import pytest
import torch

from mtkit.attention.compressed import informer
from mtkit.attention.compressed.informer import Samples, earlier_larger, spikiness
from mtkit.attention.kernels.reproducible import record_choices, replay_choices
from tests.attention.small import maker, refusals

ROLES = ["encoder", "decoder"]
VALID = torch.arange(40) < torch.tensor([[40], [23], [1]])

make = maker("informer", max_length=64)


def with_full(role: str, **arguments: Any) -> tuple[Any, Any]:
    """Informer and `full` with the same weights."""
    site = {name: arguments[name] for name in ("positions", "projection") if name in arguments}
    full, informer = make(role, "full", **site), make(role, **arguments)
    informer.load_state_dict(full.state_dict(), strict=False)
    return informer, full


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("arguments", [{}, {"positions": "rotary"}, {"projection": "multi-query"}])
def test_a_factor_that_makes_every_query_active_gives_full_attention(role: str, arguments: dict[str, Any]) -> None:
    """u = T, U = S."""
    informer, full = with_full(role, factor=40, **arguments)
    x = torch.randn(3, 40, 32)
    outputs = [each(x, query_valid=VALID).output[VALID] for each in (informer, full)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_queries_of_ever_larger_measure_are_all_active_in_a_decoder() -> None:
    """Then it is full attention at the smallest factor, over more rows than are computed at a time."""
    informer, full = with_full("decoder", factor=1, max_length=150)
    with torch.no_grad():
        for each in (informer, full):
            each.q_proj.bias.zero_()
            each.k_proj.weight[:, -1].zero_()
            each.q_proj.weight.zero_()
            each.q_proj.weight[:, -1] = 1.0
            each.v_proj.weight[:, -1].zero_()
            each.double()
    x = torch.randn(2, 150, 32, dtype=torch.float64)
    x[..., -1] = 16.0 ** torch.arange(150).double()
    q, k, _ = informer.exact_queries_keys_values(x)
    assert informer._active(q, k, None).all()
    torch.testing.assert_close(informer(x).output, full(x).output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("role", ROLES)
def test_one_token_gives_its_value(role: str) -> None:
    informer, x = make(role), torch.randn(2, 1, 32)
    torch.testing.assert_close(informer(x).output, informer.out_proj(informer.v_proj(x)))


@pytest.mark.parametrize(("factor", "lengths"), [(1, [4, 4, 1]), (5, [20, 20, 1])])
def test_an_encoder_has_as_many_active_queries_as_the_length_of_each_segment_says(
    factor: int, lengths: list[int]
) -> None:
    """c ceil(ln n): ln 40 = 3.7, ln 23 = 3.1; one of one token."""
    informer = make(factor=factor)
    q, k, _ = informer.exact_queries_keys_values(torch.randn(3, 40, 32))
    active = informer._active(q, k, VALID)
    assert active.sum(-1).tolist() == [[length] * 4 for length in lengths]
    assert not active[~VALID.unsqueeze(1).expand_as(active)].any()


@pytest.mark.parametrize("role", ROLES)
def test_the_others_get_the_mean_of_the_values_they_may_see(role: str) -> None:
    """Not their sum, which would grow with the position, and nothing of padding."""
    informer, full = with_full(role, factor=1)
    x = torch.randn(3, 40, 32)
    q, k, v = informer.exact_queries_keys_values(x)
    active = informer._active(q, k, VALID)
    heads = []
    for attention in (informer, full):
        attention.out_proj.register_forward_pre_hook(lambda _, inputs: heads.append(inputs[0]))
        attention(x, query_valid=VALID)
    ours, exact = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in heads)
    for b, length in enumerate([40, 23, 1]):
        for h in range(4):
            for i in range(length):
                seen = v[b, h, : i + 1 if role == "decoder" else length]
                expected = exact[b, h, i] if active[b, h, i] else seen.mean(0)
                torch.testing.assert_close(ours[b, h, i], expected, rtol=1e-5, atol=1e-5)
    assert not active[0].all()


@pytest.mark.parametrize("role", ROLES)
def test_active_are_the_queries_whose_best_key_stands_out_most(role: str) -> None:
    """Where each samples all its keys: the measure and the ranks by hand."""
    informer = make(role, factor=2)
    informer.samples.most, informer.samples.size = lambda keys: keys, lambda keys: keys
    q, k, _ = informer.exact_queries_keys_values(torch.randn(2, 17, 32))
    keys = torch.arange(1, 18).view(1, 1, -1) if role == "decoder" else torch.full((1, 1, 1), 17)
    measures = informer.samples.measures(q, k, keys)
    scores = q @ k.transpose(-1, -2)
    for i in range(17):
        own = scores[:, :, i, : i + 1 if role == "decoder" else 17]
        torch.testing.assert_close(measures[:, :, i], own.amax(-1) - own.mean(-1), rtol=1e-5, atol=1e-5)
    del informer.samples.most, informer.samples.size
    informer.samples.measures = lambda *_: measures
    active = informer._active(q, k, None)
    for b in range(2):
        for h in range(4):
            row = measures[b, h].tolist()
            for i, own_measure in enumerate(row):
                larger = sum(other > own_measure for other in (row[:i] if role == "decoder" else row))
                bound = math.ceil(math.log(i + 1 if role == "decoder" else 17)) * 2
                assert active[b, h, i] == (larger < max(bound, 1))


def test_a_sample_is_one_key_of_each_of_equal_stretches_and_none_twice() -> None:
    samples = Samples(heads=4, factor=2, key=7)
    i = torch.arange(60)
    for keys in ((i + 1).view(1, 1, -1), torch.tensor([60, 33, 20, 1]).view(-1, 1, 1)):
        picks, there = samples.picks(i, keys, samples.most(60))
        number = keys.expand(len(picks), 4, 60)
        for row, mask, count in zip(picks.flatten(0, 2), there.flatten(0, 2), number.flatten().tolist(), strict=True):
            size = max(1, min(2 * math.ceil(math.log(count)), count))
            own = row[mask].tolist()
            assert len(own) == size == samples.most(count)
            stretches = [range(s * count // size, (s + 1) * count // size) for s in range(size)]
            assert all(pick in stretch for pick, stretch in zip(own, stretches, strict=True))


def test_every_key_is_sampled_about_as_often() -> None:
    samples = Samples(heads=8, factor=3, key=1)
    picks, there = samples.picks(torch.arange(4000), torch.full((1, 1, 1), 60), samples.most(60))
    shares = picks[there].bincount(minlength=60) / (8 * 4000)
    assert there.all()
    assert (shares - 15 / 60).abs().max() < 0.015
    assert not torch.equal(picks[0, 0], picks[0, 1]), "heads alike"


def test_the_samples_of_a_query_do_not_depend_on_what_surrounds_it() -> None:
    samples, i = Samples(heads=2, factor=2, key=3), torch.arange(50)
    whole, there = samples.picks(i, (i + 1).view(1, 1, -1), samples.most(50))
    for at in (0, 7, 31):
        alone, own = samples.picks(i[at : at + 1], torch.full((1, 1, 1), at + 1), samples.most(at + 1))
        assert own.all()
        assert torch.equal(alone[0, :, 0], whole[0, :, at][there[0, :, at]].view(2, -1))
    for other in (Samples(2, 2, 4), Samples(2, 2, 5)):
        assert not torch.equal(other.picks(i, (i + 1).view(1, 1, -1), samples.most(50))[0], whole)


def test_measures_of_gathered_keys_are_those_of_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, q, k = Samples(heads=4, factor=2, key=3), torch.randn(3, 4, 70, 8), torch.randn(3, 2, 70, 8)
    for keys in (torch.arange(1, 71).view(1, 1, -1), torch.tensor([70, 30, 1]).view(-1, 1, 1)):
        dense = samples.measures(q, k, keys)
        with monkeypatch.context() as patched:
            patched.setattr(informer, "MOST_KEYS", 0)
            torch.testing.assert_close(samples.measures(q, k, keys), dense, rtol=1e-5, atol=1e-5)


def test_a_measure_is_over_the_sample_alone() -> None:
    scores = torch.tensor([[3.0, 1.0, -50.0, 70.0], [2.0, 9.0, 9.0, 9.0]])
    there = torch.tensor([[True, True, False, False], [True, False, False, False]])
    assert spikiness(scores, there).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("length", [1, 2, 3, 8, 31])
def test_earlier_larger_counts_by_hand(length: int) -> None:
    x = torch.randint(0, 6, (2, 3, length)).float()  # ties
    expected = [[[sum(b > a for b in row[:i]) for i, a in enumerate(row)] for row in each] for each in x.tolist()]
    assert earlier_larger(x).tolist() == expected


def test_a_decoder_has_few_active_queries() -> None:
    """Of 512, the sum of c ceil(ln i) / i where measures have no trend; more as samples grow, and their maxima."""
    expected = sum(min(1.0, max(1, 5 * math.ceil(math.log(i))) / i) for i in range(1, 513))
    informer, untrended = make("decoder"), make("decoder")
    untrended.samples.measures = lambda q, *_: torch.rand(q.shape[:3])
    q, k, _ = informer.exact_queries_keys_values(torch.randn(4, 512, 32))
    rows = [each._active(q, k, None).float().sum(-1).mean() for each in (untrended, informer)]
    assert rows[0] == pytest.approx(expected, rel=0.05)
    assert rows[0] < rows[1] < 1.3 * expected
    assert expected == pytest.approx(102, abs=1)


@pytest.mark.parametrize("role", ROLES)
def test_a_pass_that_is_run_again_attends_where_the_first_did(role: str) -> None:
    """Whatever rounding does to the second pass; here other samples stand for it."""
    informer, x = make(role, factor=1), torch.randn(2, 40, 32)
    with record_choices() as kept:
        first = informer(x).output
    informer.samples = Samples(4, 1, key=99)
    assert not torch.allclose(informer(x).output, first, atol=1e-3)
    with replay_choices(kept):
        torch.testing.assert_close(informer(x).output, first)


@pytest.mark.parametrize("projection", [None, "grouped-query"])
@torch.no_grad()
def test_a_step_of_all_heads_gives_what_a_step_of_the_active_ones_gives(projection: str | None) -> None:
    """The form of accelerators, which do not wait to know which are active."""
    informer = make("decoder", factor=1, projection=projection)
    x, outputs = torch.randn(2, 3, 30, 32), []
    for skips in (True, False):
        informer._skips_others = lambda active, skips=skips: skips
        state, _ = informer.start(2, hypotheses=3)
        for token in x.unbind(2):
            attended, state = informer.step(token, state)
            outputs.append(attended.output)
    torch.testing.assert_close(torch.stack(outputs[:30]), torch.stack(outputs[30:]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("projection", [None, "grouped-query"])
def test_attention_of_all_queries_gives_what_attention_of_the_active_ones_gives(projection: str | None) -> None:
    """The decoder's form of accelerators, and its gradients."""
    informer = make("decoder", factor=1, projection=projection)
    x, found = torch.randn(2, 70, 32, requires_grad=True), []
    for skips in (True, False):
        informer._skips_others = lambda active, skips=skips: skips
        output = informer(x).output
        found.append((output, *torch.autograd.grad(output.square().sum(), [x, *informer.parameters()])))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_active_queries_are_those_of_float32_under_autocast_in_steps_too() -> None:
    informer, x = make("decoder", factor=1), torch.randn(2, 50, 32)
    exact = informer(x).output
    state, _ = informer.start(2)
    steps = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = informer(x).output
        for token in x.split(1, dim=1):
            attended, state = informer.step(token, state)
            steps.append(attended.output)
    for output in (low, torch.cat(steps, dim=1)):
        assert ((output - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 0.1  # a row that is not active is off by 1
    assert state["keys"].dtype == torch.float32
    assert state["values"].dtype == torch.bfloat16


test_what_it_cannot_be_is_refused = refusals(
    make,
    ({"factor": 0}, "factor = 0 must"),
    ({"role": "cross"}, "encoder, decoder"),
    ({"positions": "alibi"}, "cannot combine"),
)


def test_samples_are_a_function_of_seed_role_and_layer() -> None:
    sites: list[dict[str, Any]] = [{}, {"seed": 2}, {"layer": 1}]
    keys = {make(role, **site).samples.key for role in ROLES for site in sites}
    assert len(keys) == 6
    assert make(seed=2).samples.key == make(seed=2).samples.key
