"""Clustered attention: its exactness limits, its clusters, and the planes that hash queries."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention.kernels.reproducible import record_choices, replay_choices
from tests.attention.small import maker, refusals

LENGTHS = [9, 5, 1]
VALID = torch.arange(9) < torch.tensor(LENGTHS).unsqueeze(1)

make = maker("clustered", max_length=64)


def with_full(**arguments: Any) -> tuple[Any, Any]:
    """Clustered attention and `full` with the same weights."""
    site = {name: arguments[name] for name in ("positions", "projection") if name in arguments}
    full, clustered = make(name="full", **site), make(**arguments)
    with torch.no_grad():
        full.q_proj.bias.normal_()
    clustered.load_state_dict(full.state_dict(), strict=False)
    return clustered, full


def signs(rows: list[str], **options: Any) -> tuple[Any, Tensor]:
    """The clusters of one head whose planes are the axes, and queries whose codes are these rows of + and -."""
    clusters = make(d_model=len(rows[0]), heads=1, cluster_bits=len(rows[0]), **options).clusters
    clusters.planes.copy_(torch.eye(len(rows[0]) + 1, len(rows[0])))
    return clusters, torch.tensor([[1.0 if sign == "+" else -1.0 for sign in row] for row in rows]).view(
        1, 1, len(rows), -1
    )


@pytest.mark.parametrize("arguments", [{}, {"positions": "rotary"}, {"projection": "multi-query"}, {"clusters": 9}])
def test_a_cluster_for_each_query_gives_full_attention(arguments: dict[str, Any]) -> None:
    """C >= n, and codes of 63 bits that all differ."""
    clustered, full = with_full(**arguments)
    x = torch.randn(3, 9, 32)
    outputs = [each(x, query_valid=VALID).output[VALID] for each in (clustered, full)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_one_cluster_gives_the_attention_of_the_mean_query_to_all() -> None:
    clustered, _ = with_full(clusters=1)
    x = torch.randn(3, 9, 32)
    output = clustered(x, query_valid=VALID).output
    for row, length in enumerate(LENGTHS):
        alone = x[row : row + 1, :length]
        q, k, v = clustered.queries_keys_values(alone)
        heads = (q.mean(2, keepdim=True) @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v
        expected = clustered.merge_heads(heads, alone[:, :1]).expand(-1, length, -1)
        torch.testing.assert_close(output[row : row + 1, :length], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("clusters", [1, 3, 100])
def test_queries_that_are_all_the_same_give_full_attention(clusters: int) -> None:
    clustered, full = with_full(clusters=clusters)
    with torch.no_grad():
        for each in (clustered, full):
            each.q_proj.weight.zero_()
    x = torch.randn(2, 9, 32)
    torch.testing.assert_close(clustered(x).output, full(x).output, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_distance_to_full_falls_with_the_width_of_a_cluster() -> None:
    """Queries in three bunches, codes that do not split them: the error is of the order of the bunches' width."""
    clustered, full = with_full(clusters=3, cluster_bits=256)
    bunches, noise = torch.randn(2, 1, 3, 32).double(), torch.randn(2, 4, 3, 32).double()
    errors = []
    for width in (1e-2, 1e-3, 1e-4):
        x = (bunches + width * noise).transpose(1, 2).flatten(1, 2)  # a bunch after the other
        errors.append((clustered.double()(x).output - full.double()(x).output).norm())
    assert 8 < errors[0] / errors[1] < 12
    assert 9 < errors[1] / errors[2] < 11


def test_centroids_start_at_evenly_spaced_tokens_and_equals_go_to_the_first() -> None:
    clusters, q = signs(["++++", "+++-", "----", "---+", "++--"], clusters=2, cluster_iters=1)
    assert clusters(q, None).tolist() == [[[0, 0, 1, 1, 0]]]  # the last is 2 from both
    real = torch.tensor([[True, True, True, False, False]])  # then from tokens 0 and 1
    assert clusters(q, real).tolist() == [[[0, 1, 1, 2, 2]]]


def test_a_centroid_becomes_the_majority_of_its_members_and_keeps_even_bits() -> None:
    rows = ["++++++", "+++---", "+++---", "------", "-++---", "++----"]
    first, q = signs(rows, clusters=2, cluster_iters=1)
    assert first(q, None).tolist() == [[[0, 0, 0, 1, 1, 1]]]
    moved, _ = signs(rows, clusters=2, cluster_iters=2)
    # the majorities are +++--- and -+----; the last two are 1 from both
    assert moved(q, None).tolist() == [[[0, 0, 0, 1, 0, 0]]]
    even, q = signs(["++++", "++--", "----", "+---"], clusters=2, cluster_iters=2)
    # {0, 1} are even in two bits, which stay +, and {2, 3} in one, which stays -
    assert even(q, None).tolist() == [[[0, 0, 1, 1]]]


def test_a_centroid_without_members_keeps_its_code() -> None:
    """Tokens 0 and 2 start alike, so that the second centroid is empty; the first moves away, and the second fills."""
    rows = ["++++", "++--", "++++", "+---", "+---"]
    once, q = signs(rows, clusters=2, cluster_iters=1)
    assert once(q, None).tolist() == [[[0, 0, 0, 0, 0]]]
    twice, _ = signs(rows, clusters=2, cluster_iters=2)
    assert twice(q, None).tolist() == [[[1, 0, 1, 0, 0]]]  # from the majority, ++--


def test_a_bit_says_on_which_side_of_its_plane_a_query_is() -> None:
    clusters, q = make().clusters, torch.randn(2, 4, 5, 8)
    codes = clusters.codes(q)
    for b, h, t, bit in ((0, 0, 0, 0), (1, 3, 4, 62), (0, 2, 1, 30)):
        plane, bias = clusters.planes[h, :8, bit], clusters.planes[h, 8, bit]
        assert codes[b, h, t, bit] == ((plane * q[b, h, t]).sum() > bias)
    assert 0.3 < codes.float().mean() < 0.7


def test_without_a_bias_the_length_of_a_query_changes_no_code() -> None:
    q = torch.randn(2, 4, 5, 8)
    with_bias, without = make().clusters, make(cluster_hash_bias=False).clusters
    assert torch.equal(without.codes(q), without.codes(q / 5))
    assert not torch.equal(with_bias.codes(q), with_bias.codes(q / 5))


def test_members_all_get_the_gradient_of_the_mean_and_no_other_query_does() -> None:
    clustered, x = make(clusters=3), torch.randn(1, 12, 32)
    q, k, v = (each.detach() for each in clustered.exact_queries_keys_values(x))
    q.requires_grad_()
    groups = clustered.clusters(q, None)
    heads = clustered.attended(q, k, v, None)
    (gradient,) = torch.autograd.grad(heads[0, 0, 4].sum(), q)
    members = groups[0, 0] == groups[0, 0, 4]
    assert 1 < members.sum() < 12
    torch.testing.assert_close(gradient[0, 0, members], gradient[0, 0, 4].expand(int(members.sum()), -1))
    assert gradient[0, 0, 4].any()
    assert not gradient[0, 0, ~members].any()
    assert not gradient[0, 1:].any()


@pytest.mark.parametrize("name", ["clustered", "improved-clustered"])
def test_an_update_draws_new_planes_for_training_alone(name: str) -> None:
    options = {"clusters": 3, **({"cluster_topk": 4} if "improved" in name else {})}
    clustered, x = make(name=name, **options), torch.randn(2, 40, 32)
    evaluated, trained = clustered(x).output, clustered.train()(x).output
    clustered.after_update(1, 10)
    again = clustered(x).output
    assert not torch.allclose(again, trained, atol=1e-3)
    assert torch.equal(again, clustered(x).output), "one draw an update"
    assert torch.equal(clustered.eval()(x).output, evaluated)
    other = make(name=name, **options)
    other.load_state_dict(clustered.state_dict())
    assert torch.equal(other.train()(x).output, again), "planes are saved"


def test_planes_are_a_function_of_seed_layer_and_update() -> None:
    def planes(update: int = 0, **site: Any) -> Tensor:
        clustered = make(**site)
        if update:
            clustered.after_update(update, 10)
        return clustered.clusters.training_planes

    assert torch.equal(planes(3, seed=2), planes(3, seed=2))
    drawn = [planes(), planes(1), planes(2), planes(seed=2), planes(layer=1)]
    drawn += list(planes())  # heads
    assert all(not torch.equal(a[..., :1, :1], b[..., :1, :1]) for n, a in enumerate(drawn) for b in drawn[:n])


@pytest.mark.parametrize("name", ["clustered", "improved-clustered"])
def test_a_pass_that_is_run_again_repeats_its_choices(name: str) -> None:
    """Whatever rounding does to the second pass; here other planes stand for it, and other scores."""
    clustered, x = (
        make(name=name, clusters=3, **({"cluster_topk": 4} if "improved" in name else {})).train(),
        torch.randn(2, 20, 32),
    )
    q, k, v = clustered.exact_queries_keys_values(x)
    with record_choices() as kept:
        first = clustered.attended(q, k, v, None)
    clustered.after_update(1, 10)
    assert not torch.allclose(clustered.attended(q, k, v, None), first, atol=1e-3)
    with replay_choices(kept):
        torch.testing.assert_close(clustered.attended(q, k, v, None), first)


def test_clusters_come_from_float32_under_autocast() -> None:
    clustered, x = make(), torch.randn(2, 60, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v = clustered.exact_queries_keys_values(x)
        low = clustered.clusters(q, None)
    assert v.dtype == torch.bfloat16
    assert q.dtype == k.dtype == torch.float32
    assert torch.equal(low, clustered.clusters(clustered.exact_queries_keys_values(x)[0], None))


test_what_it_cannot_be_is_refused = refusals(
    make,
    ({"clusters": 0}, "clusters = 0 must"),
    ({"cluster_bits": 0}, "cluster_bits = 0 must"),
    ({"cluster_iters": 0}, "cluster_iters = 0 must"),
    ({"role": "decoder"}, "it can play: encoder"),
    ({"role": "cross"}, "it can play: encoder"),
    ({"positions": "alibi"}, "cannot combine"),
)
