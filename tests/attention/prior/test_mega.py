"""Mega: the moving average against the recurrence, gates at their limits, chunks, and what a step costs."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention import Inputs, build
from mtkit.attention.bases.single_head import laplace
from mtkit.attention.prior._moving_average import CHUNK, MovingAverage
from mtkit.errors import MtkitError
from tests.attention.small import maker, refusals
from tests.contract.cases import Case
from tests.contract.counting import count, exponent

SELF = ["encoder", "decoder"]
ROLES = [*SELF, "cross"]
VALID = torch.tensor([[True] * 12, [True] * 7 + [False] * 5])

make = maker("mega", ema=3, max_length=64, stir=0.15, double=True)


def inputs(role: str, length: int = 12) -> tuple[Tensor, Tensor | None]:
    memory = torch.randn(2, length, 32).double() if role == "cross" else None
    return torch.randn(2, length, 32).double(), memory


def recurrence(average: MovingAverage, x: Tensor) -> Tensor:
    """e (B, T, D) of x (B, T, D), channel by channel and state by state, as plain numbers."""
    result = torch.zeros_like(x)
    ways, width, states = average.alpha.shape
    for b in range(len(x)):
        for way in range(ways):
            for c in range(width):
                for n in range(states):
                    p, d = (float(logit[way, c, n].sigmoid()) for logit in (average.alpha, average.delta))
                    beta, eta = float(average.beta[way, c, n]), float(average.eta[way, c, n])
                    h = 0.0
                    for t in range(x.shape[1])[:: -1 if way else 1]:
                        h = (1 - p * d) * h + p * beta * float(x[b, t, c])
                        result[b, t, c] += eta * h / math.sqrt(states)
    return result


class TestMovingAverage:
    @pytest.mark.parametrize("both_ways", [False, True])
    @pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
    @torch.no_grad()
    def test_it_is_the_recurrence(self, both_ways: bool, length: int) -> None:
        average, x = MovingAverage(3, 2, both_ways=both_ways).double(), torch.randn(2, length, 3).double()
        expected = F.silu(recurrence(average, x) + average.omega * x)
        torch.testing.assert_close(average(x), expected)
        padded, valid = torch.cat([x, 1e3 * torch.ones(2, 70, 3)], 1), torch.arange(length + 70) < length
        torch.testing.assert_close(average(padded, valid.expand(2, -1))[:, :length], expected)

    @torch.no_grad()
    def test_steps_are_the_recurrence(self) -> None:
        average, x = MovingAverage(3, 2, both_ways=False).double(), torch.randn(2, 70, 3).double()
        states = average.empty(2)
        for t in range(70):
            moved, states = average.step(x[:, t], states)
            torch.testing.assert_close(moved, average(x)[:, t])

    @pytest.mark.parametrize("both_ways", [False, True])
    def test_gradients_are_right_over_several_chunks(self, both_ways: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mtkit.attention.prior._moving_average.CHUNK", 3)
        average, x = MovingAverage(2, 2, both_ways=both_ways).double(), torch.randn(2, 16, 2).double().requires_grad_()
        parameters = list(average.parameters())
        assert torch.autograd.gradcheck(lambda x, *_: average(x, VALID_16), [x, *parameters])

    @pytest.mark.parametrize(("logit", "kept"), [(100.0, 0.0), (-100.0, 1.0)])
    def test_saturated_logits_forget_all_or_nothing(self, logit: float, kept: float) -> None:
        """In float32, where 1 - p d rounds to 0; the logarithm of that would make NaN of the taps."""
        average = MovingAverage(3, 2, both_ways=True)
        with torch.no_grad():
            average.alpha.fill_(logit)
            average.delta.fill_(logit)
        torch.testing.assert_close(average.kept(), torch.full((2, 3, 2), kept))
        average(torch.randn(2, 150, 3)).sum().backward()
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in average.parameters())

    @torch.no_grad()
    def test_an_infinite_token_reaches_no_earlier_chunk(self) -> None:
        average, x = MovingAverage(3, 2, both_ways=False), torch.randn(1, 200, 3)
        x[:, 150] = torch.inf
        assert average(x)[:, : 2 * CHUNK].isfinite().all()

    def test_cost_is_linear_and_nothing_of_all_pairs_is_held(self) -> None:
        average, costs = MovingAverage(8, 4, both_ways=True), []
        for length in (2048, 4096):
            x = torch.randn(1, length, 8, requires_grad=True)
            counted, flops = count(lambda x=x: average(x).sum().backward())
            assert not any(sum(side >= length for side in shape) > 1 for shape in counted.shapes)
            assert counted.largest < 5 * length * 8 * 4
            costs.append((counted.touched, flops))
        assert all(exponent(*pair) < 1.15 for pair in zip(*costs, strict=True))


VALID_16 = torch.tensor([[True] * 16, [True] * 10 + [False] * 6])


@pytest.mark.parametrize("role", SELF)
@torch.no_grad()
def test_without_averages_and_with_omega_1_they_are_silu_of_the_token(role: str) -> None:
    mega, (x, _) = make(role), inputs(role)
    mega.average.eta.zero_()
    mega.average.omega.fill_(1.0)
    torch.testing.assert_close(mega.average(x), F.silu(x))


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_a_closed_update_gate_leaves_the_token_and_an_open_one_replaces_it(role: str) -> None:
    mega, (x, memory) = make(role), inputs(role)
    mega.update_proj.weight.zero_()
    mega.update_proj.bias.fill_(-60.0)
    torch.testing.assert_close(mega(x, memory).output, torch.zeros_like(x))
    mega.update_proj.bias.fill_(60.0)
    mega.out_proj.weight.zero_()
    moved = x if role == "cross" else mega.average(x)
    hidden = mega.out_proj.bias + (0.0 if role == "cross" else mega.h_proj(moved))
    torch.testing.assert_close(mega(x, memory).output, F.silu(hidden) - x)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("activation", ["softmax", "laplace"])
@torch.no_grad()
def test_weights_are_those_of_the_scores_and_the_table(role: str, activation: str) -> None:
    mega, (x, memory) = make(role, activation=activation), inputs(role)
    moved = x if role == "cross" else mega.average(x, None if role == "decoder" else VALID)
    if role == "cross":
        q, k = mega.q_proj(x), mega.k_proj(memory)
    else:
        q, k = (F.silu(mega.z_proj(moved)) * mega.vectors.kappa[i] + mega.vectors.mu[i] for i in range(2))
    seen = torch.ones(12, 12).tril().bool() if role == "decoder" else VALID.unsqueeze(1).expand(2, 12, 12)
    bias = torch.stack([mega.table[63 - i : 63 - i + 12] for i in range(12)])
    if activation == "softmax":
        expected = (q @ k.mT / 8**0.5 + bias).masked_fill(~seen, -torch.inf).softmax(-1)
    else:
        scores = q @ k.mT / seen.sum(-1, keepdim=True) + bias
        expected = torch.distributions.Normal(0.5**0.5, (4 * math.pi) ** -0.5).cdf(scores).where(seen, 0.0)
    masks = {} if role == "decoder" else {"memory_valid" if role == "cross" else "query_valid": VALID}
    weights = mega(x, memory, **masks, need_weights=True).weights
    torch.testing.assert_close(weights.squeeze(1), expected.expand(2, 12, 12))


def test_laplace_meets_relu_squared_in_value_and_slope() -> None:
    """At sqrt(1/2), where the paper chose its mean and deviation so."""
    x = torch.tensor(0.5**0.5, dtype=torch.float64, requires_grad=True)
    value = laplace(x)
    value.backward()
    assert (value.item(), x.grad.item()) == (pytest.approx(0.5), pytest.approx(2 * 0.5**0.5))


@pytest.mark.parametrize("role", SELF)
@pytest.mark.parametrize("activation", ["softmax", "laplace"])
@torch.no_grad()
def test_a_chunk_as_long_as_the_sequence_is_no_chunk(role: str, activation: str) -> None:
    whole, chunked = make(role, activation=activation), make(role, activation=activation, chunk_size=12)
    state = whole.state_dict()
    state["table"] = state["table"][52:75]
    chunked.load_state_dict(state)
    x, _ = inputs(role)
    torch.testing.assert_close(chunked(x).output, whole(x).output)
    assert (chunked(torch.cat([x, x], 1)).output - whole(torch.cat([x, x], 1)).output).abs().max() > 1e-4


@torch.no_grad()
def test_chunks_attend_to_themselves_and_averages_to_all() -> None:
    mega, x = make("decoder", chunk_size=5), torch.randn(1, 13, 32).double()
    output = mega(x).output
    other = x.clone()
    other[:, 0] += 1
    assert (mega(other).output - output)[:, 12].abs().max() > 1e-8
    mega.average.eta.zero_()
    torch.testing.assert_close(mega(other).output[:, 5:], mega(x).output[:, 5:])
    torch.testing.assert_close(mega(x).output[:, 10:], mega(x[:, 10:]).output)


@pytest.mark.parametrize("role", SELF)
def test_with_chunks_cost_is_linear_and_the_table_short(role: str) -> None:
    mega = make(role, chunk_size=32, max_length=1024).float().train()
    assert (mega.longest, len(mega.table), make(role).longest) == (None, 63, 64)
    costs = []
    for length in (512, 1024):
        x = torch.randn(1, length, 32, requires_grad=True)
        counted, flops = count(lambda x=x: mega(x).output.sum().backward())
        assert not any(sum(side >= length for side in shape) > 1 for shape in counted.shapes)
        costs.append((counted.touched, flops))
    assert all(exponent(*pair) < 1.1 for pair in zip(*costs, strict=True))


@torch.no_grad()
def test_a_state_holds_the_averages_and_the_open_chunk() -> None:
    mega = make("decoder", chunk_size=5).float()
    state, _ = mega.start(2, hypotheses=3)
    for _ in range(23):
        _, state = mega.step(torch.randn(2, 3, 32), state)
        assert state["keys"].shape[3] <= 8
        assert state["averages"].shape == (2, 3, 32, 3)


def test_the_cross_role_has_the_longer_of_both_lengths_in_its_table() -> None:
    mega = make("cross", memory_length=100, chunk_size=5)
    assert (len(mega.table), mega.longest) == (199, 100)


@torch.no_grad()
def test_learned_numbers_are_kept_shares_gates_and_the_bias() -> None:
    mega, (x, _) = make("encoder"), inputs("encoder")
    learned = mega.learned_numbers(Inputs(x))
    assert set(learned) == {"bias by distance", "kept share", "kept share from the right", "update gate"}
    kept = 1 - mega.average.alpha.sigmoid() * mega.average.delta.sigmoid()
    torch.testing.assert_close(learned["kept share"], kept[0].mean(0, keepdim=True))
    torch.testing.assert_close(learned["kept share from the right"], kept[1].mean(0, keepdim=True))
    gates = mega.update_proj(mega.average(x)).sigmoid()
    torch.testing.assert_close(learned["update gate"], gates.mean().view(1), check_dtype=False, rtol=1e-6, atol=1e-6)


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"ema": 0}, "ema = 0"),
    ({"activation": "relu2"}, "activation = 'relu2'"),
    ({"merge": "gated"}, "merge"),
)


def test_weights_of_the_average_are_not_rounded() -> None:
    from mtkit.attention.contract import unrounded_parts
    from tests.contract.stack import make as stacked

    stack = stacked(Case("mega", "decoder", "small", {"ema": 3}))
    unrounded = unrounded_parts(stack)
    assert {type(part) for part in unrounded} == {MovingAverage}


def test_it_has_no_heads_to_mix_with_others() -> None:
    with pytest.raises(MtkitError, match="mega"):
        build("mega:2+full:2", role="encoder", d_model=32, heads=4)
