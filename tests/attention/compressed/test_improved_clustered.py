"""Improved clustered attention: its exactness limits, its weights read off the values, and how near `full` they are."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention.compressed import improved_clustered
from tests.attention.small import maker, refusals

make = maker("improved-clustered", max_length=64)


def alike(*names: str, **options: Any) -> list[Any]:
    """Attentions with the same weights, and, where they have them, the same planes."""
    made = [make(name=name, **({} if name == "full" else options)) for name in names]
    for each in made[1:]:
        each.load_state_dict(made[0].state_dict(), strict=False)
    return made


@torch.no_grad()
def weights_of(attention: Any, x: Tensor) -> Tensor:
    """The weights (B, H, 8, 8) over 8 tokens, read off values that tell positions apart."""
    eye = torch.eye(8)
    attention.q_proj.weight[:, :8] = 0
    attention.k_proj.weight[:, :8] = 0
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:, :8] = eye.repeat(4, 1)
    attention.out_proj.weight.copy_(torch.eye(32))
    x = torch.cat([eye.expand(len(x), 8, 8), x[..., 8:]], dim=-1)
    return attention(x).output.unflatten(-1, (4, 8)).transpose(1, 2)


@pytest.mark.parametrize("clusters", [1, 3, 100])
@pytest.mark.parametrize("projection", [None, "grouped-query"])
def test_segments_of_no_more_than_k_tokens_get_full_attention_whatever_their_clusters(
    clusters: int, projection: str | None
) -> None:
    """In a batch with a longer one, and in one without."""
    full, improved = (
        make(name=name, projection=projection, **options)
        for name, options in (("full", {}), ("improved-clustered", {"clusters": clusters, "cluster_topk": 5}))
    )
    improved.load_state_dict(full.state_dict(), strict=False)
    x, lengths = torch.randn(4, 12, 32), torch.tensor([[12], [5], [4], [1]])
    valid = torch.arange(12) < lengths
    for batch, width in ((slice(None), 12), (slice(1, None), 5)):
        given, real = x[batch, :width], valid[batch, :width]
        outputs = [each(given, query_valid=real).output for each in (improved, full)]
        short = real & (lengths[batch] <= 5)
        torch.testing.assert_close(*(each[short] for each in outputs), rtol=1e-5, atol=1e-5)
    assert torch.allclose(improved(x[:1]).output, full(x[:1]).output, atol=1e-3) == (clusters == 100)


def test_a_cluster_for_each_query_gives_full_attention() -> None:
    full, improved = alike("full", "improved-clustered", cluster_topk=3, positions="rotary")
    full = make(name="full", positions="rotary")
    full.load_state_dict(improved.state_dict(), strict=False)
    x = torch.randn(2, 12, 32)
    torch.testing.assert_close(improved(x).output, full(x).output, rtol=1e-5, atol=1e-5)


def test_one_key_alone_has_the_weight_that_its_cluster_gives_it() -> None:
    """k = 1: a softmax over one key is 1, and nothing changes."""
    x, valid = torch.randn(2, 30, 32), torch.arange(30) < torch.tensor([[30], [17]])
    clustered = make(name="clustered", clusters=3)
    improved = make(clusters=3, cluster_topk=1)
    improved.load_state_dict(clustered.state_dict())
    outputs = [each(x, query_valid=valid).output[valid] for each in (improved, clustered)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_weights_at_the_best_keys_are_the_querys_own_and_elsewhere_those_of_its_cluster() -> None:
    full, clustered = make(name="full"), make(name="clustered", clusters=2)
    improved = make(clusters=2, cluster_topk=3)
    for each in (clustered, improved):
        each.load_state_dict(full.state_dict(), strict=False)
    x = torch.randn(5, 8, 32)
    exact, rough, better = (weights_of(each, x) for each in (full, clustered, improved))
    torch.testing.assert_close(better.sum(-1), torch.ones(5, 4, 8))
    top = rough.topk(3).indices
    inside, of_cluster, own = (each.gather(-1, top) for each in (better, rough, exact))
    torch.testing.assert_close(inside.sum(-1), of_cluster.sum(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(inside / inside.sum(-1, keepdim=True), own / own.sum(-1, keepdim=True))
    torch.testing.assert_close(better.scatter(-1, top, 0.0), rough.scatter(-1, top, 0.0))
    # the paper's proposition 2: no query is farther from its own weights than in plain clusters
    distances = [(each - exact).abs().sum(-1) for each in (better, rough)]
    assert (distances[0] <= distances[1] + 1e-6).all()
    assert distances[0].sum() < 0.9 * distances[1].sum()


@torch.no_grad()
def test_more_keys_come_nearer_to_full() -> None:
    full, x = make(name="full"), 2 * torch.randn(4, 40, 32)
    errors = []
    for topk in (1, 10, 20, 39, 40):
        improved = make(clusters=4, cluster_topk=topk)
        improved.load_state_dict(full.state_dict(), strict=False)
        errors.append((improved(x).output - full(x).output).norm())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-4 < errors[-2]


@pytest.mark.parametrize("projection", [None, "grouped-query"])
def test_heads_in_parts_give_what_all_together_give(projection: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    improved = make(clusters=3, cluster_topk=4, projection=projection).double()
    x, valid = torch.randn(2, 20, 32, dtype=torch.double), torch.arange(20) < torch.tensor([[20], [11]])
    found = []
    for at_once in (1, 2 * 3 * 20 * 3, improved_clustered.AT_ONCE):  # one head, three, all
        monkeypatch.setattr(improved_clustered, "AT_ONCE", at_once)
        output = improved(x, query_valid=valid).output
        found.append([output, *torch.autograd.grad(output[valid].square().sum(), list(improved.parameters()))])
    for parts in found[:2]:
        torch.testing.assert_close(parts, found[2])


test_what_it_cannot_be_is_refused = refusals(
    make,
    ({"cluster_topk": 0}, "cluster_topk = 0 must"),
    ({"role": "decoder"}, "it can play: encoder"),
    ({"role": "cross"}, "it can play: encoder"),
)
