"""Routing: its exactness limits, its sets of keys, its moving centroids, and the options it refuses."""

import pytest
import torch
from torch import Tensor

from mtkit.attention import reorder
from mtkit.model.adaptation import AdaptedLinear
from mtkit.recipe.settings import LoraSettings
from tests.attention.small import maker, refusals

make = maker("routing")


def inputs(role: str) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    valid = torch.arange(9) < torch.tensor([[9], [4]])
    if role == "cross":
        return torch.randn(2, 7, 32), torch.randn(2, 9, 32), {"memory_valid": valid}
    return torch.randn(2, 9, 32), None, {"query_valid": valid}


@pytest.mark.parametrize(
    ("role", "assign"), [("encoder", "argmax"), ("encoder", "balanced"), ("decoder", "argmax"), ("cross", "argmax")]
)
@pytest.mark.parametrize("local_heads", [None, 0])
def test_one_cluster_and_a_window_of_all_is_full_attention(role: str, assign: str, local_heads: int | None) -> None:
    """C = 1, w >= T, queries and keys separate, raw scores."""
    options = {"clusters": 1, "window": 9, "assign": assign, "share_qk": False, "local_heads": local_heads}
    full, routing = make(role, "full"), make(role, **options)
    routing.adopt(full.state_dict())
    query, memory, masks = inputs(role)
    real = masks.get("query_valid", torch.ones(2, 7, dtype=torch.bool))
    outputs = [each(query, memory, **masks).output[real] for each in (routing, full)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(make(role, **{**options, "clusters": 4})(query, memory, **masks).output[real], outputs[1])


def test_one_token_gives_its_value() -> None:
    x = torch.randn(1, 1, 32)
    for role, assign in (("encoder", "argmax"), ("encoder", "balanced"), ("decoder", "argmax")):
        for share_qk in (True, False):
            routing = make(role, assign=assign, share_qk=share_qk)
            torch.testing.assert_close(routing(x).output, routing.out_proj(routing.v_proj(x)))


def test_a_shared_query_sees_itself_only_where_it_sees_no_other() -> None:
    """One cluster: position 0 gives its value, and position 1 that of position 0."""
    routing = make("decoder", clusters=1, local_heads=0)
    x = torch.randn(1, 3, 32)
    values = routing.out_proj(routing.v_proj(x))
    output = routing(x).output
    torch.testing.assert_close(output[:, :2], values[:, [0, 0]])
    assert not hasattr(routing, "k_proj")


def test_a_decoder_sees_at_most_two_windows_of_its_cluster() -> None:
    """One cluster, w = 2: the value at 0 reaches the first two chunks and no further."""
    routing = make("decoder", clusters=1, window=2, local_heads=0)
    x = torch.randn(1, 9, 32, requires_grad=True)
    (gradient,) = torch.autograd.grad(routing(x).output[0, 4].sum(), x)
    assert (gradient[0].abs().sum(-1) > 0).tolist() == [False, False, True, True, True, False, False, False, False]


def test_balanced_clusters_take_their_best_and_leave_the_rest() -> None:
    routing = make(clusters=2, window=2, assign="balanced", local_heads=0)
    taken: list[Tensor] = []
    routing.out_proj.register_forward_pre_hook(lambda _, heads: taken.append(heads[0]))
    routing(torch.randn(3, 12, 32))
    rows = taken[0].unflatten(-1, (4, 8)).abs().sum(-1) > 0  # (3, 12, 4)
    assert ((rows.sum(1) >= 2) & (rows.sum(1) <= 4)).all(), "two clusters take two queries each"


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
def test_training_moves_the_centroids_towards_the_tokens(role: str) -> None:
    routing = make(role, clusters=3, decay=0.5).train()
    query, memory, masks = inputs(role)
    first = routing(query, memory, **masks)
    assert set(first.losses) == {"commitment"}
    for update in range(30):
        last = routing(query, memory, **masks)
        routing.after_update(update, 30)
    assert last.losses["commitment"] < 0.8 * first.losses["commitment"]
    routing.eval()
    before = routing.centroids.mean.clone()
    routing(query, memory, **masks)
    assert torch.equal(routing.centroids.mean, before)
    assert not routing.centroids.new_mass.any()
    assert not {name for name, _ in routing.named_parameters() if "centroids" in name}, "buffers, not trained"


@torch.no_grad()
def test_centroids_without_tokens_stay_finite() -> None:
    """All tokens are alike, so that the mass of all clusters but one fades to nothing; later updates have no tokens."""
    routing = make(clusters=3, decay=0.1).train()
    for update in range(60):
        if update < 50:
            routing(torch.ones(2, 9, 32))
        routing.after_update(update, 60)
    assert routing.centroids.mass.min() < 1e-30
    assert all(buffer.isfinite().all() for buffer in routing.centroids.buffers())


def test_the_commitment_loss_is_the_mean_squared_distance_of_real_tokens() -> None:
    routing = make(clusters=1, commitment=0.1, share_qk=True, local_heads=0).train()
    x, _, masks = inputs("encoder")
    loss = routing(x, **masks).losses["commitment"]
    vectors = torch.nn.functional.layer_norm(routing.q_proj(x).unflatten(-1, (4, 8)), (8,))
    distance = (vectors - routing.centroids.mean[:, 0]).square().sum(-1)[masks["query_valid"]]
    torch.testing.assert_close(loss, 0.1 * distance.mean())
    (gradient,) = torch.autograd.grad(loss, routing.q_proj.weight)
    assert gradient.abs().max() > 0
    junk = x.masked_fill(~masks["query_valid"].unsqueeze(-1), 100.0)
    torch.testing.assert_close(routing(junk, **masks).losses["commitment"], loss)
    assert make(commitment=0.0).train()(x, **masks).losses == {}


def test_a_step_reads_two_windows_however_long_the_prefix_and_local_heads_keep_theirs_alone() -> None:
    routing = make("decoder", clusters=2, window=3)
    state, _ = routing.start(1, hypotheses=2)
    for _ in range(40):
        _, state = routing.step(torch.randn(1, 2, 32), state)
    assert state["lists"]["members"].shape == (1, 2, 2, 2, 6)
    assert state["keys"].shape[2] == 2
    assert state["near"]["keys"].shape[2:4] == (2, 8)
    assert reorder(state, torch.tensor([[1, 1, 0]]))["lists"]["count"].shape == (1, 3, 2, 2)


def test_clusters_are_the_same_under_bfloat16() -> None:
    routing = make(clusters=8)
    x = torch.randn(2, 400, 32)
    *_, exact, _ = routing._projected(x, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        *_, low, _ = routing._projected(x, x)
        assert torch.equal(routing.centroids.nearest(low), routing.centroids.nearest(exact))


def test_an_adapter_moves_the_clusters_under_bfloat16_too() -> None:
    routing = make(clusters=8)
    adapted = AdaptedLinear(routing.q_proj, LoraSettings(), torch.Generator().manual_seed(1))
    torch.nn.init.normal_(adapted.lora_b, std=0.5)
    x = torch.randn(2, 40, 32)
    before = routing._projected(x, x)[3]
    routing.q_proj = adapted
    exact = routing._projected(x, x)[3]
    assert not torch.allclose(exact, before, atol=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(routing._projected(x, x)[3], exact)


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"role": "decoder", "assign": "balanced"}, "argmax in the decoder"),
    ({"role": "encoder", "assign": "best"}, "one of argmax, balanced"),
    ({"role": "encoder", "clusters": 0}, "clusters = 0 must"),
    ({"role": "encoder", "window": 0}, "window = 0 must"),
    ({"role": "encoder", "local_heads": 4}, "0 to 3 in the encoder role"),
    ({"role": "cross", "local_heads": 1}, "0 to 0 in the cross role"),
    ({"role": "cross", "share_qk": True}, "false in the cross role"),
    ({"role": "decoder", "share_qk": True, "projection": "multi-query"}, "with projection"),
    ({"role": "encoder", "decay": 1.5}, "from 0 to 1"),
    ({"role": "encoder", "positions": "rotary"}, "positions"),
)


@pytest.mark.parametrize("share_qk", [True, False])
def test_centroids_follow_queries_and_keys_of_their_own(share_qk: bool) -> None:
    routing = make(share_qk=share_qk).train()
    routing(torch.randn(2, 9, 32), query_valid=torch.arange(9) < torch.tensor([[9], [4]]))
    vectors = 13 if share_qk else 2 * 13
    assert routing.centroids.new_mass.sum(1).tolist() == [vectors] * routing.centroids.new_mass.shape[0]
