"""The learned numbers mean what their names say: each is compared with what the mechanism does."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Inputs, build
from mtkit.attention.contract import for_heads, token_means
from mtkit.attention.kernels.dot_product import expand_heads

D, H, T = 32, 4, 9


def attention(name: str, role: str = "encoder", **options: Any) -> Any:
    return build(name, role=role, d_model=D, heads=H, max_length=40, **options).eval()


def inputs(role: str = "encoder") -> Inputs:
    return Inputs(torch.randn(2, T, D), torch.randn(2, 7, D) if role == "cross" else None)


def test_means_leave_padding_out() -> None:
    values = torch.tensor([[[1.0, 2.0, 99.0]], [[3.0, 99.0, 99.0]]])  # (B, H, T)
    valid = torch.tensor([[True, True, False], [True, False, False]])
    assert token_means(values, valid).tolist() == [2.0]
    assert token_means(values[:, :, :1], None).tolist() == [2.0]


def test_groups_are_repeated_and_other_heads_have_none() -> None:
    assert for_heads(torch.tensor([1.0, 2.0]), 4).tolist() == [1, 1, 2, 2]
    rows = for_heads(torch.tensor([[1.0, 2.0]]), 3, first=1)
    assert rows[1].tolist() == [1, 2]
    assert rows[[0, 2]].isnan().all()


def test_span_is_the_distance_up_to_which_nothing_fades() -> None:
    span = attention("adaptive-span", max_span=20, ramp=4)
    span.span.fraction.data = torch.tensor([0.0, 0.25, 0.5, 1.0])
    spans = span.learned_numbers()["span"]
    distances = torch.arange(40)
    full = [max(distances[row == 1.0].tolist()) for row in span.span.factor(distances.unsqueeze(0)).squeeze(1)]
    assert spans.tolist() == [0, 5, 10, 20] == full


def test_the_bias_of_gaussian_is_largest_at_the_favoured_distance() -> None:
    gaussian = attention("gaussian", initial_w=0.02, initial_b=-0.5)
    favoured = gaussian.learned_numbers()["favoured distance"]
    assert favoured.tolist() == pytest.approx([5.0] * H, rel=1e-4)
    assert gaussian.table(torch.arange(40)).argmax(1).tolist() == [5] * H


def test_distances_to_centres_and_widths_of_localness() -> None:
    localness, given = attention("localness", local_heads=2), inputs()
    torch.nn.init.normal_(localness.width_vector)
    q = localness.queries(given.query)
    distance, width = torch.zeros(2), torch.zeros(2)
    for head in range(2):
        for b in range(2):
            for i in range(T):
                hidden = torch.tanh(q[b, head, i] @ localness.query_hidden[head])
                centre = (T - 1) * torch.sigmoid(hidden @ localness.centre_vector[head])
                distance[head] += (centre - i).abs().item() / (2 * T)
                width[head] += (T * torch.sigmoid(hidden @ localness.width_vector[head]) + 0.1).item() / (2 * T)
    numbers = localness.learned_numbers(given)
    torch.testing.assert_close(numbers["distance to centre"][:2], distance)
    torch.testing.assert_close(numbers["window width"][:2], width)
    assert numbers["window width"][2:].isnan().all()


def next_token(given: Inputs, made: Any) -> Tensor:
    """The heads' outputs (B, T - 1, D) if each token reads only the token after it."""
    return made.v_proj(given.query)[:, 1:]


def heads_of(made: Any, given: Inputs) -> Tensor:
    """The joined heads (B, T, D) before `out_proj`."""
    read: list[Tensor] = []
    hook = made.out_proj.register_forward_pre_hook(lambda _, positional: read.append(positional[0]))
    made(**vars(given))
    hook.remove()
    return read[0]


@torch.no_grad()
def test_columns_by_distance_run_from_left_to_right_in_etc() -> None:
    etc, given = attention("etc", global_tokens=0, rel_clip=3, window_radius=4), inputs()
    etc.labels.biases[:, 1] = 1e3  # label 1: one to the right
    assert etc.learned_numbers()["bias by distance"].argmax(1).tolist() == [3 + 1] * H
    torch.testing.assert_close(heads_of(etc, given)[:, :-1], next_token(given, etc))
    etc.labels.biases.copy_(torch.randn(H, 9))
    left, right = etc.learned_numbers()["bias by distance"][:, [2, 4]].T * math.sqrt(D / H)
    assert torch.allclose(right, etc.labels.biases[:, 1])
    assert torch.allclose(left, etc.labels.biases[:, 3 + 1])


@torch.no_grad()
def test_columns_by_distance_run_from_left_to_right_in_sac() -> None:
    sac, given = attention("sac", edges=1), inputs()
    predictor = sac.predictor
    right = predictor.distance.shape[1] // 2 - 1
    predictor.distance[:, right] = 1e3
    bias = sac.learned_numbers()["edge bias by distance"]
    assert bias.argmax(1).tolist() == [bias.shape[1] // 2 + 1]
    edges = predictor(given.query, predictor.candidates(given.query), role="encoder")
    assert edges.targets[:, 0, :-1, 0].tolist() == [list(range(1, T))] * 2


@torch.no_grad()
def test_columns_by_distance_run_from_left_to_right_in_shaw() -> None:
    full, given = attention("full", positions={"name": "shaw", "clip": 3}), inputs()
    full.positions.value_table[3 + 1] = 1.0
    norms = full.learned_numbers()["value vector norm by distance"]
    assert norms.argmax(1).tolist() == [4]
    plain = attention("full")
    plain.load_state_dict(full.state_dict(), strict=False)
    weights = plain(**{**vars(given), "need_weights": True}).weights
    added = heads_of(full, given) - heads_of(plain, given)  # the weight of the next token, in each channel
    torch.testing.assert_close(added.unflatten(2, (H, -1))[:, :-1, :, 0], weights.diagonal(1, 2, 3).transpose(1, 2))


@torch.no_grad()
def test_columns_by_distance_run_from_left_to_right_in_the_convolution() -> None:
    nystrom = attention("nystrom", conv_kernel=5)
    nystrom.nearby.weight.zero_()
    nystrom.nearby.weight[:, 3] = 1.0
    assert nystrom.learned_numbers()["kernel by distance"].argmax(1).tolist() == [2 + 1] * H
    values = torch.randn(2, H, T, 8)
    torch.testing.assert_close(nystrom.nearby(values, None)[:, :, :-1], values[:, :, 1:])


@torch.no_grad()
def test_gates_are_means_over_tokens() -> None:
    gated, given = attention("rfa-gated", "decoder", projection="multi-query"), inputs()
    kept = torch.sigmoid(given.query @ gated.gate.weight.T + gated.gate.bias).mean((0, 1))
    torch.testing.assert_close(gated.learned_numbers(given)["kept share"], kept.expand(H))
    delta, given = attention("delta", "cross"), inputs("cross")
    beta = torch.sigmoid(given.memory @ delta.beta_proj.weight.T + delta.beta_proj.bias).mean((0, 1))
    torch.testing.assert_close(delta.learned_numbers(given)["replaced share"], beta)
    average, given = attention("average", "decoder", ffn=False), inputs()
    means = torch.stack([given.query[:, : t + 1].mean(1) for t in range(T)], 1)
    gates = torch.sigmoid(average.gates(torch.cat([given.query, means], -1))).mean((0, 1))
    numbers = average.learned_numbers(given)
    assert float(numbers["gate of the token"]) == pytest.approx(float(gates[:D].mean()), rel=1e-5)
    assert float(numbers["gate of the average"]) == pytest.approx(float(gates[D:].mean()), rel=1e-5)


@pytest.mark.parametrize("role", ["encoder", "cross"])
@torch.no_grad()
def test_use_of_slots_and_points_gives_the_mean_output(role: str) -> None:
    """The mean output of a head is the sum of the values that it reads, each with the mean weight."""
    given = Inputs(torch.randn(1, T, D), torch.randn(1, 7, D) if role == "cross" else None)
    luna = attention("luna", role, length=5)
    _, _, values, _ = luna._packed(given, *luna.keys_values(given.context))
    use = luna.learned_numbers(given)["slot use"]
    mean = torch.einsum("hl,hlk->hk", use, values[0])
    torch.testing.assert_close(mean.flatten(), heads_of(luna, given).mean((0, 1)))
    points = attention("set-transformer", role, isab_points=5, pma_seeds=5)
    _, values, _ = points._points_read(*points.keys_values(given.context), None)
    use = points.learned_numbers(given)["point use"]
    mean = torch.einsum("hl,hlk->hk", use, values[0])
    torch.testing.assert_close(mean.flatten(), heads_of(points, given).mean((0, 1)))


@torch.no_grad()
def test_centroids_of_routing_heads() -> None:
    routing = attention("routing", clusters=3, local_heads=1)
    routing.centroids.mass.copy_(torch.tensor([[1.0, 1.0, 2.0], [0.0, 0.0, 5.0], [1.0, 0.0, 0.0]]))
    use = routing.learned_numbers()["centroid use"]
    assert use[1:].tolist() == [[0.25, 0.25, 0.5], [0, 0, 1], [1, 0, 0]]
    assert use[0].isnan().all()


@torch.no_grad()
def test_rows_of_talking_heads_are_softmaxes() -> None:
    talking = attention("talking-heads")
    torch.nn.init.normal_(talking.scores_mix)
    pairs = talking.pairs(torch.randn(1, T, D))
    mixed = torch.einsum("sk,bkij->bsij", talking.learned_numbers()["score mixing"], talking.scores(pairs))
    torch.testing.assert_close(mixed, talking.logits(pairs, None)[0])


@torch.no_grad()
def test_the_largest_score_bounds_additive_scores() -> None:
    additive = attention("additive", "cross")
    torch.nn.init.normal_(additive.score_vector)
    limit = additive.learned_numbers()["largest score"]
    scores = additive.scores(additive.pairs(1e3 * torch.randn(2, T, D), 10 * torch.randn(2, 50, D)))
    assert (scores.abs().amax((0, 2, 3)) <= limit + 1e-4).all()


@torch.no_grad()
def test_sigma_of_groups_is_repeated() -> None:
    rfa = attention("rfa", projection={"name": "grouped-query", "kv_heads": 2})
    torch.nn.init.normal_(rfa.sigma)
    sigma = rfa.learned_numbers()["sigma"]
    torch.testing.assert_close(sigma, expand_heads(rfa.sigma.unsqueeze(0), H)[0])


@torch.no_grad()
def test_shares_of_a_mixture_scale_its_scores() -> None:
    mixture = attention("synthesizer", variant="mixture", mix="random,dot")
    mixture.mix_weight.copy_(torch.tensor([0.0, math.log(3.0)]))
    numbers = mixture.learned_numbers()
    assert float(numbers["share of random"]) == pytest.approx(0.25)
    assert float(numbers["share of dot"]) == pytest.approx(0.75)
