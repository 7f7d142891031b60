"""What stands in the slots around a mechanism: names, options, refusals, shapes, and weights taken over from `full`."""

from typing import Any

import pytest
import torch

from mtkit.attention import Site, build
from mtkit.attention.registry import fill
from mtkit.attention.slots import KeyValueGroups, Merge, Projection, slot_kind
from mtkit.errors import MtkitError


def make(name: str = "full", **arguments: Any) -> Any:
    return build(name, **{"role": "encoder", "d_model": 32, "heads": 4} | arguments)


def test_a_projection_is_a_name_of_its_own_and_a_slot_of_others() -> None:
    alone, around = make("grouped-query", kv_heads=2), make(projection={"name": "grouped-query", "kv_heads": 2})
    assert type(alone) is type(around)
    assert alone.k_proj.weight.shape == around.k_proj.weight.shape == (16, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"projection": "multi-qery"}, "did you mean 'multi-query'"),
        ({"positions": "rotray"}, "did you mean 'rotary'"),
        ({"projection": "em-routing"}, "no projection 'em-routing'"),
        ({"projection": {"name": "grouped-query", "kv_head": 2}}, "did you mean 'kv_heads'"),
        ({"projection": {"name": "grouped-query", "kv_heads": 3}}, "kv_heads = 3 must divide the 4 heads"),
        ({"merge": {"name": "em-routing", "capsules": 5}}, "capsules = 5 must divide"),
        ({"name": "multi-query", "projection": "grouped-query"}, "itself a projection"),
        ({"name": "linear", "positions": "alibi"}, "cannot combine with positions=alibi; it can combine with: rotary"),
        ({"name": "average", "role": "decoder", "merge": "em-routing"}, "cannot combine with merge=em-routing"),
        ({"heads": 5}, "5 heads do not divide the width 32"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MtkitError, match=message) as raised:
        make(**arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["linear", "linformer"])
def test_a_regularizer_of_weights_is_refused_where_there_are_none(name: str) -> None:
    make(name, regularizer={"name": "disagreement", "types": "output,subspace"})
    with pytest.raises(MtkitError, match="weights"):
        make(name, regularizer={"name": "disagreement", "types": "position"})


def test_an_empty_slot_holds_nothing() -> None:
    assert fill("merge", Site("encoder", 32, 4), 8) is None
    assert slot_kind(Projection) == "projection"
    assert slot_kind(KeyValueGroups) == "projection"
    assert slot_kind(Merge) == "merge"


def test_heads_are_neighbouring_channels() -> None:
    projection = Projection(Site("encoder", 32, 4))
    x = torch.randn(2, 5, 32)
    for head in range(4):
        assert torch.equal(projection.queries(x)[:, head], x[:, :, 8 * head : 8 * head + 8])
    grouped = KeyValueGroups(Site("encoder", 32, 4), kv_heads=2)
    assert grouped.widths == (32, 16, 16)
    assert torch.equal(grouped.keys(x[..., :16])[:, 1], x[:, :, 8:16])


def test_a_head_is_one_of_as_many_single_heads() -> None:
    """H heads are a loop over H attentions with one head of the sliced weights (Vaswani et al., section 3.2.2)."""
    full, x = make(), torch.randn(2, 5, 32)
    total = full.out_proj.bias
    for head in range(4):
        rows = slice(8 * head, 8 * head + 8)
        q, k, v = ((x @ p.weight[rows].T + p.bias[rows]) for p in (full.q_proj, full.k_proj, full.v_proj))
        total = total + (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v @ full.out_proj.weight[:, rows].T
    torch.testing.assert_close(full(x).output, total)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_adopting_full_pools_the_heads_of_a_group(kv_heads: int) -> None:
    full, grouped = make(), make("grouped-query", kv_heads=kv_heads)
    grouped.adopt(full.state_dict())
    for name in ("q_proj", "out_proj"):
        assert torch.equal(getattr(grouped, name).weight, getattr(full, name).weight)
    for name in ("k_proj", "v_proj"):
        got, whole = getattr(grouped, name).weight, getattr(full, name).weight
        for group in range(kv_heads):
            members = range(group * 4 // kv_heads, (group + 1) * 4 // kv_heads)
            mean = sum(whole[8 * head : 8 * head + 8] for head in members) / len(members)
            torch.testing.assert_close(got[8 * group : 8 * group + 8], mean)


def test_adopting_weights_of_another_width_leaves_them_alone() -> None:
    grouped = make("multi-query")
    before = {name: value.clone() for name, value in grouped.state_dict().items()}
    grouped.adopt(make(d_model=64).state_dict())
    assert all(torch.equal(value, before[name]) for name, value in grouped.state_dict().items())
