"""The gated attention unit: its limits, its quadratic form, and what a step costs. Naive forms are contract tests."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention import Inputs, build, reorder
from mtkit.errors import MtkitError
from tests.attention.small import refusals
from tests.contract.cases import Case
from tests.contract.counting import Count
from tests.contract.stack import apart
from tests.contract.test_naive import check_naive
from tests.contract.test_padding import check_padding
from tests.contract.test_steps import check_steps

ROLES = ["encoder", "decoder"]
VALID = torch.tensor([[True] * 12, [True] * 7 + [False] * 5])


def make(role: str = "encoder", stir: bool = True, **options: Any) -> Any:
    gau = build("gau", **{"role": role, "d_model": 32, "heads": 4, "chunk": 5, "max_length": 64} | options)
    for parameter in gau.parameters() if stir else ():
        parameter.data.add_(0.15 * torch.randn_like(parameter))
    return gau.double().eval()


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, 32, dtype=torch.float64)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("rotary", [True, False])
def test_quadratic_is_relu_squared_attention_from_the_raw_weights(role: str, rotary: bool) -> None:
    gau, x = make(role, form="quadratic", rotary=rotary), tokens(2, 12)
    z, position = F.silu(gau.z_proj(x)), torch.arange(12)
    q, k = (z * kappa + mu for kappa, mu in zip(gau.vectors.kappa, gau.vectors.mu, strict=True))
    if rotary:
        q, k = gau.rotary.rotate(q, position), gau.rotary.rotate(k, position)
    seen = torch.ones(12, 12).tril().bool() if role == "decoder" else VALID.unsqueeze(1).expand(2, 12, 12)
    n = seen.sum(-1, keepdim=True)
    bias = torch.stack([torch.stack([gau.table[63 + j - i] for j in range(12)]) for i in range(12)])
    weights = ((q @ k.mT / n + bias).clamp(min=0) ** 2).where(seen, 0.0)
    expected = gau.out_proj(F.silu(gau.gate_proj(x)) * (weights @ F.silu(gau.v_proj(x))))
    output = gau(x, query_valid=None if role == "decoder" else VALID).output
    real = torch.ones_like(VALID) if role == "decoder" else VALID
    torch.testing.assert_close(output[real], expected[real])


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_one_chunk_without_its_linear_part_is_quadratic_with_the_chunk_as_n(role: str) -> None:
    mixed, quadratic = make(role, chunk=20), make(role, form="quadratic")
    state = mixed.state_dict()
    for name in ("kappa", "mu"):
        state[f"vectors.{name}"] = state[f"vectors.{name}"][:2]
        mixed.vectors.get_parameter(name)[2:] = 0.0
    state["table"] = F.pad(state["table"], (44, 44))  # 2 * 20 - 1 distances of 2 * 64 - 1
    quadratic.load_state_dict(state)
    quadratic.counts = lambda pairs: 20.0
    x = tokens(2, 12)
    torch.testing.assert_close(mixed(x).output, quadratic(x).output)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("form", ["mixed", "quadratic"])
@torch.no_grad()
def test_without_bias_kappa_and_mu_heads_are_zero(role: str, form: str) -> None:
    gau, x = make(role, form=form), tokens(2, 12)
    assert (gau(x).output - gau.out_proj.bias).abs().max() > 1e-3
    for parameter in (gau.table, gau.vectors.kappa, gau.vectors.mu):
        parameter.zero_()
    torch.testing.assert_close(gau(x).output, gau.out_proj.bias.expand(2, 12, 32))


@torch.no_grad()
def test_a_decoder_reads_across_finished_chunks_only_and_by_their_mean() -> None:
    gau, x = make("decoder", rotary=False), tokens(1, 17)
    gau.table.zero_()
    gau.vectors.kappa.zero_()  # q = k = mu: no relu² weights, and the same linear weight for all tokens
    gau.vectors.mu.zero_()
    gau.vectors.mu[2:] = 1.0
    v, gate = F.silu(gau.v_proj(x)), F.silu(gau.gate_proj(x))
    for i in range(17):
        first = i // 5 * 5
        mean = v[0, :first].mean(0) if first else torch.zeros(64).double()
        torch.testing.assert_close(gau(x).output[0, i], gau.out_proj(8 * mean * gate[0, i]))  # 8 = |mu|²


class TestQuadratic:
    """The promises of the contract for the form that grows with T²."""

    @pytest.fixture(autouse=True)
    def _case(self) -> None:
        self.case = Case("gau", "decoder", "small", {"form": "quadratic"})

    @torch.no_grad()
    def test_steps(self) -> None:
        from tests.contract.stack import make as stacked

        indices = [torch.tensor([[2, 2, 0], [0, 1, 2]]), torch.tensor([1, 0])]
        check_steps(stacked(self.case), torch.randn(2, 3, 11, 32), None, indices=indices)

    @pytest.mark.parametrize("role", ROLES)
    def test_naive_and_padding(self, role: str) -> None:
        from tests.contract.stack import make as stacked

        stack = stacked(Case("gau", role, "small", {"form": "quadratic"}))
        with torch.no_grad():
            check_padding(stack, torch.randn(2, 7, 32), [1, 9])
        check_naive(stack.double(), tokens(2, 13), None, [13, 4])

    def test_blocks_of_queries_give_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for role in ROLES:
            gau, x = make(role, form="quadratic"), tokens(2, 50).requires_grad_()
            results = []
            for most in (1 << 18, 64):
                monkeypatch.setattr("mtkit.attention.bases.query_blocks.scores_at_once", lambda _, most=most: most)
                output = gau(x).output
                results.append((output, *torch.autograd.grad(output.square().sum(), [x, gau.table, gau.vectors.mu])))
            for one, other in zip(*results, strict=True):
                torch.testing.assert_close(one, other)

    def test_a_sequence_beyond_the_table_is_refused(self) -> None:
        gau = make("encoder", form="quadratic", max_length=10)
        assert gau.longest == 10
        with pytest.raises(MtkitError, match=r"built for 10 positions, not 11: raise model\.max_length"):
            gau(tokens(1, 11))


@pytest.mark.parametrize("role", ROLES)
def test_a_few_chunks_at_a_time_give_the_same(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, three at a time, and blocks of the queries of each."""
    gau, x, results = make(role), tokens(2, 38).requires_grad_(), []
    for most in (1 << 18, 75, 20):
        for module in ("single_head", "query_blocks"):
            monkeypatch.setattr(f"mtkit.attention.bases.{module}.scores_at_once", lambda _, most=most: most)
        monkeypatch.setattr("mtkit.attention.bases.query_blocks.LEAST", 2)
        output = gau(x, query_valid=torch.arange(38) < torch.tensor([[38], [17]])).output[:, :17]
        results.append((output, *torch.autograd.grad(output.square().sum(), [x, gau.table, gau.vectors.mu])))
    for other in results[1:]:
        for one, its in zip(results[0], other, strict=True):
            torch.testing.assert_close(its, one)


def test_chunks_have_no_longest_length() -> None:
    gau = make("decoder", max_length=10)
    assert gau.longest is None
    assert len(gau.table) == 9
    assert gau(tokens(1, 40)).output.isfinite().all()
    assert make(chunk=100, max_length=10).longest == 10


@torch.no_grad()
def test_a_state_holds_one_chunk_and_one_sum() -> None:
    gau = make("decoder").float()
    state, _ = gau.start(2, hypotheses=3)
    for position in range(23):
        _, state = gau.step(torch.randn(2, 3, 32), state)
        assert state["keys"].shape[3] <= 8
        assert state["sums"].shape == (2, 3, 8, 64)
        assert bool(state["sums"].any()) == (position >= 4)
    moved = reorder(state, torch.tensor([[1, 1], [2, 0]]))
    assert apart(moved["sums"][1], state["sums"][1, [2, 0]]) == 0


def test_no_chunk_is_padded_to_more_than_the_sequence() -> None:
    """At the default, 256 positions, a sentence costs its own length."""
    gau = build("gau", role="encoder", d_model=32, heads=4)
    with Count() as counted:
        gau(torch.randn(1, 7, 32))
    assert counted.largest <= 8 * 64


def test_learned_numbers_are_the_bias_by_distance() -> None:
    gau = make()
    ((name, numbers),) = gau.learned_numbers(Inputs(tokens(1, 3))).items()
    assert name == "bias by distance"
    torch.testing.assert_close(numbers, gau.table.unsqueeze(0))


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"role": "cross"}, "it can play: encoder, decoder"),
    ({"form": "linear"}, "form = 'linear'"),
    ({"chunk": 0}, "chunk = 0"),
    ({"expand": 0.0}, "expand = 0"),
    ({"merge": "gated"}, "cannot combine with merge"),
)


def test_it_has_no_heads_to_mix_with_others() -> None:
    with pytest.raises(MtkitError, match="gau"):
        build("gau:2+full:2", role="encoder", d_model=32, heads=4)
