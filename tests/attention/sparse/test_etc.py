"""ETC: its limits, its nodes and their way through the layers, its labels and masks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtkit.attention import build
from mtkit.attention.sparse._relative_labels import RelativeLabels, distance_label
from mtkit.errors import MtkitError
from tests.attention.small import refusals

SHARES = ("qkv", "kv", "none")
PLAIN = {"rel_clip": 0, "window_radius": 200}


def make(layer: int = 0, layers: int = 2, **options: Any) -> Any:
    options = {"window_radius": 3, "global_tokens": 5, "block": 8, "rel_clip": 2} | options
    attention = build("etc", role="encoder", d_model=16, heads=2, layer=layer, layers=layers, **options).eval()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return attention


def tied(attention: Any) -> Any:
    """The same with the projections of one `full`, which it gives back."""
    full = build("full", role="encoder", d_model=16, heads=2).eval()
    attention.adopt(full.state_dict())
    return full


def segments(length: int, *lengths: int) -> tuple[Tensor, Tensor]:
    return torch.randn(len(lengths), length, 16), torch.arange(length) < torch.tensor(lengths).unsqueeze(1)


def reached(attention: Any, length: int, position: int, what: str = "output", carry: Tensor | None = None) -> set[int]:
    """The outputs, or the carried nodes, that change with the token at a position."""
    x = torch.randn(1, length, 16)
    other = x.clone()
    other[:, position] += 1
    one, two = (getattr(attention(each, carry=carry), what) for each in (x, other))
    return set(((one - two).abs().amax((0, 2)) > 1e-6).nonzero().flatten().tolist())


@pytest.mark.parametrize("share", SHARES)
@torch.no_grad()
def test_a_wide_band_without_labels_is_full_attention_over_nodes_and_tokens(share: str) -> None:
    attention = make(**PLAIN, share=share)
    full = tied(attention)
    x, valid = segments(100, 100, 37)
    attended, nodes = attention(x, query_valid=valid), attention.first_node.expand(2, 5, -1)
    there = torch.cat([torch.arange(5) < torch.tensor([[5], [5]]), valid], dim=1)
    rows = full(torch.cat([nodes, x], dim=1), query_valid=there).output
    torch.testing.assert_close(attended.output[valid], rows[:, 5:][valid], atol=1e-5, rtol=0)
    update = attention.node_update
    nodes = update.norm(nodes + rows[:, :5])
    nodes = update.feed_forward_norm(nodes + update.feed_forward(nodes))
    torch.testing.assert_close(attended.carry, nodes, atol=1e-5, rtol=0)


@torch.no_grad()
def test_without_nodes_and_labels_a_wide_band_is_full_attention() -> None:
    attention = make(**PLAIN, global_tokens=0)
    full = tied(attention)
    x, valid = segments(100, 100, 37)
    attended = attention(x, query_valid=valid)
    torch.testing.assert_close(attended.output[valid], full(x, query_valid=valid).output[valid], atol=1e-5, rtol=0)
    assert attended.carry is None or not attended.carry.numel()


@torch.no_grad()
def test_without_nodes_and_labels_it_is_the_band() -> None:
    attention = make(global_tokens=0, rel_clip=0)
    band = build("band", role="encoder", d_model=16, heads=2, window_radius=3).eval()
    band.load_state_dict(attention.state_dict())
    x = torch.randn(2, 70, 16)
    torch.testing.assert_close(attention(x).output, band(x).output, atol=1e-5, rtol=0)


@pytest.mark.parametrize("hard", [False, True])
@torch.no_grad()
def test_tokens_attend_as_under_a_dense_block_mask(hard: bool) -> None:
    attention, x, nodes = make(layer=1, rel_clip=0, hard_l2g=hard), torch.randn(2, 50, 16), torch.randn(2, 5, 16)
    both = torch.cat([nodes, x], dim=1)
    i, j = torch.arange(50).unsqueeze(-1), torch.arange(50)
    node = (i // 8).clamp(max=4) == torch.arange(5) if hard else torch.ones(50, 5, dtype=torch.bool)
    q, (k, v) = attention.queries(x), attention.keys_values(both)
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~torch.cat([node, (i - j).abs() <= 3], 1), -torch.inf)
    wanted = attention.merge_heads(scores.softmax(-1) @ v, x)
    torch.testing.assert_close(attention(x, carry=nodes).output, wanted, atol=1e-5, rtol=0)


@torch.no_grad()
def test_nodes_read_all_and_hard_masks_keep_them_to_their_blocks() -> None:
    assert reached(make(), 60, 20, "carry") == {0, 1, 2, 3, 4}
    assert reached(make(hard_g2l=True), 60, 20, "carry") == {2}
    assert reached(make(hard_g2l=True), 60, 59, "carry") == {4}  # the last node takes in the rest


@torch.no_grad()
def test_what_one_layer_gathers_the_next_gives_to_all() -> None:
    below, above, x = make(), make(layer=1), torch.randn(1, 60, 16)
    assert reached(below, 60, 20) == set(range(17, 24))
    other = x.clone()
    other[:, 50] += 1
    one, two = (above(x, carry=below(each).carry).output for each in (x, other))
    assert (one - two).abs().amax((0, 2)).min() > 1e-6
    assert above(x, carry=below(x).carry).carry is None  # nobody reads what the last layer would carry


@torch.no_grad()
def test_rebuilt_nodes_give_what_they_gather_in_the_same_layer() -> None:
    attention = make(layers=1, global_memory="local")
    assert reached(attention, 60, 20) == set(range(60))
    assert attention(torch.randn(1, 9, 16)).carry is None


@torch.no_grad()
def test_the_first_layer_starts_nodes_of_its_own_and_others_ask_for_them() -> None:
    x = torch.randn(1, 20, 16)
    first = make()
    assert torch.equal(first(x, carry=torch.randn(1, 3, 16)).output, first(x).output)
    with pytest.raises(MtkitError, match="carries"):
        make(layer=1)(x)


@torch.no_grad()
def test_there_is_a_node_for_each_block_of_real_tokens() -> None:
    attention = make()
    assert [attention(torch.randn(1, length, 16)).carry.shape[1] for length in (1, 8, 9, 40, 41)] == [1, 1, 2, 5, 5]
    x, valid = segments(40, 40, 9)
    alone = attention(x[1:, :9]).carry
    torch.testing.assert_close(attention(x, query_valid=valid).carry[1:, :2], alone, atol=1e-5, rtol=0)


@torch.no_grad()
def test_every_label_of_tokens_and_nodes_counts() -> None:
    attention = make()
    x = torch.randn(1, 30, 16)
    for labels, what in ((attention.labels, "output"), (attention.node_labels, "carry")):
        for label in range(7):
            before = getattr(attention(x), what)
            labels.biases[:, label] += 1
            assert (getattr(attention(x), what) - before).abs().max() > 1e-5


@pytest.mark.parametrize("share", SHARES)
@torch.no_grad()
def test_projections_are_shared_as_told(share: str) -> None:
    attention = make(share=share)
    own = {name.partition(".")[0] for name, _ in attention.named_parameters() if "global_" in name}
    kv = {"global_q_proj", "global_k_proj", "global_v_proj", "global_out_proj"}
    pieces = {f"{each}_{name}" for each in ("token_global", "global_token") for name in ("k_proj", "v_proj")}
    assert own == {"qkv": set(), "kv": kv, "none": kv | pieces}[share]
    full = tied(attention)
    for name in own:
        plain = name.removeprefix("token_").removeprefix("global_").removeprefix("token_")
        assert torch.equal(getattr(attention, name).weight, getattr(full, plain).weight)


@torch.no_grad()
def test_dropout_acts_on_the_probabilities_of_all_pieces() -> None:
    attention = build("etc", role="encoder", d_model=16, heads=2, dropout=0.5, window_radius=3, block=8).train()
    x = torch.randn(1, 400, 16)
    nn.init.zeros_(attention.v_proj.weight)
    nn.init.ones_(attention.v_proj.bias)
    nn.init.eye_(attention.out_proj.weight)
    kept = attention(x).output  # the sums of what is left of each row
    assert kept.std() > 0.05
    assert abs(kept.mean() - 1) < 0.05


test_wrong_options_are_refused = refusals(
    make,
    ({"share": "all"}, "share = 'all' must be one of"),
    ({"global_memory": "kept"}, "global_memory = 'kept' must be one of"),
    ({"global_tokens": -1}, "global_tokens"),
    ({"block": 0}, "block"),
    ({"rel_clip": -1}, "rel_clip"),
    ({"window_radius": [1, 2, 3]}, "window_radius"),
)


@pytest.mark.parametrize("role", ["decoder", "cross"])
def test_only_the_encoder_may_read_ahead(role: str) -> None:
    with pytest.raises(MtkitError, match="encoder"):
        build("etc", role=role, d_model=16, heads=2)


def make_labels(heads: int = 2, width: int = 4, clip: int = 2) -> RelativeLabels:
    labels = RelativeLabels(heads, width, clip=clip).double()
    torch.nn.init.normal_(labels.vectors)
    torch.nn.init.normal_(labels.biases)
    return labels


def test_a_label_tells_the_clipped_distance_and_the_side() -> None:
    at = torch.arange(5)
    assert distance_label(at - at.unsqueeze(-1), 2).tolist() == [
        [0, 1, 2, 2, 2],
        [3, 0, 1, 2, 2],
        [4, 3, 0, 1, 2],
        [4, 4, 3, 0, 1],
        [4, 4, 4, 3, 0],
    ]


def test_vectors_and_biases_are_scaled_as_the_product_of_query_and_key_is() -> None:
    labels, q = make_labels(), torch.randn(3, 2, 5, 4, dtype=torch.float64)
    at, member = torch.arange(5), torch.rand(5, 5) < 0.5
    distances = distance_label(at - at.unsqueeze(-1), 2)
    near, far = labels.bias(q, at, at, 0.5), labels.belonging(q, member, 0.5)
    for head in range(2):
        for i in range(5):
            for j in range(5):
                for given, label in (
                    (near, distances[i, j]),
                    (far, 5 + member[i, j].long()),
                ):
                    wanted = 0.5 * (q[:, head, i] @ labels.vectors[head, label] + labels.biases[head, label])
                    torch.testing.assert_close(given[:, head, i, j], wanted)


def test_in_blocks_it_gives_what_it_gives_in_one() -> None:
    labels, q, at = make_labels(), torch.randn(3, 2, 6, 4, dtype=torch.float64), torch.arange(6)
    whole = labels.bias(q, at, at, 0.5).detach()
    blocks = labels.bias(q.unflatten(2, (1, 2, 3)), at.view(1, 2, 3), at.expand(1, 1, 6), 0.5)
    torch.testing.assert_close(blocks.detach().flatten(2, 4), whole)
